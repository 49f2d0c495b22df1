"""KV events of what the tiers hold: told once it is all there, and until it is gone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from homes import STILL
from waiting import until

from lmcache_cartridge.artifact.reading import load_token_ids
from lmcache_cartridge.errors import CartridgeError

with warnings.catch_warnings():  # torch's, while vLLM is imported
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    from lmcache_cartridge.engine.tier_events import TierEvents


@pytest.fixture
def manifest(home):
    """That of a cartridge of four chunks of 16."""
    return home.make().manifest


@pytest.fixture
def ask(home, manifest):
    """What asks a worker's store that has all of it in memory."""
    store = home.open(chunks=8, settings=STILL | {"disk_bytes": 0})
    until(lambda: store.preload(manifest.digest, {}).resident == 4)
    return lambda method, *arguments: getattr(store, method)(*arguments)


def test_a_cartridge_is_told_when_all_of_it_is_there_and_in_the_engines_blocks(home, manifest, ask):
    events, digest = TierEvents(24), manifest.digest

    def some(method: str, *arguments: Any) -> Any:
        return {"cpu": {digest: 3, "chain": 1}} if method == "chunks_by_tier" else ask(method, *arguments)

    events.look(some)
    assert events.take() == [], "a quarter is missing"
    events.look(ask)
    (stored,) = events.take()
    assert len({*stored.block_hashes}) == 2
    assert stored.token_ids == load_token_ids(manifest, home.root())[:48].tolist(), "whole blocks only"
    events.look(ask)
    assert events.take() == [], "once"
    assert ask("evict", digest) == 4
    events.look(ask)
    (gone,) = events.take()
    assert (type(gone), gone.block_hashes) == (BlockRemoved, stored.block_hashes)


def test_where_a_worker_is_gone_nothing_is_told_to_be_there(ask):
    events, calls = TierEvents(8), []

    def broken(*call: Any) -> Any:
        calls.append(call)
        if len(calls) > 3:
            raise CartridgeError("gone")
        return ask(*call)

    events.follow(broken)
    events.follow(lambda *_: pytest.fail("one thread asks"))
    found: list[Any] = []
    until(lambda: found.extend(events.take()) or len(found) == 2)
    assert [type(event) for event in found] == [BlockStored, BlockRemoved]
