"""The device tier, here in the memory of the cpu: chunks come to it from the cpu tier and are served from it first."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from chunks import one_by_one
from homes import CHUNK_BYTES, STILL, Home, Prompt, assert_served, chunk_bytes, lent, prompt_for
from invariants import check
from making import Made, flip_bit, make_fingerprint
from waiting import run_threads, until

from lmcache_cartridge.artifact.reading import chunk_range
from lmcache_cartridge.errors import CartridgeError, OverBudget
from lmcache_cartridge.library.index import ChunkKey
from lmcache_cartridge.memory import device as device_module
from lmcache_cartridge.memory.holds import Hold
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.memory.tier import MemoryTier


def _open(home: Home, *, cpu: int, device: int, **arguments: object) -> CartridgeStore:
    """Return a store with memory for so many chunks in each tier."""
    return home.open(chunks=cpu, settings=STILL | {"device_bytes": device * CHUNK_BYTES}, **arguments)


def _tiers(store: CartridgeStore) -> tuple[MemoryTier, MemoryTier]:
    return store.device, store.cpu


def _within(tier: MemoryTier, loan: Hold, made: Made, chunk: int) -> bool:
    """Whether a loan's bytes are the tier's of that chunk."""
    for own in tier.lend([ChunkKey(made.manifest.digest, chunk)]):
        with own:
            return own.bytes.data_ptr() == loan.bytes.data_ptr()
    return False


def _quiet(store: CartridgeStore) -> None:
    until(lambda: all(tier.stats().loading == 0 for tier in _tiers(store)))


def test_a_cpu_engine_has_no_device_tier_unless_it_was_given_one(home):
    home.make()
    assert list(home.open(settings=STILL).tiers()) == ["cpu", "disk", "source"]
    assert list(_open(home, cpu=4, device=0).tiers()) == ["cpu", "disk", "source"]
    assert list(home.open(settings=STILL | {"device_bytes": CHUNK_BYTES - 1}).tiers()) == ["cpu", "disk", "source"]
    tiers = _open(home, cpu=4, device=2).tiers()
    assert list(tiers) == ["device", "cpu", "disk", "source"]
    assert tiers["device"]["budget_bytes"] == 2 * CHUNK_BYTES


GIB = 1 << 30


@pytest.mark.parametrize(
    ("wanted", "free", "size"),
    [
        (None, 80 * GIB, GIB), (None, 2 * GIB, GIB // 2), (0, 2 * GIB, 0), (2 * GIB, 2 * GIB, 2 * GIB),
        (2 * GIB + 1, 2 * GIB, "2147483649, and cuda:0 has 2147483648 bytes free"),
    ],
)  # fmt: skip
def test_on_a_gpu_it_is_a_part_of_what_is_free_and_never_more(monkeypatch, wanted, free, size):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    if isinstance(size, int):
        assert device_module.device_bytes(wanted, "cuda:0") == size
    else:
        with pytest.raises(OverBudget, match=size):
            device_module.device_bytes(wanted, "cuda:0")


@pytest.mark.parametrize("kind", ["prefill", "trained"])
def test_what_was_looked_up_is_promoted_and_lent_from_the_device_from_then_on(home, kind):
    made = home.make(kind=kind, positions=64)
    store, prompt = _open(home, cpu=8, device=8), prompt_for(home, made)
    device, cpu = _tiers(store)
    assert store.lookup(prompt.hashes, prompt.tag) == 4
    with store.lend(prompt.hashes[0], prompt.tag) as loan:
        assert _within(device, loan, made, 0) or _within(cpu, loan, made, 0)
    _quiet(store)
    assert device.stats().resident == 4
    for chunk in range(4):
        with store.lend(prompt.hashes[chunk], prompt.tag) as loan:
            assert _within(device, loan, made, chunk)
            assert not _within(cpu, loan, made, chunk)
            assert loan.bytes.numpy().tobytes() == chunk_bytes(made, chunk)
    for chunk_hash in prompt.hashes[:4]:
        assert store.release(chunk_hash, prompt.tag)
    assert_served(store, made, prompt)
    assert (device.stats().hits, cpu.stats().misses) == (4, 4)


def test_a_chunk_that_cannot_reach_the_device_is_served_from_the_cpu_tier(home, monkeypatch):
    made = home.make()
    store, prompt = _open(home, cpu=4, device=4), prompt_for(home, made)
    device, cpu = _tiers(store)

    def fail(*_: object) -> None:
        raise CartridgeError("out of device memory")

    monkeypatch.setattr(device_module, "copy_and_wait", fail)
    assert_served(store, made, prompt)
    _quiet(store)
    assert (device.stats().resident, device.stats().failed > 0) == (0, True)
    assert store.refused() == {}
    assert_served(store, made, prompt)


def test_promoting_waits_for_nobody_and_closing_waits_for_it(home, monkeypatch):
    made = home.make()
    store, prompt = _open(home, cpu=4, device=4), prompt_for(home, made)
    device, cpu = _tiers(store)
    started, go, load = threading.Event(), threading.Event(), device_module.copy_and_wait

    def slow(*args: object) -> None:
        started.set()
        assert go.wait(20)
        load(*args)

    monkeypatch.setattr(device_module, "copy_and_wait", slow)
    assert store.lookup(prompt.hashes) == 4
    assert started.wait(20)
    assert lent(store, prompt.hashes[0]) == chunk_bytes(made, 0)
    go.set()
    store.close()
    assert device.stats().loading == 0
    for chunk_hash in prompt.hashes[:4]:
        store.release(chunk_hash)


# Anything, in any order.

SMALL = {"layers": 1, "head_size": 8}
NAMES = {"a": ("prefill", 64), "b": ("trained", 48), "c": ("prefill", 40), "d": ("trained", 32)}


def _shelf(home: Home) -> dict[str, tuple[Made, Prompt]]:
    shelf = {}
    for seed, (name, (kind, positions)) in enumerate(NAMES.items()):
        made = home.make(name, kind=kind, positions=positions, seed=seed, **SMALL)
        shelf[name] = (made, prompt_for(home, made, name))
    return shelf


@pytest.mark.parametrize(("cpu", "device"), [(5, 3), (4, 4), (6, 1)])
def test_sixteen_threads_over_both_tiers_get_the_right_bytes_or_none(home, cpu, device):
    shelf, fingerprint = _shelf(home), make_fingerprint(**SMALL)
    flip_bit(home.payload("d"), chunk_range(shelf["d"][0].manifest, 1, range(1)).start)
    size = fingerprint.token_bytes * 16
    store = home.open(fingerprint=fingerprint, chunks=cpu, settings=STILL | {"device_bytes": device * size})

    def work(number: int) -> None:
        chance = random.Random(number)
        for _ in range(250):
            made, prompt = shelf[chance.choice("abcd")]
            digest = made.manifest.digest
            what = chance.random()
            if what < 0.7:
                found = store.lookup(prompt.hashes, prompt.tag)
                assert prompt.tag is None or found in (0, prompt.whole)
                loans = [store.lend(chunk_hash, prompt.tag) for chunk_hash in prompt.hashes[:found]]
                for chunk, loan in enumerate(loans):
                    with loan:  # what was promised is there
                        assert loan.bytes.numpy().tobytes() == chunk_bytes(made, chunk)
                for chunk_hash in prompt.hashes[:found]:
                    assert store.release(chunk_hash, prompt.tag)
            elif what < 0.9:
                claim = store.claim(digest, {})
                claim.poll()
                claim.poll()
                claim.close()
            else:
                store.evict(digest)
            check(store)
            for tier in _tiers(store):
                assert tier.stats().resident_bytes <= tier.stats().budget_bytes

    run_threads(16, work, timeout_s=60)
    _quiet(store)
    for tier in _tiers(store):
        assert (tier.stats().leased, tier.stats().lent, tier.stats().held) == (0, 0, 0)
        assert tier.stats().promoted > 20
    assert list(store.refused()) == ["d@1"]
    for name in "abc":
        assert_served(store, *shelf[name])


def test_a_chunk_that_is_slow_to_come_holds_no_other_in_the_cpu_tier():
    """Of eight chunks in a row one left the cpu tier: others get the room of the seven while that one is loaded."""
    gate, asked = threading.Event(), threading.Event()
    gate.set()

    def load(key: ChunkKey, out: torch.Tensor) -> None:
        if not gate.is_set() and key.digest == "a":
            asked.set()
            assert gate.wait(60)
        out.fill_(key.chunk)

    cpu = MemoryTier(4096, 8 * 4096, one_by_one(load), threads=4)
    device = MemoryTier(4096, 8 * 4096, device_module.Promotions(cpu), threads=1)
    row, others = ([ChunkKey(digest, chunk) for chunk in range(8)] for digest in "ab")
    assert cpu.lease(row, 20) == 8
    for key in row:
        cpu.release(key)
    assert cpu.evict("c") == 0 and cpu.lease([ChunkKey("c", 0)], 20) == 1 and cpu.resident(row) == 7
    cpu.release(ChunkKey("c", 0))
    gate.clear()
    with device.hold(row) as promoted:
        until(lambda: promoted.poll() and asked.is_set())
        assert cpu.lease(others[:6], 20, whole=True) == 6
        for key in others[:6]:
            cpu.release(key)
        gate.set()
        until(lambda: promoted.poll().ready)
        for key in row:
            (loan,) = device.lend([key])
            with loan:
                assert bool((loan.bytes == key.chunk).all())
    cpu.close()
    device.close()
