"""Page: what was measured as one report, in HTML with its pictures inside, in Markdown, and as JSON."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ... import __version__
from ..machine import gpus, machine
from .figures import Row, Stats
from .run import Measured, Plan
from .target import Target
from .watch import Watch
from .ways import WAYS, Way

MEANING: dict[Way, str] = {
    "dense": "every token of the prompt is computed: each prompt has a `cache_salt` of its own, or begins as no other does",
    "prefix": "the document was asked about before, so that the server's own prefix cache has it",
    "warm": "the document is a cartridge that is in the server's memory",
    "cold": "the same, dropped from the server's memory and disk copies just before (`POST /v1/cartridges/NAME/evict`)",
}
EQUAL = (
    "answers that are the dense way's to the same question, letter for letter. Rounding alone may part two greedy answers, "
    "now and then: the more so with a cartridge, whose KV other kernels made. Whether it is no more than that is what "
    "`lmcache-cartridge validate` finds out"
)
APART = "not told of a server without cartridges: each document begins otherwise there, so that no two ways have the same prompt"
_NAMES = ("ttft.png", "hits.png", "memory.png")
Cells = Sequence[Mapping[str, str]]


class Report(NamedTuple):
    """All that is told."""

    target: Target
    plan: Plan
    measured: Measured
    rows: Sequence[Row]
    watch: Watch
    remarks: Sequence[str]
    """What whoever reads it has to know: what was left out, and what is not as it should be."""
    tokens: int
    """Of each answer."""


def write(report: Report, directory: Path) -> list[Path]:
    """Write `report.html`, `report.md`, `bench.json` and the pictures, as far as there is something to draw."""
    directory.mkdir(parents=True, exist_ok=True)
    found = as_values(report)
    (directory / "bench.json").write_text(json.dumps(found, indent=1) + "\n")
    pictures = _draw(report, directory)
    blocks = _blocks(report, found)
    (directory / "report.md").write_text(_markdown(blocks, pictures))
    (directory / "report.html").write_text(_html(blocks, pictures))
    return [directory / name for name in ("report.html", "report.md", "bench.json")] + [path for path, _ in pictures]


def as_values(report: Report) -> dict[str, Any]:
    """Return everything as plain values, each request's figures among them. Times of requests are from the start, in s."""
    target, measured, plan = report.target, report.measured, report.plan
    return {
        "server": {
            "url": target.url, "model": target.model, "version": target.version, "max_model_len": target.max_model_len,
            "cartridges": target.has_cartridges, "path": target.path, "is_this_machine": target.is_local,
        },
        "client": {"lmcache_cartridge": __version__, **machine(), "gpus": gpus("name", "driver_version", "memory.total")},
        "plan": {
            "p": [place.p for place in plan.places], "c": list(plan.concurrency), "repeat": plan.repeat,
            "tokens": report.tokens, "budget_s": plan.budget_s,
            "cartridges": {place.p: place.cartridge for place in plan.places if place.cartridge},
        },
        "seconds": round(measured.seconds, 1),
        "stopped": measured.stopped,
        "remarks": list(report.remarks),
        "rows": [_row(row) for row in report.rows],
        "requests": [
            {key: value for key, value in answer._asdict().items() if key != "text"}  # of somebody's document
            | {name: _since(getattr(answer, name), measured) for name in ("asked_s", "first_s", "last_s")}
            for answer in measured.answers
        ],
        "memory": {"of": report.watch.what, "seconds_and_bytes": report.watch.memory},
        "tiers": report.watch.counted(),
        "readings": [reading._asdict() for reading in report.watch.readings],
    }  # fmt: skip


def _row(row: Row) -> dict[str, Any]:
    return row._asdict() | {
        name: stats and stats._asdict()
        for name, stats in (("ttft_ms", row.ttft_ms), ("each", row.each), ("total", row.total))
    }


def _since(at_s: float | None, measured: Measured) -> float | None:
    return None if not at_s else round(at_s - measured.started_s, 6)


def times(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the table of times to the first token, in ms."""
    return [_at(row) | _spread(row.ttft_ms) | _counts(row) for row in rows]


def rates(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the table of tokens a second: of one answer once it has begun, and of all requests together."""
    return [
        _at(row) | {f"one: {name}": cell for name, cell in _spread(row.each).items()}
        | {f"all: {name}": cell for name, cell in _spread(row.total).items() if name in ("mean", "min", "max")}
        for row in rows
    ]  # fmt: skip


def _at(row: Row) -> dict[str, str]:
    return {"p": f"{row.p:,}", "c": str(row.c), "way": row.way}


def _spread(stats: Stats | None) -> dict[str, str]:
    names = ("mean", "median", "p95", "min", "max", "deviation")
    return dict(zip(names, map(_number, stats[1:]) if stats else ["-"] * len(names), strict=True))


def _counts(row: Row) -> dict[str, str]:
    wrong = [f"{row.errors} errors"] * bool(row.errors) + [f"{row.not_so} not so"] * bool(row.not_so)
    return {
        "dense / this": "-" if row.speedup is None else f"{row.speedup:.1f}",
        "cached": "not told" if row.cached is None and row.requests else _number(row.cached),
        "answers": str(row.requests) + "".join(f", {each}" for each in wrong),
        "equal": "-" if row.equal is None else f"{row.equal[0]} of {row.equal[1]}",
    }


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


class Block(NamedTuple):
    """A part of the page: a heading, sentences, or a table."""

    kind: str
    """`h1`, `h2`, `p`, `warning`, `list`, `table` or `pictures`."""
    content: Any = None


def _blocks(report: Report, found: Mapping[str, Any]) -> list[Block]:
    target, measured, client = report.target, report.measured, found["client"]
    answers = sum(row.requests for row in report.rows)
    ways = [way for way in WAYS if any(row.way == way for row in report.rows)]
    blocks = [
        Block("h1", f"{_name(target)} at {target.url}"),
        Block(
            "p",
            f"{answers} answers of {report.tokens} tokens in {measured.seconds:.0f} s, by lmcache-cartridge bench "
            f"{__version__}. {_server(target)} {_machine(client, target)}",
        ),
    ]
    if measured.stopped:
        blocks.append(Block("warning", f"Not whole: {measured.stopped}."))
    if bad := [row for row in report.rows if not row.is_sound]:
        blocks.append(Block("warning", f"{len(bad)} of {len(report.rows)} rows are not as they should be; see below."))
    return [
        *blocks,
        Block("h2", "Time to first token, ms"),
        Block("table", times(report.rows)),
        Block("h2", "Tokens a second"),
        Block("table", rates(report.rows)),
        Block("pictures"),
        Block("h2", "What the words mean"),
        Block("list", [
            "**p**: tokens of the document before the question; **c**: requests at once",
            *(f"**{way}**: {MEANING[way]}" for way in ways),
            "**cached**: median of the prompt tokens that the server says it did not compute. An answer whose count is not "
            "what its way means is *not so*: its times are in no figure",
            f"**equal**: {EQUAL if target.has_cartridges else APART}",
            "**one**: tokens of one answer a second, from its request to its last token. **all**: tokens of the c requests "
            "together, from when they were sent to the last token",
        ]),
        *([Block("h2", "Remarks"), Block("list", list(report.remarks))] if report.remarks else []),
    ]  # fmt: skip


def _name(target: Target) -> str:
    """Return what the model is called: of a path the last part."""
    return target.model.rstrip("/").rpartition("/")[2] if target.model[:1] in "./" else target.model


def _server(target: Target) -> str:
    version = f"vLLM {target.version}" if target.version else "version not told"
    context = f", context {target.max_model_len:,}" if target.max_model_len else ""
    return f"The server: {version}{context}, {'with' if target.has_cartridges else 'without'} cartridges."


def _machine(client: Mapping[str, Any], target: Target) -> str:
    memory = f", {client['memory_bytes'] / 2**30:.0f} GiB" if client["memory_bytes"] else ""
    cards = ", ".join(" ".join(gpu) for gpu in client["gpus"])
    packages = ", ".join(f"{name} {version}" for name, version in client["packages"].items())
    which = "Server and client" if target.is_local else "The server's machine is not known. The client"
    return (
        f"{which}: {client['cores']} cores of {client['cpu']}{memory}{', ' * bool(cards) + cards}, load average "
        f"{client['load_average']}, {client['system']}, Python {client['python']}{', ' * bool(packages) + packages}."
    )


def _draw(report: Report, directory: Path) -> list[tuple[Path, str]]:
    """Draw what there is to draw and return the files, each with what it shows; none without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    from .. import plot

    ttft, hits, memory = (directory / name for name in _NAMES)
    drawn = []
    if lines := _curves(report.rows):
        plot.curves(lines, ttft, f"Time to first token, {_name(report.target)}", x="p, tokens of the document", y="ms")
        drawn.append((ttft, "Time to first token over p: median, lowest and highest"))
    if tiers := _hits(report.watch):
        plot.over(tiers, hits, "Chunks that a tier held when it was asked", x="answers", y="chunks")
        drawn.append((hits, "Hits of each tier over the answers, by the server's metrics"))
    elif dots := _cached(report.measured):
        plot.over(dots, hits, "Prompt tokens that were not computed", x="answers", y="%", dots=True)
        drawn.append((hits, "Share of each prompt that came from a cache"))
    if points := [(at_s, count / 2**20) for at_s, count in report.watch.memory]:
        plot.over({"memory": points}, memory, "Memory of the server", x="seconds", y="MiB")
        drawn.append((memory, f"Memory over time: {report.watch.what}"))
    return drawn


def _curves(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[float, float, float, float]]]]:
    found: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {}
    least, most = min((row.c for row in rows), default=1), max((row.c for row in rows), default=1)
    for row in rows:
        if row.ttft_ms and row.c in (least, most):
            point = (row.p, row.ttft_ms.median, row.ttft_ms.low, row.ttft_ms.high)
            found.setdefault(row.way, {}).setdefault(f"c = {row.c}", []).append(point)
    return found


def _hits(watch: Watch) -> dict[str, list[tuple[float, float]]]:
    if not watch.readings:
        return {}
    first = watch.readings[0].tiers
    found: dict[str, list[tuple[float, float]]] = {}
    for reading in watch.readings:
        for tier, of in reading.tiers.items():
            for name in ("hits", "misses"):
                if name in of:
                    gained = of[name] - first.get(tier, {}).get(name, 0.0)
                    found.setdefault(f"{tier}: {name}", []).append((reading.answers, gained))
    return {name: points for name, points in found.items() if points[-1][1]}


def _cached(measured: Measured) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for number, answer in enumerate(measured.answers, 1):
        if answer.cached is not None and answer.prompt_tokens:
            found.setdefault(answer.way, []).append((number, 100 * answer.cached / answer.prompt_tokens))
    return found


def _markdown(blocks: Sequence[Block], pictures: Sequence[tuple[Path, str]]) -> str:
    parts = []
    for kind, content in blocks:
        if kind in ("h1", "h2"):
            parts.append(f"{'#' * int(kind[1])} {content}")
        elif kind == "table":
            parts.append(_table(content))
        elif kind == "list":
            parts.append("\n".join(f"- {line}" for line in content))
        elif kind == "pictures":
            parts += [f"![{about}]({path.name})\n\n{about}." for path, about in pictures]
        else:
            parts.append(f"**{content}**" if kind == "warning" else content)
    return "\n\n".join(parts) + "\n"


def _table(rows: Cells) -> str:
    if not rows:
        return "Nothing was measured."
    lines = [list(rows[0]), ["---:" if name != "way" else "---" for name in rows[0]], *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: .2rem .6rem; text-align: right; }
th { border-bottom: 2px solid #888; } td { border-bottom: 1px solid #ddd; } .way { text-align: left; }
.first td { border-top: 2px solid #bbb; } .dense { background: #f6f6f6; } .warning { color: #a00; font-weight: bold; }
figure { margin: 1rem 0; } img { max-width: 100%; } figcaption { color: #555; font-size: 13px; } .wide { overflow-x: auto; }
"""


def _html(blocks: Sequence[Block], pictures: Sequence[tuple[Path, str]]) -> str:
    parts = []
    for kind, content in blocks:
        if kind == "table":
            parts.append(_html_table(content))
        elif kind == "list":
            parts.append("<ul>" + "".join(f"<li>{_inline(line)}</li>" for line in content) + "</ul>")
        elif kind == "pictures":
            for path, about in pictures:
                data = base64.b64encode(path.read_bytes()).decode()
                image = f'<img alt="{html.escape(about)}" src="data:image/png;base64,{data}">'
                parts.append(f"<figure>{image}<figcaption>{html.escape(about)}</figcaption></figure>")
        elif kind == "warning":
            parts.append(f'<p class="warning">{_inline(content)}</p>')
        else:
            parts.append(f"<{kind}>{_inline(content)}</{kind}>")
    title = html.escape(str(blocks[0].content))
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _html_table(rows: Cells) -> str:
    if not rows:
        return "<p>Nothing was measured.</p>"

    def cell(tag: str, name: str, text: str) -> str:
        return f"<{tag}{' class=way' * (name == 'way')}>{html.escape(text)}</{tag}>"

    lines = ["<tr>" + "".join(cell("th", name, name) for name in rows[0]) + "</tr>"]
    before = ""
    for row in rows:
        classes = ["first"] * (row["p"] != before) + ["dense"] * (row["way"] == "dense")
        before = row["p"]
        lines.append(f'<tr class="{" ".join(classes)}">' + "".join(cell("td", *of) for of in row.items()) + "</tr>")
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def _inline(text: str) -> str:
    """Return a line of Markdown as HTML: bold, emphasis and code."""
    found = html.escape(text)
    for mark, tag in (("**", "b"), ("*", "em"), ("`", "code")):
        pieces = found.split(mark)
        if len(pieces) % 2:  # every mark has its second
            found = "".join(f"<{tag}>{piece}</{tag}>" if n % 2 else piece for n, piece in enumerate(pieces))
    return found
