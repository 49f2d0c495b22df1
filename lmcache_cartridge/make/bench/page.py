"""Page: what was measured as one HTML file with its pictures inside, and as JSON."""

from __future__ import annotations

import base64
import html
import json
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ... import __version__
from ..machine import gpus, machine
from .load import WAYS, Measured, Plan, Way
from .target import Target

MEANING: dict[Way, str] = {
    "dense": "every token of the prompt is computed: nothing came from a cache",
    "prefix": "the document was asked about before, so that the server's own prefix cache has it",
    "warm": "the document is a cartridge that is in the server's memory, and the connector brought its whole chunks",
    "cold": "the same, dropped from the server's memory and disk copies just before (`POST /v1/cartridges/NAME/evict`)",
}
_WORDS = {
    "p": "tokens of the document before the question",
    "c": "requests at once",
    "TTFT": "time to first token",
    "TPOT": "time per output token of an answer, behind its first",
    "ITL": "time between two tokens",
    "vLLM, connector": "prompt tokens that its prefix cache had and that its connector brought, by its counters: a run whose "
    "counters are not what its way means is in no figure",
    "equal": "answers that are the dense way's to the same question, letter for letter; rounding alone may part two greedy answers",
}
_COLUMNS = {
    "TTFT ms": ("ttft_ms", "median"), "p95": ("ttft_ms", "p95"), "min": ("ttft_ms", "low"), "max": ("ttft_ms", "high"),
    "TPOT ms": ("tpot_ms", "median"), "ITL ms": ("itl_ms", "median"), "ITL p95": ("itl_ms", "p95"), "tokens/s": ("output", "median"),
}  # fmt: skip
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: .2rem .6rem; text-align: right; }
th { border-bottom: 2px solid #888; } td { border-bottom: 1px solid #ddd; } .warning { color: #a00; font-weight: bold; }
figure { margin: 1rem 0; } img { max-width: 100%; }
"""


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
    directory.mkdir(parents=True, exist_ok=True)
    found = as_values(report)
    (directory / "bench.json").write_text(json.dumps(found, indent=1) + "\n")
    (directory / "report.html").write_text(_html(report, found))
    return [directory / "report.html", directory / "bench.json"]


def as_values(report: Report) -> dict[str, Any]:
    """Return everything as plain values, each run's times among them, and no text of an answer."""
    target, plan = report.target, report.plan
    return {
        "server": {
            "url": target.url, "model": target.model, "version": target.version, "max_model_len": target.context,
            "cartridges": target.has_cartridges, "is_this_machine": target.is_local,
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


def _html(report: Report, found: Mapping[str, Any]) -> str:
    target, measured, client = report.target, report.measured, found["client"]
    name = target.model.rstrip("/").rpartition("/")[2] if target.model[:1] in "./" else target.model
    title = html.escape(f"{name} at {target.url}")
    packages = ", ".join(f"{package} {version}" for package, version in client["packages"].items())
    cards = "".join(f", {' '.join(gpu)}" for gpu in client["gpus"])
    about = (
        f"{sum(row['requests'] for row in report.rows)} answers of {report.plan.tokens} tokens in {measured.seconds:.0f} s, sent by "
        f"vllm bench serve, {'with' if target.has_cartridges else 'without'} cartridges. Server: vLLM {target.version or 'not told'}"
        f"{'' if target.is_local else ', on another machine'}. Client: lmcache-cartridge {__version__}, {client['cores']} cores of "
        f"{client['cpu']}{cards}, load average {client['load_average']}, {packages}."
    )
    parts = [f"<h1>{title}</h1><p>{html.escape(about)}</p>"]
    if measured.stopped:
        parts.append(f'<p class="warning">Not whole: {html.escape(measured.stopped)}.</p>')
    if bad := sum(bool(row["remarks"]) for row in report.rows):
        parts.append(f'<p class="warning">{bad} of {len(report.rows)} rows are not as they should be; see below.</p>')
    cells = times(report.rows) or [{"": "Nothing was measured."}]
    head = "".join(f"<th>{html.escape(title)}</th>" for title in cells[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) + "</tr>" for row in cells
    )
    parts.append(f"<table><tr>{head}</tr>{body}</table>")
    for about, data in _pictures(report):
        image = f'<img alt="{html.escape(about)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        parts.append(f"<figure>{image}<figcaption>{html.escape(about)}</figcaption></figure>")
    words = _WORDS | {way: MEANING[way] for way in WAYS if any(row["way"] == way for row in report.rows)}
    for heading, lines in (
        ("What the words mean", [f"{w}: {m}" for w, m in words.items()]),
        ("Remarks", report.remarks),
    ):
        items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
        parts.append(f"<h2>{heading}</h2><ul>{items}</ul>" if lines else "")
    return (
        f'<!doctype html><html lang=en><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>\n'
        + "\n".join(parts) + "\n</body></html>\n"
    )  # fmt: skip


def _pictures(report: Report) -> list[tuple[str, bytes]]:
    """Draw what there is to draw; nothing without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    from .. import plot

    curves: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in report.rows:
        if row["ttft_ms"] and row["c"] in (min(report.plan.concurrency), max(report.plan.concurrency)):
            point = (row["p"], *(row["ttft_ms"][name] for name in ("median", "low", "high")))
            curves.setdefault(f"{row['way']}, c = {row['c']}", []).append(point)
    drawn = []
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "picture.png"
        if curves:
            plot.curves(curves, path, "Time to first token", x="p, tokens of the document", y="ms")
            drawn.append(("Time to first token over p: median, lowest and highest", path.read_bytes()))
        if memory := [(at_s, size / 2**20) for at_s, size in report.measured.memory]:
            plot.over(memory, path, "Memory of the server", x="seconds", y="MiB")
            drawn.append((f"Memory over time: {report.measured.memory_of}", path.read_bytes()))
    return drawn
