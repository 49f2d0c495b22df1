"""Device: how large the tier in the accelerator's memory is, and how chunks come there."""

from __future__ import annotations

import torch

from ..errors import CartridgeError, OverBudget
from ..library.index import ChunkKey
from .loads import ChunkSource, copy_and_wait
from .tier import MemoryTier

_PROMOTE_S = 30.0
"""How long a chunk on its way to the device may take from the cpu tier."""


def device_bytes(wanted: int | None, device: str) -> int:
    """Return the budget of the device tier: what was set, else none without CUDA, and a part of what is free with it.

    vLLM has its cache by now, and takes more from what is free for each step. Raises `OverBudget` for more than is free.
    """
    if wanted == 0 or torch.device(device).type != "cuda":
        return wanted or 0
    free, _ = torch.cuda.mem_get_info(device)
    if wanted is None:
        return min(1 << 30, free // 4)
    if wanted > free:
        raise OverBudget(
            f"device_bytes is {wanted}, and {device} has {free} bytes free beside vLLM's cache: set less, or a smaller --gpu-memory-utilization"
        )
    return wanted


class Promotions(ChunkSource):
    """The chunks of the cpu tier, with which the device tier's slots are filled."""

    def __init__(self, cpu: MemoryTier) -> None:
        self._cpu = cpu

    def read(self, at: ChunkKey, out: torch.Tensor | None) -> torch.Tensor:
        loans = self._cpu.lend([at]) or self._cpu.load([at], _PROMOTE_S)
        if not loans or out is None:
            raise CartridgeError(f"chunk {at.chunk} of {at.digest} left the cpu tier before it reached the device")
        with loans[0] as loan:
            copy_and_wait(loan.bytes, out)
        return out
