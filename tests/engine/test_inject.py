"""Chunks land in vLLM's own CPU blocks element for element, in any slots, or not at all, and are read back byte for byte."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import BLOCK, Blocks, memory_object, objects, vllm_config
from inprocess import CHUNK
from processor import needs_avx512

from lmcache_cartridge.engine.host import module
from lmcache_cartridge.engine.host_inprocess import own_connector
from lmcache_cartridge.engine.inject import EngineWriteConnector
from lmcache_cartridge.errors import UnsupportedEngine


@pytest.fixture(scope="module", params=[32, 128], ids=["copied", "written"])
def blocks(request):
    """384 slots in blocks that make up a chunk, which are copied, or in blocks that are larger than it."""
    return Blocks(vllm_config(block_size=request.param), 384 // request.param)


@pytest.fixture
def connector(blocks):
    return blocks.connector(CHUNK)


def _chunks(blocks: Blocks, kv: torch.Tensor, connector: EngineWriteConnector) -> Any:
    return objects(kv, blocks.shape(CHUNK), connector.layout)


def _zeros(blocks: Blocks, share: float = 1) -> Any:
    """Return a chunk of the blocks' size, or of another."""
    return memory_object(torch.zeros(int(share * blocks.shape(CHUNK).size_bytes), dtype=torch.uint8))


def _swapped(blocks: Blocks, tokens: int) -> torch.Tensor:
    slots = blocks.whole(tokens)
    slots[[37, 38]] = slots[[38, 37]]
    return slots


@pytest.mark.parametrize(
    "place", [Blocks.scattered, Blocks.whole, _swapped, lambda blocks, tokens: blocks.whole(tokens).roll(1)]
)
@pytest.mark.parametrize("cached", [0, 1, 32, 63, 64, 100, 2 * CHUNK])
def test_chunks_land_exactly_and_slots_that_vllm_has_cached_itself_stay_as_they_are(blocks, connector, cached, place):
    """On and beside the ends of blocks (32) and chunks (64)."""
    kv, slots, expected = blocks.noise(2 * CHUNK, seed=cached), place(blocks, 2 * CHUNK), blocks.kv()
    connector.batched_to_gpu(*_chunks(blocks, kv, connector), slot_mapping=slots, vllm_cached_tokens=cached)
    expected[:, :, slots[cached:]] = kv[:, :, cached:]
    assert torch.equal(blocks.kv(), expected)


@pytest.mark.parametrize(
    ("share", "tokens", "reason"),
    [(0.5, CHUNK, "another shape"), (2, CHUNK, "another shape"), (1, CHUNK - 1, "another length"), (1, CHUNK + 1, "another length")],
)  # fmt: skip
def test_a_chunk_of_another_size_or_for_more_or_fewer_tokens_is_not_written(blocks, connector, share, tokens, reason):
    """vLLM's op would read past the chunk's end, or leave slots as they are."""
    before, slots = blocks.kv(), blocks.scattered(3 * CHUNK)
    with pytest.raises(UnsupportedEngine, match=reason):
        connector.to_gpu(_zeros(blocks, share), 0, tokens, slot_mapping=slots, vllm_cached_tokens=1)
    assert torch.equal(blocks.kv(), before)


@pytest.mark.parametrize(("order", "cached"), [("0123", 0), ("3210", 96), ("0246", 0), ("7", 96), ("0167", 33)])
def test_chunks_are_copied_from_wherever_they_lie_in_memory(order, cached):
    """Slots of a slab at equal distances and at others. The engine's op is called where a block is not filled from its start."""
    blocks, calls = Blocks(vllm_config(), 16), []
    connector, kv = blocks.connector(CHUNK), blocks.noise(len(order) * CHUNK)
    chunks, *places = _chunks(blocks, kv, connector)
    slots, expected = blocks.whole(len(order) * CHUNK), blocks.kv()
    raws = torch.empty(8, blocks.shape(CHUNK).size_bytes, dtype=torch.uint8)
    for slot, chunk in zip(order, chunks, strict=True):
        raws[int(slot)] = chunk.raw_data
    lying = [memory_object(raws[int(slot)]) for slot in order]
    blocks.after_writes(0, calls.append)
    connector.batched_to_gpu(lying, *places, slot_mapping=slots, vllm_cached_tokens=cached)
    assert len(calls) == (4 if cached == 33 else 0)
    expected[:, :, slots[cached:]] = kv[:, :, cached:]
    assert torch.equal(blocks.kv(), expected)


# Read back, as LMCache saves it.


@pytest.mark.parametrize(
    ("block", "dtype", "isa"),
    [(16, "float32", "vec"), (64, "float16", "vec16"), pytest.param(32, "bfloat16", "amx", marks=needs_avx512)],
)
def test_what_the_engine_wrote_is_read_back_byte_for_byte_and_can_be_written_elsewhere(block, dtype, isa):
    blocks = Blocks(vllm_config(block_size=block, dtype=dtype), 384 // block)
    for layer in blocks.layers.values():
        layer.isa = isa
    connector, kv, slots = blocks.connector(CHUNK, saves=True), blocks.noise(2 * CHUNK), blocks.whole(2 * CHUNK)
    blocks.write(kv, slots)
    before, size = blocks.kv(), blocks.shape(CHUNK).size_bytes
    raw = torch.zeros(size + 64, dtype=torch.uint8)  # LMCache's allocator rounds up
    chunk = memory_object(raw, size)
    connector.batched_from_gpu([chunk], [CHUNK], [2 * CHUNK], slot_mapping=slots, offset=CHUNK, kvcaches=[])
    assert torch.equal(blocks.kv(), before)
    assert torch.equal(raw[:size], _chunks(blocks, kv, connector)[0][1].raw_data) and not raw[size:].any()
    connector.to_gpu(chunk, 0, CHUNK, slot_mapping=slots)
    assert torch.equal(blocks.kv()[:, :, slots[:CHUNK]], kv[:, :, CHUNK:])


@pytest.mark.parametrize("block", [32, 128], ids=["an unknown packing", "blocks larger than a chunk"])
def test_what_nothing_can_read_back_is_not_saved(block):
    """The engine's own op can write it, so without saving it is served."""
    blocks = Blocks(vllm_config(block_size=block), 4)
    if block == 32:
        blocks.after_writes(1, lambda cache: cache.copy_(cache.flip(1)))
    with pytest.raises(UnsupportedEngine, match="LMCache cannot save.*--no-save.*--block-size"):
        blocks.connector(CHUNK, saves=True)
    connector = blocks.connector(CHUNK)
    assert connector.layout == "heads"
    with pytest.raises(UnsupportedEngine, match="cannot be read"):
        connector.from_gpu(_zeros(blocks), 0, CHUNK, slot_mapping=torch.arange(CHUNK))


# What is bound.


def _refused(blocks: Blocks, caches: dict, layers: dict, reason: str, first_layer: int = 0) -> None:
    connector = EngineWriteConnector()
    with pytest.raises(UnsupportedEngine, match=reason):
        connector.bind(caches, layers, blocks.shape(CHUNK), first_layer=first_layer)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda op, *given: None,
        lambda op, keys, values, *rest: op(keys, keys, *rest),
        lambda op, keys, values, cache, slots: op(keys[1:], values[1:], cache, slots[1:]),
    ],
    ids=["nothing", "keys twice", "one slot too few"],
)
def test_an_op_that_writes_other_kv_than_it_is_given_is_refused(blocks, wrong):
    """Renamed or with another meaning, the op would fill live blocks with something else, and nobody would notice."""
    name = list(blocks.caches)[1]
    right = blocks.layers[name]
    op = partial(wrong, partial(right.impl.do_kv_cache_update, right))
    layer = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=lambda _, *given: op(*given)))
    _refused(blocks, blocks.caches, {**blocks.layers, name: layer}, f"layer {name} writes other KV")


def test_layers_are_taken_by_number_whatever_order_they_come_in():
    """Twelve layers: as text, layer 10 comes before layer 2."""
    blocks = Blocks(vllm_config(), 2, layers=12)
    expected, blocks.caches = list(blocks.caches.values()), dict(sorted(blocks.caches.items()))
    assert all(cache is right for (_, cache), right in zip(blocks.connector(BLOCK).layers, expected, strict=True))


@pytest.mark.parametrize(
    ("names", "first"),
    [("layers.1 layers.2", 0), ("layers.0 layers.1 layers.2 draft.layers.3", 0), ("layers.0 layers.1 vision.layers.1", 0),
     ("layers.3 layers.4 layers.5", 2)],
)  # fmt: skip
def test_an_engine_or_a_stage_of_it_that_does_not_cache_each_of_its_layers_once_is_refused(blocks, names, first):
    def of(names: list[str]) -> list[dict[str, Any]]:
        return [dict.fromkeys(names, next(iter(each.values()))) for each in (blocks.caches, blocks.layers)]

    _refused(blocks, *of(names.split()), f"are not those of layers {first} to {first + 2}", first)
    own = [f"layers.{first + n}" for n in range(3)]
    EngineWriteConnector().bind(*of(own), blocks.shape(CHUNK), first_layer=first)


def test_a_layer_or_cache_that_cannot_be_written_is_refused_with_its_name(blocks):
    """The layers are stand-ins: no attention backend of vLLM's for CPU lacks the op."""
    name = list(blocks.caches)[1]
    cache = blocks.caches[name]
    for layer in (None, SimpleNamespace(), SimpleNamespace(impl=SimpleNamespace())):
        _refused(blocks, blocks.caches, {**blocks.layers, name: layer}, "cannot write to its KV cache: .*(impl|do_kv)")
    for dtype in (torch.float16, torch.uint8):
        strange = {**blocks.caches, name: cache.to(dtype)}
        _refused(blocks, strange, blocks.layers, f"{name} is {dtype}.*--kv-cache-dtype")
    for strange in (cache[:, :1], cache[..., :64], cache[0]):
        _refused(blocks, {**blocks.caches, name: strange}, blocks.layers, f"{name} is .*not .blocks, 2 heads")
    apart = {name: cache.transpose(1, 2).contiguous().transpose(1, 2) for name, cache in blocks.caches.items()}
    _refused(blocks, apart, blocks.layers, "cannot write to its KV cache")


@pytest.mark.parametrize("in_worker", [False, True])
def test_a_worker_whose_lmcache_does_not_ask_for_the_connector_is_refused(in_worker):
    """The scheduler builds none."""
    gpu_connector = module("lmcache.v1.gpu_connector")
    original = gpu_connector.CreateGPUConnector
    refused = pytest.raises(UnsupportedEngine, match="CreateGPUConnector") if in_worker else nullcontext()
    with refused, own_connector(EngineWriteConnector, in_worker=in_worker):
        assert gpu_connector.CreateGPUConnector is not original
    assert gpu_connector.CreateGPUConnector is original
