"""What LMCache saves is what vLLM's layers wrote, read back byte for byte in the layout in which it is written again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blocks import Blocks, quietly, vllm_config
from processor import needs_avx512
from transformers import LlamaConfig

from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.layout import DTYPES

with quietly():
    from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj

    from lmcache_cartridge.engine import probe
    from lmcache_cartridge.engine.inject import EngineWriteConnector

CHUNK = 256
"""LMCache's default."""


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


def _compare(blocks: Blocks) -> EngineWriteConnector:
    """Have the engine's op write three chunks, read the last two, compare each byte, and write them elsewhere."""
    connector, kv, slots = blocks.connector(CHUNK, saves=True), blocks.noise(3 * CHUNK), blocks.whole(3 * CHUNK)
    blocks.write(kv, slots)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32, 128, 256])
def test_every_block_size_and_dtype_is_read_back(block, dtype):
    _compare(Blocks(vllm_config(block_size=block, dtype=dtype), 1024 // block))


@pytest.mark.parametrize(
    "heads", [(4, 4, 64), (4, 1, 64), (4, 2, 32), (4, 2, 80), (4, 2, 128), (4, 2, 256)], ids=lambda h: "/".join(map(str, h))
)  # fmt: skip
@pytest.mark.parametrize("block", [32, 128])
def test_every_number_of_heads_and_head_size_is_read_back(tmp_path, heads, block):
    of_query, of_kv, size = heads
    config = LlamaConfig(
        vocab_size=640, hidden_size=of_query * size, num_hidden_layers=2, num_attention_heads=of_query, head_dim=size,
        num_key_value_heads=of_kv, intermediate_size=64, max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    _compare(Blocks(vllm_config(tmp_path, block_size=block, skip_tokenizer_init=True), 1024 // block))


@pytest.mark.parametrize("isa", ["vec", "vec16", pytest.param("amx", marks=needs_avx512)])
@pytest.mark.parametrize("window", [None, 64, 1000])
def test_every_instruction_set_and_window_is_read_back(isa, window):
    blocks = Blocks(vllm_config(), 32, window=window)
    for layer in blocks.layers.values():
        layer.isa = isa
    assert _compare(blocks).layout.startswith("amx" if isa == "amx" else "vec")


def _unlike(layer: Any) -> None:
    """Have a layer write the tokens of a block in the other order."""
    own = layer.impl.do_kv_cache_update

    def write(layer: Any, keys: Any, values: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
        unlike = cache.flip(2)
        own(layer, keys, values, unlike, slots)
        cache.copy_(unlike.flip(2))

    layer.impl.do_kv_cache_update = write


@pytest.mark.parametrize("block", [32, 512], ids=["an unknown packing", "blocks larger than a chunk"])
def test_what_nothing_can_read_back_is_not_saved(block):
    """The engine's own op can write it, so without saving it is served."""
    blocks = Blocks(vllm_config(block_size=block), 1024 // block)
    for layer in blocks.layers.values() if block == 32 else ():
        _unlike(layer)
    with pytest.raises(UnsupportedEngine, match="LMCache cannot save.*--no-save.*--block-size"):
        blocks.connector(CHUNK, saves=True)
    connector, (chunk,) = blocks.connector(CHUNK), _memory(blocks, 1)
    assert connector.layout == "heads"
    with pytest.raises(UnsupportedEngine, match="cannot be read"):
        connector.from_gpu(chunk, 0, CHUNK, slot_mapping=torch.arange(CHUNK))


def test_an_op_that_puts_two_numbers_in_one_place_is_refused():
    blocks = Blocks(vllm_config(), 4)
    name, cache = next(iter(blocks.caches.items()))
    own = blocks.layers[name].impl.do_kv_cache_update

    def write(layer: Any, keys: Any, values: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
        own(layer, keys, values, cache, slots)
        cache.flatten(1)[:, 7] = cache.flatten(1)[:, 8]

    blocks.layers[name].impl.do_kv_cache_update = write
    with pytest.raises(UnsupportedEngine, match="other KV into its cache"):
        probe.places(name, cache, blocks.layers[name])


@pytest.mark.parametrize("tokens", [CHUNK - 1, CHUNK + 1])
def test_a_chunk_of_another_length_is_not_read(tokens):
    blocks = Blocks(vllm_config(), 32)
    connector, (chunk,) = blocks.connector(CHUNK, saves=True), _memory(blocks, 1)
    with pytest.raises(UnsupportedEngine, match="another length"):
        connector.batched_from_gpu([chunk], [0], [tokens], slot_mapping=torch.arange(2 * CHUNK))
    assert (chunk.raw_data == 0xAA).all()
