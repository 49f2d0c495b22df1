"""What is claimed, pinned, preloaded or labelled warm comes into memory without anybody waiting, and stays there."""

from __future__ import annotations

import threading
import time

import pytest
from homes import STILL, Home, claimed, read
from making import Made
from waiting import until

from lmcache_cartridge.errors import CartridgeError
from lmcache_cartridge.memory import claims as claim_module
from lmcache_cartridge.memory import store as store_module
from lmcache_cartridge.memory.loader import ChunkLoader
from lmcache_cartridge.memory.store import CartridgeStore


def _lookup_and_release(store: CartridgeStore, home: Home, made: Made, name: str) -> int:
    prompt = home.prompt(name)
    found = store.lookup(prompt.hashes, prompt.tag)
    for chunk_hash in prompt.hashes[:found]:
        assert store.release(chunk_hash, prompt.tag)
    return found


@pytest.fixture
def let(monkeypatch):
    """Hold all loads back, and return a function that lets so many through."""
    read, tickets = ChunkLoader.read, threading.Semaphore(0)
    monkeypatch.setattr(ChunkLoader, "read", lambda *given: tickets.acquire(timeout=20) and read(*given))
    return tickets.release


@pytest.fixture
def made(home):
    return home.make()


@pytest.fixture
def digest(made):
    return made.digest


# Claims.


@pytest.mark.parametrize("kind", ["prefill", "trained"])
def test_a_claim_is_polled_until_everything_is_resident_and_nobody_waits(home, kind, let):
    made, store = home.make(kind=kind, positions=64), home.open(settings=STILL)
    claim = store.claim(made.digest, {})
    assert store.cpu.stats().loading == 0, "it started before anybody polled"
    assert claim.poll()[:3] == (0, 4, 4)
    for count in range(1, 5):
        assert not claim.poll().ready
        let(1)
        until(lambda: claim.poll().resident == count)  # noqa: B023
    assert claim.poll().ready
    assert store.cpu.stats().misses == 4
    home.check_served(store)
    claim.close()


def test_a_claim_of_a_document_takes_what_room_there_is_and_a_trained_one_waits(home):
    held, document = home.make("held", positions=48, seed=1), home.make("document", positions=64, seed=2)
    trained = home.make("trained", kind="trained", positions=64, seed=3)
    store = home.open(chunks=5, settings=STILL)
    first = claimed(store, held.digest)
    whole, leading = store.claim(trained.digest, {}), store.claim(document.digest, {})
    assert whole.poll()[:3] == (0, 0, 4)
    until(lambda: leading.poll()[:3] == (2, 2, 4))
    assert leading.is_done(), "it is as far as memory allows"
    assert not whole.is_done()
    leading.close()
    assert whole.poll().admitted == 0
    first.close()
    until(lambda: whole.poll().ready)
    home.check_served(store, "trained")
    whole.close()


def test_a_claim_says_why_it_is_refused(home):
    sound, big = home.make("sound", positions=16), home.make("big", positions=80, seed=1)
    foreign, banned = home.make("foreign", layers=4, seed=2), home.make("banned", seed=3)
    home.ban(banned.digest, "chunk 1 is corrupt")
    store = home.open(chunks=4, settings=STILL)
    for digests, reason, mismatch in (
        ([sound.digest, "00" * 32], "a cartridge of it is not there", False),
        ([sound.digest, banned.digest], "quarantined: chunk 1 is corrupt", False),
        ([foreign.digest], "made for another model", True),
        ([big.digest], f"5 chunks take {5 * store.shape.size_bytes} bytes, more than cpu_bytes", False),
    ):
        claim = read(store.claim(".".join(digests), {}))
        state = claim.poll()
        assert reason in state.refused
        assert (state.ready, state.mismatch, claim.is_done()) == (False, mismatch, True)
        claim.close()
    assert store.cpu.stats().misses == 0


# Pins.


def test_a_pin_loads_what_is_missing_and_survives_pressure(home, made, digest):
    other, store = home.make("other", seed=2), home.open(chunks=6, settings=STILL)
    prompt = home.prompt()
    store.lookup(prompt.hashes[:1])
    store.release(prompt.hashes[0])
    assert store.pin(digest) == store.pin(digest) == 4
    until(lambda: store.resident(prompt.hashes) == 4)
    for _ in range(3):
        assert _lookup_and_release(store, home, other, "other") == 2
        assert store.evict(digest) == 0
    assert store.resident(prompt.hashes) == 4
    assert (store.unpin(digest), store.unpin(digest)) == (4, 0)
    assert _lookup_and_release(store, home, other, "other") == 4


def test_a_pin_of_what_cannot_be_served_or_has_no_room_says_why(home):
    big, one, other = (home.make(name, positions=p, seed=p) for name, p in (("big", 80), ("one", 48), ("other", 32)))
    store = home.open(chunks=4, settings=STILL)
    assert store.pin(one.digest) == 3
    for digest, reason in (
        (big.digest, "more than cpu_bytes"), ("00" * 32, "is not there"),
        (other.digest, "only 1 of 2 chunks can be pinned"),
    ):  # fmt: skip
        with pytest.raises(CartridgeError, match=reason):
            store.pin(digest)
    assert store.status()["pinned"] == [one.digest]


# Fetches in the background.


def test_preloading_returns_at_once_and_goes_on_by_itself(home, made, digest, let):
    store = home.open(settings=STILL)
    assert store.preload(digest, {})[:3] == (0, 4, 4)
    assert store.status()["loading"][digest]["chunks"] == 4
    let(1)
    until(lambda: store.preload(digest, {}).resident == 1)
    let(3)
    until(lambda: store.cpu.stats().held == 0)
    assert store.resident(home.prompt().hashes) == 4
    assert store.status()["loading"] == {}
    assert store.preload(digest, {}).ready
    assert (store.cpu.stats().held, store.cpu.stats().misses) == (0, 4), "asking again began another"


def test_preloading_gives_up_in_the_end_and_at_once_on_what_is_refused(home, digest, clock):
    store = home.open(settings=STILL, clock=clock)
    assert store.preload("00" * 32, {}).refused
    assert store.status()["loading"] == {}
    home.payload().unlink()
    store.preload(digest, {})
    clock.now += claim_module._GIVE_UP_S - 1
    time.sleep(3 * store_module._POLL_S)
    assert list(store.status()["loading"]) == [digest]
    clock.now += 2
    until(lambda: store.status()["loading"] == {} and store.cpu.stats().held == 0)


# Warm labels.


def test_a_warm_label_counts_once_each_time_it_comes_to_point_there(home):
    made = {name: home.make(name, seed=seed) for seed, name in enumerate("ab")}
    home.registry.label("current", "a", warm=True)
    store = home.open(settings=STILL)
    until(lambda: store.cpu.stats().resident == 4 and store.cpu.stats().held == 0)
    assert store.evict(made["a"].digest) == 4
    store.refresh()
    assert store.cpu.stats().loading == store.cpu.stats().resident == 0, "a person's eviction was undone"
    for name in "ba":
        home.registry.label("current", name, warm=True)
        store.refresh()
        hashes = home.prompt(name).hashes
        until(lambda hashes=hashes: store.resident(hashes) == 4)
