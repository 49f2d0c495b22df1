"""Page: what was measured as one HTML file with its pictures inside, and as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ... import __version__
from ..machine import gpus, machine
from . import figures
from .load import TOKENS, Measured
from .places import Place
from .target import Target

_COLUMNS = {
    "TTFT ms": ("ttft_ms", "median"), "p95": ("ttft_ms", "p95"), "min": ("ttft_ms", "low"), "max": ("ttft_ms", "high"),
    "TPOT ms": ("tpot_ms", "median"), "ITL ms": ("itl_ms", "median"), "ITL p95": ("itl_ms", "p95"), "tokens/s": ("output", "median"),
}  # fmt: skip
_TEMPLATE = Path(__file__).with_name("report.html")


def report(
    target: Target, places: Sequence[Place], concurrency: Sequence[int], repeat: int, measured: Measured,
    remarks: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Return everything as plain values, each run's times among them. `remarks` are what whoever reads it has to know."""
    rows = figures.rows(measured.runs)
    told = [
        "p = {p}, c = {c}, {way}: ".format_map(row) + "; ".join(row["remarks"][:3]) for row in rows if row["remarks"]
    ]
    return {
        "server": {
            "url": target.url, "model": target.model, "version": target.version, "max_model_len": target.context,
            "cartridges": target.has_cartridges,
        },
        "client": {"lmcache_cartridge": __version__, **machine(), "gpus": gpus("name", "driver_version", "memory.total")},
        "plan": {
            "p": [place.p for place in places], "c": concurrency, "repeat": repeat, "tokens": TOKENS,
            "cartridges": {place.p: place.cartridge for place in places if place.cartridge},
        },
        "seconds": round(measured.seconds, 1), "interrupted": measured.is_interrupted, "rows": rows,
        "remarks": [*remarks, *measured.left_out, *told], "runs": [run._asdict() for run in measured.runs],
        "memory": {"of": measured.memory_of, "seconds_and_bytes": measured.memory},
    }  # fmt: skip


def write(found: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write what `report` returned as `report.html` and `bench.json`."""
    from jinja2 import Environment

    directory.mkdir(parents=True, exist_ok=True)
    page = Environment(autoescape=True, trim_blocks=True).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    (directory / "bench.json").write_text(json.dumps(found, indent=1) + "\n")
    (directory / "report.html").write_text(page.render(found, times=times(found["rows"]), pictures=_pictures(found)))
    return [directory / "report.html", directory / "bench.json"]


def times(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the table: medians, and the 95th percentile where there are twenty samples of it."""
    return [
        {
            "p": f"{row['p']:,}", "c": str(row["c"]), "way": row["way"],
            **{title: _of((row[what] or {}).get(name)) for title, (what, name) in _COLUMNS.items()},
            "dense / this": _of(row["speedup"]), "answers": str(row["requests"]),
            "vLLM, connector": "{:,}, {:,}".format(*row["cached"]),
        }
        for row in rows
    ]  # fmt: skip


def _of(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _pictures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what each picture shows and its PNG in base64; nothing without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    from .. import plot

    curves: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in found["rows"]:
        if row["ttft_ms"] and row["c"] in (min(found["plan"]["c"]), max(found["plan"]["c"])):
            point = (row["p"], *(row["ttft_ms"][name] for name in ("median", "low", "high")))
            curves.setdefault(f"{row['way']}, c = {row['c']}", []).append(point)
    drawn = []
    if curves:
        drawn.append(("Time to first token over p: median, lowest and highest", plot.first_tokens(curves)))
    if memory := found["memory"]["seconds_and_bytes"]:
        drawn.append((f"Memory over time: {found['memory']['of']}", plot.memory(memory)))
    return [(about, base64.b64encode(data).decode()) for about, data in drawn]
