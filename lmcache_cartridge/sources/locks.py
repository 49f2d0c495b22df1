"""Locks on files and directories, for threads and processes alike."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, wait_s: float = math.inf) -> Iterator[int]:
    """Hold a directory, or a file that is made where it lacks, against all threads and processes; lend its descriptor.

    Raises `OSError`, `TimeoutError` where another has held it for `wait_s`. A link is not followed.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    deadline, pause_s = time.monotonic() + wait_s, 0.0002
    while True:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            if _try_lock(descriptor) and os.fstat(descriptor).st_nlink:  # once it is removed others lock a new one
                try:
                    yield descriptor
                    return
                finally:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have the descriptor too
        finally:
            os.close(descriptor)
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held it for {wait_s:g} s", str(path))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.005)


def _try_lock(descriptor: int) -> bool:
    """Lock an open file against all threads and processes; False, at once, where another has it. Raises `OSError`."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
