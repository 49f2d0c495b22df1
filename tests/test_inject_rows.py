"""Chunks land in blocks that have K beside V, as GPUs have them, in every order that vLLM has in memory.

Here in the memory of the CPU, with a stand-in for vLLM's op, which is only asked where it writes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import quietly  # vLLM before LMCache

from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.layout import DTYPES, ChunkShape

with quietly():
    from lmcache_cartridge.engine import inject
    from lmcache_cartridge.engine.inject import EngineWriteConnector

CHUNK, BLOCK, COUNT = 64, 16, 24
ORDERS = ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC")


@pytest.fixture(scope="module", autouse=True)
def made() -> Iterator[Any]:
    """The benchmark's blocks."""
    path = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, path)
    yield importlib.import_module("gpu_blocks")
    sys.path.remove(path)


def _shape(dtype: str = "bfloat16", head_size: int = 16) -> ChunkShape:
    return ChunkShape(2, 3, CHUNK, head_size, dtype)


def _bound(blocks: Any, shape: ChunkShape, *, saves: bool = False) -> EngineWriteConnector:
    connector = EngineWriteConnector()
    connector.bind(blocks.caches, blocks.layers, shape, saves=saves)
    return connector


def _chunks(made: Any, shape: ChunkShape, layout: str, order: str) -> tuple[list[Any], torch.Tensor]:
    """Return chunks that lie in the slots `order` of a slab, in this layout, and their canonical KV."""
    slab = torch.empty(8 * shape.size_bytes, dtype=torch.uint8)
    size, found, kv = shape.size_bytes, [], []
    for number, slot in enumerate(order):
        noise = torch.randn(
            2, shape.layers, CHUNK, shape.heads, shape.head_size, generator=torch.Generator().manual_seed(number)
        )
        raw = slab[int(slot) * size : (int(slot) + 1) * size]
        tiles.pack(noise.to(DTYPES[shape.dtype]), raw, shape, layout)
        found.append(made.Chunk(raw))
        kv.append(noise.to(DTYPES[shape.dtype]))
    return found, torch.cat(kv, dim=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ORDERS)
def test_rows_land_in_any_slots_of_every_order_without_the_op(made: Any, layout: str, dtype: str) -> None:
    shape = _shape(dtype)
    blocks = made.GpuBlocks(shape, COUNT, BLOCK, layout=layout, device="cpu")
    connector = _bound(blocks, shape)
    assert (connector.layout, connector.device) == ("fused", "cpu")
    for layer in blocks.layers.values():
        layer.impl.do_kv_cache_update = None
    for order in ("012", "3150", "7"):
        chunks, kv = _chunks(made, shape, connector.layout, order)
        starts = [i * CHUNK for i in range(len(order))]
        slots = torch.randperm(blocks.slots)[: len(order) * CHUNK]
        rest = torch.tensor(sorted(set(range(blocks.slots)) - set(slots.tolist())))
        for cached in (0, 1, CHUNK - 1, CHUNK, CHUNK + 7):
            before, others = blocks.kv(slots), blocks.kv(rest)
            ends = [start + CHUNK for start in starts]
            connector.batched_to_gpu(chunks, starts, ends, slot_mapping=slots, vllm_cached_tokens=cached)
            after = blocks.kv(slots)
            assert torch.equal(after[:, :, cached:], kv[:, :, cached:])
            assert torch.equal(after[:, :, :cached], before[:, :, :cached])
            assert torch.equal(blocks.kv(rest), others)


@pytest.mark.parametrize("staged", [1, 1 << 30], ids=["one by one", "together"])
def test_chunks_that_lie_elsewhere_come_by_way_of_the_engines_memory(
    made: Any, staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of one device here: it is told that all chunks lie on another."""

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

    monkeypatch.setattr(inject, "_STAGED_BYTES", staged)
    shape = _shape()
    blocks = made.GpuBlocks(shape, COUNT, BLOCK, layout="LBNHC", device="cpu")
    connector = _bound(blocks, shape)
    chunks, kv = _chunks(made, shape, connector.layout, "0123")
    for chunk in chunks:
        chunk.raw_data = chunk.raw_data.as_subclass(Elsewhere)
    copies: list[int] = []
    near = connector._copy_near
    monkeypatch.setattr(connector, "_copy_near", lambda pieces: copies.append(len(pieces)) or near(pieces))
    starts, slots = [i * CHUNK for i in range(4)], torch.randperm(blocks.slots)[: 4 * CHUNK]
    connector.batched_to_gpu(chunks, starts, [start + CHUNK for start in starts], slot_mapping=slots)
    assert torch.equal(blocks.kv(slots), kv)
    assert copies == ([1] * 4 if staged == 1 else [4])


@pytest.mark.parametrize("moved", [2, 8])
def test_chunks_that_are_not_aligned_go_through_the_op(made: Any, moved: int) -> None:
    shape = _shape()
    blocks = made.GpuBlocks(shape, COUNT, BLOCK, layout="LBHNC", device="cpu")
    connector = _bound(blocks, shape)
    (chunk,), kv = _chunks(made, shape, connector.layout, "0")
    memory = torch.zeros(shape.size_bytes + 16, dtype=torch.uint8)
    chunk.raw_data = memory[moved : moved + shape.size_bytes].copy_(chunk.raw_data)
    slots = torch.randperm(blocks.slots)[:CHUNK]
    connector.batched_to_gpu([chunk], [0], [CHUNK], slot_mapping=slots)
    assert torch.equal(blocks.kv(slots), kv)


def test_heads_that_are_no_whole_words_are_written_by_the_op(made: Any) -> None:
    shape = _shape(head_size=6)  # 24 bytes for K and V of one head
    blocks = made.GpuBlocks(shape, COUNT, BLOCK, layout="LBNHC", device="cpu")
    connector = _bound(blocks, shape)
    assert connector.layout == "heads"
    chunks, kv = _chunks(made, shape, connector.layout, "01")
    slots = torch.randperm(blocks.slots)[: 2 * CHUNK]
    connector.batched_to_gpu(chunks, [0, CHUNK], [CHUNK, 2 * CHUNK], slot_mapping=slots)
    assert torch.equal(blocks.kv(slots), kv)


def test_a_layer_that_swaps_two_elements_is_written_by_its_op(made: Any) -> None:
    shape = _shape()
    blocks = made.GpuBlocks(shape, COUNT, BLOCK, layout="LBNHC", device="cpu")
    impl = list(blocks.layers.values())[1].impl
    own = impl.do_kv_cache_update

    def write(layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        own(layer, values, keys, cache, slots)

    impl.do_kv_cache_update = write
    connector = _bound(blocks, shape)
    assert connector.layout == "heads"


@pytest.mark.parametrize("layout", ORDERS)
def test_what_is_saved_is_read_back_in_the_layout_that_is_copied(made: Any, layout: str) -> None:
    shape = _shape()
    blocks = made.GpuBlocks(shape, COUNT, BLOCK, layout=layout, device="cpu")
    connector = _bound(blocks, shape, saves=True)
    slots = torch.randperm(blocks.slots)[:CHUNK]
    saved = made.Chunk(torch.zeros(shape.size_bytes, dtype=torch.uint8))
    connector.batched_from_gpu([saved], [0], [CHUNK], slot_mapping=slots)
    assert torch.equal(saved.canonical(shape), blocks.kv(slots))
    assert torch.equal(connector.canonical(saved), blocks.kv(slots))
