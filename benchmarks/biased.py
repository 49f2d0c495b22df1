"""Attention Matching as its authors have it, with a bias for each position (Zweiger et al., arXiv 2602.16284).

Written anew from the paper, for comparison only: an engine's attention has no place for the bias. Keys are chosen per KV
head, biases fitted by non-negative least squares to the mass that the queries give the document, values by least
squares to the output of attention over the document alone. Budgets are equal for all heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lmcache_cartridge.make.compact.references import References, attending
from lmcache_cartridge.make.model import CausalModel

LEAST, MOST = 0.05, 20.0
"""Bounds of the exponential of a bias, the authors' own."""
STEPS = 500
RIDGE = 1e-6
AT_ONCE = 4
"""Keys that matching pursuit takes before it fits the biases anew, the authors' own."""


def biased(
    kv: torch.Tensor, references: References, positions: int, *, pursuit: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return canonical `kv` in fewer positions, its keys as in the document, and biases `[L, H, p]`.

    Keys are those of the greatest root mean square of attention, or found by matching `pursuit` of the mass. Queries
    that predict an answer count alone, where there are enough of them.
    """
    _, layers, _, heads, size = kv.shape
    found, biases = torch.empty(2, layers, positions, heads, size), torch.empty(layers, heads, positions)
    for number, asked in enumerate(references.layers):
        for h in range(heads):
            queries = asked.queries[h][:, references.answers].flatten(0, 1)
            keys, values = (plane[number, :, h].to(queries) for plane in kv)
            scores = queries @ keys.T
            mass = (scores - scores.amax(1, keepdim=True)).exp()
            keep, share = _pursue(mass, positions) if pursuit else _attended(mass, positions)
            bias = share.log()
            attention = (scores[:, keep] + bias).softmax(1).double()
            normal = attention.T @ attention
            normal.diagonal().add_(RIDGE * normal.diagonal().mean())
            wanted = (scores.softmax(1) @ values).double()
            found[0, number, :, h] = keys[keep]
            found[1, number, :, h] = torch.linalg.solve(normal, attention.T @ wanted).float()
            biases[number, h] = bias
    return found, biases


@contextmanager
def with_biases(model: CausalModel, biases: torch.Tensor | None) -> Iterator[None]:
    """Have the model attend the first positions with biases `[L, H, p]`; None: as it does."""
    if biases is None:
        yield
        return

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any):
        bias = biases[module.layer_idx].repeat_interleave(query.shape[1] // biases.shape[1], 0).to(mask)
        bias = torch.nn.functional.pad(bias, (0, key.shape[2] - bias.shape[1]))
        return sdpa_attention_forward(module, query, key, value, mask + bias[None, :, None], **options)

    with attending(model, attention):
        yield


def _attended(mass: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    share = mass / mass.sum(1, keepdim=True)
    keep = share.square().sum(0).topk(positions).indices.sort().values
    return keep, _within_bounds(mass[:, keep], mass.sum(1))


def _pursue(mass: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    total, keep = mass.sum(1), torch.empty(0, dtype=torch.long)
    left = total
    while len(keep) < positions:
        gain = mass.T @ left
        gain[keep] = -torch.inf
        keep = torch.cat([keep, gain.topk(min(AT_ONCE, positions - len(keep))).indices])
        share = _within_bounds(mass[:, keep], total)
        left = total - mass[:, keep] @ share
    order = keep.argsort()
    return keep[order], share[order]


def _within_bounds(columns: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the weights of columns, from `LEAST` to `MOST`, whose sum is nearest to `total`."""
    normal, right = columns.T @ columns, columns.T @ total
    rate = 1 / torch.linalg.matrix_norm(normal, 2).clamp(min=1e-12)
    found = ahead = torch.ones_like(right)
    momentum = 1.0
    for _ in range(STEPS):  # accelerated projected gradient descent
        moved = (ahead - rate * (normal @ ahead - right)).clamp(LEAST, MOST)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = moved + (momentum - 1) / following * (moved - found)
        found, momentum = moved, following
    return found
