"""Compact keys and values without training: positions merged per KV head, keys by logistic regression, values by least
squares.

After Attention Matching (Zweiger et al., arXiv 2602.16284): reference queries get from the compact positions what they
get from the document. The paper chooses some of the document's keys and adds a bias to each, for which an engine's
attention has no place. Here a position stands for a group of positions whose values are alike, its key takes the
attention that they took, and values are fitted against the *whole* softmax, the question's own tokens included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...memory.rope import shift
from ..model import CausalModel
from ..progress import Progress, silent
from ..train.initial import FROZEN
from .groups import groups, means
from .keys import fitted_keys
from .references import Layer, References

OTHERS = 0.05
"""Weight of a token that predicts no answer, beside those that do."""
FLOOR = 0.05
"""Weight of a query in the fit of a head where the heads before give it all that it gets of the document."""
RIDGE = 1e-3
"""Of the mean of the normal equations' diagonal; from 1e-4 to 1e-2 nothing changes."""
BLOCK_QUERIES = 1024
"""Queries whose attention over the document is held at a time: 64 MiB for 16,384 tokens."""
BLOCK_POSITIONS = 4096
"""Positions whose values are solved for at a time: 128 MiB of normal equations."""
LEAST = 0.1
"""Of what the document gives tokens on average: a token that gets less of it is not held to lack it."""
_SMALL = 1e-9


class Head(NamedTuple):
    """One KV head: the document's keys and values `[n, D]`, and the queries `[N, D]`, by token within query head."""

    keys: torch.Tensor
    values: torch.Tensor
    asked: Layer
    """Without its dimensions of KV heads, those of query heads and tokens made one."""


def compacted(
    kv: torch.Tensor,
    references: References,
    positions: int,
    weights: torch.Tensor | None = None,
    *,
    progress: Progress = silent,
) -> torch.Tensor:
    """Return canonical `kv` `[2, L, n, H, D]` in fewer positions, its keys rotated as they were in the document.

    The first `FROZEN` keys are kept: models use them as an attention sink. A head looks first for what the heads before
    it in the layer lack. `weights` `[T]` of the reference tokens are by default those of answers 1 and of others `OTHERS`.
    """
    weights = token_weights(references) if weights is None else weights
    _, layers, _, heads, size = kv.shape
    found = torch.empty(2, layers, positions, heads, size)
    for number, asked in enumerate(references.layers):
        missing = torch.ones_like(weights)
        for h in range(heads):
            one = _head(kv[:, number, :, h].to(weights), asked, h)
            keys, values, lacking = _compacted(one, weights * (FLOOR + (1 - FLOOR) * missing), positions)
            found[0, number, :, h], found[1, number, :, h] = keys.cpu(), values.cpu()
            missing = missing * lacking
            progress("compact", number * heads + h + 1, layers * heads)
    return found


def token_weights(references: References) -> torch.Tensor:
    """Return the weight of each reference token, float32."""
    return torch.where(references.answers, 1.0, OTHERS)


def rerotated(model: CausalModel, kv: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return compact canonical KV of a document of `tokens` with its keys as they are served.

    A question stands at p behind p positions, and stood at n behind the document. RoPE knows relative positions only, so
    that keys moved by p - n are as far from it as they were. Raises `UnsupportedModel` where keys cannot be moved.
    """
    return shift(kv, model.fingerprint, kv.shape[2] - tokens)


def attended(asked: Layer, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the attention output `[H, G, T, D]` over `keys` and `values` `[H, P, D]` and each question's own tokens."""
    scores = asked.queries @ keys[:, None].transpose(-1, -2)
    mass = torch.logaddexp(scores.logsumexp(-1), asked.own_mass)[..., None]
    return (scores - mass).exp() @ values[:, None] + (asked.own_mass[..., None] - mass).exp() * asked.own


def _head(kv: torch.Tensor, asked: Layer, head: int) -> Head:
    return Head(kv[0], kv[1], Layer(*(plane[head].flatten(0, 1) for plane in asked)))


def _compacted(head: Head, weights: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values `[p, D]`, and which share `[T]` of what the document gives each token they lack, squared."""
    each = weights.repeat(len(head.asked.queries) // len(weights))
    group, taken = _grouped(head, each, positions)
    shares, given = torch.zeros(len(each), positions, device=each.device), torch.empty_like(each)
    for at, attention in _attention(head, head.keys):
        shares[at] = shares[at].index_add(1, group, attention)
        given[at] = (attention @ head.values).square().sum(1)
    keys, values = (means(plane, taken, group, plane[:positions]) for plane in (head.keys, head.values))
    keys[:FROZEN] = head.keys[:FROZEN]  # to the last bit
    keys = fitted_keys(keys, head.asked.queries, head.asked.own_mass, shares, each, BLOCK_QUERIES)
    values = _fit(head, keys, values, each)
    lacking = torch.empty_like(each)
    for at, attention in _attention(head, keys):
        lacking[at] = (_wanted(head, at, attention) - attention @ values).square().sum(1)
    lacking, given = (plane.view(-1, len(weights)).sum(0) for plane in (lacking, given))
    # A token that gets hardly anything of the document lacks nothing of it.
    return keys, values, (lacking / given.clamp(min=LEAST * float(given.mean()) + _SMALL)).clamp(max=1)


def _grouped(head: Head, weights: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of the compact positions stands for each of the document's, and what the latter weigh, both `[n]`.

    A position weighs what a change of its value costs: the sum of its squared shares of the queries' attention.
    """
    taken = torch.zeros_like(head.keys[:, 0])
    for at, attention in _attention(head, head.keys):
        taken += weights[at] @ attention.square()
    taken = taken / taken.max().clamp(min=torch.finfo(taken.dtype).tiny) + _SMALL
    group = torch.arange(len(taken), device=taken.device).clamp(max=FROZEN)
    group[FROZEN:] += groups(head.values[FROZEN:], taken[FROZEN:], positions - FROZEN)
    return group, taken


def _attention(head: Head, keys: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield some queries at a time: which, and the shares of their attention that each of `keys` takes."""
    for start in range(0, len(head.asked.queries), BLOCK_QUERIES):
        at = slice(start, start + BLOCK_QUERIES)
        scores = head.asked.queries[at] @ keys.T
        mass = torch.logaddexp(scores.logsumexp(1), head.asked.own_mass[at])
        yield at, (scores - mass[:, None]).exp()


def _wanted(head: Head, at: slice, attention: torch.Tensor) -> torch.Tensor:
    """Return what some queries are to get of positions with these shares, the rest being their questions' own tokens'."""
    return head.asked.wanted[at] - (1 - attention.sum(1))[:, None] * head.asked.own[at]


def _fit(head: Head, keys: torch.Tensor, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return values `[p, D]` of `keys` by weighted least squares, near to `values` by `RIDGE`."""
    values = values.double()
    for first in range(0, len(keys), BLOCK_POSITIONS):
        part = slice(first, first + BLOCK_POSITIONS)
        width = len(keys[part])
        normal = torch.zeros(width, width, dtype=torch.double, device=keys.device)
        right = torch.zeros(width, values.shape[1], dtype=torch.double, device=keys.device)
        for at, shares in _attention(head, keys):
            attention = shares.double()
            weighted = attention[:, part] * weights[at][:, None]
            normal += weighted.T @ attention[:, part]
            right += weighted.T @ (_wanted(head, at, shares).double() - attention @ values)
        normal.diagonal().add_(RIDGE * normal.diagonal().mean().clamp(min=1e-12))
        values[part] += torch.linalg.solve(normal, right)
    return values.float()
