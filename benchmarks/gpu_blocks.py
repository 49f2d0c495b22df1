"""Paged KV caches as vLLM >= 0.26 lays them out on GPUs, K beside V, with a stand-in for its op; and no vLLM.

A bare machine with a GPU has torch and neither vLLM nor LMCache. What is copied into the blocks there is the package's own
`EngineWriteConnector`, given attention layers that write as vLLM's do. `without_hosts` lets it be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from lmcache_cartridge.memory.layout import HELD, ChunkShape, heads_view

ORDERS = {
    "LBNHC": (0, 1, 3, 2, 4),
    "LBHNC": (0, 1, 2, 3, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""By the name that `VLLM_KV_CACHE_LAYOUT` takes, the order in memory of layer, block, head, token and content (vLLM 0.32,
`kv_cache_layout.py`). LBNHC is also called NHD, LBHNC HND."""


def _write(layer: Any, keys: torch.Tensor, values: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write K and V `[T, H, D]` to these slots, as `reshape_and_cache_flash` does."""
    rows = kv_cache.transpose(1, 2)
    rows[slots // rows.shape[1], slots % rows.shape[1]] = torch.cat([keys, values], dim=-1)


class GpuBlocks:
    """One cache a layer, `[blocks, heads, block, 2 * size]`, in memory as a layout of vLLM's orders it."""

    def __init__(self, shape: ChunkShape, blocks: int, block: int, *, layout: str, device: str) -> None:
        """Make caches of noise for chunks of `shape`."""
        sizes, order = (shape.layers, blocks, shape.heads, block, 2 * shape.head_size), ORDERS[layout]
        memory = torch.empty([sizes[axis] for axis in order], dtype=HELD[shape.dtype], device=device).normal_()
        caches = memory.permute([order.index(axis) for axis in range(5)])
        self.caches = {f"model.layers.{i}.self_attn.attn": cache for i, cache in enumerate(caches)}
        self.layers = {name: SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=_write)) for name in self.caches}
        self.block, self.slots = block, blocks * block

    def kv(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the canonical KV `[2, L, T, H, D]` of some slots."""
        rows = [cache.transpose(1, 2)[slots // self.block, slots % self.block] for cache in self.caches.values()]
        return torch.stack(rows).unflatten(-1, (2, -1)).permute(3, 0, 1, 2, 4)


class Chunk:
    """What LMCache hands an injector, as far as that looks at it: bytes."""

    def __init__(self, raw_data: torch.Tensor) -> None:
        self.raw_data = raw_data

    def get_size(self) -> int:
        """Return the number of bytes."""
        return self.raw_data.numel()

    def canonical(self, shape: ChunkShape) -> torch.Tensor:
        """View it as canonical KV, with K beside V in its bytes."""
        return heads_view(self.raw_data, shape)


_NAMES = {
    "lmcache.v1.gpu_connector.gpu_connectors": {"GPUConnectorInterface": object},
    "lmcache.v1.memory_management": {"MemoryObj": object},
    "vllm.model_executor.models.utils": {"extract_layer_index": lambda name: int(name.split(".")[2])},
}
"""The names of LMCache and vLLM without which the injector cannot be imported or bound; none of them moves a byte."""


@contextmanager
def without_hosts(missing: Sequence[str] | None = None) -> Iterator[list[str]]:
    """Let the injector be used where vLLM or LMCache are `missing`, by default where they are; yields which are."""
    if missing is None:
        missing = [name for name in ("vllm", "lmcache") if find_spec(name) is None]
    made = []
    for path, names in _NAMES.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1) if parts[0] in missing else ():
            name = ".".join(parts[:end])
            if name not in sys.modules:
                sys.modules[name] = ModuleType(name)
                made.append(name)
        if path in made:
            vars(sys.modules[path]).update(names)
    try:
        yield list(missing)
    finally:
        for name in made:
            del sys.modules[name]
