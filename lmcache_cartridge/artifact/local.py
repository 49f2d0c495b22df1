"""LocalSource: artefacts in local directories."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CartridgeError, SourceDenied, SourceError, SourceNotFound, TruncatedPayload
from .bytesource import ByteRange, Seen, SmallFile

_STEP_BYTES = 2 << 20
"""Most that is read before it is shown, so that it is in the reading core's cache then. Every step takes the interpreter's
lock a few times, for which four threads wait on each other: measured with a chunk's check, 512 KiB take 1.6 times as long
as 2 MiB, 8 MiB a tenth longer."""


class LocalSource:
    """Artefacts in local directories, read with `preadv` straight into the caller's buffer. See `ByteSource`.

    Reads past the page cache gained nothing in a served request: p = 16,384, nine by turns, first token after 4.2 s through it
    and 4.6 past it, on two busy cores.
    """

    def read_into(self, location: str, file: str, where: ByteRange, out: memoryview, seen: Seen | None = None) -> None:
        if not len(out):
            return
        path = f"{location}/{file}"
        with naming(path), open(path, "rb", buffering=0, opener=open_regular) as opened:
            read_exactly(opened.fileno(), where.start, out, path, seen)

    def read(self, location: str, file: str, limit_bytes: int, *, known: str | None = None) -> SmallFile | None:
        path = f"{location}/{file}"
        with naming(path), open(path, "rb", opener=open_regular) as opened:
            status = os.fstat(opened.fileno())
            revision = _revision(status)
            if revision == known:
                return None
            data = opened.read(min(limit_bytes, status.st_size) + 1)
        if len(data) > limit_bytes:
            raise SourceError(f"{path} has more than the {limit_bytes} bytes that it may have")
        return SmallFile(data, revision)

    def size(self, location: str, file: str) -> int:
        with naming(path := f"{location}/{file}"):
            return Path(path).stat().st_size

    def revision(self, location: str, file: str) -> str:
        with naming(path := f"{location}/{file}"):
            return _revision(Path(path).stat())


def read_exactly(descriptor: int, offset: int, out: memoryview, path: str, seen: Seen | None = None) -> None:
    """Fill `out` from `offset` of an open file, the caller's to close.

    Raises `TruncatedPayload`, naming `path`, or `OSError`.
    """
    done = shown = 0
    if len(out) > _STEP_BYTES:  # the disk goes on while this thread looks at a part
        os.posix_fadvise(descriptor, offset, len(out), os.POSIX_FADV_WILLNEED)
    while done < len(out):
        end = shown + _STEP_BYTES if seen else len(out)
        count = os.preadv(descriptor, [out[done:end]], offset + done)
        if count == 0:
            raise TruncatedPayload(f"{path} ends at byte {offset + done}, {len(out) - done} bytes early")
        done += count
        if seen and done in (end, len(out)):  # a short read may end within a number
            seen(out[shown:done])
            shown = done


def open_regular(path: str, flags: int) -> int:
    """Open a file, which must be a regular one: to open or read a FIFO or device may block for ever. Raises `OSError`."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_IFMT(os.fstat(descriptor).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is no regular file", path)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Let an `OSError` come out as a `SourceError` that names `path`."""
    try:
        yield
    except CartridgeError:
        raise
    except OSError as error:
        kind: type[SourceError] = SourceError
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            kind = SourceNotFound
        elif isinstance(error, PermissionError):
            kind = SourceDenied
        raise kind(f"{path}: {error.strerror}") from error


def _revision(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"
