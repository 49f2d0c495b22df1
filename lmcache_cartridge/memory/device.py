"""Device: how large the tier in the accelerator's memory is, and how chunks come there."""

from __future__ import annotations

import torch

from ..errors import CartridgeError
from ..library.index import ChunkKey
from ..settings import Settings
from .described import Engine
from .layout import ChunkShape
from .loads import copy_and_wait
from .tier import MemoryTier

_PROMOTE_S = 30.0
"""How long a chunk on its way to the device may take from the cpu tier."""


def device_bytes(settings: Settings, engine: Engine, shape: ChunkShape, largest_bytes: int) -> int:
    """Return the budget of the device tier: none on a CPU engine unless it was set. `largest_bytes` has a cartridge."""
    if settings.device_bytes is not None:
        return settings.device_bytes
    if engine.device == "cpu":
        return 0
    free, _ = torch.cuda.mem_get_info(engine.device)
    share = shape.layers / engine.fingerprint.layers / engine.world
    return min(8 * int(largest_bytes * share), 1 << 30, free // 2)


def promote(cpu: MemoryTier, key: ChunkKey, out: torch.Tensor) -> None:
    """Fill a slot of the device tier from the cpu tier. Returns when the bytes are there; raises `CartridgeError`."""
    loan = next(iter(cpu.lend([key])), None) or cpu.load(key, _PROMOTE_S)
    if loan is None:
        raise CartridgeError(f"chunk {key.chunk} of {key.digest} left the cpu tier before it reached the device")
    with loan:
        copy_and_wait(loan.bytes, out)
