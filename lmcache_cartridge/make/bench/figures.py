"""Figures: a row of statistics for each p, number of requests at once and way, in the field's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .load import WAYS, Measured, Run, Way

_TAIL = 20
"""Samples from which a 95th percentile is told."""


class Stats(NamedTuple):
    """Some samples, summed up."""

    number: int
    median: float
    p95: float | None
    """None of fewer than twenty."""
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Stats | None:
        """Sum up; None of none."""
        if not samples:
            return None
        p95 = float(np.quantile(samples, 0.95)) if len(samples) >= _TAIL else None
        return cls(len(samples), float(np.median(samples)), p95, min(samples), max(samples))


class Row(NamedTuple):
    """One way at one p, with so many requests at once."""

    p: int
    c: int
    way: Way
    ttft_ms: Stats | None
    """Time to first token."""
    tpot_ms: Stats | None
    """Time per output token of each answer, behind its first."""
    itl_ms: Stats | None
    """Time between two tokens."""
    output: Stats | None
    """Tokens a second of all answers of a run."""
    requests: int
    """Whose times are in the figures."""
    cached: tuple[int, int] | None
    """Prompt tokens that vLLM's own prefix cache had, and that its connector brought; None where the server does not tell."""
    remarks: tuple[str, ...]
    """Why runs are in no figure."""
    equal: tuple[int, int] | None
    """How many answers are those of the dense way to the same question, of how many compared; None where none is."""
    speedup: float | None
    """Median time to first token of the dense way over this one's."""


def rows(measured: Measured, unlike: Mapping[int, bool]) -> list[Row]:
    """Return the rows. Cartridges' answers at a p that is `unlike` are not compared with the dense ones."""
    cells: dict[tuple[int, int, Way], list[Run]] = {}
    for run in measured.runs:
        cells.setdefault((run.p, run.c, run.way), []).append(run)
    found = []
    for p, c, way in sorted(cells, key=lambda cell: (cell[0], cell[1], WAYS.index(cell[2]))):
        good = [run for run in cells[p, c, way] if run.is_good]
        dense = [run for run in cells.get((p, c, "dense"), ()) if run.is_good]
        ttft, first = (Stats.of([1000 * s for run in of for s in run.ttft_s]) for of in (good, dense))
        gaps = [gap for run in good for gap in run.itl_s if gap]
        told = [run.cached for run in good if run.cached is not None]
        is_like = way != "dense" and (way == "prefix" or not unlike.get(p, False))
        reasons = [reason for run in cells[p, c, way] for reason in (*run.errors, run.wrong) if reason]
        found.append(
            Row(
                p, c, way, ttft,
                tpot_ms=Stats.of([1000 * sum(each) / len(each) for each in gaps]),
                itl_ms=Stats.of([1000 * s for each in gaps for s in each]),
                output=Stats.of([sum(run.tokens) / run.seconds for run in good if run.seconds]),
                requests=sum(len(run.ttft_s) for run in good),
                cached=(sum(a for a, _ in told), sum(b for _, b in told)) if told else None,
                remarks=tuple(dict.fromkeys(reasons)), equal=_equal(good, dense) if is_like else None,
                speedup=first.median / ttft.median if first and ttft and way != "dense" else None,
            )
        )  # fmt: skip
    return found


def _equal(found: Sequence[Run], dense: Sequence[Run]) -> tuple[int, int] | None:
    by_turn = {run.turn: run.texts for run in dense}
    pairs = [pair for run in found if run.turn in by_turn for pair in zip(run.texts, by_turn[run.turn], strict=False)]
    return (sum(a == b for a, b in pairs), len(pairs)) if pairs else None
