"""A corpus: which documents there are in files, directories, patterns and JSON lines, and what each is called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..errors import ArtifactError

_FOREIGN = re.compile(r"[^A-Za-z0-9._-]+")
"""What a file's name may have and an id may not."""


class _Line(msgspec.Struct):
    id: str
    text: str


_decode = msgspec.json.Decoder(_Line | None).decode


class Source(NamedTuple):
    """A document, unchecked."""

    id: str
    name: str
    """Its file, of a JSON line with the line's number behind it."""
    raw: bytes


class Row(NamedTuple):
    """What became of a document."""

    document: str
    """What its source is called."""
    name: str | None = None
    """`id@version` of its cartridge."""
    made: bool = False
    """Whether it was made now; else it was there."""
    problem: str | None = None
    """Why there is none."""


def find(places: Sequence[str]) -> tuple[list[Source], list[Row]]:
    """Return the documents in files, in directories and below them, and in what patterns match, in order.

    With them, lines of JSON that are none. A file's id is its name without the suffix; below a directory that
    was given it is its path there, with `-` for what no id may have; a JSON line's is its field `id`. Raises `ArtifactError`
    for a place where nothing is, and for two documents with one id.
    """
    found: dict[str, Source] = {}
    problems: list[Row] = []
    for place in map(Path, places):
        for name, path in _files(place):
            for source in _documents(name, path, problems):
                other = found.setdefault(source.id, source)
                if other.name != source.name:
                    raise ArtifactError(f"{other.name} and {source.name} would both be called {source.id}; rename one")
    return list(found.values()), problems


def _files(place: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files at a place, and below it, with what ids are made of. What is hidden in a directory is left out."""
    root = place if place.is_dir() else Path(place.anchor)
    paths = [place] if place.is_file() else sorted(root.glob("**/*" if root is place else str(place.relative_to(root))))
    found = [path for path in paths if path.is_file() and "/." not in str(path)[len(str(root)) :]]
    if not found:
        raise ArtifactError(f"{place}: there is no such file, nor one in it")
    yield from ((str(path.relative_to(root).with_suffix("")) if root is place else path.stem, path) for path in found)


def _documents(name: str, path: Path, problems: list[Row]) -> Iterator[Source]:
    """Yield the document in a file, or those in its lines."""
    raw = path.read_bytes()
    if path.suffix != ".jsonl":
        yield Source(_FOREIGN.sub("-", name).strip(".-"), str(path), raw)
        return
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            found = _decode(line or b"null")
            if found:
                yield Source(found.id, f"{path}:{number}", found.text.encode())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems.append(Row(f"{path}:{number}", problem=f'no JSON of {{"id": ..., "text": ...}}: {error}'))
