"""Layouts are exact inverses of each other, and ranks own the heads that vLLM gives them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_cartridge.memory.layout import DTYPES, VIEWS, ChunkShape, rank_heads, to_heads

POWERS = [1, 2, 4, 8]
SHAPES = st.builds(
    ChunkShape,
    heads=st.integers(1, 4),
    layers=st.integers(1, 4),
    tokens=st.integers(1, 6),
    head_size=st.integers(1, 5),
    dtype=st.sampled_from(sorted(DTYPES)),
    planes=st.just(2),
)


def _canonical(shape: ChunkShape) -> torch.Tensor:
    """Return a canonical chunk of which every element is another bit pattern."""
    dims = (2, shape.layers, shape.tokens, shape.heads, shape.head_size)
    count = torch.Size(dims).numel()
    if DTYPES[shape.dtype].itemsize == 2:
        return torch.arange(count, dtype=torch.int16).view(DTYPES[shape.dtype]).view(dims)
    return torch.arange(count, dtype=torch.int32).view(DTYPES[shape.dtype]).view(dims)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@settings(deadline=None)
@given(SHAPES, st.sampled_from(sorted(VIEWS)))
def test_writing_through_a_view_and_reading_it_back_is_exact(shape, layout):
    canonical = _canonical(shape)
    raw = torch.full((shape.size_bytes,), 0xAA, dtype=torch.uint8)
    VIEWS[layout](raw, shape)[:] = canonical
    assert _bits(VIEWS[layout](raw, shape)) == _bits(canonical)


def test_the_stored_layout_has_heads_outermost_element_by_element():
    shape = ChunkShape(heads=2, layers=2, tokens=3, head_size=4, dtype="float32")
    canonical = torch.arange(96, dtype=torch.float32).view(2, 2, 3, 2, 4)
    flat = to_heads(canonical).flatten()
    at = 0
    for head in range(2):
        for plane in range(2):
            for layer in range(2):
                for token in range(3):
                    for element in range(4):
                        assert flat[at] == canonical[plane, layer, token, head, element]
                        at += 1
    assert at == shape.size_bytes // 4


class _Ranks(NamedTuple):
    """What vLLM's linear layers ask of their tensor-parallel group."""

    world_size: int
    rank_in_group: int


def _vllm_kv_heads(kv_heads: int, rank: int, world: int) -> list[int]:
    """Return the KV heads that vLLM's own layer and weight loader give to a rank.

    QKVParallelLinear divides them in vllm/model_executor/layers/linear.py:1053-1058 and loads the shard of
    `tp_rank // num_kv_head_replicas` in line 1303 (weight_loader) and vllm/model_executor/parameter.py:191
    (vLLM 0.32.0). Here head h of the checkpoint's K projection is the single weight h.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.linear import QKVParallelLinear

    before, parallel_state._TP = parallel_state._TP, _Ranks(world, rank)
    try:
        with set_current_vllm_config(VllmConfig()):
            layer = QKVParallelLinear(1, 1, total_num_heads=8, total_num_kv_heads=kv_heads, bias=False)
        checkpoint = torch.arange(kv_heads, dtype=layer.weight.dtype)[:, None]
        layer.weight.weight_loader(layer.weight, checkpoint, "k")
        owned = layer.weight.data[layer.num_heads : layer.num_heads + layer.num_kv_heads, 0]
    finally:
        parallel_state._TP = before
    return [int(head) for head in owned]


# vLLM warns while it is imported; how it divides heads is what is tested.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world", POWERS)
@pytest.mark.parametrize("kv_heads", POWERS)
def test_ranks_own_the_heads_that_vllm_loads_for_them(kv_heads, world):
    for rank in range(world):
        assert list(rank_heads(kv_heads, rank, world)) == _vllm_kv_heads(kv_heads, rank, world)


@pytest.mark.parametrize(("kv_heads", "world"), [(3, 2), (2, 3), (8, 3), (6, 4), (4, 6)])
def test_heads_that_cannot_be_divided_are_refused(kv_heads, world):
    with pytest.raises(ValueError, match=f"{kv_heads} KV heads cannot be divided among {world} ranks"):
        rank_heads(kv_heads, 0, world)


@pytest.mark.parametrize("rank", [-1, 2, 100])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ValueError, match=rf"\(rank {rank}\)"):
        rank_heads(4, rank, 2)
