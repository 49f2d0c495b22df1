"""ByteSource: where payload bytes come from. Ranged reads into a caller's buffer; foreign errors end here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from .artifact import ByteRange
from .errors import SourceError, TruncatedPayload


class ByteSource(Protocol):
    """Read-only bytes of artefacts."""

    def read_into(self, root: Path, file: str, where: ByteRange, out: memoryview) -> None:
        """Fill `out` with bytes `where` of `file` of the artefact at `root`. Blocks; safe from any thread.

        Raises `TruncatedPayload` when the file ends early, `SourceError` when it cannot be read. `out` is then
        undefined.
        """


class LocalSource:
    """Artefacts in local directories, read with `preadv` straight into the caller's buffer."""

    def read_into(self, root: Path, file: str, where: ByteRange, out: memoryview) -> None:
        """See `ByteSource.read_into`."""
        path = root / file
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from error
        try:
            read_exactly(descriptor, where.start, out, str(path))
        finally:
            os.close(descriptor)


def read_exactly(descriptor: int, offset: int, out: memoryview, path: str) -> None:
    """Fill `out` from `offset` of an open file. Raises `TruncatedPayload` or `SourceError`, naming `path`."""
    done = 0
    while done < len(out):
        try:
            count = os.preadv(descriptor, [out[done:]], offset + done)
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from error
        if count == 0:
            raise TruncatedPayload(f"{path} ends at byte {offset + done}, {len(out) - done} bytes early")
        done += count
