"""DiskTier: payload pieces kept on a local disk, within a byte budget."""

from __future__ import annotations

import os
import threading
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from .errors import CartridgeError
from .sources import read_exactly


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
        self._hits = self._misses = self._evictions = 0
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = []
        for path in root.glob("*/*.bin"):
            digest, piece = path.parent.name, path.stem.split("-")
            status = path.stat()
            found.append((status.st_mtime_ns, PieceKey(digest, *map(int, piece)), status.st_size))
        for _, key, size in sorted(found):
            self._sizes[key] = size
        for path in root.glob("*/*.partial"):
            path.unlink(missing_ok=True)
        with self._lock:
            self._evict()

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
        if len(data) > self._budget_bytes:
            return
        path = self._path(key)
        partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            # The budget is taken before the bytes exist, so that concurrent writers cannot exceed it together.
            with self._lock:
                self._sizes.pop(key, None)
                self._sizes[key] = len(data)
                self._evict()
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            with self._lock:
                if key in self._sizes:
                    partial.rename(path)
                else:
                    partial.unlink()
        except OSError:
            partial.unlink(missing_ok=True)
            self.discard(key)

    def discard(self, key: PieceKey) -> None:
        """Forget the piece and remove its file, if there is one."""
        with self._lock:
            self._sizes.pop(key, None)
            self._path(key).unlink(missing_ok=True)

    def stats(self) -> DiskStats:
        """Return the counters; no side effects."""
        with self._lock:
            return DiskStats(
                self._hits, self._misses, self._evictions, sum(self._sizes.values()), self._budget_bytes
            )

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

    def _evict(self) -> None:
        """Remove the least recently used pieces until the budget holds. The lock is held."""
        total = sum(self._sizes.values())
        while total > self._budget_bytes:
            key, size = self._sizes.popitem(last=False)
            self._path(key).unlink(missing_ok=True)
            total -= size
            self._evictions += 1

    def _path(self, key: PieceKey) -> Path:
        return self.root / key.digest / f"{key.chunk}-{key.first_head}-{key.last_head}.bin"
