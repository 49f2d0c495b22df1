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


class _Layer:
    """An attention layer whose cache write is `write(keys, values, blocks)` for keys and values `[blocks, H, block, D]`."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
        self.impl, self._write = self, write

    def do_kv_cache_update(self, _: Any, keys: Any, values: Any, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        given = torch.cat([keys, values], -1)
        tokens = torch.empty_like(given)
        tokens[slots] = given
        self._write(*tokens.unflatten(0, (len(blocks), -1)).transpose(1, 2).chunk(2, -1), blocks)


def _beside(keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor) -> None:
    """As vLLM's backends for GPUs write: K beside V for each token and head."""
    blocks.copy_(torch.cat([keys, values], -1))


def _caches(names: str = "ab", dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (4, 2, 32, 128)) -> dict:
    return {name: torch.randn(shape).to(dtype) for name in names}


@pytest.mark.parametrize(
    ("isa", "block"), [("vec", 32), ("vec", 64), ("vec16", 128), pytest.param("amx", 32, marks=needs_avx512)]
)
def test_every_packing_of_the_x86_ops_is_told_apart_and_blocks_are_left_alone(isa, block):
    blocks = Blocks(vllm_config(block_size=block), 3)
    before = [cache.clone() for cache in blocks.caches.values()]
    for layer in blocks.layers.values():
        layer.isa = isa
    found = f"{isa[:3]}/{block}"
    assert written_layout(blocks.caches, blocks.layers) == found
    assert written_layout(blocks.caches, blocks.layers, in_blocks=True) == f"{found}/blocks"
    assert all(map(torch.equal, before, blocks.caches.values()))


def test_whole_blocks_that_are_not_known_are_refused():
    """Views of a block as tokens cannot be copied in whole; neither can blocks whose heads lie apart."""
    with pytest.raises(UnsupportedEngine, match="not known"):
        written_layout(_caches(), dict.fromkeys("ab", _Layer(_beside)), in_blocks=True)
    blocks = Blocks(vllm_config(), 3)
    strided = {name: cache.transpose(1, 2).contiguous().transpose(1, 2) for name, cache in blocks.caches.items()}
    with pytest.raises(UnsupportedEngine, match="one run"):
        written_layout(strided, blocks.layers, in_blocks=True)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, -1), (64, 65)])
def test_one_swap_of_two_elements_makes_a_layout_unknown(one, other):
    """The engine's own op, but for one pair of elements of every head and block: as an instruction set of tomorrow."""
    blocks = Blocks(vllm_config(), 3)

    def swap(cache: torch.Tensor) -> None:
        flat = cache.flatten(2)
        flat[..., one], flat[..., other] = flat[..., other].clone(), flat[..., one].clone()

    blocks.after_writes(-1, swap)
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


@pytest.mark.parametrize(("shape", "layer"), [((2, 4, 32, 2, 64), _Layer(_beside)), ((4, 2, 32, 128), None)])
def test_a_cache_of_another_form_or_of_a_layer_that_cannot_be_asked_is_refused(shape, layer):
    with pytest.raises(UnsupportedEngine, match="layer b .*cannot be probed|'NoneType' .*impl"):
        written_layout(_caches("b", shape=shape), {"b": layer})
