"""PieceFiles: pieces of payload as files under one directory, each whole or absent, whoever else uses it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..artifact.bytesource import Seen
from ..artifact.local import read_exactly

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})-([0-9]{1,9})\.bin")
_PARTIALS = "partial"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_EXISTING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class PieceKey(NamedTuple):
    """Heads `first_head` to `last_head` (exclusive) of one stored chunk."""

    digest: str
    chunk: int
    first_head: int
    last_head: int


class Piece(NamedTuple):
    """One piece and when it was last used."""

    key: PieceKey
    bytes: int
    used_ns: int
    """Modification time of its file."""


class Partial(NamedTuple):
    """A piece that is being written, of its full size from the start."""

    name: str
    descriptor: int


class PieceFiles:
    """Pieces as `<digest>/<chunk>-<first_head>-<last_head>.bin` under `root`; partial ones under `partial`.

    A piece appears by rename. A partial file is locked by its writer until it is renamed or removed, so that the
    kernel says whether its writer lives. Modes are private. Links in `root` are not followed, and no key leads out
    of it. Methods raise `OSError` unless they say otherwise.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def read_into(self, key: PieceKey, out: memoryview, seen: Seen | None = None) -> None:
        """Fill `out` with a piece and note its use, where that may be written. Blocks for the read; takes no lock.

        Raises `FileNotFoundError` when there is none, `CartridgeError` when it ends early. `out` is then undefined.
        """
        directory, name = _place(key)
        with self._directory(directory) as parent, _opened(name, parent) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size != len(out):
                raise OSError(errno.EINVAL, f"no file of {len(out)} bytes", name)
            read_exactly(descriptor, 0, out, name, seen)
            with suppress(OSError):
                _use(descriptor)

    def start(self, size_bytes: int) -> Partial:
        """Make a partial file that takes `size_bytes` from now on, the caller's to close. Hold the directory's lock."""
        with self._directory(_PARTIALS, make=True) as parent:
            name = uuid.uuid4().hex
            descriptor = os.open(name, _NEW, 0o600, dir_fd=parent)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, size_bytes)
            except OSError:
                os.unlink(name, dir_fd=parent)
                os.close(descriptor)
                raise
            return Partial(name, descriptor)

    def fill(self, partial: Partial, data: memoryview) -> int:
        """Write all bytes and return when, as the file has it. Blocks for the write; needs no lock."""
        done = 0
        while done < len(data):
            done += os.pwrite(partial.descriptor, data[done:], done)
        _use(partial.descriptor)
        return os.fstat(partial.descriptor).st_mtime_ns

    def publish(self, partial: Partial, key: PieceKey) -> None:
        """Let a filled partial file be the piece, in place of one there. Hold the directory's lock."""
        directory, name = _place(key)
        with self._directory(_PARTIALS) as source, self._directory(directory, make=True) as target:
            os.rename(partial.name, name, src_dir_fd=source, dst_dir_fd=target)

    def abandon(self, partial: Partial) -> None:
        """Remove a partial file; needs no lock. Never raises."""
        with suppress(OSError), self._directory(_PARTIALS) as parent:
            os.unlink(partial.name, dir_fd=parent)

    def partial_bytes(self) -> int:
        """Return what partial files take, having removed those of dead writers. Hold the directory's lock."""
        try:
            with self._directory(_PARTIALS) as parent, os.scandir(parent) as entries:
                return sum(_claimed_bytes(entry.name, parent) for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def find(self, key: PieceKey) -> Piece | None:
        """Return what a piece's file says of it, None if there is no such file."""
        directory, name = _place(key)
        try:
            with self._directory(directory) as parent:
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Piece(key, status.st_size, status.st_mtime_ns)

    def remove(self, key: PieceKey) -> None:
        """Remove a piece, and its directory when it was the last; no change if there is none."""
        directory, name = _place(key)
        with suppress(FileNotFoundError, NotADirectoryError), self._directory(directory) as parent:
            os.unlink(name, dir_fd=parent)
        with suppress(OSError):
            (self.root / directory).rmdir()

    def of_cartridge(self, digest: str) -> Iterator[Piece]:
        """Yield the pieces of one cartridge, in no order. Never raises."""
        if not _DIGEST.fullmatch(digest):
            return
        with suppress(OSError), self._directory(digest) as parent, os.scandir(parent) as entries:
            for entry in entries:
                numbers = _FILE.fullmatch(entry.name)
                with suppress(OSError):  # it may go while this looks
                    if numbers and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        key = PieceKey(digest, *map(int, numbers.groups()))
                        yield Piece(key, status.st_size, status.st_mtime_ns)

    def all(self) -> Iterator[Piece]:
        """Yield every piece there is, in no order. Never raises."""
        with suppress(OSError):
            for path in self.root.iterdir():
                yield from self.of_cartridge(path.name)

    @contextmanager
    def _directory(self, name: str, *, make: bool = False) -> Iterator[int]:
        if make:
            with suppress(FileExistsError):
                (self.root / name).mkdir(mode=0o700)
        descriptor = os.open(self.root / name, _DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def is_key(key: PieceKey) -> bool:
    """Return whether a piece may have this key."""
    return bool(_DIGEST.fullmatch(key.digest) and _FILE.fullmatch(_name(key)))


def _place(key: PieceKey) -> tuple[str, str]:
    if not is_key(key):
        raise OSError(errno.EINVAL, "no key of a piece", repr(key))
    return key.digest, _name(key)


def _name(key: PieceKey) -> str:
    return f"{key.chunk}-{key.first_head}-{key.last_head}.bin"


@contextmanager
def _opened(name: str, parent: int) -> Iterator[int]:
    descriptor = os.open(name, _EXISTING, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _use(descriptor: int) -> None:
    now = time.time_ns()
    os.utime(descriptor, ns=(now, now))


def _claimed_bytes(name: str, parent: int) -> int:
    try:
        with _opened(name, parent) as descriptor:
            size = os.fstat(descriptor).st_size
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return size
            os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    return 0
