"""DiskCache: copies of stored chunks on a local disk, within a byte budget that all processes share.

    <root>/<digest>/                                        its modification time is when a copy in it was last used
    <root>/<digest>/<chunk>-<first_head>-<last_head>.bin    a copy
    <root>/<digest>/.<copy>.<random>.partial                one being written, or what a killed process left of it
    <root>/lock                                             held for every change

Every use and every change gives a directory another time, so what it comes to has to be found again only where that is new.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..artifact import files
from ..artifact.bytesource import Seen
from ..artifact.local import open_regular, read_exactly
from ..errors import CartridgeError
from .locks import locked

logger = logging.getLogger(__name__)

T = TypeVar("T")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"(\.)?([0-9]{1,9})-[0-9]{1,9}-[0-9]{1,9}\.bin(?(1)\..*\.partial)")
_LOCK_TIMEOUT_S = 2.0
"""How long a process may hold up a change; it may be stopped."""


class CopyKey(NamedTuple):
    """Heads `first_head` to `last_head` (exclusive) of one stored chunk."""

    digest: str
    chunk: int
    first_head: int
    last_head: int


class DiskStats(NamedTuple):
    """What this cache did since it was opened, and what its directory held, whoever wrote it, when this cache last changed something."""

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


class _Copy(NamedTuple):
    is_partial: bool
    chunk: int
    bytes: int
    path: Path


class _Held(NamedTuple):
    """What there is of a cartridge."""

    used_ns: int
    copies: list[_Copy]


class DiskCache:
    """Copies of chunks under `root`, one file each.

    Any number of processes may share `root`, and its budget: the smallest one that any of them has. The cartridge that was
    used least recently goes first, its last chunk first of all.

    Copies are named by content digest, so they outlive a restart and are never stale. Whatever fails is a miss, never
    an error: a copy that another process evicted meanwhile, a full disk, a directory that was deleted or may not be
    written, which is served with what it holds. Trouble with writing is logged once of each kind.
    The bytes are not verified here: whoever loads them into memory does, and calls `discard` on a mismatch.
    """

    def __init__(self, root: Path, budget_bytes: int) -> None:
        """Adopt the copies in `root`, evicting what exceeds the budget. Looks at every file there, reads none."""
        self.root, self._budget_bytes = root, budget_bytes
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._complaints: set[int | None] = set()
        self._held: dict[str, _Held] = {}
        """By digest, as of the last look."""
        self._change(lambda: self._make_room(0))

    def read_into(self, key: CopyKey, out: memoryview, seen: Seen | None = None) -> bool:
        """Fill `out` with a copy and return True, or return False on a miss. Blocks for the read, for no lock.

        After a miss `out` is undefined. `seen` is that of `ByteSource.read_into`.
        """
        try:
            path = self._path(key)
            file = open_regular(str(path), os.O_NOFOLLOW)
            try:
                read_exactly(file, 0, out, str(path), seen)
            finally:
                os.close(file)
        except (OSError, CartridgeError):
            self._count(misses=1)
            return False
        with suppress(OSError):
            _touch(path.parent)
        self._count(hits=1, read_bytes=len(out))
        return True

    def write(self, key: CopyKey, data: memoryview) -> None:
        """Keep a copy if the budget allows one of its size. Blocks for the write, and for those of other processes; never raises."""

        def write() -> bool:
            path = self._path(key)
            self._make_room(len(data))
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with files.replacing(path) as partial, files.create(partial, 0o600) as file:
                file.write(data)
            _touch(path.parent)
            return True

        if len(data) <= self._budget_bytes and self._change(write):
            self._count(promoted=1, written_bytes=len(data))

    def discard(self, key: CopyKey) -> None:
        """Remove a copy, if there is one, whoever holds the directory. Never raises."""
        with suppress(OSError):
            self._remove(self._path(key))

    def evict(self, digest: str) -> int:
        """Remove every copy of a cartridge and return how many there were. Never raises."""
        nothing = _Held(0, [])
        return (
            self._change(lambda: sum(self._remove(copy.path) for copy in self._look().get(digest, nothing).copies)) or 0
        )

    def stats(self) -> DiskStats:
        """Return the counters, at a cost that does not grow with the copies. Waits for nobody, looks at no disk."""
        sizes = [copy.bytes for held in self._held.values() for copy in held.copies]
        with self._lock:
            did = {name: self._counts[name] for name in DiskStats._fields[:6]}
        return DiskStats(**did, resident=len(sizes), resident_bytes=sum(sizes), budget_bytes=self._budget_bytes)

    def chunks_by_digest(self) -> dict[str, int]:
        """Return how many stored chunks of each cartridge have a copy, of any heads. Blocks to look at the disk."""
        held = self._look().items()
        return {digest: len({copy.chunk for copy in there.copies if not copy.is_partial}) for digest, there in held}

    def _path(self, key: CopyKey) -> Path:
        return self.root / key.digest / f"{key.chunk}-{key.first_head}-{key.last_head}.bin"

    def _change(self, work: Callable[[], T]) -> T | None:
        """Return what `work` does while the directory is held; None where that fails."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locked(self.root / "lock", _LOCK_TIMEOUT_S):
                try:
                    return work()
                finally:
                    self._look()
        except OSError as error:
            if error.errno not in self._complaints:
                logger.warning("disk cache %s keeps no new copies while this lasts: %s", self.root, error)
            self._complaints.add(error.errno)
            return None

    def _look(self) -> dict[str, _Held]:
        """Return what there is by digest, having looked into the directories that have another time than at the last look."""
        held, last = {}, self._held
        with suppress(OSError), os.scandir(self.root) as directories:
            for directory in directories:
                with suppress(OSError):
                    if _DIGEST.fullmatch(directory.name):
                        used_ns, there = directory.stat().st_mtime_ns, last.get(directory.name)
                        if there is None or there.used_ns != used_ns:
                            there = _Held(used_ns, list(_copies(directory.path)))
                        held[directory.name] = there
        self._held = held
        return held

    # The directory is held in everything below, but where a copy is discarded.

    def _make_room(self, needed_bytes: int) -> None:
        """Evict what was used least recently until the budget has room for more."""
        held = sorted(self._look().values())
        excess = sum(copy.bytes for there in held for copy in there.copies) + needed_bytes - self._budget_bytes
        for there in held:
            for copy in sorted(there.copies, reverse=True):
                if excess <= 0:
                    return
                self._remove(copy.path)
                excess -= copy.bytes

    def _remove(self, path: Path) -> int:
        """Remove a copy, and its directory if that is empty then; return how many there were."""
        try:
            used_ns = path.parent.stat().st_mtime_ns
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return 0
        self._count(evicted=1)
        with suppress(OSError):
            os.utime(path.parent, ns=(used_ns + 1, used_ns + 1))  # it changed, and was not used
            path.parent.rmdir()
        return 1

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


def _copies(directory: str) -> Iterator[_Copy]:
    """Yield the files of a cartridge, in no order."""
    for entry in os.scandir(directory):
        with suppress(OSError):
            if (match := _FILE.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                size_bytes = entry.stat(follow_symlinks=False).st_size
                yield _Copy(bool(match[1]), int(match[2]), size_bytes, Path(entry.path))


def _touch(directory: Path) -> None:
    """Note that a cartridge is used now."""
    now_ns = max(time.time_ns(), directory.stat().st_mtime_ns + 1)
    os.utime(directory, ns=(now_ns, now_ns))
