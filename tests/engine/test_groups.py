"""What vLLM 0.32 and LMCache 0.5.6 do with several KV cache groups: what serving them builds on, and what stands in the way
of trained cartridges and of saving beside them. Where one fails that is to be looked at again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import Blocks, memory_object, quietly, vllm_config

with quietly():
    from lmcache.lmcache_native import TransferDirection
    from lmcache.utils import EngineType
    from lmcache.v1.gpu_connector.utils import normalize_and_discover_per_layer_formats
    from lmcache.v1.kv_layer_groups import KVLayerGroupsManager
    from lmcache.v1.multiprocess.group_view import EngineGroupInfo
    from lmcache.v1.multiprocess.object_group_transfer import (
        downsample_and_stage_block_ids,
        transfer_kv_per_object_group,
    )
    from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext
    from lmcache.v1.platform.devices.cpu.cache_context import CPUCacheContext
    from lmcache.v1.platform.devices.cpu.shm import migrate_to_shm_and_wrap
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    from lmcache_cartridge.engine.l2 import _fill
from lmcache_cartridge.engine.probe import written_layout
from lmcache_cartridge.memory import tiles

BLOCK, CHUNK = 32, 64
LAYERS = ((0, 1, 3), (2,))
"""Sliding ones and a full one, as of Gemma 3."""


def _groups(window: int) -> list[EngineGroupInfo]:
    return [EngineGroupInfo(0, LAYERS[0], BLOCK, window), EngineGroupInfo(1, LAYERS[1], BLOCK)]


def _manager(window: int, **options: Any) -> KVLayerGroupsManager:
    caches, formats = normalize_and_discover_per_layer_formats(
        [torch.zeros(8, 2, BLOCK, 64) for _ in range(4)], [list(layers) for layers in LAYERS], EngineType.VLLM, None
    )
    return KVLayerGroupsManager(caches, formats, _groups(window), lmcache_tokens_per_chunk=CHUNK, **options)


def test_workers_that_move_blocks_themselves_take_one_group():
    """As on every CPU: `serve` starts LMCache's server with `--supported-transfer-mode engine_driven` there."""
    context = EngineDrivenTransferContext(1, SimpleNamespace())
    with pytest.raises(ValueError, match="does not support multiple KV transfer groups"):
        context.register({}, "m", 1, CHUNK // BLOCK, 1.0, engine_group_infos=_groups(CHUNK))


def test_a_block_that_was_not_loaded_ends_an_engine_of_several_groups():
    """By such blocks a trained cartridge that is not all there is kept from being computed (`engine/whole.py`)."""
    engine: Any = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=[0, 1]))
    with pytest.raises(RuntimeError, match="failed_recving"):
        Scheduler._handle_invalid_blocks(engine, {1}, {})


def test_only_a_request_that_still_waits_for_lmcache_can_be_ended_by_its_name():
    """So one whose whole chunks vLLM has, or which LMCache found nothing for, would have to wait first."""
    requests = {
        name: SimpleNamespace(status=RequestStatus[status], num_computed_tokens=1)
        for name, status in (("waits", "WAITING_FOR_REMOTE_KVS"), ("runs", "RUNNING"))
    }
    engine: Any = SimpleNamespace(requests=requests, recompute_kv_load_failures=False)
    assert Scheduler._handle_failed_recving(engine, {"waits", "runs"}) == {"waits"}


def test_a_server_that_moves_blocks_has_one_object_a_chunk_with_each_groups_layers_apart():
    """So a chunk would have to lie in another order of layers than the model's."""
    manager = _manager(CHUNK)
    assert [tuple(group.layer_indices) for group in manager.kernel_groups] == list(LAYERS)
    assert len(manager.object_groups) == 1
    assert len(_manager(CHUNK, separate_object_groups=True).object_groups) == 2


def test_a_window_shorter_than_a_chunk_must_be_whole_blocks():
    """Of which it then keeps the last of each chunk alone."""
    assert _manager(BLOCK).get_subchunk_sw_size_tokens(0) == BLOCK
    with pytest.raises(ValueError, match="sliding window size 48 must be a multiple of tokens_per_block 32"):
        _manager(48)


def test_lmcaches_server_brings_a_chunk_of_ours_into_each_groups_own_blocks():
    """By LMCache's own code, from the object as our adapter fills it: layers together that have blocks together."""
    blocks, groups = Blocks(vllm_config(), 8, layers=4), _groups(CHUNK)
    shape, order = blocks.shape(CHUNK), [layer for group in LAYERS for layer in group]
    layout = written_layout(blocks.caches, blocks.layers)
    kv, chunk = blocks.noise(CHUNK), torch.empty(shape.size_bytes, dtype=torch.uint8)
    tiles.pack(kv, chunk, shape, layout)
    before = blocks.kv()
    with quietly():
        context = CPUCacheContext(
            [migrate_to_shm_and_wrap(cache) for cache in blocks.caches.values()], CHUNK, engine_group_infos=groups
        )
        object_, own = memory_object(torch.zeros(shape.size_bytes, dtype=torch.uint8)), [[5, 2], [1, 6]]
        _fill(object_, chunk, LAYERS)
        staged = downsample_and_stage_block_ids(context, [list(ids) for ids in own])
        transfer_kv_per_object_group(context, staged, [object_], 0, 1, 0, TransferDirection.H2D, transfer_key="k")
    found = blocks.kv()
    for layers, ids in zip(LAYERS, own, strict=True):
        slots = [block * BLOCK + at for block in ids for at in range(BLOCK)]
        others = [slot for slot in range(blocks.slots) if slot not in slots]
        for layer in layers:
            assert torch.equal(found[:, layer, slots], kv[:, layer])
            assert torch.equal(found[:, layer, others], before[:, layer, others])
    assert order != sorted(order), "the control: else no order were needed"
