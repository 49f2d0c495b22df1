"""Write the tables of settings, commands and metrics into the pages here: `python docs/generate.py`, or `make docs`."""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from lmcache_cartridge.cli.main import make_parser
from lmcache_cartridge.serve.metrics import PREFIX, metrics_table
from lmcache_cartridge.settings import Settings

HERE = Path(__file__).parent
START, END = "<!-- made by docs/generate.py: change the code, then `make docs` -->", "<!-- end -->"


def settings() -> str:
    """Return the table of all settings, from the class that reads them."""
    effects = docstrings(Settings)
    rows = [
        (f"`{name}`", _kind(name, field), _default(name, field), effects[name])
        for name, field in Settings.model_fields.items()
    ]
    return _table(("setting", "value", "default", "effect"), rows)


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


def commands() -> str:
    """Return a chapter on every command, from the parser."""
    parser = make_parser()
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    summaries = [(f"[`{name}`](#{name})", verb.description) for name, verb in verbs.choices.items()]
    shared = {action.dest for action in verbs.choices["list"]._actions}
    chapters = [
        _table(("command", ""), summaries),
        "All take these:\n\n" + _options(a for a in verbs.choices["list"]._actions if a.dest != "help"),
    ]
    for name, verb in verbs.choices.items():
        example = str(verb.epilog).removeprefix("example: ")
        parts = [f"## {name}", str(verb.description), f"```sh\n{example}\n```"]
        if own := [action for action in verb._actions if action.dest not in shared]:
            parts.append(_options(own))
        chapters.append("\n\n".join(parts))
    return "\n\n".join(chapters)


def _options(actions: Iterable[argparse.Action]) -> str:
    rows = []
    for action in actions:
        name = action.option_strings[-1] if action.option_strings else ""
        value = "" if action.nargs == 0 else action.metavar or (action.dest if not name else action.dest.upper())
        if action.choices and action.option_strings:
            value = "{" + ",".join(map(str, action.choices)) + "}"
        shown = " ".join(part for part in (name, str(value)) if part)
        if action.nargs == "+":
            shown += " ..."
        needed = "" if not name or not action.required else " (required)"
        rows.append((f"`{shown}`{needed}", action.help or ""))
    return _table(("option", ""), rows)


def metrics() -> str:
    """Return the table of all metrics."""
    rows = [
        (f"`{name.removeprefix(PREFIX)}`", kind, ", ".join(labels), text)
        for name, kind, labels, text in metrics_table()
    ]
    return _table(("metric", "type", "labels", ""), sorted(rows, key=lambda row: (row[2], row[0])))


def _table(heading: Sequence[str], rows: Iterable[Sequence[str | None]]) -> str:
    lines = [heading, ["---"] * len(heading), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines)


PAGES: dict[str, Callable[[], str]] = {"settings.md": settings, "cli.md": commands, "metrics.md": metrics}


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
