"""Under load nothing grows."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from homes import STILL, Home, catalog_of
from making import Made, make_fingerprint
from waiting import Clock, until

from lmcache_cartridge.memory.store import CartridgeStore

SMALL = {"layers": 1, "head_size": 8}


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _grow(path: Path, warm_up: int, count: int) -> tuple[float, int, int]:
    """Load and evict two cartridges in turns, `warm_up` times and then `count` times; return how many MiB and objects the process
    has more after the latter, and how many loads there were.
    """
    home, shape = Home(path), make_fingerprint(**SMALL)
    made = [home.make(name, positions=16, seed=seed, **SMALL) for seed, name in enumerate("ab")]
    prompts = [home.prompt(name) for one, name in zip(made, "ab", strict=True)]
    store = home.open(fingerprint=shape, chunks=1, settings=STILL)

    def cycles(count: int) -> tuple[float, int]:
        for turn in range(count // 2):
            for prompt in prompts:
                if turn % 10 == 0:
                    store.lend(prompt.hashes[0]).close()
                assert store.lookup(prompt.hashes) == 1
                assert store.release(prompt.hashes[0])
        gc.collect()
        return _resident_mib(), len(gc.get_objects())

    before_mib, before_objects = cycles(warm_up)
    after_mib, after_objects = cycles(count)
    home.close()
    return after_mib - before_mib, after_objects - before_objects, store.cpu.stats().promoted


def test_memory_is_flat_over_thousands_of_loads_and_evictions(tmp_path):
    """In a process of its own: memory that other files of tests freed comes and goes by some MiB."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        mib, objects, loads = process.submit(_grow, tmp_path, 600, 2400).result()
    assert loads >= 3000
    assert objects < 200
    assert mib < 3


def _tables(store: CartridgeStore) -> dict[str, int]:
    catalog = catalog_of(store)
    held = {**vars(catalog), **{f"index.{name}": value for name, value in vars(catalog.index).items()}}
    return {name: len(value) for name, value in held.items() if isinstance(value, dict | set | list)} | {
        name: len(value) for name, value in vars(store).items() if isinstance(value, dict | set | list)
    }


def test_nothing_is_left_of_cartridges_that_came_and_went(home):
    clock = Clock()
    made: list[Made] = [home.make(name, positions=32, seed=seed, **SMALL) for seed, name in enumerate("abc")]
    home.registry.label("current", "a", warm=True)
    settings = {"reload_s": 0, "lease_s": 10.0}
    store = home.open(fingerprint=make_fingerprint(**SMALL), chunks=4, settings=settings, clock=clock)
    until(lambda: store.cpu.stats().held == 0)
    before = _tables(store)
    for turn in range(30):
        name, one = "bc"[turn % 2], made[1 + turn % 2]
        store.preload(one.digest, {})
        claim = store.claim(one.digest, {})
        claim.poll()
        home.registry.remove(name)
        store.refresh()
        claim.close()
        clock.now += 11
        store.refresh()
        home.registry.register(home.root(name))
        store.refresh()
    until(lambda: store.cpu.stats().held == 0)
    assert _tables(store) == before
    assert sorted(store.names()) == ["a@1", "b@1", "c@1"]
