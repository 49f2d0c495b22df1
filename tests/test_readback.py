"""What LMCache saves is what vLLM's layers wrote, read back byte for byte in the layout in which it is written again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import Blocks, quietly, vllm_config
from transformers import LlamaConfig

from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.layout import DTYPES, heads_view

with quietly():
    from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj

    from lmcache_cartridge.engine import probe
    from lmcache_cartridge.engine.inject import EngineWriteConnector

CHUNK = 256
"""LMCache's default."""


def _kv(blocks: Blocks, tokens: int) -> torch.Tensor:
    shape = blocks.shape(tokens)
    kv = torch.randn(2, shape.layers, tokens, shape.heads, shape.head_size, generator=torch.Generator().manual_seed(1))
    return kv.to(DTYPES[shape.dtype])


def _engine_writes(blocks: Blocks, kv: torch.Tensor, slots: torch.Tensor) -> None:
    for plane, (name, layer) in zip(kv.unbind(1), blocks.layers.items(), strict=True):
        layer.impl.do_kv_cache_update(layer, *plane.contiguous(), blocks.caches[name], slots)


def _bound(blocks: Blocks, *, saves: bool = True) -> EngineWriteConnector:
    connector = EngineWriteConnector()
    connector.bind(blocks.caches, blocks.layers, blocks.shape(CHUNK), saves=saves)
    return connector


def _memory(blocks: Blocks, chunks: int, rounded_up: int = 64) -> list[MemoryObj]:
    """Return what LMCache would allocate: its shape, and memory rounded up to its allocator's alignment."""
    shape = blocks.shape(CHUNK)
    size, dtype = torch.Size([2, shape.layers, CHUNK, shape.heads * shape.head_size]), DTYPES[shape.dtype]

    def one() -> MemoryObj:
        raw = torch.full((shape.size_bytes + rounded_up,), 0xAA, dtype=torch.uint8)
        described = MemoryObjMetadata(size, dtype, 0, len(raw), 1, fmt=MemoryFormat.KV_2LTD, shapes=[size],
                                      dtypes=[dtype])  # fmt: skip
        return TensorMemoryObj(raw, described, None)

    return [one() for _ in range(chunks)]


def _slots(blocks: Blocks, tokens: int, where: str) -> torch.Tensor:
    noise = torch.Generator().manual_seed(2)
    if where == "scattered":
        return torch.randperm(blocks.slots, generator=noise)[:tokens]
    order = torch.randperm(blocks.slots // blocks.block, generator=noise)
    return (order[:, None] * blocks.block + torch.arange(blocks.block)).flatten()[:tokens]


def _compare(blocks: Blocks, where: str) -> EngineWriteConnector:
    """Have the engine's op write three chunks, read the last two, compare each byte, and write them elsewhere."""
    connector, kv, slots = _bound(blocks), _kv(blocks, 3 * CHUNK), _slots(blocks, 3 * CHUNK, where)
    _engine_writes(blocks, kv, slots)
    before = {name: cache.clone() for name, cache in blocks.caches.items()}
    chunks, starts = _memory(blocks, 2), [CHUNK, 2 * CHUNK]
    connector.batched_from_gpu(
        chunks, starts, [start + CHUNK for start in starts], slot_mapping=slots, offset=CHUNK, kvcaches=[]
    )
    assert all(torch.equal(before[name], cache) for name, cache in blocks.caches.items())
    shape = blocks.shape(CHUNK)
    expected = torch.empty(shape.size_bytes, dtype=torch.uint8)
    for chunk, start in zip(chunks, starts, strict=True):
        tiles.pack(kv[:, :, start : start + CHUNK], expected, shape, connector.layout)
        assert torch.equal(chunk.raw_data[: shape.size_bytes], expected)
        assert (chunk.raw_data[shape.size_bytes :] == 0xAA).all(), "memory that is not the chunk's was written"
    elsewhere = slots.roll(blocks.block)
    connector.batched_to_gpu(chunks, [0, CHUNK], [CHUNK, 2 * CHUNK], slot_mapping=elsewhere[: 2 * CHUNK])
    assert torch.equal(blocks.kv()[:, :, elsewhere[: 2 * CHUNK]], kv[:, :, CHUNK:])
    return connector


@pytest.mark.parametrize("where", ["whole blocks", "scattered"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32, 64, 128, 512])
def test_every_block_size_and_dtype_is_read_back(block: int, dtype: str, where: str) -> None:
    """A chunk is many blocks, one, or half of one, which no copy of blocks can read."""
    blocks = Blocks(vllm_config(block_size=block, dtype=dtype), 1024 // block)
    connector = _compare(blocks, where)
    assert tiles.is_tiled(connector.layout) == (block <= CHUNK)


@pytest.mark.parametrize(
    "heads", [(4, 4, 64), (4, 1, 64), (4, 2, 32), (4, 2, 80), (4, 2, 128), (4, 2, 256)], ids=lambda h: "/".join(map(str, h))
)  # fmt: skip
@pytest.mark.parametrize("block", [32, 128])
def test_every_number_of_heads_and_head_size_is_read_back(
    tmp_path: Path, heads: tuple[int, int, int], block: int
) -> None:
    of_query, of_kv, size = heads
    config = LlamaConfig(
        vocab_size=640, hidden_size=of_query * size, num_hidden_layers=2, num_attention_heads=of_query, head_dim=size,
        num_key_value_heads=of_kv, intermediate_size=64, max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    for where in ("whole blocks", "scattered"):
        _compare(Blocks(vllm_config(tmp_path, block_size=block, skip_tokenizer_init=True), 1024 // block), where)


@pytest.mark.parametrize("window", [64, 1000])
def test_layers_with_a_window_are_read_back(window: int) -> None:
    blocks = Blocks(vllm_config(), 32, window=window)
    for where in ("whole blocks", "scattered"):
        _compare(blocks, where)


@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_every_instruction_set_is_read_back(isa: str) -> None:
    blocks = Blocks(vllm_config(), 32)
    for layer in blocks.layers.values():
        layer.isa = isa
    assert _compare(blocks, "whole blocks").layout.startswith("amx" if isa == "amx" else "vec")


def test_a_packing_that_nobody_knows_is_read_back_by_the_engines_own_op() -> None:
    blocks = Blocks(vllm_config(), 32)
    for layer in blocks.layers.values():
        own = layer.impl.do_kv_cache_update

        def write(layer: Any, keys: Any, values: Any, cache: torch.Tensor, slots: torch.Tensor, own: Any = own) -> None:
            unlike = cache.flip(2)
            own(layer, keys, values, unlike, slots)
            cache.copy_(unlike.flip(2))

        layer.impl.do_kv_cache_update = write
    connector = _compare(blocks, "whole blocks")
    assert connector.layout == "heads"


@pytest.mark.parametrize("block", [32, 512])
def test_two_heads_swapped_on_the_way_back_are_noticed(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """The control: the inverse of another packing turns the comparison red, whichever way the bytes are read."""
    blocks = Blocks(vllm_config(block_size=block), 1024 // block)
    read = EngineWriteConnector.batched_from_gpu

    def swapped(self: EngineWriteConnector, chunks: list[MemoryObj], *args: Any, **kwargs: Any) -> None:
        read(self, chunks, *args, **kwargs)
        shape = blocks.shape(CHUNK)
        for chunk in chunks:
            raw = chunk.raw_data[: shape.size_bytes]
            if self.layout == "heads":
                kv = tiles.VIEWS["heads"](raw, shape).clone()
            else:
                kv = tiles.unpack(raw, shape, self.layout)
            tiles.pack(kv.flip(3), raw, shape, self.layout)

    monkeypatch.setattr(EngineWriteConnector, "batched_from_gpu", swapped)
    with pytest.raises(AssertionError):
        _compare(blocks, "whole blocks")


def test_an_op_that_puts_two_numbers_in_one_place_is_refused() -> None:
    blocks = Blocks(vllm_config(), 4)
    name, cache = next(iter(blocks.caches.items()))
    own = blocks.layers[name].impl.do_kv_cache_update

    def write(layer: Any, keys: Any, values: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
        own(layer, keys, values, cache, slots)
        cache.flatten(1)[:, 7] = cache.flatten(1)[:, 8]

    blocks.layers[name].impl.do_kv_cache_update = write
    with pytest.raises(UnsupportedEngine, match="cannot be read back"):
        probe.places(name, cache, blocks.layers[name])


def test_blocks_whose_tokens_lie_before_their_heads_are_read_back() -> None:
    """As on GPUs: K beside V, and in memory the tokens of a block before its heads."""
    blocks = Blocks(vllm_config(), 32)

    class Beside:
        class impl:
            @staticmethod
            def do_kv_cache_update(
                layer: Any, keys: Any, values: Any, cache: torch.Tensor, slots: torch.Tensor
            ) -> None:
                assert cache.stride(1) < cache.stride(2)
                cache[slots // 32, :, slots % 32] = torch.cat([keys, values], -1)

    blocks.caches = {name: cache.transpose(1, 2).contiguous().transpose(1, 2) for name, cache in blocks.caches.items()}
    blocks.layers = dict.fromkeys(blocks.layers, Beside)
    connector, kv, slots = _bound(blocks), _kv(blocks, 2 * CHUNK), _slots(blocks, 2 * CHUNK, "scattered")
    assert connector.layout == "heads"
    _engine_writes(blocks, kv, slots)
    chunks, shape = _memory(blocks, 2), blocks.shape(CHUNK)
    connector.batched_from_gpu(chunks, [0, CHUNK], [CHUNK, 2 * CHUNK], slot_mapping=slots)
    assert torch.equal(
        torch.cat([heads_view(chunk.raw_data[: shape.size_bytes], shape) for chunk in chunks], dim=2), kv
    )


def test_an_injector_that_was_not_bound_to_save_reads_nothing_it_cannot_copy() -> None:
    blocks = Blocks(vllm_config(block_size=512), 2)
    connector, chunks = _bound(blocks, saves=False), _memory(blocks, 1)
    with pytest.raises(UnsupportedEngine, match="not bound to read"):
        connector.from_gpu(chunks[0], 0, CHUNK, slot_mapping=torch.arange(CHUNK))


@pytest.mark.parametrize("tokens", [CHUNK - 1, CHUNK + 1])
def test_a_chunk_of_another_length_is_not_read(tokens: int) -> None:
    blocks = Blocks(vllm_config(), 32)
    connector, (chunk,) = _bound(blocks), _memory(blocks, 1)
    with pytest.raises(UnsupportedEngine, match="another length"):
        connector.batched_from_gpu([chunk], [0], [tokens], slot_mapping=torch.arange(2 * CHUNK))
    assert (chunk.raw_data == 0xAA).all()
