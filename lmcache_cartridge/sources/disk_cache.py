"""DiskCache: copies of stored chunks on a local disk, within a byte budget that all processes share.

    <root>/<digest>/<chunk>-<first_head>-<last_head>.bin    a copy; its modification time is when it was last used
    <root>/<digest>/<random>.part                           a copy being written, or what a killed process left of one
    <root>/lock                                             held for every change; says what all files come to

A copy appears by rename, and its bytes count in full from before they are written. So what the lock file says is too much after a
process was killed, never too little, until the files are counted again: when a cache is opened, and when the budget is used
up and the oldest files that the last count found are gone. That takes a second for some 100,000 files and holds up nobody, so
what is counted while something is changed goes for nothing.
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
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..artifact.bytesource import Seen
from ..artifact.local import read_exactly
from ..errors import CartridgeError
from .locks import locked

logger = logging.getLogger(__name__)

T = TypeVar("T")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"([0-9]{1,9})-[0-9]{1,9}-[0-9]{1,9}\.bin")
_SUM = struct.Struct("<qqq")
_LOCK_TIMEOUT_S, _PAUSE_S = 2.0, 20.0
"""How long a process may hold up a change, and how long nothing is changed after one did: it may be stopped."""
_LEFT_S = 3600.0
"""Age of a half-written file that nobody writes any more."""
_TOUCH_S = 60.0
"""A read notes that a copy was used when the last note is older."""


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
    """Copies removed to make room, or by `evict`."""
    discarded: int
    """Copies removed by `discard`, or replaced by `write`."""
    read_bytes: int
    written_bytes: int
    resident: int
    resident_bytes: int
    """With those that are being written."""
    budget_bytes: int


class _Sum(NamedTuple):
    """What all files come to."""

    bytes: int = 0
    copies: int = 0
    changes: int = 0
    """How often one of the others was changed."""


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
        self._lock, self._changing = threading.Lock(), threading.Lock()
        self._counts: Counter[str] = Counter()
        self._complaints: set[int | None] = set()
        self._paused_until = 0.0
        self._oldest: list[_Copy] = []
        """The oldest last; shortened by whoever holds the directory."""
        if self._count_files():
            self._change(lambda: self._make_room(0))
        else:
            self._sum = self._look()

    def read_into(self, key: CopyKey, out: memoryview, seen: Seen | None = None) -> bool:
        """Fill `out` with a copy and return True, or return False on a miss. Blocks for the read, for no lock.

        After a miss `out` is undefined. `seen` is that of `ByteSource.read_into`.
        """
        try:
            path = self._path(key)
            with _opened(path, os.O_RDONLY) as file:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode) or status.st_size != len(out):
                    raise OSError(f"{path} is no file of {len(out)} bytes")
                read_exactly(file, 0, out, str(path), seen)
                if abs(self._clock() - status.st_mtime) > _TOUCH_S:
                    with suppress(OSError):
                        self._touch(file)
        except (OSError, CartridgeError):
            self._count(misses=1)
            return False
        self._count(hits=1, read_bytes=len(out))
        return True

    def write(self, key: CopyKey, data: memoryview) -> None:
        """Keep a copy if the budget allows one of its size. Blocks for the write; never raises."""
        if len(data) > self._budget_bytes:
            return
        start = partial(self._start, key, len(data))
        part = self._change(start)
        if part is None and not self._oldest and self._count_files():
            part = self._change(start)
        if part is None:
            return
        published = None
        try:
            with _opened(part, os.O_WRONLY) as file:
                done = 0
                while done < len(data):
                    done += os.pwrite(file, data[done:], done)
                self._touch(file)
            published = self._change(lambda: self._publish(part, self._path(key)))
        except OSError as error:
            self._complain(error)
        if published is None:
            self._drop(part)
        else:
            self._count(promoted=1, written_bytes=len(data), discarded=published)

    def _start(self, key: CopyKey, size_bytes: int) -> Path | None:
        """Return the file of a copy that is to be written, which counts in full from now on; None without room for it."""
        path = self._path(key)
        if not self._make_room(size_bytes):
            return None
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.parent / f"{uuid.uuid4().hex}.part"
        self._add(size_bytes, 0)
        try:
            with _opened(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                os.ftruncate(file, size_bytes)
        except OSError:
            part.unlink(missing_ok=True)
            self._add(-size_bytes, 0)
            raise
        return part

    def _publish(self, part: Path, path: Path) -> int:
        """Let a filled file be the copy; return how many it takes the place of."""
        replaced = self._remove(path)
        self._add(0, 1)
        try:
            part.rename(path)
        except OSError:
            self._add(0, -1)
            raise
        return replaced

    def discard(self, key: CopyKey) -> None:
        """Remove a copy, if there is one. Never raises."""
        with suppress(OSError):
            self._count(discarded=self._drop(self._path(key)))

    def _drop(self, path: Path) -> int:
        """Remove a file, whoever holds the directory: the next count notices. Return how many were taken from the sum."""
        removed = self._change(lambda: self._remove(path))
        if removed is None:
            with suppress(OSError):
                path.unlink()
        return removed or 0

    def evict(self, digest: str) -> int:
        """Remove every copy of a cartridge and return how many there were. Never raises."""

        def remove_all() -> int:
            return sum(self._remove(Path(copy.path)) for copy in list(self._copies(digest)))

        removed = self._change(remove_all) or 0
        self._count(evicted=removed)
        return removed

    def stats(self) -> DiskStats:
        """Return the counters, at a cost that does not grow with the copies. Waits for nobody.

        Files removed by hand are counted as resident until the budget is used up or the cache is opened again.
        """
        total = self._sum
        try:
            with _opened(self.root / "lock", os.O_RDONLY) as lock:
                total = _read_sum(lock) or total
        except OSError:
            if not self.root.exists():
                total = _Sum()
        with self._lock:
            did = {name: self._counts[name] for name in DiskStats._fields[:7]}
        return DiskStats(**did, resident=total.copies, resident_bytes=total.bytes, budget_bytes=self._budget_bytes)

    def chunks_by_digest(self) -> dict[str, int]:
        """Return how many stored chunks of each cartridge have a copy, of any heads. Looks at every file."""
        return {digest: len({copy.chunk for copy in self._copies(digest)}) for digest in self._digests()}

    def close(self) -> None:
        """Nothing to give back."""

    def _path(self, key: CopyKey) -> Path:
        if not _DIGEST.fullmatch(key.digest) or (self.root / key.digest).is_symlink():
            raise OSError(errno.EINVAL, "is no digest, or a link", key.digest)
        return self.root / key.digest / f"{key.chunk}-{key.first_head}-{key.last_head}.bin"

    def _change(self, work: Callable[[], T]) -> T | None:
        """Return what `work` does while the directory is held and `_sum` is right; None where that fails."""
        try:
            if time.monotonic() < self._paused_until:
                return None
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._changing, locked(self.root / "lock", _LOCK_TIMEOUT_S) as self._file:
                self._sum = _read_sum(self._file) or self._set(self._look())
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
        directory = self.root / digest
        with suppress(OSError):
            if not _DIGEST.fullmatch(digest) or directory.is_symlink():
                return
            for entry in os.scandir(directory):
                with suppress(OSError):
                    if (match := _FILE.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        yield _Copy(status.st_mtime_ns, int(match[1]), status.st_size, entry.path)

    def _count_files(self) -> bool:
        """Let the sum be what the files come to, unless it is changed while they are counted; False where it cannot be."""
        if (before := self._change(lambda: self._sum)) is None:
            return False
        total = self._look(before.changes)
        self._change(lambda: self._sum == before != total and self._set(total))
        return True

    def _look(self, changes: int = 0) -> _Sum:
        """Return what the files come to, and remember in which order they go. Never raises."""
        cartridges, sizes = [], []
        for digest in self._digests():
            with suppress(OSError):  # it may go while this looks
                sizes += [_size(part) or 0 for part in (self.root / digest).glob("*.part") if not _is_left(part)]
            cartridges.append(sorted(self._copies(digest), key=lambda copy: copy.chunk))
        cartridges.sort(key=lambda copies: max(copies, default=()), reverse=True)
        self._oldest = oldest = [copy for copies in cartridges for copy in copies]
        return _Sum(sum(sizes) + sum(copy.bytes for copy in oldest), len(oldest), changes)

    # The directory is held in everything below that changes the sum.

    def _set(self, total: _Sum) -> _Sum:
        os.pwrite(self._file, _SUM.pack(*total), 0)
        self._sum = total
        return total

    def _add(self, size_bytes: int, copies: int) -> None:
        known = self._sum
        total = _Sum(known.bytes + size_bytes, known.copies + copies, known.changes + 1)
        if min(total) < 0:  # files were put here by hand
            total = self._look(total.changes)
        self._set(total)

    def _make_room(self, needed_bytes: int) -> bool:
        """Evict what was used least recently until the budget has room for more; False where the last count found too little."""
        oldest = self._oldest  # a thread that counts puts another in its place
        while self._sum.bytes > self._budget_bytes - needed_bytes:
            if not oldest:
                return False
            copy = oldest.pop()
            with suppress(FileNotFoundError, NotADirectoryError):
                if os.lstat(copy.path).st_mtime_ns == copy.used_ns:  # else it was used since, or is another
                    self._count(evicted=self._remove(Path(copy.path)))
        return True

    def _remove(self, path: Path) -> int:
        """Remove a copy, and its directory if that is empty then; return how many there were. The directory is held."""
        if (size_bytes := _size(path)) is None:
            return 0
        path.unlink()
        self._add(-size_bytes, -(path.suffix == ".bin"))
        with suppress(OSError):
            path.parent.rmdir()
        return 1

    def _touch(self, file: int) -> None:
        now = int(self._clock() * 1e9)
        os.utime(file, ns=(now, now))

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _complain(self, error: OSError) -> None:
        if error.errno not in self._complaints:
            logger.warning("disk cache %s keeps no new copies while this lasts: %s", self.root, error)
        self._complaints.add(error.errno)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _is_left(part: Path) -> bool:
    """Remove what a process left that was killed long ago; whether it is gone."""
    with suppress(OSError):
        if time.time() - part.lstat().st_mtime > _LEFT_S:
            part.unlink()
    return not part.exists()


def _size(path: Path) -> int | None:
    """Return the size of a file, None where there is none."""
    try:
        return path.lstat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read_sum(lock: int) -> _Sum | None:
    data = os.pread(lock, _SUM.size, 0)
    return _Sum(*_SUM.unpack(data)) if len(data) == _SUM.size else None
