"""DiskCache: copies of stored chunks on a local disk, within a byte budget that all processes share.

    <root>/<digest>/<chunk>-<first_head>-<last_head>.bin    a copy; its modification time is when it was last used
    <root>/<digest>/.<random>.partial                      a copy being written, or what a killed process left of one
    <root>/lock                                             held for every change; says what all files come to

A copy appears by rename, and its bytes count in full from before they are written. So what the lock file says is too much after a
process was killed, never too little, until the files are counted again: when a cache is opened, and when the budget is used
up and the oldest files that the last count found are gone. That takes a second for some 100,000 files, for which writes wait.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..artifact import files
from ..artifact.bytesource import Seen
from ..artifact.local import read_exactly
from ..errors import CartridgeError
from .locks import locked

logger = logging.getLogger(__name__)

T = TypeVar("T")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"([0-9]{1,9})-[0-9]{1,9}-[0-9]{1,9}\.bin")
_SUM = struct.Struct("<qq")
_LOCK_TIMEOUT_S, _PAUSE_S = 2.0, 20.0
"""How long a process may hold up a change, and how long nothing is changed after one did: it may be stopped."""


class CopyKey(NamedTuple):
    """Heads `first_head` to `last_head` (exclusive) of one stored chunk."""

    digest: str
    chunk: int
    first_head: int
    last_head: int


class DiskStats(NamedTuple):
    """What this cache did since it was opened, and what its directory holds now, whoever wrote it."""

    hits: int
    misses: int
    promoted: int
    """Copies written."""
    evicted: int
    """Copies removed, for whatever reason."""
    read_bytes: int
    written_bytes: int
    resident: int
    resident_bytes: int
    budget_bytes: int


class _Sum(NamedTuple):
    """What all files come to."""

    bytes: int = 0
    copies: int = 0


class _Copy(NamedTuple):
    used_ns: int
    chunk: int
    bytes: int
    path: str


class DiskCache:
    """Copies of chunks under `root`, one file each.

    Any number of processes may share `root`, and its budget: the smallest one that any of them has. The cartridge that was
    used least recently goes first, its last chunk first of all.

    Copies are named by content digest, so they outlive a restart and are never stale. Whatever fails is a miss, never
    an error: a copy that another process evicted meanwhile, a full disk, a directory that was deleted or may not be
    written, which is served with what it holds. Trouble with writing is logged once of each kind.
    The bytes are not verified here: whoever loads them into memory does, and calls `discard` on a mismatch.
    """

    def __init__(self, root: Path, budget_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """Adopt the copies in `root`, evicting what exceeds the budget. Looks at every file there, reads none."""
        self.root = root
        self._budget_bytes, self._clock = budget_bytes, clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._complaints: set[int | None] = set()
        self._paused_until = 0.0
        self._oldest: list[_Copy] = []
        """The oldest last, as of the last count."""
        self._change(lambda: (self._recount(), self._make_room(0)))

    def read_into(self, key: CopyKey, out: memoryview, seen: Seen | None = None) -> bool:
        """Fill `out` with a copy and return True, or return False on a miss. Blocks for the read, for no lock.

        After a miss `out` is undefined. `seen` is that of `ByteSource.read_into`.
        """
        try:
            path = self._path(key)
            with _opened(path) as file:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode) or status.st_size != len(out):
                    raise OSError(f"{path} is no file of {len(out)} bytes")
                read_exactly(file, 0, out, str(path), seen)
                with suppress(OSError):
                    self._touch(path)
        except (OSError, CartridgeError):
            self._count(misses=1)
            return False
        self._count(hits=1, read_bytes=len(out))
        return True

    def write(self, key: CopyKey, data: memoryview) -> None:
        """Keep a copy if the budget allows one of its size. Blocks for the write, and for those of other processes; never raises."""
        if len(data) <= self._budget_bytes and self._change(lambda: self._write(self._path(key), data)):
            self._count(promoted=1, written_bytes=len(data))

    def _write(self, path: Path, data: memoryview) -> bool:
        """Write a copy in place of the one there is; False without room for it. The directory is held."""
        if not self._make_room(len(data)):
            return False
        self._add(len(data), 1)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with files.replacing(path) as partial:
                with files.create(partial, 0o600) as file:
                    file.write(data)
                self._touch(partial)
                self._remove(path)
        except OSError:
            self._add(-len(data), -1)
            raise
        return True

    def discard(self, key: CopyKey) -> None:
        """Remove a copy, if there is one, whoever holds the directory: the next count notices. Never raises."""
        with suppress(OSError):
            path = self._path(key)
            if self._change(lambda: self._remove(path)) is None:
                path.unlink()

    def evict(self, digest: str) -> int:
        """Remove every copy of a cartridge and return how many there were. Never raises."""

        def remove_all() -> int:
            return sum(self._remove(Path(copy.path)) for copy in list(self._copies(digest)))

        return self._change(remove_all) or 0

    def stats(self) -> DiskStats:
        """Return the counters, at a cost that does not grow with the copies. Waits for nobody.

        Files removed by hand are counted as resident until the budget is used up or the cache is opened again.
        """
        total = None
        with suppress(OSError), _opened(self.root / "lock") as lock:
            total = _read_sum(lock)
        total = total or _Sum()
        with self._lock:
            did = {name: self._counts[name] for name in DiskStats._fields[:6]}
        return DiskStats(**did, resident=total.copies, resident_bytes=total.bytes, budget_bytes=self._budget_bytes)

    def chunks_by_digest(self) -> dict[str, int]:
        """Return how many stored chunks of each cartridge have a copy, of any heads. Looks at every file."""
        return {digest: len({copy.chunk for copy in self._copies(digest)}) for digest in self._digests()}

    def _path(self, key: CopyKey) -> Path:
        return self._directory(key.digest) / f"{key.chunk}-{key.first_head}-{key.last_head}.bin"

    def _directory(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise OSError(errno.EINVAL, "is no digest", digest)
        return self.root / digest

    def _change(self, work: Callable[[], T]) -> T | None:
        """Return what `work` does while the directory is held and `_sum` is right; None where that fails."""
        try:
            if time.monotonic() < self._paused_until:
                return None
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locked(self.root / "lock", _LOCK_TIMEOUT_S) as self._file:
                self._sum = _read_sum(self._file) or self._recount()
                return work()
        except OSError as error:
            if isinstance(error, TimeoutError):
                self._paused_until = time.monotonic() + _PAUSE_S
            self._complain(error)
            return None

    def _digests(self) -> list[str]:
        with suppress(OSError):
            return [path.name for path in self.root.iterdir() if _DIGEST.fullmatch(path.name)]
        return []

    def _copies(self, digest: str) -> Iterator[_Copy]:
        """Yield the files of a cartridge, in no order. Never raises."""
        with suppress(OSError):
            for entry in os.scandir(self._directory(digest)):
                with suppress(OSError):
                    if (match := _FILE.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        yield _Copy(status.st_mtime_ns, int(match[1]), status.st_size, entry.path)

    # The directory is held in everything below that changes the sum.

    def _recount(self) -> _Sum:
        """Let the sum be what the files come to, and remember in which order they go. Removes what killed processes left."""
        cartridges = []
        for digest in self._digests():
            with suppress(OSError):
                for left in (self.root / digest).glob(".*.partial"):
                    left.unlink()
            cartridges.append(sorted(self._copies(digest), key=lambda copy: copy.chunk))
        cartridges.sort(key=lambda copies: max(copies, default=()), reverse=True)
        self._oldest = oldest = [copy for copies in cartridges for copy in copies]
        return self._set(_Sum(sum(copy.bytes for copy in oldest), len(oldest)))

    def _set(self, total: _Sum) -> _Sum:
        os.pwrite(self._file, _SUM.pack(*total), 0)
        self._sum = total
        return total

    def _add(self, size_bytes: int, copies: int) -> None:
        total = _Sum(self._sum.bytes + size_bytes, self._sum.copies + copies)
        if min(total) < 0:  # files were put here by hand
            self._recount()
        else:
            self._set(total)

    def _make_room(self, needed_bytes: int) -> bool:
        """Evict what was used least recently until the budget has room for more; False where it cannot have."""
        is_counted = False
        while self._sum.bytes > self._budget_bytes - needed_bytes:
            if self._oldest:
                copy = self._oldest.pop()
                with suppress(FileNotFoundError):
                    if os.lstat(copy.path).st_mtime_ns == copy.used_ns:  # else it was used since, or is another
                        self._remove(Path(copy.path))
            elif is_counted:
                return False
            else:
                self._recount()
                is_counted = True
        return True

    def _remove(self, path: Path) -> int:
        """Remove a copy, and its directory if that is empty then; return how many there were."""
        try:
            size_bytes = path.lstat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0
        path.unlink()
        self._add(-size_bytes, -1)
        self._count(evicted=1)
        with suppress(OSError):
            path.parent.rmdir()
        return 1

    def _touch(self, path: Path) -> None:
        now_s = self._clock()
        os.utime(path, (now_s, now_s))

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _complain(self, error: OSError) -> None:
        if error.errno not in self._complaints:
            logger.warning("disk cache %s keeps no new copies while this lasts: %s", self.root, error)
        self._complaints.add(error.errno)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _read_sum(lock: int) -> _Sum | None:
    data = os.pread(lock, _SUM.size, 0)
    return _Sum(*_SUM.unpack(data)) if len(data) == _SUM.size else None
