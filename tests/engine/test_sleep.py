"""Sleep mode: which engines that may sleep are refused. On a CPU none ever does."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from blocks import quietly, vllm_config
from homes import CHUNK_BYTES, STILL

from lmcache_cartridge.engine.contract import CONTROL
from lmcache_cartridge.errors import UnsupportedEngine

with quietly():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from lmcache_cartridge.engine import backend
    from lmcache_cartridge.engine.connector import CartridgeConnector


@pytest.mark.parametrize("may_sleep", [True, False])
@pytest.mark.parametrize("device_chunks", [4, 0])
def test_a_device_tier_is_refused_where_vllm_may_sleep(home, monkeypatch, may_sleep, device_chunks):
    home.make()
    store = home.open(chunks=4, settings=STILL | {"device_bytes": device_chunks * CHUNK_BYTES})
    monkeypatch.setattr(backend, "stores", lambda: [store])
    connector = CartridgeConnector.__new__(CartridgeConnector)
    connector._config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=may_sleep))
    with (
        pytest.raises(UnsupportedEngine, match="sleep mode with a device tier, .* set `device_bytes: 0`")
        if may_sleep and device_chunks
        else nullcontext()
    ):
        connector._check_sleep()


def test_an_engine_that_may_sleep_is_refused_beside_lmcaches_server():
    with quietly():
        from lmcache_cartridge.engine.mp_connector import CartridgeMPConnector
    config = vllm_config(transfer={"kv_connector_extra_config": {CONTROL: "/nowhere"}})
    config.model_config.enable_sleep_mode = True
    with pytest.raises(UnsupportedEngine, match="sleep mode is enabled: LMCache's server keeps handles"):
        CartridgeMPConnector(config, KVConnectorRole.WORKER)
