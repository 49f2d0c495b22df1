"""DiskTier: payload pieces kept on a local disk, within a byte budget that all processes share."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..artifact.bytesource import Seen
from ..errors import CartridgeError
from .disk_index import DiskIndex, Totals, locked, make_index, open_index
from .pieces import Partial, Piece, PieceFiles, PieceKey

__all__ = ["DiskStats", "DiskTier", "PieceKey"]

logger = logging.getLogger(__name__)
_LOCK_TIMEOUT_S = 2.0
_GONE_LIMIT = 10_000
"""Missing pieces remembered until the index is next open, in case it lists one."""
_Result = TypeVar("_Result")


class DiskStats(NamedTuple):
    """What this tier did since it was opened, and what its directory holds now, whoever wrote it.

    Summed over every tier of a directory since it was empty, `promoted - evicted - discarded` is `pieces`.
    """

    hits: int
    misses: int
    promoted: int
    """Pieces written."""
    evicted: int
    """Pieces removed to make room."""
    discarded: int
    """Pieces removed by `discard`, replaced by `write`, or found to be gone."""
    read_bytes: int
    written_bytes: int
    resident_bytes: int
    budget_bytes: int
    pieces: int


class DiskTier:
    """Pieces as files under `root`, one each, evicted least recently used first.

    Any number of processes may share `root`. All pieces and those being written never exceed `budget_bytes`
    together; each process enforces its own budget, when it opens the tier and when it writes, so the smallest one
    holds whenever its owner is the last to write. The index beside the pieces (some 200 bytes each) is not counted.

    Pieces are named by content digest, so they outlive a restart and are never stale. Whatever fails is a miss, never
    an error: a piece that another process evicted meanwhile, a full disk, a directory that was deleted or may not be
    written. The last is served read-only, with what it holds. Trouble with writing is logged once of each kind.
    The bytes are not verified here: whoever loads them into memory does, and calls `discard` on a mismatch.
    """

    def __init__(self, root: Path, budget_bytes: int) -> None:
        """Adopt what `root` holds already, evicting what exceeds the budget. Reads the index, not the pieces."""
        self.root = root
        self._budget_bytes = budget_bytes
        self._files = PieceFiles(root)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._gone: set[PieceKey] = set()
        self._complaints: set[object] = set()
        self._totals = self._locked(self._adopt) or self._sum()

    def read_into(self, key: PieceKey, out: memoryview, seen: Seen | None = None) -> bool:
        """Fill `out` with the piece and return True, or return False on a miss. Blocks for the read, for no lock."""
        try:
            self._files.read_into(key, out, seen)
        except (OSError, CartridgeError) as error:
            with self._lock:
                self._counts["misses"] += 1
                if isinstance(error, FileNotFoundError) and len(self._gone) < _GONE_LIMIT:
                    self._gone.add(key)
            return False
        with self._lock:
            self._counts.update(hits=1, read_bytes=len(out))
        return True

    def write(self, key: PieceKey, data: memoryview) -> None:
        """Keep a copy of the piece if the budget allows one of its size. Blocks for the write; never raises."""
        partial = self._locked(lambda index: self._reserve(index, key, len(data)))
        if partial is None:
            return
        kept = None
        try:
            piece = Piece(key, len(data), self._files.fill(partial, data))
            kept = self._locked(lambda index: self._keep(index, partial, piece))
        except OSError as error:
            self._complain(error)
        finally:
            if kept is None:
                self._files.abandon(partial)
            os.close(partial.descriptor)

    def discard(self, key: PieceKey) -> None:
        """Forget the piece and remove its file, if there is one."""
        if self._locked(lambda index: self._discard(index, [key])) is None:
            with suppress(OSError):  # the index may list what is gone
                self._files.remove(key)

    def discard_cartridge(self, digest: str) -> None:
        """Forget every piece of a cartridge and remove its files."""
        self._locked(
            lambda index: self._discard(
                index, {*index.of_cartridge(digest), *(piece.key for piece in self._files.of_cartridge(digest))}
            )
        )

    def stats(self) -> DiskStats:
        """Return the counters. What the directory holds is as last seen where its index cannot be read."""
        totals = self._locked(DiskIndex.totals)
        with self._lock:
            self._totals = totals = totals or self._totals
            counts = self._counts
            return DiskStats(
                counts["hits"],
                counts["misses"],
                counts["promoted"],
                counts["evicted"],
                counts["discarded"],
                counts["read_bytes"],
                counts["written_bytes"],
                totals.bytes,
                self._budget_bytes,
                totals.pieces,
            )

    def check(self) -> None:
        """Raise `AssertionError` unless the index says what is on disk and the budget holds. Reads the directory.

        Where files were removed by hand, call it after reading them.
        """
        assert self._locked(self._check), f"{self.root} cannot be checked"

    def _locked(self, work: Callable[[DiskIndex], _Result]) -> _Result | None:
        """Run `work` while no other thread or process changes the directory; None if it cannot be changed.

        Where the index turns out to be broken it is made anew and `work` runs again, so `work` must bear that.
        """
        try:
            if not self.root.exists():
                self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locked(self.root / "lock", _LOCK_TIMEOUT_S):
                path = self.root / "index.sqlite"
                with suppress(sqlite3.Error):
                    return self._run(path, work)
                make_index(path, self._files)
                return self._run(path, work)
        except (OSError, sqlite3.Error) as error:
            self._complain(error)
            return None

    def _run(self, path: Path, work: Callable[[DiskIndex], _Result]) -> _Result:
        with open_index(path) as index:
            with self._lock:
                gone, self._gone = self._gone, set()
            self._forget(index, (key for key in gone if self._files.find(key) is None))
            result = work(index)
            index.commit()
            return result

    def _adopt(self, index: DiskIndex) -> Totals:
        index.verify()
        self._make_room(index, self._files.partial_bytes())
        return index.totals()

    def _reserve(self, index: DiskIndex, key: PieceKey, size_bytes: int) -> Partial | None:
        """Return a partial file of the size, or None if too much is being written already."""
        needed_bytes = self._files.partial_bytes() + size_bytes
        if needed_bytes > self._budget_bytes:
            return None
        self._discard(index, [key])
        self._make_room(index, needed_bytes)
        index.commit()  # nothing may fail after the start
        return self._files.start(size_bytes)

    def _keep(self, index: DiskIndex, partial: Partial, piece: Piece) -> bool:
        self._discard(index, [piece.key])
        index.add(piece)
        index.commit()  # before the file appears: the index lists all that is there
        try:
            self._files.publish(partial, piece.key)
        except OSError:
            index.remove(piece.key)
            index.commit()
            raise
        self._count(promoted=1, written_bytes=piece.bytes)
        return True

    def _make_room(self, index: DiskIndex, needed_bytes: int) -> None:
        """Remove the least recently used pieces until the budget has room for more."""
        while index.totals().bytes > max(self._budget_bytes - needed_bytes, 0):
            oldest = index.oldest()
            found = self._files.find(oldest.key)
            if found is None:
                self._forget(index, [oldest.key])
            elif found.used_ns != oldest.used_ns:  # a hit, of whichever process, is noted on the file alone
                index.use(oldest.key, found.used_ns)
            else:
                self._files.remove(oldest.key)
                index.remove(oldest.key)
                self._count(evicted=1)

    def _discard(self, index: DiskIndex, keys: Iterable[PieceKey]) -> bool:
        keys = list(keys)
        for key in keys:
            self._files.remove(key)
        self._forget(index, keys)
        return True

    def _forget(self, index: DiskIndex, keys: Iterable[PieceKey]) -> None:
        self._count(discarded=sum([index.remove(key) for key in keys]))

    def _check(self, index: DiskIndex) -> bool:
        on_disk = {piece.key: piece.bytes for piece in self._files.all()}
        listed = {piece.key: piece.bytes for piece in index.all()}
        assert listed == on_disk, f"listed or on disk alone: {set(listed.items()) ^ set(on_disk.items())}"
        assert index.totals() == (sum(on_disk.values()), len(on_disk)), index.totals()
        assert sum(on_disk.values()) + self._files.partial_bytes() <= self._budget_bytes
        return True

    def _sum(self) -> Totals:
        sizes = [piece.bytes for piece in self._files.all()]
        return Totals(sum(sizes), len(sizes))

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _complain(self, error: OSError | sqlite3.Error) -> None:
        kind = error.errno if isinstance(error, OSError) else error.args
        with self._lock:
            known = kind in self._complaints
            self._complaints.add(kind)
        if not known:
            logger.warning("disk tier %s keeps no new copies while this lasts: %s", self.root, error)
