"""Published: a library that a fleet shares, followed into a registry file of this machine, and changed through its log."""

from __future__ import annotations

import logging
import random
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from ..artifact.bytesource import FileReader, SmallFile
from ..artifact.manifest import Manifest
from ..errors import CartridgeError, CartridgeNotFound, RegistryError, SourceDenied, SourceError, SourceNotFound
from . import log
from .changes import Added, Change, Labelled, apply, check_same
from .looks import Held, Look, Looks
from .registry import Registry, RegistryEntry

logger = logging.getLogger(__name__)

_TABLE = (
    "CREATE TABLE IF NOT EXISTS followed (one INTEGER PRIMARY KEY CHECK (one = 1), position INTEGER NOT NULL, "
    "mark TEXT NOT NULL, revision TEXT NOT NULL, problem TEXT)"
)
_SNAPSHOT_EVERY = 64
"""Records between two snapshots: a fresh server reads so many at most. One of 10,000 cartridges has 0.5 MB."""
_RECHECK_LOOKS = 60
"""Looks that find nothing after which the record that was read last is compared with what is there now."""
_ATTEMPTS = 200
"""How often others may be first before a publisher gives up."""


class Shelf(Protocol):
    """Where a library lies, for those who may write there. Every call blocks and raises `SourceError`."""

    def create(self, file: str, data: bytes) -> bool:
        """Make a file whole, only where there is none of this name; return whether that was done."""

    def replace(self, file: str, data: bytes) -> None:
        """Make a file whole, in place of the one that may be there."""

    def remove(self, file: str) -> None:
        """Remove a file; no change if there is none."""

    def settle(self) -> bool:
        """Return False where `create` decides between two callers in one step. Else wait until any other call that began
        before has ended, and return True: whose file is there now was first.
        """


class Following(NamedTuple):
    """How far a library is followed."""

    location: str
    position: int
    """Number of the last record that was taken in."""
    seen_s: float | None
    """Unix time of the last look that went well, None where there was none."""
    problem: str | None
    """Why the last look went wrong; what was known is served on."""


class _State(NamedTuple):
    position: int
    mark: str
    """Hash of the record at `position`."""
    revision: str
    """The source's name for that record's content; empty where it is not known."""
    problem: str | None = None


class Published(Registry):
    """The library at `location`, and its copy in the registry file at `path`.

    What only reads is answered from the copy, as of the last look. What changes anything looks first, and is done once
    its record is in the log: then everybody sees all of it, and nobody a part. Any number of processes may share the
    copy; one of them looks at a time. A copy that is damaged is made anew.
    """

    def __init__(
        self,
        path: Path,
        location: str,
        source: FileReader,
        shelf: Shelf | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make the copy where it is missing; asks `source` nothing yet. Without a `shelf` nothing can be changed.

        Raises `RegistryError` where the copy cannot be written.
        """
        self.location = location
        self._source, self._shelf, self._clock = source, shelf, clock
        self._looks = Looks(path.with_suffix(".lock"))
        self._checked, self._idle = False, 0
        self._final = log.mark(log.GENESIS)
        """Mark of a record that nobody can replace any more."""
        try:
            super().__init__(path)
        except RegistryError as error:
            if not _is_damaged(error):
                raise
            logger.warning("%s is made anew: %s", path, error)
            for file in (path, path.with_name(f"{path.name}-journal")):
                file.unlink(missing_ok=True)
            super().__init__(path)
        with self._connect() as db:
            db.execute(_TABLE)

    def follow(self, *, max_age_s: float = 0.0, wait: bool = True) -> int:
        """Take in what others published since the last look, and return how many records that were.

        Costs one request where there were none, one more for each. 0 where anybody on this machine looked in the last
        `max_age_s`, or looks now, unless it is to `wait`. Raises `SourceError`, or `RegistryError` for a log that cannot be
        understood; what came before is taken in.
        """
        with suppress(Held), self._looks.take(wait=wait) as look:
            now_s = self._clock()
            if not 0 <= now_s - look.looked_s < max_age_s:
                look.begins(now_s)
                return self._look(look)
        return 0

    def following(self) -> Following:
        """Return how far the library is followed, by whatever process of this machine."""
        state = self._state()
        position, problem = (max(0, state.position), state.problem) if state else (0, None)
        return Following(self.location, position, self._looks.well_s(), problem)

    def begin(self) -> None:
        """Begin a library where there is none, and look. Raises `SourceError` for who may not write there."""
        with self._looks.take() as look:
            self._writable()
            self._look(look)

    def check_free(self, manifest: Manifest) -> None:
        """Raise `CartridgeExists` where other content has an id and version, as of the last look."""
        with suppress(CartridgeNotFound):
            check_same(manifest.name, self.find(manifest.name).digest, manifest.digest)

    def free_version(self, manifest: Manifest) -> int:
        """Return the next version of an id, or the one that has this content already, as of the last look."""
        same = [row.version for row in self.having([manifest.digest]) if row.id == manifest.id]
        return max(same) if same else self.next_version(manifest.id)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to serve from: a look went well once."""
        state = self._state()
        return state is not None and state.position >= 0

    # Looking.

    def _look(self, look: Look) -> int:
        done, problem = 0, None
        try:
            for _ in self._news():
                done += 1
            self._idle = 0 if done else self._idle + 1
            look.went_well(self._clock())
        except CartridgeError as error:
            problem = str(error)
            raise
        finally:
            state = self._state()
            if problem != (state.problem if state else None):
                with self._connect() as db:
                    db.execute(
                        "INSERT INTO followed VALUES (1, -1, '', '', ?) ON CONFLICT DO UPDATE SET problem = excluded.problem",
                        (problem,),
                    )
        return done

    def _news(self) -> Iterator[log.Record]:
        """Take in one record after the other and yield each."""
        state = self._state()
        if state is None or state.position < 0:
            state = self._begin(None)
        elif not self._checked or self._idle >= _RECHECK_LOOKS:
            self._idle = 0
            if not self._is_there(state):
                state = self._begin(state)
        self._checked = True
        while (found := self._next(state)) is not None:
            name = f"{self.location}/{log.record_file(state.position + 1)}"
            record = log.decode(found.data, name)
            if record.previous != state.mark:
                # Where a server lets both of two publishers write, the record of the one who lost may have been read.
                if self._is_there(state):
                    raise RegistryError(f"{name} does not follow the record before it; one of them was replaced")
                state = self._begin(state)
                continue
            new = _State(state.position + 1, log.mark(found.data), found.revision)
            with self._connect() as db:
                db.execute("BEGIN IMMEDIATE")
                try:
                    self._apply(db, record)
                except CartridgeError as error:
                    raise RegistryError(f"{name} contradicts the records before it: {error}") from error
                _set_state(db, new)
            state = new
            yield record

    def _apply(self, db: sqlite3.Connection, record: log.Record) -> None:
        for change in record.changes:
            if isinstance(change, Added):
                change = msgspec.structs.replace(change, location=f"{self.location}/{change.location}")
            apply(db, change, record.at)

    def _next(self, state: _State) -> SmallFile | None:
        """Return the record after `state`, None where there is none."""
        try:
            return self._read(log.record_file(state.position + 1))
        except SourceDenied:
            # Who may not list a bucket of AWS is denied what is not there.
            if not self._is_there(state):
                raise
            return None

    def _is_there(self, state: _State) -> bool:
        """Whether the record that was taken in last is what is there now."""
        file = log.record_file(state.position)
        try:
            found = self._source.read(self.location, file, log.MAX_BYTES, known=state.revision or None)
        except SourceNotFound:
            return False
        if found is None:
            return True
        if log.mark(found.data) != state.mark:
            return False
        with self._connect() as db:
            db.execute("UPDATE followed SET revision = ?", (found.revision,))
        return True

    def _begin(self, known: _State | None) -> _State:
        """Take in the library as its newest snapshot has it, in place of what is `known`, and return that state."""
        if known is not None:
            logger.warning("%s is not the library that was followed before; it is read anew", self.location)
        pointer = self._read(log.POINTER)
        if pointer is None:
            raise SourceNotFound(
                f"nothing is published at {self.location}; `lmcache-cartridge publish NAME --library {self.location}` "
                "begins a library"
            )
        name = f"{self.location}/{log.POINTER}"
        if number := log.decode_pointer(pointer.data, name):
            file = log.snapshot_file(number)
            found = self._read(file, log.MAX_SNAPSHOT_BYTES)
            if found is None:
                raise RegistryError(f"{self.location}/{file} is not there, and {name} names it")
            snapshot = log.decode_snapshot(found.data, f"{self.location}/{file}")
        else:
            snapshot = log.Snapshot(log.FORMAT, 0, log.mark(log.GENESIS), (), ())
        state = _State(snapshot.position, snapshot.mark, "")
        if not self._is_there(state):  # else all that is known would be forgotten for a log that is away
            raise RegistryError(
                f"{self.location}/{log.record_file(state.position)} is not there, or not what {name} names"
            )
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")
            _replace(db, self._rows(snapshot), snapshot.labels)
            _set_state(db, state)
        return state

    def _rows(self, snapshot: log.Snapshot) -> list[tuple]:
        return [
            (a.id, a.version, a.digest, a.kind, a.positions, a.bytes, f"{self.location}/{a.location}", registered,
             int(a.promote))
            for a, registered in ((kept.added, kept.registered) for kept in snapshot.cartridges)
        ]  # fmt: skip

    def _read(self, file: str, limit_bytes: int = log.MAX_BYTES) -> SmallFile | None:
        try:
            return self._source.read(self.location, file, limit_bytes)
        except SourceNotFound as error:
            if "NoSuchBucket" in str(error):
                raise
            return None

    # Changing.

    def _target(self, name: str) -> RegistryEntry:
        self.follow()
        return self.find(name)

    def _change(self, *changes: Change) -> None:
        with self._looks.take() as look:
            shelf = self._writable()
            for attempt in range(_ATTEMPTS):
                self._look(look)
                if self._is_final(shelf) and self._write(shelf, changes):
                    return
                time.sleep(random.uniform(0, min(1.0, 0.01 * attempt)))
        raise SourceError(f"{self.location}: others published {_ATTEMPTS} times first; try again")

    def _writable(self) -> Shelf:
        """Begin the library where there is none, and see that nobody can overwrite what another one published."""
        shelf = self._shelf
        if shelf is None:
            raise RegistryError(f"{self.location} was opened for reading only")
        if self._read(log.POINTER) is None:
            shelf.replace(log.POINTER, log.encode_pointer(0))
        first = log.record_file(0)
        if shelf.create(first, log.GENESIS) and shelf.create(first, log.GENESIS):
            raise SourceError(
                f"{self.location}: the server overwrites an object although it was asked not to (If-None-Match: *), so "
                "that two publishers could not know of each other. Publish to another server, or to a shared directory"
            )
        return shelf

    def _is_final(self, shelf: Shelf) -> bool:
        """Whether the record that was taken in last is there to stay; else the next look finds out what took its place.

        Where a server lets both of two publishers write, the second's may come after the first one's was read.
        """
        state = self._state()
        assert state is not None, "it was just looked at"
        if state.mark != self._final and shelf.settle() and not self._is_there(state):
            self._checked = False
            return False
        self._final = state.mark
        return True

    def _write(self, shelf: Shelf, changes: tuple[Change, ...]) -> bool:
        """Do some changes and write them as the next record; False where another one was first."""
        state = self._state()
        assert state is not None, "it was just looked at"
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")
            at, before = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), db.total_changes
            for change in changes:
                apply(db, change, at)
            if db.total_changes == before:
                return True
            record = log.Record(log.FORMAT, state.mark, uuid.uuid4().hex, at, tuple(map(self._relative, changes)))
            data, number = log.encode(record), state.position + 1
            log.decode(data, "the record")
            revision = self._won(shelf, log.record_file(number), data)
            if revision is None:
                db.rollback()
                return False
            _set_state(db, _State(number, log.mark(data), revision))
        self._final = log.mark(data)
        if number % _SNAPSHOT_EVERY == 0:
            self._snapshot(shelf, number, log.mark(data))
        return True

    def _relative(self, change: Change) -> Change:
        if not isinstance(change, Added):
            return change
        return msgspec.structs.replace(change, location=change.location.removeprefix(f"{self.location}/"))

    def _won(self, shelf: Shelf, file: str, data: bytes) -> str | None:
        """Write a record; return its revision, empty where that is not known, or None where another one is there."""
        try:
            if shelf.create(file, data) and not shelf.settle():
                return ""
        except SourceError:
            # It may be there all the same, or come yet: the answer was lost.
            shelf.settle()
            found = self._read(file)
            if found is None:
                raise
        else:
            found = self._read(file)
        return found.revision if found is not None and found.data == data else None

    def _snapshot(self, shelf: Shelf, number: int, mark: str) -> None:
        """Write what there is now for those who begin; whoever cannot leaves it to a later publisher."""
        cut = len(self.location) + 1
        with self._connect() as db:
            db.execute("BEGIN")
            columns = ", ".join(RegistryEntry._fields)
            rows = [
                log.Row(RegistryEntry(*row[:-1])._replace(location=row[6][cut:]), bool(row[-1]))
                for row in db.execute(f"SELECT {columns}, promoted FROM cartridges ORDER BY id, version")
            ]
            labels = [
                Labelled(label, cartridge_id, version, bool(warm))
                for label, cartridge_id, version, warm in db.execute("SELECT * FROM labels ORDER BY label")
            ]
        try:
            shelf.replace(log.snapshot_file(number), log.encode_snapshot(number, mark, rows, labels))
            shelf.replace(log.POINTER, log.encode_pointer(number))
            # Nobody begins with it any more; one who did just now has read it.
            shelf.remove(log.snapshot_file(number - 2 * _SNAPSHOT_EVERY))
        except SourceError as error:
            logger.warning("%s: snapshots could not be kept at record %d: %s", self.location, number, error)

    # The copy.

    def _state(self) -> _State | None:
        with self._connect() as db:
            row = db.execute("SELECT position, mark, revision, problem FROM followed").fetchone()
        return None if row is None else _State(*row)


def _set_state(db: sqlite3.Connection, state: _State) -> None:
    db.execute("INSERT OR REPLACE INTO followed VALUES (1, ?, ?, ?, ?)", state)


def _replace(db: sqlite3.Connection, rows: list[tuple], labels: tuple[Labelled, ...]) -> None:
    """Let the tables hold this and nothing else; what was there already is no change."""
    columns = f"{', '.join(RegistryEntry._fields)}, promoted"
    there = {row[:2]: row for row in db.execute(f"SELECT {columns} FROM cartridges")}
    new = {row[:2]: row for row in rows}
    db.execute("DELETE FROM labels")
    gone = [key for key, row in there.items() if new.get(key) != row]
    db.executemany("DELETE FROM cartridges WHERE id = ? AND version = ?", gone)
    marks = ", ".join("?" * (len(RegistryEntry._fields) + 1))
    db.executemany(
        f"INSERT INTO cartridges ({columns}) VALUES ({marks})", [r for k, r in new.items() if there.get(k) != r]
    )
    db.executemany("INSERT INTO labels VALUES (?, ?, ?, ?)", [(v.label, v.id, v.version, v.warm) for v in labels])


def _is_damaged(error: RegistryError) -> bool:
    """Whether a file is no registry of this release, rather than one that cannot be read now."""
    return error.__cause__ is None or type(error.__cause__) is sqlite3.DatabaseError
