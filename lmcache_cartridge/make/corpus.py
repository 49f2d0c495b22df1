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
    text: str | None = None
    document: str | None = None


_decode = msgspec.json.Decoder(_Line).decode


class Source(NamedTuple):
    """A document, unchecked."""

    id: str
    path: Path
    """Its file; of a JSON line with the line's number behind it."""
    text: str | None = None
    """Of a JSON line."""

    def read(self) -> bytes:
        """Return its text, in UTF-8 if it is any. Raises `OSError`."""
        return self.path.read_bytes() if self.text is None else self.text.encode()


def find(places: Sequence[str]) -> tuple[list[Source], dict[str, str]]:
    """Return the documents in files, in directories and below them, and in what patterns match, in order.

    With them, by their places, why other lines are none. A file's id is its name without the suffix; below a directory that
    was given it is its path there, with `-` for what no id may have; a JSON line's is its field `id`. Raises `ArtifactError`
    for a place where nothing is, and for two documents with one id.
    """
    found: dict[str, Source] = {}
    problems: dict[str, str] = {}
    for place in places:
        for path, name in _files(Path(place)):
            own = Source(_FOREIGN.sub("-", str(name)).strip(".-"), path)
            for source in _lines(path, problems) if path.suffix == ".jsonl" else [own]:
                other = found.setdefault(source.id, source)
                if other.path != source.path:
                    raise ArtifactError(f"{other.path} and {source.path} would both be called {source.id}; rename one")
    return list(found.values()), problems


def _files(place: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files at a place and below it with what ids are made of. What is hidden in a directory is left out."""
    inside = place.is_dir()
    root = place if inside else Path(place.anchor)
    pattern = "**/*" if inside else str(place.relative_to(root))
    paths = [place] if place.is_file() else sorted(path for path in root.glob(pattern) if path.is_file())
    shown = [path for path in paths if not re.search(r"(^|/)\.", str(path.relative_to(root)))] if inside else paths
    if not shown:
        raise ArtifactError(f"{place}: there is no such file, nor one in it")
    yield from ((path, path.relative_to(root).with_suffix("") if inside else Path(path.stem)) for path in shown)


def _lines(path: Path, problems: dict[str, str]) -> Iterator[Source]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        where = path.with_name(f"{path.name}:{number}")
        try:
            if line.strip():
                found = _decode(line)
                yield Source(found.id, where, found.text or found.document or "")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems[str(where)] = f'no JSON of {{"id": ..., "text": ...}}: {error}'
