"""Sleep mode: what our connectors do when vLLM tells them that it falls asleep and wakes up. On a CPU it never does."""

from __future__ import annotations

import pytest
from blocks import quietly, vllm_config
from homes import CHUNK_BYTES, STILL, Home, assert_served, prompt_for

from lmcache_cartridge.engine.contract import CONTROL
from lmcache_cartridge.errors import UnsupportedEngine

with quietly():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

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


def test_an_engine_that_may_sleep_is_refused_beside_lmcaches_server() -> None:
    with quietly():
        from lmcache_cartridge.engine.mp_connector import CartridgeMPConnector
    config = vllm_config(transfer={"kv_connector_extra_config": {CONTROL: "/nowhere"}})
    config.model_config.enable_sleep_mode = True
    with pytest.raises(UnsupportedEngine, match="sleep mode is enabled: LMCache's server keeps handles"):
        CartridgeMPConnector(config, KVConnectorRole.WORKER)
