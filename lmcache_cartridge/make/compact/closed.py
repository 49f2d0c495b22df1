"""Compact keys and values in closed form: keys chosen per KV head, values by least squares.

After Attention Matching (Zweiger et al., arXiv 2602.16284): the keys that reference queries attend to most, and values
that give those queries the attention output that the document gives them. An engine's attention has no bias for each
position, so there is none here. Instead values are fitted against the *whole* softmax, the question's own tokens
included, and so make up for the attention that the dropped positions no longer take.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...memory.rope import shift_keys
from ..model import CausalModel
from ..progress import Progress, silent
from ..train.initial import FROZEN
from .references import Layer, References

OTHERS = 0.05
"""Weight of a token that predicts no answer, beside those that do."""
FLOOR = 0.05
"""Weight of a query in the choice of a head's keys where the heads before hold all that it attends to, and in the fit of
a head's values where the head holds nothing of it. At 16x of the shipped model (3 sheets) heads that choose apart answer
58% where heads that choose alike answer 49%; 0.3 gives 56%, 0.02 and 0.1 what this gives."""
RIDGE = 1e-3
"""Of the mean of the normal equations' diagonal; from 1e-4 to 1e-2 nothing changes."""
BLOCK_QUERIES = 1024
"""Queries whose attention over the document is held at a time: 64 MiB for 16,384 tokens."""
BLOCK_POSITIONS = 4096
"""Positions whose values are solved for at a time: 128 MiB of normal equations."""


class Head(NamedTuple):
    """One KV head: the document's keys and values `[n, D]`, and the queries `[N, D]`, by token within query head."""

    keys: torch.Tensor
    values: torch.Tensor
    asked: Layer
    """Without its dimensions of KV heads, those of query heads and tokens made one."""

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield some queries at a time: which, themselves and the mass of their questions' own tokens."""
        for start in range(0, len(self.asked.queries), BLOCK_QUERIES):
            at = slice(start, start + BLOCK_QUERIES)
            yield at, self.asked.queries[at], self.asked.own_mass[at]


def compacted(
    kv: torch.Tensor,
    references: References,
    positions: int,
    weights: torch.Tensor | None = None,
    *,
    progress: Progress = silent,
) -> torch.Tensor:
    """Return canonical `kv` `[2, L, n, H, D]` in fewer positions, its keys rotated as they were in the document.

    The first `FROZEN` positions are kept: models use them as an attention sink. `weights` `[T]` of the reference tokens
    are by default those of answers 1 and of others `OTHERS`.
    """
    weights = token_weights(references) if weights is None else weights
    _, layers, _, heads, size = kv.shape
    found = torch.empty(2, layers, positions, heads, size)
    for number, asked in enumerate(references.layers):
        missing = torch.ones_like(weights)
        for h in range(heads):
            one = _head(kv[:, number, :, h].to(weights), asked, h)
            keep, lost = _choose(one, weights * _above_floor(missing), positions)
            fit_weights = weights * _above_floor(1 - lost)
            found[0, number, :, h] = one.keys[keep].cpu()
            found[1, number, :, h] = _fit(one, keep, fit_weights.repeat(asked.queries.shape[1])).cpu()
            missing = missing * lost
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
    return torch.stack([shift_keys(kv[0], model.fingerprint.rope, kv.shape[2] - tokens), kv[1]])


def fit_errors(kv: torch.Tensor, references: References, which: torch.Tensor) -> list[float]:
    """Return for each layer how far the attention output of some reference tokens is from the wanted one.

    Relative to its norm, over all heads. `kv` is compact, its keys rotated as in the document; `which` is a mask `[T]`.
    """
    found = []
    for number, asked in enumerate(references.layers):
        keys, values = kv[:, number].transpose(1, 2).to(asked.queries)
        part = Layer(*(plane[:, :, which] for plane in asked))
        found.append(float((attended(part, keys, values) - part.wanted).norm() / part.wanted.norm()))
    return found


def attended(asked: Layer, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the attention output `[H, G, T, D]` over `keys` and `values` `[H, P, D]` and each question's own tokens."""
    scores = asked.queries @ keys[:, None].transpose(-1, -2)
    mass = torch.logaddexp(scores.logsumexp(-1), asked.own_mass)[..., None]
    return (scores - mass).exp() @ values[:, None] + (asked.own_mass[..., None] - mass).exp() * asked.own


def _head(kv: torch.Tensor, asked: Layer, head: int) -> Head:
    return Head(kv[0], kv[1], Layer(*(plane[head].flatten(0, 1) for plane in asked)))


def _above_floor(share: torch.Tensor) -> torch.Tensor:
    return FLOOR + (1 - FLOOR) * share


def _choose(head: Head, weights: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which keys to keep, in order, and the share `[T]` of each token's attention to the document that they lose.

    Those of the greatest root mean square of attention over the queries.
    """
    groups = len(head.asked.queries) // len(weights)
    each = weights.repeat(groups)
    score = torch.zeros_like(head.keys[:, 0])
    mass = torch.empty_like(head.asked.own_mass)
    for at, queries, own in head.blocks():
        scores = queries @ head.keys.T
        mass[at] = torch.logaddexp(scores.logsumexp(1), own)
        score += each[at] @ (scores - mass[at][:, None]).exp().square()
    score[:FROZEN] = torch.inf
    keep = score.topk(positions).indices.sort().values
    held = torch.empty_like(mass)
    for at, queries, _ in head.blocks():
        held[at] = (queries @ head.keys[keep].T - mass[at][:, None]).exp().sum(1)
    of_document = 1 - (head.asked.own_mass - mass).exp()
    lost = (of_document - held).clamp(min=0).view(groups, -1).mean(0)
    # A token that hardly looks at the document misses nothing of it.
    return keep, (lost / of_document.view(groups, -1).mean(0).clamp(min=0.3)).clamp(0, 1)


def _fit(head: Head, keep: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the values `[p, D]` of the kept keys by weighted least squares, near to the document's own by `RIDGE`."""
    keys, values = head.keys[keep], head.values[keep].double()
    for first in range(0, len(keep), BLOCK_POSITIONS):
        part = slice(first, first + BLOCK_POSITIONS)
        width = len(keep[part])
        normal = torch.zeros(width, width, dtype=torch.double, device=keys.device)
        right = torch.zeros(width, values.shape[1], dtype=torch.double, device=keys.device)
        for at, queries, own in head.blocks():
            scores = queries @ keys.T
            mass = torch.logaddexp(scores.logsumexp(1), own)[:, None]
            attention = (scores - mass).exp().double()
            wanted = head.asked.wanted[at] - (own[:, None] - mass).exp() * head.asked.own[at]
            weighted = attention[:, part] * weights[at][:, None]
            normal += weighted.T @ attention[:, part]
            right += weighted.T @ (wanted.double() - attention @ values)
        normal.diagonal().add_(RIDGE * normal.diagonal().mean().clamp(min=1e-12))
        values[part] += torch.linalg.solve(normal, right)
    return values.float()
