"""CartridgeBackend as it is, except that requests with one tag are answered by LMCache's own LocalCPU backend.

LMCache 0.5.6 has no connector for CPU, so its LocalCPU cache cannot be filled from an engine there. Here it is filled with
the chunks of the cartridge instead, and its hits go through the same injector as ours: what is compared is the tier alone.
"""

from __future__ import annotations

from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from lmcache_cartridge.engine import backend

TAG = ("bench", "localcpu")


class CartridgeBackend(backend.CartridgeBackend):
    """See the module."""

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Ask LocalCPU for its requests, having copied there what is resident here."""
        if not _is_for_it(keys[0]):
            return super().batched_contains(keys, pin)
        missing = [key for key in keys if not self.local_cpu_backend.contains(key)]
        for key, loan in zip(missing, self.store.lend_run([key.chunk_hash for key in missing]), strict=False):
            with loan:
                self._copy(key, loan.bytes)
        return self.local_cpu_backend.batched_contains(keys, pin)

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Let LocalCPU answer its requests."""
        if not _is_for_it(keys[0]):
            return super().batched_get_blocking(keys)
        return self.local_cpu_backend.batched_get_blocking(keys)

    def unpin(self, key: CacheEngineKey) -> bool:
        """Let LocalCPU unpin its chunks."""
        return self.local_cpu_backend.unpin(key) if _is_for_it(key) else super().unpin(key)

    def _copy(self, key: CacheEngineKey, data: torch.Tensor) -> None:
        shape = self.store.shape
        size = torch.Size([2 * shape.heads, shape.layers, shape.tokens, shape.head_size])
        chunk: Any = self.local_cpu_backend.allocate(size, getattr(torch, shape.dtype), MemoryFormat.KV_2LTD)
        chunk.raw_data[: len(data)].copy_(data)
        self.local_cpu_backend.submit_put_task(key, chunk)  # not the batched one, which is off with local_cpu: false
        chunk.ref_count_down()


def _is_for_it(key: CacheEngineKey) -> bool:
    return tuple(map(tuple, key.tags or ())) == (TAG,)
