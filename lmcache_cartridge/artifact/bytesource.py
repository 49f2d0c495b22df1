"""ByteSource: what every source of artefacts can do, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

Seen = Callable[[memoryview], None]
"""Gets a buffer's bytes in order, each part as soon as it is filled; what it raises ends the read."""


class ByteRange(NamedTuple):
    """Bytes `start` to `end` (exclusive) of a file."""

    start: int
    end: int


class SmallFile(NamedTuple):
    """A file, whole."""

    data: bytes
    revision: str
    """Changes whenever the file does; compare for equality only."""


class ByteSource(Protocol):
    """Read-only bytes of artefacts. Ranges are read into the caller's memory. Safe from any thread.

    A *location* is an artefact's absolute directory or its `s3://bucket/prefix`; `file` is a file of it. Every read
    blocks. All raise `SourceError`: `SourceNotFound`, `SourceDenied` or `SourceTimeout` where it is known to be that.
    Where a file ends early `TruncatedPayload` is raised. After an error a buffer's bytes are undefined, and nothing is
    written to it.
    """

    def read(self, location: str, file: str, limit_bytes: int, *, known: str | None = None) -> SmallFile | None:
        """Return a whole file, None if its revision still is `known`. Refuses a file larger than `limit_bytes`."""

    def size(self, location: str, file: str) -> int:
        """Return the size of a file in bytes."""

    def read_into(self, location: str, file: str, where: ByteRange, out: memoryview, seen: Seen | None = None) -> None:
        """Fill `out`, as many bytes as `where`, with these bytes of a file. An empty range asks nobody.

        `seen` is called in this thread.
        """


def read_whole(source: ByteSource, location: str, file: str, limit_bytes: int) -> bytes:
    """Return all bytes of a file, as `ByteSource.read` does."""
    found = source.read(location, file, limit_bytes)
    assert found is not None, "no revision is known that it could still have"
    return found.data
