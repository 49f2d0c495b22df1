"""Files: written whole or not at all, and on the disk when they are said to be."""

from __future__ import annotations

import io
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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


def replace(path: Path, parts: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Make a file of some parts, in the place of the one that may be there, and bring it to the disk."""
    with replacing(path) as partial:
        write(partial, parts, mode)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` for a new file or directory, which is renamed to `path` at the end.

    Nobody sees it half-made. After an error `path` is what it was and nothing is left behind. Raises `OSError` where it
    cannot be renamed: an empty directory gives way, others do not.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
