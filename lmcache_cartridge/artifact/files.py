"""Files: new ones that are on the disk when they are said to be written."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def create(path: Path, mode: int = 0o666) -> io.BufferedWriter:
    """Return a new file, open for writing, the caller's to `sync` and close. Raises `OSError` if it is there.

    Who may read it is for the umask to say, within `mode`.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")


def sync(file: io.BufferedWriter) -> None:
    """Bring what was written to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk, as far as its file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, parts: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Make a new file of some parts, as `create` does, and bring it to the disk."""
    with create(path, mode) as file:
        for part in parts:
            file.write(part)
        sync(file)
