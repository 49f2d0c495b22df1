"""The catalog follows the registry and the quarantine while it serves, and disturbs nobody who was there before."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from homes import GRACE_S, Home, Prompt, assert_served, catalog_of, claimed, prompt_for
from making import Made, flip_bit, make_artifact, make_fingerprint, make_ids, make_rope
from waiting import until

from lmcache_cartridge.artifact.cartridge import Place

CHAINABLE = make_fingerprint(rope=msgspec.structs.replace(make_rope(), pairing="half"))


def _place(root: Path) -> Place:
    return Place(root, str(root))


# What is removed.


@pytest.mark.parametrize("kind", ["prefill", "trained"])
def test_a_request_that_has_a_removed_cartridge_is_served_to_its_end(home, opened, clock, kind):
    made = home.make(kind=kind, positions=64)
    digest = made.digest
    store, prompt = opened(), home.prompt()._replace(tag=digest)
    claim = claimed(store, digest)
    home.registry.remove("doc")
    for _ in range(3):
        store.refresh()
        clock.now += GRACE_S - 1
        assert_served(store, made, prompt)
    assert store.cpu.stats().misses == 4, "it was loaded again"
    claim.close()
    clock.now += GRACE_S
    store.refresh()
    assert not catalog_of(store).knows(digest)
    assert store.lookup(prompt.hashes, digest) == 0
    assert store.claim(digest, {}).poll().refused == "a cartridge of it is not there"


# What is moved.


@pytest.mark.parametrize("gone", ["here", "elsewhere"])
def test_a_cartridge_that_moved_is_read_where_it_is_sound(home, opened, gone):
    made = home.make()
    store = opened()
    home.registry.register(shutil.copytree(home.root(), home.path / "elsewhere"))
    if gone == "elsewhere":
        shutil.rmtree(home.path / "elsewhere")
    prompt = home.prompt()
    store.refresh()
    if gone == "here":
        home.root().rename(home.path / "away")
    assert_served(store, made, prompt)


# A registry in trouble.


# The quarantine.


# Copies of one cartridge, of which a damaged one is read last at a start or first.


def _copies(home: Home, copy: str, kind: str) -> tuple[Made, Prompt]:
    made = [home.make(name, positions=64, seed=1, token_ids=make_ids(64, 7), kind=kind) for name in ("m", copy)]
    assert made[0].digest == made[1].digest
    flip_bit(home.payload(copy), 40_000)
    return made[0], home.prompt("m")


last = pytest.mark.parametrize("copy", ["zcopy", "acopy"])
kinds = pytest.mark.parametrize("kind", ["prefill", "trained"])


@last
@kinds
def test_a_flipped_bit_in_one_copy_takes_nothing_from_the_other(home, opened, copy, kind):
    made, prompt = _copies(home, copy, kind)
    store, beside = opened(), opened()
    for find in (lambda: store, lambda: store, lambda: beside, opened):  # the last ones as other processes
        other = find()
        other.refresh()
        until(lambda: not other.refused())  # noqa: B023
        other.evict(made.digest)
        assert_served(other, made, prompt)
        assert (sorted(other.names()), other.refused()) == (sorted(["m@1", f"{copy}@1"]), {})


@last
@kinds
def test_where_every_copy_is_damaged_it_is_refused_until_one_is_sound(home, opened, copy, kind):
    made, prompt = _copies(home, copy, kind)
    flip_bit(home.payload("m"), 40_000)
    store, digest = opened(), made.digest
    for _ in range(3):
        assert store.lookup(prompt.hashes, digest) < 4
    until(lambda: len(store.refused()) == 2)
    assert store.claim(digest, {}).poll().refused
    flip_bit(home.payload("m"), 40_000)
    home.quarantine.lift(digest, str(home.root("m")))
    for sound in (store, opened()):
        sound.refresh()
        until(lambda: sound.lookup(prompt.hashes, digest) == 4)  # noqa: B023
        assert sound.refused() == {}


# What is named by path, and what lies on S3.


def test_a_document_named_by_its_path_answers_its_tag_alone_and_is_forgotten_when_nobody_uses_it(home, opened, clock):
    made = make_artifact(home.root(), positions=72)
    store, digest, prompt = opened(), made.digest, prompt_for(home, made)
    claim = claimed(store, digest, {digest: _place(home.root())})
    assert (store.names(), store.refused()) == ([], {})
    for _ in range(3):
        assert store.lookup(prompt.hashes) == 0
        assert_served(store, made, prompt._replace(tag=digest))
        clock.now += GRACE_S - 1
        store.refresh()
    claim.close()
    clock.now += GRACE_S
    store.refresh()
    assert store.claim(digest, {}).poll().refused == "a cartridge of it is not there"
    assert not catalog_of(store).index.has(digest)
    claimed(store, digest, {digest: _place(home.root())}).close()
    home.registry.register(home.root())
    store.refresh()
    assert_served(store, made, prompt)


@pytest.mark.parametrize("named", [True, False], ids=["named", "by path"])
@pytest.mark.parametrize("seen", [True, False], ids=["removal seen", "removal not seen"])
def test_what_is_gone_from_where_it_was_is_read_from_where_a_claim_says(home, opened, named, seen):
    made = home.make(positions=72)
    store, digest, prompt = opened(), made.digest, home.prompt()
    moved = _place(home.path / "moved")
    shutil.move(home.root(), moved.root)
    home.registry.remove("doc")
    if seen:
        store.refresh()
    if named:
        home.registry.register(moved.root)
    claim = claimed(store, digest, {digest: moved})
    assert_served(store, made, prompt._replace(tag=digest))
    assert catalog_of(store).locations(digest) == {moved.location}
    assert store.names() == (["doc@1"] if named else [])
    claim.close()
