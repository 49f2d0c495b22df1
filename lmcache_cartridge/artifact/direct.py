"""Direct reads: large cold files from a disk, past the page cache.

What a tier keeps in memory of its own the page cache need not keep too, and copying it from there costs more processor
time than checking it. Measured on two busy cores, four threads, 7 MiB of a cold file, hashed in steps: 3.7 ms and 1.8 ms of
processor time direct, 9 to 12.5 ms and 4.4 through the page cache.

What is read again, by this process or another, is worth a place in the page cache. So a direct read leaves a trace, the
last page of what it read, and whoever finds that goes through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
from contextlib import suppress

import numpy as np

logger = logging.getLogger(__name__)

PAGE = 4096
"""Alignment of memory, offset and length of a direct read: what any disk asks for, more than most do."""
LEAST_BYTES = 1 << 20
"""Smaller reads go through the page cache, which reads ahead. Of 64 KiB neither is faster."""
_HUGE_PAGE = 2 << 20
_BOUNCE_BYTES = 2 * _HUGE_PAGE
_REFUSALS = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)
_LOOKS = 8
"""Pages of a range that are looked for in the page cache; all pages of 7 MiB would take 110 us."""
_libc = ctypes.CDLL(None, use_errno=True)
_of_thread = threading.local()
_refused: set[int] = set()
"""Devices whose file systems have no direct reads."""


class DirectRead:
    """A direct read of a range of one open file, for one thread."""

    def __init__(self, descriptor: int, offset: int, out: memoryview) -> None:
        """The range has as many bytes as `out` and begins at `offset`."""
        self._descriptor, self._direct = descriptor, True
        self._last_page = (offset + len(out) - 1) // PAGE * PAGE

    def read(self, out: memoryview, at: int) -> int:
        """Fill some of `out`, a part of the range, with the bytes from `at` on; return how many, 0 at the file's end."""
        if self._direct:
            try:
                return self._bounced(out, at)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._direct = False
                _refuse(self._descriptor, error)
                _set_direct(self._descriptor, False)
        return os.preadv(self._descriptor, [out], at)

    def finish(self) -> None:
        """Change the file back, and leave the trace by which the next reader knows of this read. Does not wait for the disk."""
        if self._direct:
            with suppress(OSError):  # the bytes are there
                _set_direct(self._descriptor, False)
                os.posix_fadvise(self._descriptor, self._last_page, PAGE, os.POSIX_FADV_WILLNEED)

    def _bounced(self, out: memoryview, at: int) -> int:
        """Do `read` through memory that is aligned."""
        bounce, start = _bounce(), at // PAGE * PAGE
        end = min(-(-(at + len(out)) // PAGE) * PAGE, start + len(bounce))
        count = os.preadv(self._descriptor, [bounce.data[: end - start]], start)
        count = max(min(count - (at - start), len(out)), 0)
        np.frombuffer(out, np.uint8)[:count] = bounce[at - start : at - start + count]
        return count


def begin(descriptor: int, offset: int, out: memoryview) -> DirectRead | None:
    """Return the direct read of a range of an open file, which is changed to be read so; None where there is none.

    That is for a range that is large, cold and on a block device. A range is not cold where most of it is in the page
    cache or a direct read left its trace, nor where the kernel does not say: it tells only who may write the file.
    """
    if len(out) < LEAST_BYTES:
        return None
    device = os.fstat(descriptor).st_dev
    # Others, without a device of their own, are in memory or elsewhere: what reads ahead or keeps copies there is not known.
    if not os.major(device) or device in _refused or not _is_cold(descriptor, offset, len(out)):
        return None
    try:
        _set_direct(descriptor, True)
    except OSError as error:
        _refuse(descriptor, error)
        return None
    return DirectRead(descriptor, offset, out)


def _is_cold(descriptor: int, offset: int, size_bytes: int) -> bool:
    start = offset // PAGE * PAGE
    length = offset + size_bytes - start
    try:
        mapped = mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
    except (OSError, ValueError):  # not so long, for one
        return False
    with mapped:
        address = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
        if _is_resident(address + (length - 1) // PAGE * PAGE):
            return False
        return 2 * sum(_is_resident(address + length * i // _LOOKS // PAGE * PAGE) for i in range(_LOOKS)) < _LOOKS


def _is_resident(address: int) -> bool:
    """Whether the page at an address is in the page cache, as far as the kernel says."""
    answer = ctypes.c_ubyte(1)
    return bool(_libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.byref(answer)) or answer.value & 1)


def _set_direct(descriptor: int, direct: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)


def _refuse(descriptor: int, error: OSError) -> None:
    device = os.fstat(descriptor).st_dev
    if device not in _refused:
        _refused.add(device)
        logger.info(
            "files on device %d:%d are read through the page cache, since direct reads are refused there: %s",
            os.major(device), os.minor(device), error.strerror,
        )  # fmt: skip


def _bounce() -> np.ndarray:
    """Return this thread's aligned memory, of huge pages where the system has them, committed as it is used.

    The disk writes to each page by itself: 7 MiB, hashed, took 7.5 ms into pages of 4 KiB, 4.2 into huge ones, the copy from
    there included. Memory of the tiers is of small ones: in huge ones a first use takes longer.
    """
    memory: np.ndarray | None = getattr(_of_thread, "bounce", None)
    if memory is None:
        mapped = mmap.mmap(-1, 2 * _BOUNCE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without such pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(mapped, np.uint8)
        first = -whole.__array_interface__["data"][0] % _HUGE_PAGE
        memory = _of_thread.bounce = whole[first : first + _BOUNCE_BYTES]
    return memory
