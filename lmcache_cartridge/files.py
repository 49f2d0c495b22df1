"""Files: new ones, private to their user, that are on the disk when they are said to be written."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path


def create(path: Path) -> io.BufferedWriter:
    """Return a new file, open for writing, the caller's to `sync` and close. Raises `OSError` if it is there."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def sync(file: io.BufferedWriter) -> None:
    """Bring what was written to the disk."""
    file.flush()
    os.fsync(file.fileno())


def write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Make a new file of some parts and bring it to the disk."""
    with create(path) as file:
        for part in parts:
            file.write(part)
        sync(file)
