"""Chunks land in vLLM's own CPU blocks element for element, in any slots, or not at all."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from blocks import Blocks, memory_object, vllm_config
from inprocess import CHUNK, lmcache_config, lmcache_metadata
from lmcache.utils import EngineType
from lmcache.v1.memory_management import MemoryObj

from lmcache_cartridge.engine.host import module
from lmcache_cartridge.engine.host_inprocess import own_connector
from lmcache_cartridge.engine.inject import EngineWriteConnector
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.layout import DTYPES
from lmcache_cartridge.settings import Settings

CACHED = [0, 1, 31, 32, 63, 64, 65, 100, 127]
"""Tokens that vLLM has cached itself: on and beside the ends of blocks (32) and chunks (64)."""


@pytest.fixture(scope="module", params=[32, 128], ids=["copied", "written"])
def blocks(request):
    """384 slots in blocks that make up a chunk, which are copied, or in blocks that are larger than it."""
    return Blocks(vllm_config(block_size=request.param), 384 // request.param)


@pytest.fixture
def connector(blocks):
    return blocks.connector(CHUNK)


def _chunks(
    blocks: Blocks, kv: torch.Tensor, connector: EngineWriteConnector
) -> tuple[list[MemoryObj], list[int], list[int]]:
    """Return the memory objects of a prefix's chunks in the connector's layout, their starts and their ends."""
    shape = blocks.shape(CHUNK)
    parts = [torch.empty(shape.size_bytes, dtype=torch.uint8) for _ in range(kv.shape[2] // CHUNK)]
    for canonical, part in zip(kv.split(CHUNK, dim=2), parts, strict=True):
        tiles.pack(canonical, part, shape, connector.layout)
    starts = list(range(0, kv.shape[2], CHUNK))
    return [memory_object(part) for part in parts], starts, [start + CHUNK for start in starts]


def _others(blocks: Blocks, slots: torch.Tensor) -> torch.Tensor:
    untouched = torch.ones(blocks.slots, dtype=torch.bool)
    untouched[slots] = False
    return untouched


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32, 128])
def test_chunks_land_exactly_in_scattered_slots_of_every_packing(block, dtype):
    blocks = Blocks(vllm_config(block_size=block, dtype=dtype), 384 // block)
    kv, slots, before = blocks.noise(2 * CHUNK), blocks.scattered(2 * CHUNK), blocks.kv()
    connector = blocks.connector(CHUNK)
    connector.batched_to_gpu(*_chunks(blocks, kv, connector), slot_mapping=slots)
    after = blocks.kv()
    assert torch.equal(after[:, :, slots], kv)
    others = _others(blocks, slots)
    assert torch.equal(after[:, :, others], before[:, :, others])


def test_reading_blocks_back_sees_a_single_wrong_element(blocks, connector):
    """The control of every comparison here: it fails for one element, and for K in the place of V."""
    kv, slots = blocks.noise(CHUNK), blocks.scattered(CHUNK)
    for wrong in (kv.clone(), kv.flip(0), kv.flip(1), kv.flip(3), kv.roll(1, 2), kv.roll(1, 4)):
        wrong[1, 2, CHUNK - 1, 1, -1] += 1
        connector.batched_to_gpu(*_chunks(blocks, wrong, connector), slot_mapping=slots)
        assert torch.equal(blocks.kv()[:, :, slots], wrong)
        assert not torch.equal(blocks.kv()[:, :, slots], kv)


@pytest.mark.parametrize("place", ["scattered", "whole"])
@pytest.mark.parametrize("cached", [*CACHED, 96, 2 * CHUNK])
def test_slots_that_vllm_has_cached_itself_stay_as_they_are(blocks, connector, cached, place):
    kv, slots, before = blocks.noise(2 * CHUNK, seed=cached), getattr(blocks, place)(2 * CHUNK), blocks.kv()
    connector.batched_to_gpu(*_chunks(blocks, kv, connector), slot_mapping=slots, vllm_cached_tokens=cached)
    after = blocks.kv()
    assert torch.equal(after[:, :, slots[:cached]], before[:, :, slots[:cached]])
    assert torch.equal(after[:, :, slots[cached:]], kv[:, :, cached:])
    others = _others(blocks, slots)
    assert torch.equal(after[:, :, others], before[:, :, others])


@pytest.mark.parametrize(
    ("share", "tokens", "cached", "reason"),
    [
        (0.5, CHUNK, 0, "another shape"), (2, CHUNK, 0, "another shape"), (0, CHUNK, 0, "another shape"),
        (1, 2, 0, "another length"), (1, CHUNK - 1, 1, "another length"), (1, CHUNK + 1, 0, "another length"),
        (1, 2 * CHUNK, 1, "another length"),
    ],
)  # fmt: skip
def test_a_chunk_of_another_size_or_for_more_or_fewer_tokens_is_not_written(
    blocks, connector, share, tokens, cached, reason
):
    """vLLM's op would read past the chunk's end, or leave slots as they are."""
    before, chunk = (
        blocks.kv(),
        memory_object(torch.zeros(int(share * blocks.shape(CHUNK).size_bytes), dtype=torch.uint8)),
    )
    with pytest.raises(UnsupportedEngine, match=reason):
        connector.to_gpu(chunk, 0, tokens, slot_mapping=blocks.scattered(3 * CHUNK), vllm_cached_tokens=cached)
    assert torch.equal(blocks.kv(), before)


def test_whole_blocks_are_copied_and_nothing_else_is(monkeypatch):
    """The engine's op is what copying saves; it is still called where a block is not filled from its start to its end."""
    blocks = Blocks(vllm_config(), 12)
    connector = blocks.connector(CHUNK)
    assert connector.layout.endswith("/32/blocks")
    calls = []
    for layer in blocks.layers.values():
        op = layer.impl.do_kv_cache_update
        monkeypatch.setattr(layer.impl, "do_kv_cache_update", lambda *a, op=op: calls.append(1) or op(*a))
    chunks = _chunks(blocks, blocks.noise(2 * CHUNK), connector)
    for cached in (0, 32, 64, 96, 128):
        connector.batched_to_gpu(*chunks, slot_mapping=blocks.whole(2 * CHUNK), vllm_cached_tokens=cached)
    assert not calls
    connector.batched_to_gpu(*chunks, slot_mapping=blocks.whole(2 * CHUNK), vllm_cached_tokens=33)
    assert len(calls) == 2 * len(blocks.layers)
    whole = blocks.whole(2 * CHUNK)
    swapped = whole.clone()
    swapped[[37, 38]] = whole[[38, 37]]
    for slots in (whole.roll(1), whole.flip(0), swapped, blocks.scattered(2 * CHUNK)):
        calls.clear()
        connector.batched_to_gpu(*chunks, slot_mapping=slots)
        assert len(calls) == 2 * len(blocks.layers)


@pytest.mark.parametrize("order", ["0123", "3210", "0246", "7", "2031", "66", "0167"])
@pytest.mark.parametrize("cached", [0, 96])
def test_chunks_are_copied_bit_for_bit_from_wherever_they_lie_in_memory(order, cached):
    """Any bits, such as those of NaN that arithmetic would change; slots of a slab at equal distances and at others."""
    blocks = Blocks(vllm_config(), 16)
    connector, size = blocks.connector(CHUNK), blocks.shape(CHUNK).size_bytes
    slab = torch.randint(0, 256, (8, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    raws, starts = [slab[int(slot)] for slot in order], [i * CHUNK for i in range(len(order))]
    slots, ends = blocks.whole(len(raws) * CHUNK), [start + CHUNK for start in starts]
    expected = {name: cache.flatten(1).view(torch.uint8).clone() for name, cache in blocks.caches.items()}
    places = {"slot_mapping": slots, "vllm_cached_tokens": cached}
    connector.batched_to_gpu(list(map(memory_object, raws)), starts, ends, **places)
    numbers = slots[cached :: blocks.block] // blocks.block
    new = torch.cat([raw.view(len(expected), CHUNK // blocks.block, -1) for raw in raws], dim=1)
    for layer, (name, cache) in enumerate(blocks.caches.items()):
        expected[name][numbers] = new[layer, cached // blocks.block :]
        assert torch.equal(cache.flatten(1).view(torch.uint8), expected[name])


def test_chunks_that_are_not_aligned_are_written_all_the_same():
    blocks = Blocks(vllm_config(), 12)
    connector, kv, slots = blocks.connector(CHUNK), blocks.noise(CHUNK), blocks.whole(CHUNK)
    (chunk,), starts, ends = _chunks(blocks, kv, connector)
    memory = torch.zeros(chunk.raw_data.numel() + 16, dtype=torch.uint8)
    moved = memory[8 : 8 + chunk.raw_data.numel()].copy_(chunk.raw_data)
    connector.batched_to_gpu([memory_object(moved)], starts, ends, slot_mapping=slots)
    assert torch.equal(blocks.kv()[:, :, slots], kv)


@pytest.mark.parametrize(("block", "chunk"), [(128, 64), (32, 48), (64, 32)])
def test_chunks_that_are_not_made_of_whole_blocks_are_not_packed_in_blocks(block, chunk):
    blocks = Blocks(vllm_config(block_size=block), 4)
    connector = EngineWriteConnector()
    connector.bind(blocks.caches, blocks.layers, blocks.shape(chunk))
    assert connector.layout == "heads"


def test_caches_that_the_op_cannot_write_to_are_refused_when_they_are_bound():
    blocks = Blocks(vllm_config(), 12)
    apart = {name: cache.transpose(1, 2).contiguous().transpose(1, 2) for name, cache in blocks.caches.items()}
    assert "cannot write to its KV cache" in _refused(blocks, apart, blocks.layers)


@pytest.mark.parametrize("wrong", ["nothing", "keys twice", "one slot too few"])
def test_an_op_that_writes_other_kv_than_it_is_given_is_refused(blocks, wrong):
    """Renamed or with another meaning, the op would fill live blocks with something else, and nobody would notice."""
    name, right = list(blocks.caches)[1], blocks.layers[list(blocks.caches)[1]]

    def update(
        layer: object, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        if wrong == "keys twice":
            right.impl.do_kv_cache_update(right, keys, keys, cache, slots)
        elif wrong == "one slot too few":
            right.impl.do_kv_cache_update(right, keys[1:], values[1:], cache, slots[1:])

    layer = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update))
    assert f"layer {name} writes other KV" in _refused(blocks, blocks.caches, {**blocks.layers, name: layer})


def test_layers_are_taken_by_number_whatever_order_they_come_in():
    """Twelve layers: as text, layer 10 comes before layer 2."""
    blocks = Blocks(vllm_config(), 4, layers=12)
    names = list(blocks.caches)
    shuffled = {names[i]: blocks.caches[names[i]] for i in (10, 2, 0, 11, 1, 9, 3, 8, 4, 7, 5, 6)}
    connector = EngineWriteConnector()
    connector.bind(shuffled, blocks.layers, blocks.shape(CHUNK))
    kv, slots = blocks.noise(CHUNK), blocks.scattered(CHUNK)
    connector.batched_to_gpu(*_chunks(blocks, kv, connector), slot_mapping=slots)
    assert torch.equal(blocks.kv()[:, :, slots], kv)


def _refused(blocks: Blocks, caches: dict, layers: dict) -> str:
    connector = EngineWriteConnector()
    with pytest.raises(UnsupportedEngine) as refusal:
        connector.bind(caches, layers, blocks.shape(CHUNK))
    with pytest.raises(UnsupportedEngine):
        connector.get_shape(CHUNK)
    return str(refusal.value)


@pytest.mark.parametrize(
    "names",
    [
        [1, 2], [0, 2], [0, 1], [0, 1, 2, "draft.layers.3.self_attn.attn"], [0, 1, "vision.layers.1.attn"],
        [1, 2, "model.layers.3.self_attn.attn"],
    ],
    ids=["without the first", "a middle one", "the last", "one too many", "one twice", "not from zero"],
)  # fmt: skip
def test_an_engine_that_does_not_cache_each_layer_once_is_refused(blocks, names):
    known, cache, layer = list(blocks.caches), *(next(iter(d.values())) for d in (blocks.caches, blocks.layers))
    own = [name if isinstance(name, str) else known[name] for name in names]
    reason = _refused(blocks, dict.fromkeys(own, cache), dict.fromkeys(own, layer))
    assert "are not those of layers 0 to 2" in reason and all(name in reason for name in own)


def test_a_stage_of_a_pipeline_has_its_own_layers_and_no_others(blocks):
    cache, layer = (next(iter(d.values())) for d in (blocks.caches, blocks.layers))
    own = [f"model.layers.{number}.self_attn.attn" for number in (3, 4, 5)]
    connector, caches, layers = EngineWriteConnector(), dict.fromkeys(own, cache), dict.fromkeys(own, layer)
    for first in (0, 2, 4):
        with pytest.raises(UnsupportedEngine, match=f"are not those of layers {first} to {first + 2}"):
            connector.bind(caches, layers, blocks.shape(CHUNK), first_layer=first)
    connector.bind(caches, layers, blocks.shape(CHUNK), first_layer=3)


def test_a_layer_or_cache_that_cannot_be_written_is_refused_with_its_name(blocks):
    """The layers are stand-ins: no attention backend of vLLM's for CPU lacks the op."""
    name = list(blocks.caches)[1]
    cache = blocks.caches[name]
    for layer in (None, SimpleNamespace(), SimpleNamespace(impl=SimpleNamespace())):
        assert f"layer {name} has no op" in _refused(blocks, blocks.caches, {**blocks.layers, name: layer})
    for dtype in (torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn):
        reason = _refused(blocks, {**blocks.caches, name: cache.to(dtype)}, blocks.layers)
        assert all(word in reason for word in (name, str(dtype), "--kv-cache-dtype"))
    twice = (torch.cat([cache, cache], dim=dim) for dim in (1, -1))
    for strange in (cache[:, :1], *twice, cache[..., :64], cache[0], cache[None]):
        reason = _refused(blocks, {**blocks.caches, name: strange}, blocks.layers)
        assert name in reason and str(list(strange.shape)) in reason


def test_lmcache_builds_its_engine_on_cpu_only_with_our_connector(tmp_path):
    config = lmcache_config(Settings(home=tmp_path))
    gpu_connector = module("lmcache.v1.gpu_connector")
    metadata, original = lmcache_metadata(config, vllm_config()), gpu_connector.CreateGPUConnector

    def create() -> object:
        return gpu_connector.CreateGPUConnector(config, metadata, EngineType.VLLM)

    with pytest.raises(RuntimeError, match="No supported cpu connector"):
        create()
    for error in (None, KeyError):
        with suppress(KeyError), own_connector(EngineWriteConnector, in_worker=True):
            assert isinstance(create(), EngineWriteConnector) and create() is not create()
            if error:
                raise error
        assert gpu_connector.CreateGPUConnector is original
    with own_connector(EngineWriteConnector, in_worker=False):
        pass  # the scheduler builds none
    with (
        pytest.raises(UnsupportedEngine, match="CreateGPUConnector"),
        own_connector(EngineWriteConnector, in_worker=True),
    ):
        pass
