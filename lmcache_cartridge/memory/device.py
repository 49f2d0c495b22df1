"""Device: how large the tier in the accelerator's memory is, and how chunks come there."""

from __future__ import annotations

import torch

from ..errors import CartridgeError
from ..library.index import ChunkKey
from ..settings import Settings
from .described import Engine
from .layout import ChunkShape
from .loads import ChunkSource, copy_and_wait
from .tier import MemoryTier

_PROMOTE_S = 30.0
"""How long a chunk on its way to the device may take from the cpu tier."""


def device_bytes(settings: Settings, engine: Engine, shape: ChunkShape, largest_bytes: int) -> int:
    """Return the budget of the device tier: none without CUDA unless it was set. `largest_bytes` has a cartridge."""
    if settings.device_bytes is not None:
        return settings.device_bytes
    if torch.device(engine.device).type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(engine.device)
    share = shape.layers / engine.fingerprint.layers / engine.world
    return min(8 * int(largest_bytes * share), 1 << 30, free // 2)


class Promotions(ChunkSource):
    """The chunks of the cpu tier, with which the device tier's slots are filled."""

    def __init__(self, cpu: MemoryTier) -> None:
        self._cpu = cpu

    def read(self, at: ChunkKey, out: torch.Tensor | None) -> torch.Tensor:
        loan = next(iter(self._cpu.lend([at])), None) or self._cpu.load(at, _PROMOTE_S)
        if loan is None or out is None:
            raise CartridgeError(f"chunk {at.chunk} of {at.digest} left the cpu tier before it reached the device")
        with loan:
            copy_and_wait(loan.bytes, out)
        return out
