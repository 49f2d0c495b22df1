"""The engine's layout is seen, never guessed: real attention layers write known KV, and what is not known is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import Blocks, vllm_config
from processor import needs_avx512

from lmcache_cartridge.engine.probe import written_layout
from lmcache_cartridge.errors import UnsupportedEngine


class _Impl:
    """An attention backend whose cache write is `write(keys, values, blocks)` for keys and values `[2, block, H, D]`."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
        self._write = write

    def do_kv_cache_update(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor
    ) -> None:
        tokens = torch.empty_like(torch.cat([keys, values], -1))
        tokens[slots] = torch.cat([keys, values], -1)
        per_block = tokens.unflatten(0, (len(blocks), -1)).transpose(1, 2)  # [blocks, H, block, 2 * D]
        self._write(*per_block.chunk(2, -1), blocks)


class _Layer:
    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
        self.impl = _Impl(write)


def _beside(keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor) -> None:
    """As vLLM's backends for GPUs write: K beside V for each token and head."""
    blocks.copy_(torch.cat([keys, values], -1))


def _caches(names: str = "ab", dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (4, 2, 32, 128)) -> dict:
    return {name: torch.randn(shape).to(dtype) for name in names}


@pytest.mark.parametrize("block", [32, 64, 128])
def test_this_machines_real_layers_are_recognised_and_their_blocks_left_alone(block):
    blocks = Blocks(vllm_config(block_size=block), 3)
    before = {name: cache.clone() for name, cache in blocks.caches.items()}
    isa = {layer.isa for layer in blocks.layers.values()}
    assert len(isa) == 1
    kind = "amx" if isa == {"amx"} else "vec"
    assert written_layout(blocks.caches, blocks.layers) == f"{kind}/{block}"
    assert written_layout(blocks.caches, blocks.layers, in_blocks=True) == f"{kind}/{block}/blocks"
    assert all(torch.equal(before[name], cache) for name, cache in blocks.caches.items())


@pytest.mark.parametrize(
    ("isa", "found"), [("vec", "vec/32"), ("vec16", "vec/32"), pytest.param("amx", "amx/32", marks=needs_avx512)]
)
def test_every_packing_of_the_x86_ops_is_told_apart(isa, found):
    blocks = Blocks(vllm_config(), 3)
    for layer in blocks.layers.values():
        layer.isa = isa
    assert written_layout(blocks.caches, blocks.layers) == found
    assert written_layout(blocks.caches, blocks.layers, in_blocks=True) == f"{found}/blocks"


def test_keys_beside_values_are_recognised():
    layers = {name: _Layer(_beside) for name in "ab"}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert written_layout(_caches(dtype=dtype), layers) == "fused"


def test_a_cache_whose_heads_are_strided_is_probed_as_it_is():
    caches = {name: cache.transpose(1, 2).contiguous().transpose(1, 2) for name, cache in _caches().items()}
    seen = []

    def write(keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor) -> None:
        seen.append(blocks.stride())
        _beside(keys, values, blocks)

    assert written_layout(caches, {name: _Layer(write) for name in caches}) == "fused"
    assert set(seen) == {caches["a"].stride()}


@pytest.mark.parametrize(
    "write",
    [
        lambda k, v, blocks: _beside(v, k, blocks),
        lambda k, v, blocks: _beside(k.flip(1), v.flip(1), blocks),
        lambda k, v, blocks: _beside(k.flip(2), v, blocks),
        lambda k, v, blocks: _beside(k.roll(1, -1), v, blocks),
        lambda k, v, blocks: _beside((k.float() * 1.01).to(k.dtype), v, blocks),
        lambda k, v, blocks: _beside(k[..., :32].repeat(1, 1, 1, 2), v, blocks),
        lambda k, v, blocks: None,
    ],
    ids=["values first", "heads", "tokens", "elements", "quantised", "half of it", "nothing"],
)
def test_a_layout_that_is_not_known_is_refused(write):
    for in_blocks in (False, True):
        with pytest.raises(UnsupportedEngine, match="not known"):
            written_layout(_caches(), {name: _Layer(write) for name in "ab"}, in_blocks=in_blocks)


def test_whole_blocks_that_are_not_known_are_refused():
    """Views of a block as tokens cannot be copied in whole; neither can blocks whose heads lie apart."""
    with pytest.raises(UnsupportedEngine, match="not known"):
        written_layout(_caches(), {name: _Layer(_beside) for name in "ab"}, in_blocks=True)
    blocks = Blocks(vllm_config(), 3)
    strided = {name: cache.transpose(1, 2).contiguous().transpose(1, 2) for name, cache in blocks.caches.items()}
    with pytest.raises(UnsupportedEngine, match="one run"):
        written_layout(strided, blocks.layers, in_blocks=True)


@pytest.mark.parametrize("swapped", [(0, 1), (0, -1), (64, 65)])
def test_one_swap_of_two_elements_makes_a_layout_unknown(swapped):
    """The engine's own op, but for one pair of elements of every head and block: as an instruction set of tomorrow."""
    blocks = Blocks(vllm_config(), 3)

    def write(layer: Any, keys: Any, values: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
        own(layer, keys, values, cache, slots)
        tiles = cache.flatten(2)
        tiles[..., list(swapped)] = tiles[..., list(reversed(swapped))]

    last = list(blocks.layers.values())[-1]
    own, last.impl.do_kv_cache_update = last.impl.do_kv_cache_update, write
    for in_blocks in (False, True):
        with pytest.raises(UnsupportedEngine, match="not known"):
            written_layout(blocks.caches, blocks.layers, in_blocks=in_blocks)


@needs_avx512
def test_layers_that_write_differently_are_refused():
    blocks = Blocks(vllm_config(), 3)
    last = list(blocks.layers)[-1]
    blocks.layers[last].isa = "vec" if blocks.layers[last].isa == "amx" else "amx"
    with pytest.raises(UnsupportedEngine, match="2 layouts"):
        written_layout(blocks.caches, blocks.layers)


@pytest.mark.parametrize("shape", [(2, 4, 32, 2, 64), (4, 32, 576)])
def test_caches_of_another_form_are_refused(shape):
    with pytest.raises(UnsupportedEngine, match="cannot be probed"):
        written_layout(_caches(shape=shape), {name: _Layer(_beside) for name in "ab"})


def test_a_layer_that_cannot_be_asked_is_refused():
    with pytest.raises(UnsupportedEngine, match="layer b"):
        written_layout(_caches(), {"a": _Layer(_beside)})
