"""Looks: one process of a machine looks at a published library at a time, and all know when one did."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..artifact.files import try_lock
from ..errors import RegistryError

_LOOKS = struct.Struct("<dd")
"""Unix times of the last look, and of the last that went well."""
_WAIT_S = 120.0
"""How long others may hold the file; a look takes some seconds at most, where S3 does not answer."""


class Held(Exception):
    """Another one looks or changes something at this moment."""


class Look:
    """What holds the file; it is let go when its context ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def looked_s(self) -> float:
        """Unix time of the last look, 0 for none."""
        return _read(self._descriptor)[0]

    def begins(self, now_s: float) -> None:
        """Note that a look begins."""
        os.pwrite(self._descriptor, _LOOKS.pack(now_s, _read(self._descriptor)[1]), 0)

    def went_well(self, now_s: float) -> None:
        """Note that a look found out what there is."""
        os.pwrite(self._descriptor, _LOOKS.pack(now_s, now_s), 0)


class Looks:
    """The lock file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def take(self, *, wait: bool = True) -> Iterator[Look]:
        """Hold the file against all threads and processes.

        Raises `Held` rather than to `wait`, and `RegistryError` where it was waited for in vain.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RegistryError(f"{self._path}: {error.strerror}") from error
        try:
            deadline = time.monotonic() + _WAIT_S
            while not try_lock(descriptor):
                if not wait:
                    raise Held
                if time.monotonic() > deadline:
                    raise RegistryError(f"{self._path}: another process has held it for {_WAIT_S:g} s")
                time.sleep(0.01)
            try:
                yield Look(descriptor)
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have the descriptor too
        finally:
            os.close(descriptor)

    def well_s(self) -> float | None:
        """Return the Unix time of the last look that went well, None for none. Waits for nobody."""
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _read(descriptor)[1] or None
            finally:
                os.close(descriptor)
        return None


def _read(descriptor: int) -> tuple[float, float]:
    data = os.pread(descriptor, _LOOKS.size, 0)
    return _LOOKS.unpack(data) if len(data) == _LOOKS.size else (0.0, 0.0)
