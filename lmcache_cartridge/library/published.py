"""Published: a library that a fleet shares, one index object, followed into a registry file of this machine."""

from __future__ import annotations

import gzip
import logging
import random
import sqlite3
import time
import uuid
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from ..artifact.bytesource import ByteSource
from ..artifact.manifest import Id, Manifest
from ..errors import CartridgeError, RegistryError, SourceDenied, SourceError, SourceNotFound
from .registry import COLUMNS, Number, Registry, RegistryEntry

logger = logging.getLogger(__name__)

T = TypeVar("T")

INDEX = "library.json.gz"
"""The index object of a library; beside it lie `cartridges/ID/VERSION/DIGEST16/`, artefacts as `publish` stores them."""
_MAX_BYTES = 1 << 28
"""Of an index; one of 10,000 cartridges has 0.5 MB, and 1.5 MB when it is not compressed."""
_RECENT = 64
"""Changes that an index names, so that a publisher whose answer was lost knows its own."""
_ATTEMPTS = 200
"""How often others may be first before a publisher gives up."""
_TABLE = "CREATE TABLE IF NOT EXISTS published (revision TEXT NOT NULL, number INTEGER NOT NULL, recent TEXT NOT NULL)"


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that is published."""

    format: Literal[2]
    number: Number
    """Changes since the library was begun."""
    recent: tuple[str, ...]
    """Names of the last of them, the newest first."""
    cartridges: tuple[RegistryEntry, ...]
    """Without their places."""
    labels: tuple[tuple[Id, Id, int, bool], ...]
    """Each with the id and version it points at, and whether it is warm."""


_decoder = msgspec.json.Decoder(_Index, strict=False)


class LibraryWriter(Protocol):
    """Where a library lies, for those who may write there. Every call blocks and raises `SourceError`."""

    def check(self) -> None:
        """Raise `SourceError` unless `swap` lets one of several callers win."""

    def swap(self, file: str, data: bytes, known: str | None) -> str | None:
        """Replace a file whose revision is `known`, None for one that is not there, and return its new revision.

        None where its revision is another, and it is not replaced.
        """


class Following(NamedTuple):
    """How far a library is followed, as of the last look of this process."""

    location: str
    position: int
    """How many changes were taken in since the library was begun."""
    seen_s: float | None = None
    """Unix time of the last look that went well, None where there was none."""
    problem: str | None = None
    """Why the last look went wrong; what was known is served on."""


class _State(NamedTuple):
    """Which index this machine's copy is of."""

    revision: str
    """The source's name for its content; empty where there is none."""
    number: int
    recent: tuple[str, ...]


class Published(Registry):
    """The library at `location`, and its copy in the registry file at `path`.

    What only reads is answered from the copy, as of the last look. A change is made to a copy of the newest index, which is
    then put in the place of that index and of no other: if another publisher was first, it is tried again with theirs. Any
    number of processes may share the copy.
    """

    def __init__(self, path: Path, location: str, source: ByteSource, writer: LibraryWriter | None = None) -> None:
        """Make the copy where it is missing; asks `source` nothing yet. Without a `writer` nothing can be changed.

        Raises `RegistryError` where the copy is damaged or cannot be written.
        """
        self.location = location
        self._source, self._writer = source, writer
        self._checked = False
        super().__init__(path)
        with self._connect() as db:
            db.execute(_TABLE)
        self.following = Following(location, self._state().number)

    def follow(self) -> bool:
        """Take in the index if it is not the one that was read last, and return whether it is another.

        Costs one request. Raises `SourceError`, or `RegistryError` for an index that cannot be understood; what is known stays.
        """
        try:
            is_another = self._look()
            self.following = Following(self.location, self._state().number, time.time())
        except CartridgeError as error:
            self.following = self.following._replace(problem=str(error))
            raise
        return is_another

    def begin(self) -> None:
        """Begin a library where there is none, and look. Raises `SourceError` for who may not write there."""
        self._change(lambda db: None)

    def place(self, one: Manifest | RegistryEntry) -> str:
        """Return where an artefact has to be stored, and is registered at. Other content lies elsewhere, so nobody overwrites what another stored."""
        return f"{self.location}/cartridges/{one.id}/{one.version}/{one.digest[:16]}"

    def _look(self) -> bool:
        known = self._state().revision
        try:
            found = self._source.read(self.location, INDEX, _MAX_BYTES, known=known or None)
        except SourceNotFound:
            raise SourceNotFound(
                f"nothing is published at {self.location}; `lmcache-cartridge publish NAME --library {self.location}` "
                "begins a library"
            ) from None
        if found is None:
            return False
        index = _decode(found.data, f"{self.location}/{INDEX}")
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")
            if _state(db).revision == known:  # else another process was faster, and may have a later one
                self._take_in(db, index, found.revision)
        return True

    def _change(self, change: Callable[[sqlite3.Connection], T]) -> T:
        if (writer := self._writer) is None:
            raise RegistryError(f"{self.location} was opened for reading only")
        if not self._checked:
            writer.check()
            self._checked = True
        name = uuid.uuid4().hex[:16]
        result: Any = None
        lost: SourceError | None = None
        for attempt in range(_ATTEMPTS):
            try:
                self._look()
            except SourceNotFound:
                with self._connect() as db:
                    self._take_in(db, _Index(2, 0, (), (), ()), "")
            with self._connect() as db:
                db.execute("BEGIN IMMEDIATE")
                state = _state(db)
                if name in state.recent:
                    return result
                if lost is not None:
                    raise lost
                before = _content(db)
                result = change(db)
                after = _content(db)
                if before == after and state.revision:
                    return result
                number, recent = state.number + 1, (name, *state.recent)[:_RECENT]
                index = {"format": 2, "number": number, "recent": recent} | after
                packed = gzip.compress(msgspec.json.encode(index), 6, mtime=0)
                try:
                    revision = writer.swap(INDEX, packed, state.revision or None)
                except SourceDenied:
                    raise
                except SourceError as error:  # it may have been done all the same
                    revision, lost = None, error
                if revision is not None:
                    _set_state(db, revision, number, recent)
                    return result
                db.rollback()
            if lost is None:
                time.sleep(random.uniform(0, min(1.0, 0.01 * attempt)))
        raise SourceError(f"{self.location}: others published {_ATTEMPTS} times first; try again")

    def _take_in(self, db: sqlite3.Connection, index: _Index, revision: str) -> None:
        """Let the tables hold what an index does. Raises `sqlite3.IntegrityError` for one that contradicts itself."""
        db.execute("DELETE FROM labels")
        db.execute("DELETE FROM cartridges")
        rows = (row._replace(location=self.place(row)) for row in index.cartridges)
        db.executemany(f"INSERT INTO cartridges ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        db.executemany("INSERT INTO labels VALUES (?, ?, ?, ?)", index.labels)
        _set_state(db, revision, index.number, index.recent)

    def _state(self) -> _State:
        with self._connect() as db:
            return _state(db)


def _state(db: sqlite3.Connection) -> _State:
    revision, number, recent = db.execute("SELECT revision, number, recent FROM published").fetchone() or ("", 0, "")
    return _State(revision, number, tuple(recent.split()))


def _set_state(db: sqlite3.Connection, revision: str, number: int, recent: Iterable[str]) -> None:
    db.execute("DELETE FROM published")
    db.execute(
        "INSERT INTO published (revision, number, recent) VALUES (?, ?, ?)", (revision, number, " ".join(recent))
    )


def _content(db: sqlite3.Connection) -> dict[str, list[tuple]]:
    """Return what the tables hold as an index says it: an entry but for its place."""
    kept = ", ".join(RegistryEntry._fields[:-1])
    return {
        "cartridges": db.execute(f"SELECT {kept} FROM cartridges ORDER BY id, version").fetchall(),
        "labels": db.execute("SELECT label, id, version, warm FROM labels ORDER BY label").fetchall(),
    }


def _decode(data: bytes, name: str) -> _Index:
    """Return the index in a file called `name`. Raises `RegistryError` unless it is one that this release knows."""
    try:
        inflate = zlib.decompressobj(wbits=31)
        plain = inflate.decompress(data, _MAX_BYTES)
        if not inflate.eof:
            raise ValueError("it has no end")
        return _decoder.decode(plain)
    except (ValueError, zlib.error, RecursionError) as error:
        raise RegistryError(
            f"{name} is damaged or was written by something else, or by another release: then upgrade lmcache-cartridge, or "
            f"publish its cartridges again, at another place ({error})"
        ) from None
