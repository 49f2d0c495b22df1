"""DiskIndex: what a cache directory holds, by recency, in one SQLite file; made anew from the files when it is broken."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from .pieces import Piece, PieceFiles, PieceKey, is_key

_FORMAT = 1
_BUSY_S = 0.5
_TABLES = """
    CREATE TABLE pieces (
        digest TEXT NOT NULL,
        chunk INTEGER NOT NULL,
        first_head INTEGER NOT NULL,
        last_head INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        used_ns INTEGER NOT NULL,
        PRIMARY KEY (digest, chunk, first_head, last_head)
    ) WITHOUT ROWID;
    CREATE INDEX pieces_used ON pieces (used_ns);
    CREATE TABLE totals (bytes INTEGER NOT NULL, pieces INTEGER NOT NULL, boot TEXT NOT NULL);
"""
_TRIGGERS = f"""
    CREATE TRIGGER piece_added AFTER INSERT ON pieces BEGIN
        UPDATE totals SET bytes = bytes + NEW.bytes, pieces = pieces + 1;
    END;
    CREATE TRIGGER piece_removed AFTER DELETE ON pieces BEGIN
        UPDATE totals SET bytes = bytes - OLD.bytes, pieces = pieces - 1;
    END;
    PRAGMA user_version = {_FORMAT};
"""
_KEY = "digest = ? AND chunk = ? AND first_head = ? AND last_head = ?"


class Totals(NamedTuple):
    """All pieces of a directory together."""

    bytes: int
    pieces: int


class DiskIndex:
    """Rows of an open index. Hold the directory's lock. Methods raise `sqlite3.Error` when the index is broken.

    It may list a piece that is gone, or one used since, but lists every piece there is: so a piece is added before
    its file appears and removed after. Changes last from `commit` on. They are not synced to the disk, so an index
    from before the last boot counts as broken.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def totals(self) -> Totals:
        """Return the sums over all rows; costs the same however many there are."""
        return Totals(*self._one("SELECT bytes, pieces FROM totals", int, int))

    def oldest(self) -> Piece:
        """Return the piece that the index has as least recently used. Raises when it has none."""
        row = self._one("SELECT * FROM pieces ORDER BY used_ns LIMIT 1", str, int, int, int, int, int)
        piece = Piece(PieceKey(*row[:4]), *row[4:])
        if not is_key(piece.key):
            raise sqlite3.DatabaseError(f"index is broken: {piece}")
        return piece

    def all(self) -> Iterator[Piece]:
        """Yield every row."""
        for row in self._db.execute("SELECT * FROM pieces"):
            yield Piece(PieceKey(*row[:4]), *row[4:])

    def of_cartridge(self, digest: str) -> list[PieceKey]:
        """Return the keys of one cartridge's pieces."""
        rows = self._db.execute("SELECT digest, chunk, first_head, last_head FROM pieces WHERE digest = ?", (digest,))
        return [PieceKey(*row) for row in rows]

    def add(self, piece: Piece) -> None:
        """Add a row; there must be none for its key."""
        self._db.execute("INSERT INTO pieces VALUES (?, ?, ?, ?, ?, ?)", (*piece.key, piece.bytes, piece.used_ns))

    def remove(self, key: PieceKey) -> bool:
        """Remove a piece's row and return whether there was one."""
        return self._db.execute(f"DELETE FROM pieces WHERE {_KEY}", key).rowcount > 0

    def use(self, key: PieceKey, used_ns: int) -> None:
        """Change when a piece was used."""
        self._db.execute(f"UPDATE pieces SET used_ns = ? WHERE {_KEY}", (used_ns, *key))

    def commit(self) -> None:
        """Make the changes last."""
        self._db.commit()

    def verify(self) -> None:
        """Raise unless the file is sound and its totals are the sums of its rows. Reads all of it."""
        (answer,) = self._one("PRAGMA quick_check(1)", str)
        sums = self._one("SELECT COALESCE(SUM(bytes), 0), COUNT(*) FROM pieces", int, int)
        if answer != "ok" or sums != self.totals():
            raise sqlite3.DatabaseError(f"index is broken: {answer}")

    def _one(self, statement: str, *types: type) -> tuple:
        row = self._db.execute(statement).fetchone()
        if row is None or tuple(map(type, row)) != types:
            raise sqlite3.DatabaseError(f"index is broken: {statement}: {row!r}")
        return row


@contextmanager
def open_index(path: Path) -> Iterator[DiskIndex]:
    """Open the index file. Raises `sqlite3.Error` when it is missing, broken, in use or from before the last boot."""
    with closing(_connect(path)) as db:
        (format_,) = db.execute("PRAGMA user_version").fetchone()
        if format_ != _FORMAT or db.execute("SELECT boot FROM totals").fetchall() != [(_boot(),)]:
            raise sqlite3.DatabaseError("index is of another format or from before the last boot")
        yield DiskIndex(db)


def make_index(path: Path, files: PieceFiles) -> None:
    """Put an index of what the files are in place of the one there. Raises `sqlite3.Error` or `OSError`."""
    path.unlink(missing_ok=True)  # SQLite ignores a journal beside an empty file
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(_connect(path)) as db:
        db.executescript(_TABLES)
        rows = ((*piece.key, piece.bytes, piece.used_ns) for piece in files.all())
        db.executemany("INSERT INTO pieces VALUES (?, ?, ?, ?, ?, ?)", rows)
        db.execute("INSERT INTO totals SELECT COALESCE(SUM(bytes), 0), COUNT(*), ? FROM pieces", (_boot(),))
        db.commit()
        db.executescript(_TRIGGERS)  # its last statement is what makes the file an index


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file at `path`, over all threads and processes. Raises `OSError`, `TimeoutError` among them."""
    end, pause_s = time.monotonic() + timeout_s, 0.0002
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if _lock(descriptor) and _is_at(descriptor, path):  # if removed, others lock the new one
                try:
                    yield
                    return
                finally:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have the descriptor too
        finally:
            os.close(descriptor)
        if time.monotonic() > end:
            raise TimeoutError(errno.ETIMEDOUT, "locked by another process", str(path))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.005)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _connect(path: Path) -> sqlite3.Connection:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise sqlite3.DatabaseError("index is no file")
    except FileNotFoundError:
        raise sqlite3.DatabaseError("index is missing") from None
    db = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=rw", uri=True, timeout=_BUSY_S)
    try:
        db.execute("PRAGMA synchronous = OFF")
    except sqlite3.Error:
        db.close()
        raise
    return db


@cache
def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
