"""Chunks through LMCache's kernel land in blocks of the layouts of GPUs as the layers' op writes them, or the op is used.

The tensors are real and on the CPU, where LMCache's platform layer has a version of the call in torch; the op is a stand-in with
the effect of vLLM's for CUDA, `reshape_and_cache_flash`. What only the CUDA kernel can do has a stand-in that is made after its
source (`_cuda`). No GPU has run any of it.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import memory_object, objects, quietly

with quietly():
    from lmcache import device_ops
    from lmcache.lmcache_native import EngineKVFormat, TransferDirection

    from lmcache_cartridge.engine.inject import EngineWriteConnector
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.layout import ChunkShape

CHUNK, BLOCK, LAYERS, SIZE = 64, 16, 3, 32
ORDERS = {
    "NHD": (0, 1, 3, 2, 4),
    "HND": (0, 1, 2, 3, 4),
    "blocks first": (1, 0, 3, 2, 4),
    "blocks first, HND": (1, 0, 2, 3, 4),
}
"""Of layer, block, head, token and K beside V in memory: FlashAttention's and Triton's, FlashInfer's, and those of vLLM's
`VLLM_KV_CACHE_LAYOUT` in which a block of all layers is one run."""
KERNEL = type(device_ops).multi_layer_kv_transfer


def _op(layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    kv = torch.cat([keys, values], dim=-1)
    if cache.dtype == torch.uint8:  # as vLLM's ops for CUDA quantise: rounded to the nearest
        kv = (kv.float() / layer.scale).nan_to_num(0).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    cache[slots // cache.shape[2], :, slots % cache.shape[2]] = kv


class Engine:
    """Attention layers with their caches, full of noise, as one run of memory."""

    def __init__(
        self, order: str = "NHD", dtype: torch.dtype = torch.bfloat16, heads: int = 2, block: int = BLOCK
    ) -> None:
        sizes, axes = (LAYERS, 384 // block, heads, block, 2 * SIZE), ORDERS[order]
        noise = torch.randint(0, 100, [sizes[axis] for axis in axes], generator=torch.Generator().manual_seed(5))
        self.memory, impl = noise.to(dtype), SimpleNamespace(do_kv_cache_update=_op)
        seen = self.memory.permute([axes.index(axis) for axis in range(5)])
        self.caches = {f"model.layers.{number}.attn": cache for number, cache in enumerate(seen)}
        self.layers = {name: SimpleNamespace(impl=impl, scale=0.1 + i) for i, name in enumerate(self.caches)}
        self.shape = ChunkShape(heads, LAYERS, CHUNK, SIZE, str(dtype).removeprefix("torch."))

    def connector(self, **given: Any) -> EngineWriteConnector:
        connector = EngineWriteConnector()
        connector.bind(self.caches, self.layers, self.shape, **given)
        return connector

    def by_op(self, kv: torch.Tensor, slots: torch.Tensor) -> Engine:
        for layer, (name, cache) in enumerate(self.caches.items()):
            _op(self.layers[name], kv[0, layer], kv[1, layer], cache, slots[: kv.shape[2]])
        return self


def _kv(tokens: int, heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(2, LAYERS, tokens, heads, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)


SLOTS = torch.randperm(384, generator=torch.Generator().manual_seed(2))[: 2 * CHUNK]


def _cuda(
    rows: torch.Tensor, pointers: torch.Tensor, slots: torch.Tensor, device: Any, page: int, direction: Any, layout: Any, *,
    block_size: int, head_size: int, skip_prefix_n_tokens: int, block_stride_elems: int,
) -> None:  # fmt: skip
    """Move rows as `mem_kernels.cu` does: NHD by the row, whole or strided blocks; HND by the head of two planes."""
    _, _, tokens, width = rows.shape
    step, double = block_stride_elems or block_size * width, 2 * head_size
    at, numbers = slots[skip_prefix_n_tokens:, None], torch.arange(width)
    places = at // block_size * step
    if layout == EngineKVFormat.NL_X_NB_NH_BS_CS:
        places = places + numbers // double * block_size * double + at % block_size * double + numbers % double
    else:
        assert layout in (EngineKVFormat.NL_X_NB_BS_NH_CS, EngineKVFormat.NL_X_NB_BS_HS)
        assert layout == EngineKVFormat.NL_X_NB_BS_NH_CS or not block_stride_elems
        places = places + at % block_size * width + numbers
    size = (page // block_size - 1) * step + block_size * width
    for layer, pointer in enumerate(pointers.tolist()):
        memory = torch.frombuffer((ctypes.c_char * (size * rows.itemsize)).from_address(pointer), dtype=rows.dtype)
        if direction == TransferDirection.H2D:
            memory[places] = rows[0, layer, skip_prefix_n_tokens:]
        else:
            rows[0, layer, skip_prefix_n_tokens:] = memory[places]


@pytest.mark.parametrize(
    ("order", "dtype", "heads", "block", "cached"),
    [
        ("NHD", torch.bfloat16, 2, 128, 63), ("NHD", torch.float16, 8, 32, 64), ("NHD", torch.float32, 1, 16, 128),
        *((order, torch.bfloat16, 2, BLOCK, 5) for order in ORDERS),
    ],
)  # fmt: skip
def test_chunks_land_as_the_op_writes_them_and_are_saved_as_they_came(monkeypatch, order, dtype, heads, block, cached):
    """A block may be larger than a chunk. The last four go through the kernel of CUDA."""
    if cached == 5:
        monkeypatch.setattr(device_ops, "multi_layer_kv_transfer", _cuda, raising=False)
    ours, theirs, kv = (
        Engine(order, dtype, heads, block),
        Engine(order, dtype, heads, block),
        _kv(2 * CHUNK, heads, dtype),
    )
    connector = ours.connector(saves=True)
    assert torch.equal(ours.memory, theirs.memory), "the probe wrote into the engine's blocks"
    chunks = objects(kv, ours.shape, connector.layout)
    connector.batched_to_gpu(*chunks, slot_mapping=SLOTS, vllm_cached_tokens=cached)
    assert torch.equal(ours.memory, theirs.by_op(kv[:, :, cached:], SLOTS[cached:]).memory)
    saved = memory_object(torch.zeros(ours.shape.size_bytes, dtype=torch.uint8))
    ours.by_op(kv, SLOTS)
    connector.from_gpu(saved, CHUNK, 2 * CHUNK, slot_mapping=SLOTS)
    assert torch.equal(saved.raw_data, chunks[0][1].raw_data)
    assert torch.equal(connector.canonical(saved), kv[:, :, CHUNK:])


def test_bytes_for_a_quantised_cache_are_those_of_the_op():
    ours, theirs, kv = Engine(dtype=torch.uint8), Engine(dtype=torch.uint8), _kv(CHUNK)
    connector = ours.connector(computed=torch.bfloat16)
    (plain,), _, _ = objects(kv, ours.shape._replace(dtype="bfloat16"), "heads")
    raw = torch.empty(ours.shape.size_bytes, dtype=torch.uint8)
    connector.quantiser.quantise(plain.raw_data, raw, ours.shape)
    fused = objects(tiles.unpack(raw, ours.shape, "heads"), ours.shape, connector.layout)
    connector.batched_to_gpu(*fused, slot_mapping=SLOTS)
    assert torch.equal(ours.memory, theirs.by_op(kv, SLOTS).memory)


def _too_far(rows: torch.Tensor, pointers: Any, slots: torch.Tensor, *rest: Any, **given: Any) -> None:
    KERNEL(device_ops, rows, pointers, slots.roll(1), *rest, **given)


def _skips_nothing(*rest: Any, **given: Any) -> None:
    KERNEL(device_ops, *rest, **given | {"skip_prefix_n_tokens": 0})


def _reads_nothing(*given: Any, **named: Any) -> None:
    if TransferDirection.H2D in given:
        KERNEL(device_ops, *given, **named)


@pytest.mark.parametrize("wrong", [_too_far, _skips_nothing, _reads_nothing])
def test_a_kernel_that_moves_other_bytes_is_refused_and_the_op_used(monkeypatch, wrong):
    """The controls of the probe: an LMCache in which the kernel means something else never touches a live cache."""
    monkeypatch.setattr(device_ops, "multi_layer_kv_transfer", wrong, raising=False)
    _is_written_by_the_op(Engine(), "LMCache's kernel")


@pytest.mark.parametrize("order", ["HND", "blocks first"])
def test_what_torchs_version_cannot_do_is_done_by_the_op(order):
    _is_written_by_the_op(Engine(order), "kernel cannot move these blocks")


def test_layers_that_lie_in_memory_each_in_a_way_of_its_own_are_written_by_the_op():
    engine = Engine()
    last = list(engine.caches)[-1]
    engine.caches[last] = Engine("HND").caches[last]
    _is_written_by_the_op(engine, "do not lie alike")


def _is_written_by_the_op(engine: Engine, reason: str) -> None:
    with pytest.raises(UnsupportedEngine, match=f"(?s)cannot save.*{reason}.*--no-save"):
        engine.connector(saves=True)
    connector, kv, slots = engine.connector(), _kv(CHUNK), SLOTS[:CHUNK]
    connector.batched_to_gpu(*objects(kv, engine.shape, "heads"), slot_mapping=slots)
    found = torch.stack([cache[slots // BLOCK, :, slots % BLOCK] for cache in engine.caches.values()])
    assert torch.equal(found, torch.cat(kv.unbind(0), dim=-1))
