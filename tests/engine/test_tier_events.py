"""KV events of what the tiers hold: told once it is all there, and until it is gone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from homes import STILL, Home
from waiting import until

from lmcache_cartridge.artifact.reading import load_manifest, load_token_ids
from lmcache_cartridge.engine.client import ControlClient
from lmcache_cartridge.engine.control import ControlServer
from lmcache_cartridge.errors import CartridgeError

with warnings.catch_warnings():  # torch's, while vLLM is imported
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    from lmcache_cartridge.engine.tier_events import TierEvents


@pytest.fixture
def ask(home):
    """A worker's store with a cartridge of four chunks of 16, asked over its socket."""
    home.make()
    store = home.open(chunks=8, settings=STILL | {"disk_bytes": 0})
    server = ControlServer(lambda: store)
    client = ControlClient([server.path])
    yield lambda *call: client.call(*call)[0]
    client.close()
    server.close()


def _load(home: Home, ask: Callable[..., Any]) -> tuple[str, list[int]]:
    manifest = load_manifest(home.root())
    until(lambda: ask("preload", manifest.digest, {manifest.digest: [str(home.root())] * 2})["resident"] == 4)
    return manifest.digest, load_token_ids(manifest, home.root())[:64].tolist()


def test_a_cartridge_is_told_when_all_of_it_is_there_and_in_the_engines_blocks(home, ask):
    events, (digest, token_ids) = TierEvents(24), _load(home, ask)

    def some(method: str, *arguments: Any) -> Any:
        return {"cpu": {digest: 3, "chain": 1}} if method == "chunks_by_tier" else ask(method, *arguments)

    events.look(some)
    assert events.take() == [], "a quarter is missing"
    events.look(ask)
    (stored,) = events.take()
    assert (len({*stored.block_hashes}), stored.token_ids) == (2, token_ids[:48]), "whole blocks only"
    events.look(ask)
    assert events.take() == [], "once"
    assert ask("evict", digest) == 4
    events.look(ask)
    (gone,) = events.take()
    assert (type(gone), gone.block_hashes) == (BlockRemoved, stored.block_hashes)


def test_where_a_worker_is_gone_nothing_is_told_to_be_there(home, ask):
    events, calls = TierEvents(8), []
    _load(home, ask)

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
