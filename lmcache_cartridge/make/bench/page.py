"""Page: what was measured as one HTML file with its pictures inside, and as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ... import __version__
from ..machine import gpus, machine
from .load import Measured, Plan
from .target import Target

_COLUMNS = {
    "TTFT ms": ("ttft_ms", "median"), "p95": ("ttft_ms", "p95"), "min": ("ttft_ms", "low"), "max": ("ttft_ms", "high"),
    "TPOT ms": ("tpot_ms", "median"), "ITL ms": ("itl_ms", "median"), "ITL p95": ("itl_ms", "p95"), "tokens/s": ("output", "median"),
}  # fmt: skip
_TEMPLATE = Path(__file__).with_name("report.html")


class Report(NamedTuple):
    """All that is told."""

    target: Target
    plan: Plan
    measured: Measured
    rows: Sequence[dict[str, Any]]
    remarks: Sequence[str]
    """What whoever reads it has to know: what was left out, and what is not as it should be."""


def write(report: Report, directory: Path) -> list[Path]:
    """Write `report.html` and `bench.json`."""
    from jinja2 import Environment

    directory.mkdir(parents=True, exist_ok=True)
    found = as_values(report)
    page = Environment(autoescape=True, trim_blocks=True).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    (directory / "bench.json").write_text(json.dumps(found, indent=1) + "\n")
    (directory / "report.html").write_text(page.render(found, times=times(report.rows), pictures=_pictures(report)))
    return [directory / "report.html", directory / "bench.json"]


def as_values(report: Report) -> dict[str, Any]:
    """Return everything as plain values, each run's times among them, and no text of an answer."""
    target, plan = report.target, report.plan
    return {
        "server": {
            "url": target.url, "model": target.model, "version": target.version, "max_model_len": target.context,
            "cartridges": target.has_cartridges,
        },
        "client": {"lmcache_cartridge": __version__, **machine(), "gpus": gpus("name", "driver_version", "memory.total")},
        "plan": {
            "p": [place.p for place in plan.places], "c": list(plan.concurrency), "repeat": plan.repeat, "tokens": plan.tokens,
            "cartridges": {place.p: place.cartridge for place in plan.places if place.cartridge},
        },
        "seconds": round(report.measured.seconds, 1), "stopped": report.measured.stopped, "remarks": list(report.remarks),
        "rows": list(report.rows),
        "runs": [
            {name: value for name, value in run._asdict().items() if name != "texts"} for run in report.measured.runs
        ],
        "memory": {"of": report.measured.memory_of, "seconds_and_bytes": report.measured.memory},
    }  # fmt: skip


def times(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the table: medians, and the 95th percentile where there are twenty samples of it."""
    return [
        {
            "p": f"{row['p']:,}", "c": str(row["c"]), "way": row["way"],
            **{title: _of((row[what] or {}).get(name)) for title, (what, name) in _COLUMNS.items()},
            "dense / this": _of(row["speedup"]), "answers": str(row["requests"]),
            "vLLM, connector": "{:,}, {:,}".format(*row["cached"]) if row["cached"] else "not told",
            "equal": "{} of {}".format(*row["equal"]) if row["equal"] else "-",
        }
        for row in rows
    ]  # fmt: skip


def _of(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _pictures(report: Report) -> list[tuple[str, str]]:
    """Return what each picture shows and its PNG in base64; nothing without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    from .. import plot

    curves: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in report.rows:
        if row["ttft_ms"] and row["c"] in (min(report.plan.concurrency), max(report.plan.concurrency)):
            point = (row["p"], *(row["ttft_ms"][name] for name in ("median", "low", "high")))
            curves.setdefault(f"{row['way']}, c = {row['c']}", []).append(point)
    drawn = []
    if curves:
        drawn.append(("Time to first token over p: median, lowest and highest", plot.first_tokens(curves)))
    if memory := [(at_s, size / 2**20) for at_s, size in report.measured.memory]:
        drawn.append((f"Memory over time: {report.measured.memory_of}", plot.memory(memory)))
    return [(about, base64.b64encode(data).decode()) for about, data in drawn]
