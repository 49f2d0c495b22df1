"""Keys of groups of positions: each takes as much of the queries' attention as the positions that it stands for."""

from __future__ import annotations

import torch

from ..train.initial import FROZEN

STEPS = 60
"""Of L-BFGS, at most. At 16x of the shipped model (2 sheets of 274 facts) 30, 60 and 120 answer 88, 92 and 91%."""
RIDGE = 1e-4
"""Of the squared distance to the first keys, in units of the queries' mean square; 1e-3 gives the same, 1e-2 3 points less."""
ENOUGH = 3e-4
"""Nats a query: a step that gains less is the last one. 0 takes twice as long and answers no more."""
MEMORY = 10
"""Earlier steps that L-BFGS knows."""


def fitted_keys(
    start: torch.Tensor,
    queries: torch.Tensor,
    own_mass: torch.Tensor,
    shares: torch.Tensor,
    weights: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """Return keys `[p, D]` by which `queries` `[N, D]` give each position the share of attention in `shares` `[N, p]`.

    What is left of a query's attention goes to its question's own tokens, whose mass `[N]` is `own_mass`. This is
    multinomial logistic regression, convex in the keys; nothing of the model is passed through. The first `FROZEN` keys
    of `start` stay. `block` queries are worked on at a time.
    """
    weights = weights / weights.sum()
    ridge = RIDGE * float(queries.square().mean()) / len(start)
    moving = start.clone().requires_grad_(True)
    fit = torch.optim.LBFGS(
        [moving], max_iter=STEPS, history_size=MEMORY, tolerance_grad=0, tolerance_change=ENOUGH,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    @torch.no_grad()
    def loss() -> torch.Tensor:
        away = moving - start
        gradient, total = ridge * away, 0.5 * ridge * away.square().sum()
        for at in torch.arange(len(queries), device=queries.device).split(block):
            scores = queries[at] @ moving.T
            mass = torch.logaddexp(scores.logsumexp(1), own_mass[at])
            wanted = shares[at]
            left = (1 - wanted.sum(1)).clamp(min=0)
            total += weights[at] @ (mass - (wanted * scores).sum(1) - left * own_mass[at])
            over = (scores - mass[:, None]).exp() - wanted
            gradient += (over * weights[at][:, None]).T @ queries[at]
        gradient[:FROZEN] = 0
        moving.grad = gradient
        return total

    fit.step(loss)
    return moving.detach()
