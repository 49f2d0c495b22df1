"""Write what the code and the result files know into the pages: `python docs/generate.py`, or `make docs`."""

from __future__ import annotations

import ast
import inspect
import re
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
sys.path += [str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "tests" / "served")]

import cells  # noqa: E402
import figures  # noqa: E402
import picture  # noqa: E402
import sizes as sizes_of_models  # noqa: E402

PART = re.compile(r"(<!-- made by docs/generate.py: (\w+) -->\n).*?(<!-- end -->)", re.S)
"""A generated part of a page: its first line with its name, what is between, its last line."""


def settings() -> str:
    """Return the list of all settings, from the class that reads them."""
    effects = docstrings(Settings)
    return "\n".join(
        f"- `{name}` ({_default(name, field) or _type(field.annotation)}{_bounds(name, field)}): {effects[name]}"
        for name, field in Settings.model_fields.items()
    )


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


def _bounds(name: str, field: Any) -> str:
    """Return between what a number has to be, where both are said."""
    limits = {key: getattr(bound, key) for bound in field.metadata for key in ("ge", "gt", "le") if hasattr(bound, key)}
    if "le" not in limits or name.endswith("_bytes"):
        return ""
    return f", {'above ' * ('gt' in limits)}{limits.get('ge', limits.get('gt')):g} to {limits['le']:g}"


def _type(annotation: Any) -> str:
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inside)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(part) for part in inside if part is not types.NoneType)
    if origin is typing.Annotated:
        return _type(inside[0])
    if origin in (tuple, list):
        return f"list of {_type(inside[0])}s"
    if origin is dict:
        return f"map of text to {_type(inside[1])}"
    return {bool: "`true` or `false`", int: "number", float: "number", str: "text", Path: "path"}[annotation]


def _default(name: str, field: Any) -> str:
    """Return the default, and what else may be chosen; nothing where the effect says it."""
    value = None if field.default_factory else field.get_default()
    if value is None or value in ((), {}):
        return ""
    if name.endswith("_bytes"):
        unit, shift = next((u, s) for u, s in (("GiB", 30), ("MiB", 20), ("B", 0)) if value >> s)
        return f"`{value >> shift}{unit}`"
    shown = str(value).lower() if isinstance(value, bool) else f"{value:.9g}" if isinstance(value, float) else value
    choices = [] if field.annotation is bool else re.findall(r"`(\w+)`", _type(field.annotation))
    return " or ".join(f"`{choice}`" for choice in dict.fromkeys([str(shown), *choices]))


def metrics_table() -> list[tuple[str, str, tuple[str, ...], str]]:
    """Return name, kind, labels and help of everything exported, with the names as queries have them."""
    rows: list[tuple[Any, tuple[str, ...]]] = [(row, ("tier", "rank")) for row in exported.TIER_NUMBERS]
    rows += [(row, ("rank",)) for row in exported.RANK_NUMBERS]
    rows += [(row, ()) for row in exported.LIBRARY_NUMBERS]
    rows += [(row, ("outcome",) * (row.name in exported.OUTCOMES)) for row in exported.SERVER_NUMBERS]
    return [
        (exported.PREFIX + row.name + "_total" * (row.kind == "counter"), row.kind, of, row.help) for row, of in rows
    ]


def metrics() -> str:
    """Return the list of all metrics, those of the same labels together."""
    lists: dict[str, list[str]] = {}
    for name, kind, labels, text in sorted(metrics_table(), key=lambda row: (row[2], row[0])):
        of = ", ".join(f"`{label}`" for label in labels)
        shown = f"`{name.removeprefix(exported.PREFIX)}`{' (histogram)' * (kind == 'histogram')}"
        lists.setdefault(f"By {of}:" if of else "Without labels:", []).append(f"- {shown}: {text}")
    return "\n\n".join("\n".join([heading, "", *rows]) for heading, rows in lists.items())


def versions() -> str:
    """Return what was done with which versions."""
    levels = "\n".join(f"- **{name}**: {text}" for name, text in LEVELS.items())
    return f"{figures.table(('vLLM', 'LMCache', ''), MATRIX)}\n\n{levels}"


def models() -> str:
    """Return what `benchmarks/models.py` has measured."""
    return figures.section(figures.Results(), "models")


def matrix() -> str:
    """Return the servers that the suite serves cartridges on, and what stands beside them."""
    rows = []
    for name, cell in cells.CELLS.items():
        options = [f"`{option.removeprefix('--')}`" for option in cell.options if option.startswith("--")]
        said = [f"`{cell.model}`", cell.mode, f"{cell.chunk}/{cell.block}", *options, *["saving"] * cell.saves]
        rows.append(f"- {name}: {', '.join([*said, *[cell.source] * (cell.source != 'directory')])}")
    return "\n".join(rows)


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
    "contexts",
    "fleet",
    "quality",
    "corpus",
)


def measured() -> str:
    """Return all that was measured of today's code, benchmark by benchmark, but for README's table."""
    results = figures.Results()
    sections = [f"### {name}\n\n{figures.section(results, name, tables=name != 'ttft')}" for name in BENCHMARKS]
    found = [result for name in (*BENCHMARKS, "models") for result in results.of(name)]
    return "\n\n".join([*sections, "Measured on:", figures.about(found)])


WAYS = ("dense", "prefix", "warm")
"""What README shows of `ttft`."""


def saves() -> str:
    """Return README's few figures: what stands beside what, of one run, with their picture."""
    results = figures.Results()
    found = results.of("ttft")[:1]
    if not found:
        return results.again("ttft")
    table = figures.compared(found[0], figures.PEERS["ttft"], WAYS)
    by = f"Measured by `{found[0].command}`:\n\n{figures.about(found)}"
    return f"{table}\n\n![First token](docs/{PICTURE.name})\n\n{by}"


def pictured() -> str:
    """Return the picture of README's few figures."""
    found = figures.Results().of("ttft")[:1]
    return picture.drawn(found[0] if found else None, "first token", "way", WAYS)


PARTS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "metrics": metrics,
    "versions": versions,
    "models": models,
    "matrix": matrix,
    "sizes": sizes,
    "figures": measured,
    "saves": saves,
}
README, PICTURE = HERE.parent / "README.md", HERE / "saves.svg"
PAGES = {
    path.name: path for path in (README, *sorted(HERE.glob("*.md"))) if PART.search(path.read_text(encoding="utf-8"))
}
"""The pages that have such parts, by name."""


def made(name: str) -> str:
    """Return a page as it should be: what is written by hand, and the generated parts as the code has them now."""
    text = PAGES[name].read_text(encoding="utf-8")
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", text)


if __name__ == "__main__":
    for path, text in [*((path, made(page)) for page, path in PAGES.items()), (PICTURE, pictured())]:
        if not path.exists() or text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}", file=sys.stderr)
