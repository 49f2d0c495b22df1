"""Figures: a row of statistics for each p, number of requests at once and way, in the field's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .load import WAYS, Run

_TAIL = 20
"""Samples from which a 95th percentile is told."""


def stats(samples: Sequence[float]) -> dict[str, float | None] | None:
    """Sum samples up; None of none. `p95` is None of fewer than twenty."""
    if not samples:
        return None
    p95 = float(np.quantile(samples, 0.95)) if len(samples) >= _TAIL else None
    return {"number": len(samples), "median": float(np.median(samples)), "p95": p95, "low": min(samples),
            "high": max(samples)}  # fmt: skip


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the rows.

    `requests` are those whose times are in the figures, `remarks` why runs are in none. `cached` are the prompt tokens that
    vLLM's own prefix cache had and that its connector brought; `speedup` is the median time to first token of the dense way
    over this one's.
    """
    cells: dict[tuple[int, int, int], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.p, run.c, WAYS.index(run.way)), []).append(run)
    found = []
    for p, c, way in sorted(cells):
        good, dense = ([run for run in cells.get((p, c, each), ()) if not run.wrong] for each in (way, 0))
        ttft, first = (stats([1000 * s for run in of for s in run.ttft_s]) for of in (good, dense))
        gaps = [gap for run in good for gap in run.itl_s if gap]
        found.append({
            "p": p, "c": c, "way": WAYS[way], "ttft_ms": ttft,
            "tpot_ms": stats([1000 * sum(each) / len(each) for each in gaps]),
            "itl_ms": stats([1000 * s for each in gaps for s in each]),
            "output": stats([sum(run.tokens) / run.seconds for run in good]),
            "requests": sum(len(run.ttft_s) for run in good),
            "cached": [sum(run.cached[of] for run in good) for of in (0, 1)],
            "remarks": list(dict.fromkeys(why for run in cells[p, c, way] for why in run.wrong)),
            "speedup": first["median"] / ttft["median"] if first and ttft and way else None,  # type: ignore[operator]
        })  # fmt: skip
    return found
