"""KV events of what the tiers hold: told once it is all there, and until it is gone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from homes import STILL
from waiting import until

from lmcache_cartridge.errors import CartridgeError

with warnings.catch_warnings():  # torch's, while vLLM is imported
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    from lmcache_cartridge.engine.tier_events import TierEvents


@pytest.fixture
def ask(home):
    """What asks a worker's store that has all of a cartridge of four chunks of 16 in memory."""
    store, digest = home.open(settings=STILL | {"disk_bytes": 0}), home.make().manifest.digest
    store.refresh()
    until(lambda: store.preload(digest, {}).resident == 4)
    return lambda method, *arguments: [getattr(store, method)(*arguments)]


def test_where_a_worker_is_gone_nothing_is_told_to_be_there(ask):
    calls: list[Any] = []

    def broken(*call: Any) -> Any:
        calls.append(call)
        if len(calls) > 3:
            raise CartridgeError("gone")
        return ask(*call)

    events, found = TierEvents(8, broken), []
    until(lambda: found.extend(events.take()) or len(found) == 2)
    assert [type(event) for event in found] == [BlockStored, BlockRemoved]
