"""Device: how large the tier in the accelerator's memory is, and how chunks come there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from ..errors import CartridgeError
from ..library.index import ChunkKey
from ..settings import Settings
from .described import Engine
from .layout import ChunkShape
from .loads import LoadRun, Plan, copy_and_wait
from .tier import MemoryTier

_RUN_CHUNKS = 8
"""Chunks that one wait for the device is for. A chunk of 7 MiB takes 0.15 to 0.3 ms over PCIe 5 and 4, and to wait for it
takes a part of that."""
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


def promotions(cpu: MemoryTier) -> Plan:
    """Return the plan by which the device tier's slots are filled from the cpu tier."""

    def plan(key: ChunkKey) -> LoadRun:
        return LoadRun(_RUN_CHUNKS, partial(_promote, cpu, key.digest))

    return plan


def _promote(cpu: MemoryTier, digest: str, first: int, outs: Sequence[torch.Tensor]) -> list[CartridgeError | None]:
    """Fill slots of the device tier with chunks in a row. Returns when the bytes are there, or why they are not."""
    errors: list[CartridgeError | None] = []
    with ExitStack() as loans:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for chunk, out in enumerate(outs, first):
            key = ChunkKey(digest, chunk)
            loan = next(iter(cpu.lend([key])), None)
            if loan is None:
                # Nothing is held while one is loaded: that may take long, and others need the room.
                copy_and_wait(pairs)
                loans.close()
                pairs = []
                loan = cpu.load(key, _PROMOTE_S)
            gone = f"chunk {chunk} of {digest} left the cpu tier before it reached the device"
            errors.append(CartridgeError(gone) if loan is None else None)
            if loan is not None:
                pairs.append((loans.enter_context(loan).bytes, out))
        copy_and_wait(pairs)
    return errors
