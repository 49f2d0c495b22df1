"""DiskTier: payload pieces kept on a local disk, within a byte budget."""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .errors import CartridgeError
from .sources import read_exactly

_FILE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})-([0-9]{1,9})\.bin")


class PieceKey(NamedTuple):
    """Heads `first_head` to `last_head` (exclusive) of one stored chunk."""

    digest: str
    chunk: int
    first_head: int
    last_head: int


class DiskStats(NamedTuple):
    """Counters since the tier was opened, and what it holds now."""

    hits: int
    misses: int
    evictions: int
    resident_bytes: int
    budget_bytes: int


class DiskTier:
    """Pieces as files under `root`, one each, evicted least recently used first.

    Files are named by content digest, so they outlive a restart and are never stale; they appear by rename, so
    another process sees a whole file or none. A file that cannot be read or written is a miss, never an error.
    The bytes are not verified here: whoever loads them into memory does, and calls `discard` on a mismatch.
    """

    def __init__(self, root: Path, budget_bytes: int) -> None:
        """Adopt what `root` holds already, evicting what exceeds the budget."""
        self.root = root
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[PieceKey, int] = OrderedDict()
        self._writing: dict[PieceKey, int] = {}
        self._hits = self._misses = self._evictions = 0
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = []
        for path in root.glob("*/*.bin"):
            piece = _FILE.fullmatch(path.name)
            with suppress(OSError):  # another process of this tier may evict it meanwhile
                status = path.stat()
                if piece:
                    key = PieceKey(path.parent.name, *map(int, piece.groups()))
                    found.append((status.st_mtime_ns, key, status.st_size))
        for _, key, size in sorted(found):
            self._sizes[key] = size
        for path in root.glob("*/*.partial"):
            _unlink(path)
        with self._lock:
            self._evict(0)

    def read_into(self, key: PieceKey, out: memoryview) -> bool:
        """Fill `out` with the piece and return True, or return False on a miss. Blocks for the read."""
        with self._lock:
            known = self._sizes.get(key) == len(out)
            if known:
                self._sizes.move_to_end(key)
        done = known and self._read(key, out)
        with self._lock:
            self._hits += done
            self._misses += not done
        return done

    def write(self, key: PieceKey, data: memoryview) -> None:
        """Keep a copy of the piece if the budget allows one of its size. Blocks for the write; never raises."""
        # The budget is taken before the bytes exist and given back only when they are gone, so that concurrent writers
        # cannot exceed it together; who finds it taken by them keeps no copy.
        with self._lock:
            if key in self._writing or len(data) > self._budget_bytes - sum(self._writing.values()):
                return
            self._forget(key)
            self._evict(len(data))
            self._writing[key] = len(data)
        path = self._path(key)
        partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            with self._lock:
                partial.rename(path)
                self._sizes[key] = self._writing.pop(key)
        except OSError:
            _unlink(partial)
            with self._lock:
                del self._writing[key]

    def discard(self, key: PieceKey) -> None:
        """Forget the piece and remove its file, if there is one."""
        with self._lock:
            self._forget(key)

    def discard_cartridge(self, digest: str) -> None:
        """Forget every piece of a cartridge and remove its files."""
        with self._lock:
            keys = [key for key in self._sizes if key.digest == digest]
        for key in keys:
            self.discard(key)

    def stats(self) -> DiskStats:
        """Return the counters; no side effects."""
        with self._lock:
            return DiskStats(self._hits, self._misses, self._evictions, sum(self._sizes.values()), self._budget_bytes)

    def _read(self, key: PieceKey, out: memoryview) -> bool:
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            read_exactly(descriptor, 0, out, str(path))
        except CartridgeError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _evict(self, needed_bytes: int) -> None:
        """Remove the least recently used pieces until the budget has room for more. The lock is held."""
        total = sum(self._sizes.values()) + sum(self._writing.values()) + needed_bytes
        while total > self._budget_bytes:
            key, size = self._sizes.popitem(last=False)
            _unlink(self._path(key))
            total -= size
            self._evictions += 1

    def _forget(self, key: PieceKey) -> None:
        self._sizes.pop(key, None)
        _unlink(self._path(key))

    def _path(self, key: PieceKey) -> Path:
        return self.root / key.digest / f"{key.chunk}-{key.first_head}-{key.last_head}.bin"


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
