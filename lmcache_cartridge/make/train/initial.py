"""Initial KV of a cartridge to be trained: where in the space of KV its training starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...errors import CartridgeError
from ..model import CausalModel
from ..progress import Progress, silent

FROZEN = 1
"""Leading positions that training leaves alone: models use the first one as an attention sink."""
COMPACT = "compact"
"""The start that is a compaction for the questions to train on, which `compact.job` makes."""
RATE, OTHER_RATE = 0.015, 0.09
"""Peak learning rates from a compaction, which is near to where it should be, and from any other start, in standard
deviations of the document's keys: 0.05 and 0.3 for the shipped model."""
STANDARD_DEVIATION = 0.02
SAMPLE_TOKENS = 64
"""Length of a chunk that `sci` samples."""
BLOCK_TOKENS = 512
"""Tokens prefilled at a time."""


class Source(NamedTuple):
    """What initial KV is made from."""

    model: CausalModel
    ids: list[int]
    """The document's, as a prompt begins."""
    positions: int
    random: torch.Generator


def initial_kv(init: str, model: CausalModel, ids: list[int], positions: int, seed: int) -> torch.Tensor:
    """Return canonical KV `[2, L, p, H, D]`, float32, of positions 0 to p - 1; the same for the same seed.

    Its first `FROZEN` positions are those of the document, whatever `init`. Raises `CartridgeError` unless the
    document is longer than p.
    """
    check_positions(positions, len(ids))
    return INITIALS[init](Source(model, ids, positions, torch.Generator().manual_seed(seed)))


def check_positions(positions: int, tokens: int) -> None:
    """Raise `CartridgeError` unless p positions can stand for a document of so many tokens."""
    if not FROZEN < positions < tokens:
        raise CartridgeError(
            f"p = {positions} positions cannot stand for a document of {tokens} tokens: give fewer, and more than {FROZEN}, "
            "or a smaller chunk size"
        )


def usual_rate(init: str, document: torch.Tensor) -> float:
    """Return the peak learning rate from a start for a document of such canonical KV, two digits of it."""
    return float(f"{(RATE if init == COMPACT else OTHER_RATE) * float(document[0].float().std()):.2g}")


def positions_of(tokens: int, chunk_tokens: int, *, compress: float | None = None, positions: int | None = None) -> int:
    """Return p: as asked for, or `tokens / compress` rounded to whole chunks, which requests share, at least one.

    Raises `CartridgeError` where neither is given.
    """
    if positions is not None:
        return positions
    if compress is None:
        raise CartridgeError("give the number of positions, or by how much to compress")
    return max(1, math.floor(tokens / compress / chunk_tokens + 0.5)) * chunk_tokens


def prefilled(model: CausalModel, ids: list[int], progress: Progress = silent) -> torch.Tensor:
    """Return the canonical float32 KV of `ids`, computed block by block."""
    blocks = []
    for block in model.prefill(ids, BLOCK_TOKENS):
        blocks.append(block)
        progress("prefill", min(len(blocks) * BLOCK_TOKENS, len(ids)), len(ids))
    return torch.cat(blocks, dim=2).float()


def _random(source: Source) -> torch.Tensor:
    sink = prefilled(source.model, source.ids[:FROZEN])
    shape = (*sink.shape[:2], source.positions - FROZEN, *sink.shape[3:])
    return torch.cat([sink, STANDARD_DEVIATION * torch.randn(shape, generator=source.random)], dim=2)


def _vocab(source: Source) -> torch.Tensor:
    ordinary = torch.as_tensor(source.model.ordinary_ids())
    drawn = ordinary[torch.randint(len(ordinary), (source.positions - FROZEN,), generator=source.random)]
    return prefilled(source.model, [*source.ids[:FROZEN], *drawn.tolist()])


def _first_k(source: Source) -> torch.Tensor:
    return prefilled(source.model, source.ids[: source.positions])


def _sci(source: Source) -> torch.Tensor:
    """Sampled chunks: runs of the document, in its order, no two overlapping, prefilled as one text."""
    rest = source.ids[FROZEN:]
    wanted = source.positions - FROZEN
    starts = range(0, len(rest), SAMPLE_TOKENS)
    order = torch.randperm(len(starts), generator=source.random).tolist()
    chosen, count = [], 0
    for index in order:
        if count >= wanted:
            break
        chosen.append(index)
        count += len(rest[starts[index] : starts[index] + SAMPLE_TOKENS])
    sampled = [token for index in sorted(chosen) for token in rest[starts[index] : starts[index] + SAMPLE_TOKENS]]
    return prefilled(source.model, [*source.ids[:FROZEN], *sampled[:wanted]])


INITIALS: dict[str, Callable[[Source], torch.Tensor]] = {
    "random": _random,
    "vocab": _vocab,
    "first-k": _first_k,
    "sci": _sci,
}
