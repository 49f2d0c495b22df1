"""ByteSource: what every source of artefacts can do, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

Seen = Callable[[memoryview], None]
"""Gets a buffer's bytes in order, each part as soon as it is filled; what it raises ends the read."""


class ByteRange(NamedTuple):
    """Bytes `start` to `end` (exclusive) of a file."""

    start: int
    end: int


class Small(NamedTuple):
    """A small file, whole."""

    data: bytes
    revision: str
    """Changes whenever the file does; compare for equality only."""


class ByteSource(Protocol):
    """Read-only bytes of artefacts, safe from any thread.

    A *location* is an artefact's absolute directory or its `s3://bucket/prefix`; `file` is a file of it. Every call
    blocks. All raise `SourceError`: `SourceNotFound`, `SourceDenied` or `SourceTimeout` where it is known to be that.
    """

    def read_into(self, location: str, file: str, where: ByteRange, out: memoryview, seen: Seen | None = None) -> None:
        """Fill `out`, of as many bytes as `where`, with those bytes of a file. An empty range asks nobody.

        `seen` is called in this thread. Raises `TruncatedPayload` when the file ends early. After an error `out` is
        undefined, and not written to.
        """

    def read_each(self, location: str, file: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill `outs` one after the other with a file's bytes from `start` on, in one request. As `read_into` else."""

    def read(self, location: str, file: str, limit_bytes: int, *, known: str | None = None) -> Small | None:
        """Return a whole file, None if its revision still is `known`. Refuses a file larger than `limit_bytes`."""

    def size(self, location: str, file: str) -> int:
        """Return the size of a file in bytes."""

    def close(self) -> None:
        """Give back connections and threads. Reads still under way may fail."""
