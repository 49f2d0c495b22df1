"""Chunks land in vLLM's own CPU blocks element for element, in any slots, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from blocks import Blocks, vllm_config
from inprocess import CHUNK, lmcache_config, lmcache_metadata
from lmcache.utils import EngineType
from lmcache.v1 import gpu_connector
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj
from making import heads_bytes

from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.layout import DTYPES
from lmcache_cartridge.serve.cpu import cpu_connector
from lmcache_cartridge.serve.inject import EngineWriteConnector
from lmcache_cartridge.settings import Settings

CACHED = [0, 1, 31, 32, 63, 64, 65, 100, 127]
"""Tokens that vLLM has cached itself: on and beside the ends of blocks (32) and chunks (64)."""


@pytest.fixture(scope="module")
def blocks() -> Blocks:
    return Blocks(vllm_config(), 12)


@pytest.fixture
def connector(blocks: Blocks) -> EngineWriteConnector:
    return _bound(blocks)


def _bound(blocks: Blocks) -> EngineWriteConnector:
    connector = EngineWriteConnector()
    connector.bind(blocks.caches, blocks.layers, blocks.shape(CHUNK))
    return connector


def _kv(blocks: Blocks, tokens: int, seed: int = 1) -> torch.Tensor:
    shape = blocks.shape(tokens)
    noise = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, shape.layers, tokens, shape.heads, shape.head_size, generator=noise)
    return kv.to(DTYPES[shape.dtype])


def _memory_object(raw: torch.Tensor) -> MemoryObj:
    """Wrap flat bytes as a backend does; nobody but the connector looks at it, and that at the bytes only."""
    size = raw.shape
    metadata = MemoryObjMetadata(size, torch.uint8, 0, raw.numel(), 1, fmt=MemoryFormat.KV_2LTD, shapes=[size],
                                 dtypes=[torch.uint8])  # fmt: skip
    return TensorMemoryObj(raw, metadata, None)


def _chunks(kv: torch.Tensor) -> tuple[list[MemoryObj], list[int], list[int]]:
    """Return the memory objects of a prefix's chunks, their starts and their ends."""
    parts = [torch.frombuffer(bytearray(heads_bytes(part)), dtype=torch.uint8) for part in kv.split(CHUNK, dim=2)]
    starts = list(range(0, kv.shape[2], CHUNK))
    return [_memory_object(part) for part in parts], starts, [start + CHUNK for start in starts]


def _scattered(blocks: Blocks, tokens: int) -> torch.Tensor:
    """Return a slot for each token, no two neighbours, over parts of all blocks."""
    return torch.randperm(blocks.slots, generator=torch.Generator().manual_seed(2))[:tokens]


def _others(blocks: Blocks, slots: torch.Tensor) -> torch.Tensor:
    untouched = torch.ones(blocks.slots, dtype=torch.bool)
    untouched[slots] = False
    return untouched


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32, 128])
def test_chunks_land_exactly_in_scattered_slots_of_every_packing(block: int, dtype: str) -> None:
    blocks = Blocks(vllm_config(block_size=block, dtype=dtype), 384 // block)
    kv, slots, before = _kv(blocks, 2 * CHUNK), _scattered(blocks, 2 * CHUNK), blocks.kv()
    _bound(blocks).batched_to_gpu(*_chunks(kv), slot_mapping=slots)
    after = blocks.kv()
    assert torch.equal(after[:, :, slots], kv)
    others = _others(blocks, slots)
    assert torch.equal(after[:, :, others], before[:, :, others])


def test_chunks_land_exactly_in_whole_blocks_in_any_order(blocks: Blocks, connector: EngineWriteConnector) -> None:
    kv = _kv(blocks, 2 * CHUNK)
    slots = torch.cat([torch.arange(blocks.block) + blocks.block * block for block in (7, 2, 11, 0)])
    connector.batched_to_gpu(*_chunks(kv), slot_mapping=slots, vllm_cached_tokens=0)
    assert torch.equal(blocks.kv()[:, :, slots], kv)


def test_reading_blocks_back_sees_a_single_wrong_element(blocks: Blocks, connector: EngineWriteConnector) -> None:
    """The control of every comparison here: it fails for one element, and for K in the place of V."""
    kv, slots = _kv(blocks, CHUNK), _scattered(blocks, CHUNK)
    for wrong in (kv.clone(), kv.flip(0), kv.flip(1), kv.flip(3), kv.roll(1, 2), kv.roll(1, 4)):
        wrong[1, 2, CHUNK - 1, 1, -1] += 1
        connector.batched_to_gpu(*_chunks(wrong), slot_mapping=slots)
        assert torch.equal(blocks.kv()[:, :, slots], wrong)
        assert not torch.equal(blocks.kv()[:, :, slots], kv)


@pytest.mark.parametrize("cached", CACHED)
def test_slots_that_vllm_has_cached_itself_stay_as_they_are(
    blocks: Blocks, connector: EngineWriteConnector, cached: int
) -> None:
    kv, slots, before = _kv(blocks, 2 * CHUNK, seed=cached), _scattered(blocks, 2 * CHUNK), blocks.kv()
    connector.batched_to_gpu(*_chunks(kv), slot_mapping=slots, vllm_cached_tokens=cached)
    after = blocks.kv()
    assert torch.equal(after[:, :, slots[:cached]], before[:, :, slots[:cached]])
    assert torch.equal(after[:, :, slots[cached:]], kv[:, :, cached:])


def test_a_prefix_that_vllm_has_cached_whole_is_not_written(blocks: Blocks, connector: EngineWriteConnector) -> None:
    before = blocks.kv()
    slots = _scattered(blocks, 2 * CHUNK)
    connector.batched_to_gpu(*_chunks(_kv(blocks, 2 * CHUNK)), slot_mapping=slots, vllm_cached_tokens=2 * CHUNK)
    assert torch.equal(blocks.kv(), before)


def test_a_single_chunk_is_written_as_a_batch_of_one(blocks: Blocks, connector: EngineWriteConnector) -> None:
    kv, slots = _kv(blocks, 2 * CHUNK), _scattered(blocks, 2 * CHUNK)
    chunks, starts, ends = _chunks(kv)
    before = blocks.kv()
    connector.to_gpu(chunks[1], starts[1], ends[1], slot_mapping=slots)
    after = blocks.kv()
    assert torch.equal(after[:, :, slots[CHUNK:]], kv[:, :, CHUNK:])
    assert torch.equal(after[:, :, slots[:CHUNK]], before[:, :, slots[:CHUNK]])


@pytest.mark.parametrize("bytes_", [lambda n: n // 2, lambda n: n - 1, lambda n: n + 2, lambda n: 2 * n, lambda n: 0])
def test_a_chunk_of_another_size_is_not_written(
    blocks: Blocks, connector: EngineWriteConnector, bytes_: Callable[[int], int]
) -> None:
    before, size = blocks.kv(), blocks.shape(CHUNK).size_bytes
    strange = _memory_object(torch.zeros(bytes_(size), dtype=torch.uint8))
    with pytest.raises(AssertionError, match="another shape"):
        connector.to_gpu(strange, 0, CHUNK, slot_mapping=_scattered(blocks, CHUNK))
    assert torch.equal(blocks.kv(), before)


@pytest.mark.parametrize("tokens", [2, CHUNK - 1, CHUNK + 1, 2 * CHUNK])
@pytest.mark.parametrize("cached", [0, 1])
def test_a_chunk_that_is_to_cover_more_or_fewer_tokens_is_not_written(
    blocks: Blocks, connector: EngineWriteConnector, tokens: int, cached: int
) -> None:
    """vLLM's op would read past the chunk's end, or leave slots as they are."""
    chunk, before = _chunks(_kv(blocks, CHUNK))[0][0], blocks.kv()
    with pytest.raises(AssertionError, match="another length"):
        connector.to_gpu(chunk, 0, tokens, slot_mapping=_scattered(blocks, 3 * CHUNK), vllm_cached_tokens=cached)
    assert torch.equal(blocks.kv(), before)


def test_nothing_is_written_before_the_engine_is_known(blocks: Blocks) -> None:
    connector = EngineWriteConnector()
    with pytest.raises(AssertionError):
        connector.batched_to_gpu(*_chunks(_kv(blocks, CHUNK)), slot_mapping=_scattered(blocks, CHUNK))
    with pytest.raises(AssertionError, match="not bound"):
        connector.get_shape(CHUNK)


def test_layers_are_taken_by_number_whatever_order_they_come_in() -> None:
    """Twelve layers: as text, layer 10 comes before layer 2."""
    blocks = Blocks(vllm_config(), 4, layers=12)
    names = list(blocks.caches)
    shuffled = {names[i]: blocks.caches[names[i]] for i in (10, 2, 0, 11, 1, 9, 3, 8, 4, 7, 5, 6)}
    connector = EngineWriteConnector()
    connector.bind(shuffled, blocks.layers, blocks.shape(CHUNK))
    kv, slots = _kv(blocks, CHUNK), _scattered(blocks, CHUNK)
    connector.batched_to_gpu(*_chunks(kv), slot_mapping=slots)
    assert torch.equal(blocks.kv()[:, :, slots], kv)


def _refused(blocks: Blocks, caches: dict, layers: dict) -> str:
    connector = EngineWriteConnector()
    with pytest.raises(UnsupportedEngine) as refusal:
        connector.bind(caches, layers, blocks.shape(CHUNK))
    with pytest.raises(AssertionError):
        connector.get_shape(CHUNK)
    return str(refusal.value)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_an_engine_that_does_not_cache_every_layer_is_refused(blocks: Blocks, missing: int) -> None:
    names = list(blocks.caches)
    caches = {name: cache for i, (name, cache) in enumerate(blocks.caches.items()) if i != missing}
    assert "are not those of layers 0 to 2" in _refused(blocks, caches, blocks.layers)
    assert names[missing] not in _refused(blocks, caches, blocks.layers)


def test_an_engine_with_a_layer_too_many_is_refused(blocks: Blocks) -> None:
    draft = "draft.layers.3.self_attn.attn"
    caches = {**blocks.caches, draft: next(iter(blocks.caches.values()))}
    assert draft in _refused(blocks, caches, {**blocks.layers, draft: next(iter(blocks.layers.values()))})


def test_an_engine_with_two_caches_of_one_layer_is_refused(blocks: Blocks) -> None:
    first, second, third = blocks.caches.items()
    twice = {first[0]: first[1], second[0]: second[1], "vision.layers.1.attn": third[1]}
    assert "vision.layers.1.attn" in _refused(blocks, twice, blocks.layers)


def test_an_engine_whose_layers_do_not_start_at_zero_is_refused(blocks: Blocks) -> None:
    """As a later rank of a pipeline has them."""
    shifted = {f"model.layers.{i}.self_attn.attn": cache for i, cache in enumerate(blocks.caches.values(), start=1)}
    assert "are not those of layers 0 to 2" in _refused(blocks, shifted, blocks.layers)


@pytest.mark.parametrize("layer", [None, SimpleNamespace(), SimpleNamespace(impl=SimpleNamespace())])
def test_a_layer_that_cannot_write_its_cache_is_refused(blocks: Blocks, layer: object) -> None:
    """The layers are stand-ins: no attention backend of vLLM's for CPU lacks the op."""
    name = list(blocks.caches)[1]
    layers = {**blocks.layers, name: layer}
    assert f"layer {name} has no op" in _refused(blocks, blocks.caches, layers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_a_cache_of_another_dtype_is_refused(blocks: Blocks, dtype: torch.dtype) -> None:
    name = list(blocks.caches)[2]
    reason = _refused(blocks, {**blocks.caches, name: blocks.caches[name].to(dtype)}, blocks.layers)
    assert name in reason
    assert str(dtype) in reason
    assert "--kv-cache-dtype" in reason


def test_a_cache_that_holds_other_heads_or_elements_is_refused(blocks: Blocks) -> None:
    name = list(blocks.caches)[1]
    cache = blocks.caches[name]
    fewer, wider = cache[:, :1], torch.cat([cache, cache], dim=-1)
    for strange in (fewer, torch.cat([cache, cache], dim=1), wider, cache[..., :64], cache[0], cache[None]):
        reason = _refused(blocks, {**blocks.caches, name: strange}, blocks.layers)
        assert name in reason
        assert str(list(strange.shape)) in reason


def test_reading_blocks_is_refused_since_nothing_may_be_saved(blocks: Blocks, connector: EngineWriteConnector) -> None:
    chunk = _memory_object(torch.zeros(blocks.shape(CHUNK).size_bytes, dtype=torch.uint8))
    with pytest.raises(UnsupportedEngine, match="kv_consumer"):
        connector.from_gpu(chunk, 0, CHUNK)
    with pytest.raises(UnsupportedEngine, match="kv_consumer"):
        connector.batched_from_gpu([chunk], [0], [CHUNK])
    assert not chunk.raw_data.any()


def test_the_shape_it_tells_lmcache_holds_a_chunks_bytes(blocks: Blocks, connector: EngineWriteConnector) -> None:
    shape = blocks.shape(CHUNK)
    assert connector.get_shape(CHUNK).numel() * DTYPES[shape.dtype].itemsize == shape.size_bytes
    assert connector.get_shape(CHUNK) == (2 * shape.heads, shape.layers, CHUNK, shape.head_size)
    assert connector.get_shape(CHUNK)[MemoryFormat.KV_2LTD.token_dim()] == CHUNK


def test_lmcache_builds_its_engine_on_cpu_only_with_our_connector(tmp_path: Path) -> None:
    config = lmcache_config(Settings(home=tmp_path))
    metadata = lmcache_metadata(config, vllm_config())

    def create() -> object:
        return gpu_connector.CreateGPUConnector(config, metadata, EngineType.VLLM)

    with pytest.raises(RuntimeError, match="No supported cpu connector"):
        create()
    original = gpu_connector.CreateGPUConnector
    with cpu_connector():
        assert isinstance(create(), EngineWriteConnector)
        assert create() is not create()
    assert gpu_connector.CreateGPUConnector is original
    with pytest.raises(KeyError), cpu_connector():
        raise KeyError
    assert gpu_connector.CreateGPUConnector is original
