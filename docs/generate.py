"""Write the tables of settings, commands and metrics into the pages here: `python docs/generate.py`, or `make docs`."""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lmcache_cartridge.engine.versions import LEVELS, MATRIX
from lmcache_cartridge.serve import metrics as exported
from lmcache_cartridge.settings import Settings

HERE = Path(__file__).parent
sys.path.append(str(HERE))

import figures  # noqa: E402
import sizes as sizes_of_models  # noqa: E402

START, END = "<!-- made by docs/generate.py: change the code, then `make docs` -->", "<!-- end -->"


def settings() -> str:
    """Return the table of all settings, from the class that reads them."""
    effects = docstrings(Settings)
    rows = [
        (f"`{name}`", _kind(name, field), _default(name, field), effects[name])
        for name, field in Settings.model_fields.items()
    ]
    return figures.table(("setting", "value", "default", "effect"), rows)


def docstrings(of: type) -> dict[str, str]:
    """Return the string below each attribute of a class."""
    (body,) = ast.parse(inspect.getsource(of)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(statement.target, ast.Name) and isinstance(below.value, ast.Constant)
            found[statement.target.id] = " ".join(str(below.value.value).split())
    return found


def _kind(name: str, field: Any) -> str:
    """Return what may be written, with its unit and bounds."""
    if name.endswith("_bytes"):
        return "bytes, or `512MiB`"
    kind = _type(field.annotation)
    if name.endswith("_s"):
        kind = "seconds"
    for bound in field.metadata:
        for key, sign in (("ge", ">="), ("gt", ">"), ("le", "<=")):
            if (limit := getattr(bound, key, None)) is not None:
                kind += f", {sign} {limit:g}"
    return kind


def _type(annotation: Any) -> str:
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(part) for part in inside if part is not types.NoneType)
    if origin is typing.Annotated:
        return _type(inside[0])
    if origin in (tuple, list):
        return f"list of {_type(inside[0])}s"
    if origin is dict:
        return f"map of text to {_type(inside[1])}"
    return {bool: "`true`, `false`", int: "number", float: "number", str: "text", Path: "path"}[annotation]


def _default(name: str, field: Any) -> str:
    value = None if field.default_factory else field.get_default()
    if value is None or value in ((), {}):
        return ""  # the effect says which
    if name.endswith("_bytes"):
        unit, shift = next((u, s) for u, s in (("GiB", 30), ("MiB", 20), ("B", 0)) if value >> s)
        return f"`{value >> shift}{unit}`"
    return f"`{str(value).lower() if isinstance(value, bool) else format(value, 'g') if isinstance(value, float) else value}`"


def metrics_table() -> list[tuple[str, str, tuple[str, ...], str]]:
    """Return name, kind, labels and help of everything exported, with the names as queries have them."""
    rows: list[tuple[Any, tuple[str, ...]]] = [
        (row, ("tier", "rank")) for row in (*exported.TIER_NUMBERS, exported.LOADS)
    ]
    rows += [(row, ("rank",)) for row in exported.RANK_NUMBERS] + [(exported.RESIDENTS, exported.RESIDENT_LABELS)]
    rows += [(row, ()) for row in exported.LIBRARY_NUMBERS]
    rows += [(row, ("outcome",) * (row.name in exported.OUTCOMES)) for row in exported.SERVER_NUMBERS]
    return [
        (exported.PREFIX + row.name + "_total" * (row.kind == "counter"), row.kind, of, row.help) for row, of in rows
    ]


def metrics() -> str:
    """Return the table of all metrics."""
    rows = [
        (f"`{name.removeprefix(exported.PREFIX)}`", kind, ", ".join(labels), text)
        for name, kind, labels, text in metrics_table()
    ]
    return figures.table(("metric", "type", "labels", ""), sorted(rows, key=lambda row: (row[2], row[0])))


def versions() -> str:
    """Return what was done with which versions."""
    levels = figures.table(("", "what it means"), [(f"**{name}**", text) for name, text in LEVELS.items()])
    return f"{figures.table(('vLLM', 'LMCache', ''), MATRIX)}\n\n{levels}"


def models() -> str:
    """Return what `benchmarks/models.py` has measured."""
    return figures.section(figures.Results(), "models")


def sizes() -> str:
    """Return the bytes of a cartridge, by model and p."""
    return sizes_of_models.markdown(sizes_of_models.rows())


BENCHMARKS = (
    "ttft",
    "retrieval",
    "inject",
    "replacement",
    "scale",
    "cold_fetch",
    "saving",
    "fleet",
    "quality",
)


def measured() -> str:
    """Return all that was measured of today's code, benchmark by benchmark."""
    results = figures.Results()
    return "\n\n".join(f"## {name}\n\n{figures.section(results, name)}" for name in BENCHMARKS)


def saves() -> str:
    """Return README's few figures: what stands beside what, of one run."""
    results = figures.Results()
    found = results.of("ttft")
    if not found:
        return results.again("ttft")
    return f"{figures.compared(found[0], figures.PEERS['ttft'])}\n\n{found[0].about()}."


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings,
    "metrics.md": metrics,
    "versions.md": versions,
    "models.md": models,
    "memory.md": sizes,
    "benchmarks.md": measured,
    "../README.md": saves,
}


def made(name: str) -> str:
    """Return a page as it should be: what is written by hand, and the generated part as the code has it now."""
    text = (HERE / name).read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"docs/{name} has no part between {START} and {END}")
    return f"{before}{START}\n\n{PAGES[name]()}\n\n{END}{after}"


if __name__ == "__main__":
    for page in PAGES:
        text = made(page)
        if text != (HERE / page).read_text(encoding="utf-8"):
            (HERE / page).write_text(text, encoding="utf-8")
            print(f"wrote docs/{page}", file=sys.stderr)
