"""Sleep mode: what our connectors do when vLLM tells them that it falls asleep and wakes up. On a CPU it never does."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from blocks import quietly, vllm_config
from homes import CHUNK_BYTES, STILL, Home, assert_served, prompt_for

from lmcache_cartridge.engine.contract import CONTROL
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.memory import store as store_module

with quietly():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

    from lmcache_cartridge.engine import backend
    from lmcache_cartridge.engine.connector import CartridgeConnector


def test_the_device_tier_has_no_memory_while_vllm_sleeps(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    made = home.make()
    store = home.open(chunks=4, settings=STILL | {"device_bytes": 4 * CHUNK_BYTES})
    monkeypatch.setattr(backend, "stores", lambda: [store])
    connector = CartridgeConnector.__new__(CartridgeConnector)
    assert connector.supports_sleep_mode(None)
    for _ in range(2):  # vLLM says each may be told twice
        connector.unregister_kv_caches()
        assert store.device is None
    assert_served(store, made, prompt_for(home, made))
    for _ in range(2):
        connector.restore_kv_caches()
        assert store.device.budget_bytes == 4 * CHUNK_BYTES
    assert_served(store, made, prompt_for(home, made))


def test_an_engine_that_wakes_up_where_memory_is_short_goes_without_a_device_tier(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = home.make()
    store = home.open(chunks=4, settings=STILL | {"device_bytes": 4 * CHUNK_BYTES})
    monkeypatch.setattr(backend, "stores", lambda: [store])
    connector = CartridgeConnector.__new__(CartridgeConnector)
    connector.unregister_kv_caches()
    with monkeypatch.context() as full:
        full.setattr(store_module, "MemoryTier", _no_memory)
        connector.restore_kv_caches()
    assert store.device is None
    assert_served(store, made, prompt_for(home, made))
    connector.restore_kv_caches()
    assert store.device.budget_bytes == 4 * CHUNK_BYTES


def _no_memory(*given: object, **named: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("may_sleep", [True, False])
@pytest.mark.parametrize("device_chunks", [4, 0])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_device_tier_is_refused_where_vllm_does_not_tell_that_it_sleeps(
    home: Home, monkeypatch: pytest.MonkeyPatch, may_sleep: bool, device_chunks: int, is_told: bool
) -> None:
    home.make()
    store = home.open(chunks=4, settings=STILL | {"device_bytes": device_chunks * CHUNK_BYTES})
    monkeypatch.setattr(backend, "stores", lambda: [store])
    if is_told:
        monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", lambda self: None, raising=False)
    else:
        monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    connector = CartridgeConnector.__new__(CartridgeConnector)
    connector._config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=may_sleep))
    with (
        pytest.raises(UnsupportedEngine, match="sleep mode with a device tier: .* set `device_bytes: 0`")
        if may_sleep and device_chunks and not is_told
        else nullcontext()
    ):
        connector._check_sleep()


def test_an_engine_that_may_sleep_is_refused_beside_lmcaches_server() -> None:
    with quietly():
        from lmcache_cartridge.engine.mp_connector import CartridgeMPConnector
    config = vllm_config(transfer={"kv_connector_extra_config": {CONTROL: "/nowhere"}})
    config.model_config.enable_sleep_mode = True
    with pytest.raises(UnsupportedEngine, match="sleep mode is enabled: LMCache's server keeps handles"):
        CartridgeMPConnector(config, KVConnectorRole.WORKER)
