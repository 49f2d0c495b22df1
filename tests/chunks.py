"""Loading of one chunk: as a plan that a tier goes by, and at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from lmcache_cartridge.library.index import ChunkKey
from lmcache_cartridge.memory.loads import LoadRun, Plan

if TYPE_CHECKING:
    from lmcache_cartridge.artifact.cartridge import Segment
    from lmcache_cartridge.memory.loader import ChunkLoader


def one_by_one(load: Callable[[ChunkKey, torch.Tensor], None]) -> Plan:
    """Return the plan of a function that loads one chunk, or raises `CartridgeError`."""

    def plan(key: ChunkKey) -> LoadRun:
        def run(chunk: int, outs: Sequence[torch.Tensor]) -> list[None]:
            load(key, outs[0])
            return [None]

        return LoadRun(1, run)

    return plan


def load(loader: ChunkLoader, segments: Sequence[Segment], chunk: int, out: torch.Tensor) -> None:
    """Fill `out` with one chunk of some cartridges in a row. Raises why it cannot be had."""
    (error,) = loader.load_run(segments, chunk, [out])
    if error is not None:
        raise error
