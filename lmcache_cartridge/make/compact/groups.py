"""Groups: positions of a document whose values are alike, so that one position can stand for all of a group."""

from __future__ import annotations

import torch

ROUNDS = 16
"""In which the first centres are picked: each takes what the earlier ones are farthest from."""
STEPS = 10
BLOCK = 2048
"""Positions whose distances to all centres are held at a time: 32 MiB for 4,096 centres."""


def groups(values: torch.Tensor, weights: torch.Tensor, count: int) -> torch.Tensor:
    """Return for each of `values` `[n, D]` the number of its group, `[n]`, from 0 to `count` - 1; a group may be empty.

    Weighted k-means, no weight being 0: the sum of weight x squared distance to the group's mean is made small.
    """
    distance = (values - (weights[:, None] * values).sum(0) / weights.sum()).square().sum(1)
    picked: list[torch.Tensor] = []
    while (left := count - sum(map(len, picked))) > 0:
        most = (weights * distance).topk(min(left, -(-count // ROUNDS))).indices
        picked.append(most)
        distance = torch.minimum(distance, _nearest(values, values[most])[0])
    centres = values[torch.cat(picked)].clone()
    for _ in range(STEPS):
        centres = means(values, weights, _nearest(values, centres)[1], centres)
    return _nearest(values, centres)[1]


def means(values: torch.Tensor, weights: torch.Tensor, group: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean `[count, D]` of each group, and that row of `otherwise` for one without weight."""
    sums = torch.zeros_like(otherwise).index_add_(0, group, values * weights[:, None])
    total = torch.zeros_like(otherwise[:, 0]).index_add_(0, group, weights)[:, None]
    return torch.where(total > 0, sums / total.clamp(min=torch.finfo(sums.dtype).tiny), otherwise)


def _nearest(values: torch.Tensor, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the squared distance of each value to its nearest centre, and which that is."""
    found = [torch.cdist(part, centres).min(1) for part in values.split(BLOCK)]
    return torch.cat([each.values for each in found]).square(), torch.cat([each.indices for each in found])
