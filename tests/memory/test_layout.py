"""Layouts lie as they are described, and ranks own the heads that vLLM gives them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from lmcache_cartridge.memory.layout import rank_heads

POWERS = [1, 2, 4, 8]


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
