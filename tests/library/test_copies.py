"""Copies of one cartridge: a flipped bit in one is that copy's own, and the others go on serving."""

from __future__ import annotations

import pytest
from homes import Home, Prompt, assert_served, prompt_for
from making import Made, flip_bit, make_ids
from waiting import until

from lmcache_cartridge.artifact.reading import chunk_range
from lmcache_cartridge.library.quarantine import Quarantine
from lmcache_cartridge.memory.store import CartridgeStore


class Copies:
    """A cartridge and a copy of it, which is read last at a start or first; one chunk of the copy is damaged."""

    def __init__(self, home: Home, copy: str, kind: str) -> None:
        self.home, self.copy = home, copy
        made = {
            name: home.make(name, positions=64, seed=1, token_ids=make_ids(64, 7), kind=kind) for name in ("m", copy)
        }
        self.made: Made = made["m"]
        assert self.made.manifest.digest == made[copy].manifest.digest
        self.flip(copy)
        self.prompt: Prompt = prompt_for(home, self.made, "m")

    def flip(self, name: str) -> None:
        flip_bit(self.home.payload(name), chunk_range(self.made.manifest, 2, range(1)).start + 9)

    def open(self) -> CartridgeStore:
        return self.home.open(settings={"reload_s": 0})


last = pytest.mark.parametrize("copy", ["zcopy", "acopy"])
kinds = pytest.mark.parametrize("kind", ["prefill", "trained"])


@last
@kinds
def test_a_flipped_bit_in_one_copy_takes_nothing_from_the_other(home, copy, kind):
    copies = Copies(home, copy, kind)
    store = copies.open()
    assert_served(store, copies.made, copies.prompt)
    assert (sorted(store.names()), store.refused()) == (sorted(["m@1", f"{copy}@1"]), {})
    for other in (store, copies.open()):  # as another process, or the next start, finds it
        other.refresh()
        other.evict(copies.made.manifest.digest)
        assert_served(other, copies.made, copies.prompt)
        assert other.refused() == {}


@last
@kinds
def test_where_every_copy_is_damaged_it_is_refused_until_one_is_sound(home, copy, kind):
    copies = Copies(home, copy, kind)
    copies.flip("m")
    store, digest = copies.open(), copies.made.manifest.digest
    for _ in range(3):
        assert store.lookup(copies.prompt.hashes, digest) < 4
    until(lambda: len(store.refused()) == 2)
    assert store.claim(digest, {}).poll().refused
    copies.flip("m")
    Quarantine(home.path / "quarantine").lift(digest, str(home.root("m")))
    fresh = copies.open()
    until(lambda: fresh.lookup(copies.prompt.hashes, digest) == 4)
    assert fresh.refused() == {}
