"""Sleep mode: which engines that may sleep are refused. On a CPU none ever does."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from blocks import quietly
from homes import CHUNK_BYTES, STILL

from lmcache_cartridge.errors import UnsupportedEngine

with quietly():
    from lmcache_cartridge.engine import backend
    from lmcache_cartridge.engine.connector import CartridgeConnector


@pytest.mark.parametrize(("may_sleep", "device_chunks"), [(True, 4), (False, 4), (True, 0)])
def test_a_device_tier_is_refused_where_vllm_may_sleep(home, monkeypatch, may_sleep, device_chunks):
    store = home.open(chunks=4, settings=STILL | {"device_bytes": device_chunks * CHUNK_BYTES})
    monkeypatch.setattr(backend, "stores", lambda: [store])
    connector = CartridgeConnector.__new__(CartridgeConnector)
    connector._config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=may_sleep))
    refused = pytest.raises(UnsupportedEngine, match="`device_bytes: 0`")
    with refused if may_sleep and device_chunks else nullcontext():
        connector._check_sleep()
