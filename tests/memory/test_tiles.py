"""Chunks packed as vLLM's CPU attention packs its blocks: held against vLLM's own cache-write op, bit by bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from blocks import quietly
from processor import needs_avx512

from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.layout import DTYPES, ChunkShape

with quietly():
    from vllm import _custom_ops as ops

HEADS, LAYERS = 2, 2
CASES = [
    *itertools.product(["vec"], ["bfloat16", "float16", "float32"], [32, 128], [32, 96]),
    *itertools.product(["vec16"], ["bfloat16", "float32"], [48], [80, 112]),
    *(
        pytest.param(*case, marks=needs_avx512)
        for case in itertools.product(["amx"], ["bfloat16", "float16"], [32, 128], [32, 96])
    ),
]


def _blocks(isa: str, kv: torch.Tensor, block: int) -> torch.Tensor:
    """Return `[L, block, H, token, 2 * D]`: the blocks that vLLM wrote canonical KV into, the last of them first."""
    tokens, heads, size = kv.shape[2:]
    layers = []
    for keys, values in zip(kv[0], kv[1], strict=True):
        cache = torch.zeros(tokens // block, heads, block, 2 * size, dtype=kv.dtype)
        order = torch.arange(len(cache)).flip(0)
        slots = (order[:, None] * block + torch.arange(block)).flatten()
        regions = cache.view(len(cache), heads, 2 * block, size).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            keys, values, *regions, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
        layers.append(cache[order])
    return torch.stack(layers)


def _shape(kv: torch.Tensor) -> ChunkShape:
    _, layers, tokens, heads, size = kv.shape
    return ChunkShape(heads, layers, tokens, size, str(kv.dtype).removeprefix("torch."))


def _bytes(kv: torch.Tensor, name: str) -> torch.Tensor:
    out = torch.full((_shape(kv).size_bytes,), 0xAA, dtype=torch.uint8)
    tiles.pack(kv, out, _shape(kv), name)
    return out


def _kv(dtype: str, tokens: int, size: int) -> torch.Tensor:
    return torch.randn(2, LAYERS, tokens, HEADS, size).to(DTYPES[dtype])


@pytest.mark.parametrize(("isa", "dtype", "block", "size"), CASES)
def test_a_packed_chunk_is_what_vllm_writes_and_in_blocks_the_memory_itself_and_is_unpacked_again(
    isa, dtype, block, size
):
    kv = _kv(dtype, 3 * block, size)
    kind, blocks = "vec" if isa == "vec16" else isa, _blocks(isa, kv, block)
    names = [tiles.layout(kind, block, blocks=whole) for whole in (False, True)]
    packed, in_blocks = (_bytes(kv, name) for name in names)
    for each, name in zip((packed, in_blocks), names, strict=True):
        assert torch.equal(tiles.unpack(each, _shape(kv), name), kv)
    assert torch.equal(packed, blocks.transpose(2, 3).contiguous().flatten().view(torch.uint8)), "what LMCache moves"
    assert torch.equal(in_blocks, blocks.flatten().view(torch.uint8))
