"""vLLM's half of an engine, in this process: a real configuration, attention layers and their paged CPU blocks.

Import this before anything that imports lmcache: on CPU, vLLM breaks when lmcache was there first (vLLM 0.32).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.layout import DTYPES, ChunkShape

_QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING", "VLLM_LOGGING_LEVEL": "ERROR"}


@contextmanager
def quietly() -> Iterator[None]:
    """Run code of vLLM or LMCache, undoing what it does to the process that other tests would notice.

    It warns, sets environment variables that the servers of other tests would inherit (LD_PRELOAD among them), and
    our plugin gives our records to LMCache's log, where `caplog` does not find them.
    """
    environment, ours = dict(os.environ), logging.getLogger("lmcache_cartridge")
    try:
        os.environ.update(_QUIET)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        ours.handlers.clear()
        ours.propagate = True
        ours.setLevel(logging.NOTSET)


with quietly():
    from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj
    from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    from lmcache_cartridge.engine.inject import EngineWriteConnector

BLOCK = 32
"""Tokens in a block of vLLM's cache."""
CARTRIDGES = {
    "kv_connector": "CartridgeConnector",
    "kv_connector_module_path": "lmcache_cartridge.engine.connector",
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "fail",
}


def vllm_config(model: Path = MODEL_DIR, transfer: dict[str, Any] | None = None, **arguments: Any) -> VllmConfig:
    """Return what vLLM makes of these engine arguments; `transfer` goes over `CARTRIDGES`."""
    given = {"block_size": BLOCK, "max_model_len": 2048, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    with quietly():
        transfer_config = KVTransferConfig(**CARTRIDGES | (transfer or {}))
        return EngineArgs(str(model), kv_transfer_config=transfer_config, **given | arguments).create_engine_config()


def memory_object(raw: torch.Tensor, size_bytes: int | None = None) -> MemoryObj:
    """Wrap flat bytes, the first `size_bytes` of them, as a backend does; nobody but the connector looks at it."""
    size = torch.Size([size_bytes or raw.numel()])
    metadata = MemoryObjMetadata(size, torch.uint8, 0, raw.numel(), 1, fmt=MemoryFormat.KV_2LTD, shapes=[size],
                                 dtypes=[torch.uint8])  # fmt: skip
    return TensorMemoryObj(raw, metadata, None)


def objects(kv: torch.Tensor, shape: ChunkShape, layout: str) -> tuple[list[MemoryObj], list[int], list[int]]:
    """Return memory objects of canonical KV in chunks of a shape and layout, their starts and their ends."""
    made, starts = [], list(range(0, kv.shape[2], shape.tokens))
    for part in kv.split(shape.tokens, dim=2):
        raw = torch.empty(shape.size_bytes, dtype=torch.uint8)
        tiles.pack(part, raw, shape, layout)
        made.append(memory_object(raw))
    return made, starts, [start + shape.tokens for start in starts]


class Blocks:
    """Paged KV caches of real attention layers, full of noise, that can be read back.

    vLLM's CPU blocks are packed for the instruction set and there is no op to read them, so the packing is found by
    writing numbered elements through vLLM's own write op and seeing where each one lands.
    """

    def __init__(self, config: VllmConfig, blocks: int, *, layers: int | None = None) -> None:
        """Make the layers of the configured model, or `layers` of them, with `blocks` blocks each."""
        model, parallel = config.model_config, config.parallel_config
        heads, self.size = model.get_num_kv_heads(parallel), model.get_head_size()
        names = [f"model.layers.{i}.self_attn.attn" for i in range(layers or model.get_num_layers(parallel))]
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config), quietly():
            self.layers = {
                name: Attention(
                    model.get_num_attention_heads(parallel), self.size, self.size**-0.5, num_kv_heads=heads,
                    cache_config=config.cache_config, prefix=name,
                )
                for name in names
            }  # fmt: skip
            spec = self.layers[names[0]].get_kv_cache_spec(config)
            CPUAttentionMetadataBuilder(spec, names, config, torch.device("cpu"))  # tells the layers their packing
        self.block, dtype = spec.block_size, spec.dtype
        noise = torch.Generator().manual_seed(0)
        self.caches = {
            name: torch.randn(blocks, heads, self.block, 2 * self.size, generator=noise).to(dtype) for name in names
        }
        for name, cache in self.caches.items():
            self.layers[name].kv_cache = cache
        self.slots = blocks * self.block

    def shape(self, tokens: int) -> ChunkShape:
        """Return the shape of a chunk for these layers."""
        cache = next(iter(self.caches.values()))
        return ChunkShape(cache.shape[1], len(self.caches), tokens, self.size, str(cache.dtype).removeprefix("torch."))

    def kv(self) -> torch.Tensor:
        """Return the canonical KV `[2, L, slots, H, D]` of every slot."""
        planes = []
        for cache in self.caches.values():
            tokens = cache.flatten(1)[:, self._packing].flatten(0, 1)  # [slots, H, 2 * D]
            planes.append(torch.stack(tokens.chunk(2, dim=-1)))
        return torch.stack(planes, dim=1)

    def connector(self, tokens: int, **given: Any) -> EngineWriteConnector:
        """Return our connector, bound to these layers for chunks of so many tokens."""
        connector = EngineWriteConnector()
        connector.bind(self.caches, self.layers, self.shape(tokens), **given)
        return connector

    def noise(self, tokens: int, seed: int = 1) -> torch.Tensor:
        """Return canonical KV of noise for these layers."""
        shape = self.shape(tokens)
        size = 2, shape.layers, tokens, shape.heads, shape.head_size
        return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DTYPES[shape.dtype])

    def write(self, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """Have the engine's op write canonical KV to slots."""
        for (keys, values), (name, layer) in zip(kv.unbind(1), self.layers.items(), strict=True):
            layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), self.caches[name], slots)

    def after_writes(self, number: int, change: Callable[[torch.Tensor], Any]) -> None:
        """Have a layer's op be followed by `change` of the cache that it wrote to."""
        impl = list(self.layers.values())[number].impl
        op = impl.do_kv_cache_update
        impl.do_kv_cache_update = lambda *given: (op(*given), change(given[3]))

    def whole(self, tokens: int, seed: int = 4) -> torch.Tensor:
        """Return the slots of whole blocks, in an order of no pattern; of the last block as many as it takes."""
        order = torch.randperm(self.slots // self.block, generator=torch.Generator().manual_seed(seed))
        return (order[:, None] * self.block + torch.arange(self.block)).flatten()[:tokens]

    def scattered(self, tokens: int, seed: int = 2) -> torch.Tensor:
        """Return a slot for each token, no two neighbours, over parts of all blocks."""
        return torch.randperm(self.slots, generator=torch.Generator().manual_seed(seed))[:tokens]

    @cached_property
    def _packing(self) -> torch.Tensor:
        """For each element of `[block, H, 2 * D]`, its place in a block's memory."""
        _, heads, block, width = next(iter(self.caches.values())).shape
        number = torch.arange(block * heads * width).view(block, heads, width)
        landed = torch.zeros(number.numel(), dtype=torch.int64)
        for digit in range(3):  # bfloat16 holds integers up to 256 exactly, so one base-128 digit a pass
            landed += self._written(number // 128**digit % 128).to(torch.int64) * 128**digit
        place = torch.argsort(landed)
        assert torch.equal(landed[place], number.flatten()), "some element of a block was not written"
        return place.view(number.shape)

    def _written(self, codes: torch.Tensor) -> torch.Tensor:
        name, module = next(iter(self.layers.items()))
        scratch, slots = torch.zeros_like(self.caches[name][:1]), torch.arange(self.block)
        keys, values = codes.to(scratch.dtype).chunk(2, dim=-1)
        module.impl.do_kv_cache_update(module, keys.contiguous(), values.contiguous(), scratch, slots)
        return scratch.flatten()
