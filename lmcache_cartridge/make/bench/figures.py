"""Figures: a row of statistics for each p, number of requests at once and way, in the field's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .load import WAYS, Measured, Run

_TAIL = 20
"""Samples from which a 95th percentile is told."""


def stats(samples: Sequence[float]) -> dict[str, float | None] | None:
    """Sum samples up; None of none. `p95` is None of fewer than twenty."""
    if not samples:
        return None
    p95 = float(np.quantile(samples, 0.95)) if len(samples) >= _TAIL else None
    return {"number": len(samples), "median": float(np.median(samples)), "p95": p95, "low": min(samples),
            "high": max(samples)}  # fmt: skip


def rows(measured: Measured, unlike: Mapping[int, bool]) -> list[dict[str, Any]]:
    """Return the rows. Cartridges' answers at a p that is `unlike` are not compared with the dense ones.

    `requests` are those whose times are in the figures, `remarks` why runs are in none. `cached` are the prompt tokens that
    vLLM's own prefix cache had and that its connector brought, None where the server does not tell; `equal` how many answers
    are those of the dense way to the same question, and of how many; `speedup` the median time to first token of the dense
    way over this one's.
    """
    cells: dict[tuple[int, int, str], list[Run]] = {}
    for run in measured.runs:
        cells.setdefault((run.p, run.c, run.way), []).append(run)
    found = []
    for p, c, way in sorted(cells, key=lambda cell: (cell[0], cell[1], WAYS.index(cell[2]))):
        good, dense = ([run for run in cells.get((p, c, each), ()) if run.is_good] for each in (way, "dense"))
        ttft, first = (stats([1000 * s for run in of for s in run.ttft_s]) for of in (good, dense))
        gaps = [gap for run in good for gap in run.itl_s if gap]
        told = [run.cached for run in good if run.cached is not None]
        is_like = way == "prefix" or (way != "dense" and not unlike.get(p))
        found.append({
            "p": p, "c": c, "way": way, "ttft_ms": ttft,
            "tpot_ms": stats([1000 * sum(each) / len(each) for each in gaps]),
            "itl_ms": stats([1000 * s for each in gaps for s in each]),
            "output": stats([sum(run.tokens) / run.seconds for run in good if run.seconds]),
            "requests": sum(len(run.ttft_s) for run in good),
            "cached": [sum(each) for each in zip(*told, strict=True)] or None,
            "remarks": list(dict.fromkeys(why for run in cells[p, c, way] for why in (*run.errors, run.wrong) if why)),
            "equal": _equal(good, dense) if is_like else None,
            "speedup": first["median"] / ttft["median"] if first and ttft and way != "dense" else None,  # type: ignore[operator]
        })  # fmt: skip
    return found


def _equal(found: Sequence[Run], dense: Sequence[Run]) -> list[int] | None:
    by_turn = {run.turn: run.texts for run in dense}
    same = [a == b for run in found for a, b in zip(run.texts, by_turn.get(run.turn, ()), strict=False)]
    return [sum(same), len(same)] if same else None
