"""Under load nothing grows."""

from __future__ import annotations

from homes import catalog_of
from making import Made, make_fingerprint
from waiting import Clock, until

from lmcache_cartridge.memory.store import CartridgeStore

SMALL = {"layers": 1, "head_size": 8}


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
