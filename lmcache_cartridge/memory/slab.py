"""Slab: the one run of memory that a tier cuts its slots from, in the memory of a device or beside one."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress

import numpy as np
import torch

logger = logging.getLogger(__name__)

PAGE = 4096
"""Alignment of slots of whole pages. From the page cache the kernel takes a tenth longer to read into memory that is not so
aligned, and twice as long where it is not aligned to 64 bytes."""


def slab(size_bytes: int, device: str = "cpu", *, pin_memory: bool = False) -> torch.Tensor:
    """Return `size_bytes` of memory that begins with a page, flat uint8, on `device`; page-locked with `pin_memory`.

    Without page-locking the system commits memory only as it is written. Memory that CUDA refuses to lock is used as it
    is, with a warning.
    """
    if pin_memory and device == "cpu":
        return _locked(size_bytes)
    memory = torch.empty(size_bytes + PAGE, dtype=torch.uint8, device=device)
    if memory.is_cuda:
        # It may have been freed just now, with kernels under way that write to it; the copies into it are no part of
        # their stream.
        torch.cuda.current_stream(memory.device).synchronize()
    return memory[-memory.data_ptr() % PAGE :][:size_bytes]


def _locked(size_bytes: int) -> torch.Tensor:
    """Lock memory of our own: what PyTorch's allocator locks it rounds up to a power of two, 17 GiB to 32."""
    pages = -(-size_bytes // PAGE) * PAGE
    memory = np.empty(pages + PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    address, cuda = memory.ctypes.data + start, torch.cuda.cudart()
    if code := int(cuda.cudaHostRegister(address, pages, 0)):
        with suppress(
            RuntimeError, AssertionError
        ):  # else the next kernel of this thread would report this error as its own
            torch.zeros(1, device="cuda")
        logger.warning("CUDA cannot lock %d bytes of memory (error %d); copies to the device are slower", pages, code)
    else:
        # Before the memory is freed, and so after the last view of it has gone.
        weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory[start : start + size_bytes])
