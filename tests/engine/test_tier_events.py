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
    """A worker's store with two cartridges of four chunks of 16, asked over its socket."""
    for seed, name in enumerate("ab"):
        home.make(name, seed=seed)
    store = home.open(chunks=8, settings=STILL | {"disk_bytes": 0})
    server = ControlServer(lambda: store)
    client = ControlClient([server.path])
    yield lambda *call: client.call(*call)[0]
    client.close()
    server.close()


def _load(home: Home, ask: Callable[..., Any], name: str) -> tuple[str, list[int]]:
    manifest = load_manifest(home.root(name))
    until(lambda: ask("preload", manifest.digest, {manifest.digest: [str(home.root(name))] * 2})["resident"] == 4)
    return manifest.digest, load_token_ids(manifest, home.root(name))[:64].tolist()


def test_what_comes_and_goes_is_told_once(home, ask):
    events = TierEvents(8)
    events.look(ask)
    assert events.take() == []
    first, second = (_load(home, ask, name) for name in "ab")
    events.look(ask)
    stored = events.take()
    assert sorted(event.token_ids for event in stored) == sorted([first[1], second[1]])
    assert {(event.medium, event.block_size, len(event.block_hashes)) for event in stored} == {("CPU", 8, 8)}
    assert len({block for event in stored for block in event.block_hashes}) == 16, "every block has a name of its own"
    events.look(ask)
    assert events.take() == []
    ask("unpin", first[0])
    assert ask("evict", first[0]) == 4
    events.look(ask)
    (gone,) = events.take()
    assert (type(gone), gone.block_hashes) == (
        BlockRemoved,
        next(e for e in stored if e.token_ids == first[1]).block_hashes,
    )
    events.tell_again()
    assert [event.token_ids for event in events.take()] == [second[1]]


def test_a_cartridge_is_told_when_all_of_it_is_there_and_in_the_engines_blocks(home, ask):
    events, (digest, token_ids) = TierEvents(24), _load(home, ask, "a")

    def some(method: str, *arguments: Any) -> Any:
        return {"cpu": {digest: 3, "chain": 1}} if method == "chunks_by_tier" else ask(method, *arguments)

    events.look(some)
    assert events.take() == [], "a quarter is missing"
    events.look(ask)
    (stored,) = events.take()
    assert (len(stored.block_hashes), stored.token_ids) == (2, token_ids[:48]), "whole blocks only"


def test_where_a_worker_is_gone_nothing_is_told_to_be_there(home, ask):
    events, calls = TierEvents(8), []
    _load(home, ask, "a")

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
