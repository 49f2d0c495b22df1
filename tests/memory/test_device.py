"""The device tier, here in the memory of the cpu: chunks come to it from the cpu tier and are served from it first."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch
from homes import CHUNK_BYTES, STILL, Home, Prompt, assert_served, chunk_bytes, lent
from invariants import check
from making import Made, flip_bit, make_fingerprint
from waiting import run_threads, until

from lmcache_cartridge.artifact.reading import chunk_range
from lmcache_cartridge.errors import CartridgeError, OverBudget
from lmcache_cartridge.memory import device as device_module
from lmcache_cartridge.memory.store import CartridgeStore


def _open(home: Home, chunks: int) -> CartridgeStore:
    """Return a store with memory for so many chunks in each tier."""
    return home.open(chunks=chunks, settings=STILL | {"device_bytes": chunks * CHUNK_BYTES})


def _quiet(store: CartridgeStore) -> None:
    until(lambda: all(tier.stats().loading == 0 for tier in (store.device, store.cpu)))


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
    store, prompt = _open(home, 8), home.prompt()
    assert store.lookup(prompt.hashes, prompt.tag) == 4
    _quiet(store)
    assert store.device.stats().resident == 4
    for chunk, chunk_hash in enumerate(prompt.hashes[:4]):
        with store.lend(chunk_hash, prompt.tag) as loan:
            assert (store.device.stats().lent, store.cpu.stats().lent) == (1, 0)
            assert loan.bytes.numpy().tobytes() == chunk_bytes(made, chunk)
        assert store.release(chunk_hash, prompt.tag)
    assert_served(store, made, prompt)
    assert store.cpu.evict(made.digest) == 4
    claim = store.claim(made.digest, {})
    assert claim.poll().ready and store.cpu.stats().misses == 4, "it is claimed where it is"
    claim.close()


def test_a_chunk_that_cannot_reach_the_device_is_served_from_the_cpu_tier(home, monkeypatch):
    def fail(*_: object) -> None:
        raise CartridgeError("out of device memory")

    monkeypatch.setattr(device_module, "copy_and_wait", fail)
    made = home.make()
    store, prompt = _open(home, 4), home.prompt()
    for _ in range(2):
        assert_served(store, made, prompt)
        _quiet(store)
    assert (store.device.stats().resident, store.device.stats().failed > 0, store.refused()) == (0, True, {})


# Anything, in any order.

SMALL = {"layers": 1, "head_size": 8}
NAMES = {"a": ("prefill", 64), "b": ("trained", 48), "c": ("prefill", 40), "d": ("trained", 32)}


@pytest.mark.parametrize(("cpu", "device"), [(4, 4), (6, 1)])
def test_sixteen_threads_over_both_tiers_get_the_right_bytes_or_none_and_the_books_are_right(home, cpu, device):
    fingerprint, shelf = make_fingerprint(**SMALL), dict[str, tuple[Made, Prompt]]()
    for seed, (name, (kind, positions)) in enumerate(NAMES.items()):
        made = home.make(name, kind=kind, positions=positions, seed=seed, **SMALL)
        shelf[name] = made, home.prompt(name)
    flip_bit(home.payload("d"), chunk_range(shelf["d"][0].manifest, 1, range(1)).start)
    size = fingerprint.token_bytes * 16
    store = home.open(fingerprint=fingerprint, chunks=cpu, settings={"reload_s": 0.01, "device_bytes": device * size})

    def look(name: str) -> None:
        made, prompt = shelf[name]
        found = store.lookup(prompt.hashes, prompt.tag)
        assert prompt.tag is None or found in (0, prompt.whole)
        for chunk, chunk_hash in enumerate(prompt.hashes[:found]):
            assert lent(store, chunk_hash, prompt.tag) == chunk_bytes(made, chunk), "what was promised is there"
            assert store.release(chunk_hash, prompt.tag)

    def claim(name: str) -> None:
        claim = store.claim(shelf[name][0].digest, {})
        claim.poll()
        claim.poll()
        claim.close()

    def pin(name: str) -> None:
        with suppress(CartridgeError):
            store.pin(shelf[name][0].digest)
        store.unpin(shelf[name][0].digest)

    def preload_or_evict(name: str) -> None:
        store.preload(shelf[name][0].digest, {})
        store.evict(shelf[name][0].digest)

    def work(number: int) -> None:
        chance = random.Random(number)
        for _ in range(160):
            name = chance.choice("abcd")
            chance.choice([look] * 7 + [claim, pin, preload_or_evict])(name)
            check(store)
            if not number:
                home.registry.register(home.root(name))

    run_threads(16, work, timeout_s=60)
    for tier in (store.device, store.cpu):
        until(lambda tier=tier: tier.stats().loading == tier.stats().held == tier.stats().lent == 0)
        assert tier.stats().promoted > 20
    assert list(store.refused()) == ["d@1"]
    for name in "abc":
        assert_served(store, *shelf[name])
