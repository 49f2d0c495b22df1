"""What a command prints: its result on stdout, as text for people or JSON for programs; progress on stderr, to a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..make.progress import Bars


FORM: ContextVar[str] = ContextVar("form", default="text")
"""What `--format` says."""


def is_json() -> bool:
    """Whether programs read what this command prints."""
    return FORM.get() == "json"


def size(value: float) -> str:
    """Return a number of bytes for people, in at most 8 characters: `3.0 MiB`."""
    return _scaled(value, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024)


def count(value: float) -> str:
    """Return a number in at most 6 characters: `1.2 k`."""
    return f"{value:.0f}" if value < 1000 and value == int(value) else _scaled(value, ["", "k", "M", "G", "T"], 1000)


def _scaled(value: float, units: list[str], base: int) -> str:
    """Return a number with the largest of `units` that fits, each `base` times the one before; three digits or so."""
    from rich.filesize import pick_unit_and_suffix

    unit, suffix = pick_unit_and_suffix(int(value), units, base)
    value /= unit
    return f"{value:.{int(value < 99.95 and suffix != 'B')}f} {suffix}".rstrip()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows of equal keys as aligned columns under a heading; numbers to the right."""
    columns = list(rows[0])
    cells = [[_cell(column, row[column]) for column in columns] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    right = [all(type(row[column]) in (int, float) for row in rows) for column in columns]

    def line(texts: Sequence[str]) -> str:
        padded = [t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * w for w in widths]), *map(line, cells)])


def _cell(name: str, value: Any) -> str:
    """Return a value for people: what is called bytes in MiB, a list by its words, what is not so left open."""
    if value is None or value is False:
        return ""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return size(value) if name.startswith("bytes") else "yes" if value is True else str(value)


def fields(values: Mapping[str, Any]) -> str:
    """Return one `label   value` line for each value that is not None, nor an empty list; nested mappings are indented under their label."""
    lines = []
    values = {key: value for key, value in values.items() if value not in (None, [])}
    width = max((len(key) for key in values), default=0)
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(key)
            lines += ["  " + line for line in fields(value).splitlines()]
        else:
            lines.append(f"{key.ljust(width)}  {size(value) if key.startswith('bytes') else value}")
    return "\n".join(lines)


def show(values: Any, text: str | None = None) -> None:
    """Print `values` as JSON or `text`, by default the `fields` of them, as `--format` says."""
    text = fields(values) if text is None and not is_json() else text
    print(json.dumps(values, indent=2, default=str) if is_json() else text, flush=True)


def say(line: str) -> None:
    """Print a line on stderr; for programs nothing."""
    if not is_json():
        print(line, file=sys.stderr, flush=True)


def warn(warnings: Sequence[str]) -> None:
    """Print warnings on stderr; programs have them in the result."""
    for warning in warnings:
        say(f"lmcache-cartridge: warning: {warning}")


def bar(**options: Any) -> Any:
    """Return a tqdm of such options. It is shown on stderr if that is a terminal, and never to programs."""
    from tqdm import tqdm

    return tqdm(disable=True if is_json() else None, **options)


def bars(**options: Any) -> Bars:
    """Return a context manager that shows a bar for each thing that is done, as `bar` does with these options."""
    from ..make.progress import Bars

    return Bars(partial(bar, **options))
