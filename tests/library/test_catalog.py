"""The catalog follows the registry and the quarantine while it serves, and disturbs nobody who was there before."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest
from homes import GRACE_S, assert_served, catalog_of, chunk_bytes, lent, prompt_for, read
from making import make_artifact, make_fingerprint, make_rope
from waiting import until

from lmcache_cartridge.artifact.cartridge import Place
from lmcache_cartridge.artifact.reading import PAYLOAD
from lmcache_cartridge.errors import CartridgeNotFound, RegistryError
from lmcache_cartridge.library.quarantine import Quarantine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.library.workers import noted
from lmcache_cartridge.settings import Settings

# What is registered while serving.


# What is removed.


def test_what_was_promised_before_a_removal_is_delivered(home, opened):
    made = home.make()
    store, prompt = opened(), prompt_for(home, made)
    assert store.lookup(prompt.hashes) == 4
    home.registry.remove("doc")
    store.refresh()
    assert store.lookup(prompt.hashes) == 0
    for chunk in range(4):
        assert lent(store, prompt.hashes[chunk]) == chunk_bytes(made, chunk)
        assert store.release(prompt.hashes[chunk]) is True
    assert store.cpu.stats().leased == 0


@pytest.mark.parametrize("kind", ["prefill", "trained"])
def test_a_request_that_has_a_removed_cartridge_is_served_to_its_end(home, opened, clock, kind):
    made = home.make(kind=kind, positions=64)
    digest = made.manifest.digest
    store, prompt = opened(), prompt_for(home, made)._replace(tag=digest)
    claim = store.claim(digest, {})
    until(lambda: claim.poll().ready)
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


def test_a_chain_with_a_removed_cartridge_is_forgotten_with_it(home, opened, clock):
    shape = make_fingerprint(rope=msgspec.structs.replace(make_rope(), pairing="half"))
    first, second = (
        home.make(name, positions=32, seed=seed, fingerprint=shape) for seed, name in enumerate(("a", "b"))
    )
    tag = f"{first.manifest.digest}.{second.manifest.digest}"
    store = opened(fingerprint=shape)
    with_claim = read(store.claim(tag, {}))
    assert with_claim.poll().chunks == 4
    home.registry.remove("b")
    clock.now += 2 * GRACE_S
    store.refresh()
    clock.now += GRACE_S - 1
    store.refresh()
    assert catalog_of(store).derive(tag) is not None, "the claim is open"
    with_claim.close()
    clock.now += GRACE_S + 1
    store.refresh()
    assert catalog_of(store).derive(tag) is None
    assert not catalog_of(store).index.has(tag)
    assert [catalog_of(store).knows(one.manifest.digest) for one in (first, second)] == [True, False]


def test_what_is_removed_and_registered_again_where_it_is_not_sound_is_refused(home, opened, clock):
    made, other = home.make(seed=1), home.make("other", seed=2)
    store, prompt = opened(), prompt_for(home, made)
    bad = shutil.copytree(home.root(), home.path / "bad")
    home.registry.remove("doc")
    store.refresh()
    home.registry.register(bad)
    (bad / PAYLOAD).unlink()
    for _ in range(3):
        store.refresh()
        assert (store.names(), list(store.refused())) == (["other@1"], ["doc@1"])
        assert store.lookup(prompt.hashes) == 0
        clock.now += GRACE_S
    home.registry.remove("doc")
    store.refresh()
    clock.now += GRACE_S
    store.refresh()
    assert (store.names(), store.refused()) == (["other@1"], {})
    assert_served(store, other, prompt_for(home, other, "other"))


# What is moved.


@pytest.mark.parametrize("gone", ["here", "elsewhere"])
def test_a_cartridge_that_moved_is_read_where_it_is_sound(home, opened, gone):
    made = home.make()
    store = opened()
    home.registry.register(shutil.copytree(home.root(), home.path / "elsewhere"))
    if gone == "elsewhere":
        shutil.rmtree(home.path / "elsewhere")
    prompt = prompt_for(home, made)
    store.refresh()
    if gone == "here":
        home.root().rename(home.path / "away")
    assert_served(store, made, prompt)


# A registry in trouble.


def _delete(path: Path) -> None:
    for file in path.parent.glob("registry.sqlite*"):
        file.unlink()


def _corrupt(path: Path) -> None:
    _delete(path)
    path.write_bytes(b"no database at all" * 999)


@pytest.mark.parametrize(("spoil", "message"), [(_delete, "is gone"), (_corrupt, "not a database")])
def test_what_was_served_is_served_on_without_its_registry_and_later_changes_are_followed(home, opened, spoil, message):
    made = home.make(seed=1)
    store, backup = opened(), home.path / "backup"
    with sqlite3.connect(home.registry.path) as source, sqlite3.connect(backup) as target:
        source.backup(target)
    source.close(), target.close()
    spoil(home.registry.path)
    for _ in range(2):
        with pytest.raises(RegistryError, match=message):
            store.refresh()
        assert_served(store, made, prompt_for(home, made))
    assert store.names() == ["doc@1"]
    shutil.copy(backup, home.registry.path)
    home.registry = Registry(home.registry.path)
    home.make("later", seed=2)
    store.refresh()
    assert store.names() == ["doc@1", "later@1"]


def test_the_keeper_complains_now_and_then_and_goes_on(home, caplog):
    home.make(seed=1)
    store = home.open(settings={"reload_s": 0.01})
    away = home.registry.path.rename(home.path / "away")
    with caplog.at_level(logging.WARNING, "lmcache_cartridge.library.workers"):
        before = noted()
        until(lambda: noted() > before + 8)
        count = noted() - before
    assert 3 <= len(caplog.records) <= count.bit_length() + 1 < count  # at its first time, its second, fourth and so on
    assert caplog.records[0].getMessage() == f"cartridge-read goes on: registry {home.registry.path} is gone"
    away.rename(home.registry.path)
    home.make("later", seed=2)
    until(lambda: store.names() == ["doc@1", "later@1"])


@pytest.mark.parametrize("place", ["refresh", "poll", "relieve"])
def test_the_keeper_outlives_an_error_that_nobody_thought_of(home, place, monkeypatch):
    store = home.open(settings={"reload_s": 0.01})
    part = {"refresh": catalog_of(store), "poll": store._background, "relieve": store.cpu}[place]
    work, failures, before = getattr(part, place), [ZeroDivisionError("a bug")], store.numbers()["background_errors"]

    def broken() -> list[str]:
        if failures:
            raise failures.pop()
        return work()

    monkeypatch.setattr(part, place, broken)
    until(lambda: not failures)
    home.make()
    until(lambda: store.names() == ["doc@1"])
    assert store.numbers()["background_errors"] == before + 1


# The quarantine.


def test_a_quarantine_by_another_process_is_followed_and_its_end_too(home, opened):
    made, other = home.make(seed=1), home.make("other", seed=2)
    store, prompt = opened(), prompt_for(home, made)
    elsewhere = Quarantine(Settings(home=home.path).quarantine_dir)
    elsewhere.put(made.manifest.digest, "chunk 3 is corrupt")
    store.refresh()
    assert store.refused() == {"doc@1": "quarantined: chunk 3 is corrupt"}
    assert store.names() == ["other@1"]
    assert store.lookup(prompt.hashes) == 0
    assert "corrupt" in store.claim(made.manifest.digest, {}).poll().refused
    assert_served(store, other, prompt_for(home, other, "other"))
    elsewhere.lift(made.manifest.digest)
    store.refresh()
    assert store.refused() == {}
    assert_served(store, made, prompt)


# What is named by path, and what lies on S3.


def test_a_document_named_by_its_path_answers_its_tag_and_no_plain_prompt(home, opened):
    made = make_artifact(home.root(), positions=72)
    store, prompt = opened(), prompt_for(home, made)
    claim = read(store.claim(made.manifest.digest, {made.manifest.digest: Place(home.root(), str(home.root()))}))
    until(lambda: claim.poll().ready)
    assert (store.names(), store.refused()) == ([], {})
    assert store.lookup(prompt.hashes) == 0
    assert_served(store, made, prompt._replace(tag=made.manifest.digest))
    claim.close()
    home.registry.register(home.root())
    store.refresh()
    assert_served(store, made, prompt)


@pytest.mark.parametrize("sound", [True, False])
def test_what_was_named_by_its_path_is_forgotten_when_nobody_uses_it(home, opened, clock, sound):
    made = make_artifact(home.root(), positions=72)
    digest, place = made.manifest.digest, Place(home.root(), str(home.root()))
    if not sound:
        shutil.rmtree(home.root())
    store = opened()
    claim = read(store.claim(digest, {digest: place}))
    assert (claim.poll().refused is None) == sound
    for _ in range(3):
        clock.now += GRACE_S - 1
        store.refresh()
        assert catalog_of(store).knows(digest) == sound
    claim.close()
    clock.now += GRACE_S
    store.refresh()
    catalog = catalog_of(store)
    assert (catalog.knows(digest), catalog.index.has(digest)) == (False, False)
    with pytest.raises(CartridgeNotFound, match="^a cartridge of it is not there$"):
        catalog.require(digest)


@pytest.mark.parametrize("named", [True, False], ids=["named", "by path"])
@pytest.mark.parametrize("seen", [True, False], ids=["removal seen", "removal not seen"])
def test_what_is_gone_from_where_it_was_is_read_from_where_a_claim_says(home, opened, named, seen):
    made = home.make(positions=72)
    store, digest, prompt = opened(), made.manifest.digest, prompt_for(home, made)
    moved = Place(home.path / "moved", str(home.path / "moved"))
    shutil.move(home.root(), moved.root)
    home.registry.remove("doc")
    if seen:
        store.refresh()
    if named:
        home.registry.register(moved.root)
    claim = read(store.claim(digest, {digest: moved}))
    until(lambda: claim.poll().ready)
    assert_served(store, made, prompt._replace(tag=digest))
    assert catalog_of(store).locations(digest) == {moved.location}
    assert store.names() == (["doc@1"] if named else [])


def test_where_two_copies_are_registered_a_claim_on_one_is_served_from_either(home, opened):
    made = home.make(positions=72)
    store, digest = opened(), made.manifest.digest
    copy = Place(home.path / "copy", str(home.path / "copy"))
    shutil.copytree(home.root(), copy.root)
    home.registry.register(copy.root, version=2)
    store.refresh()
    where = catalog_of(store).locations(digest)
    for place in (copy, Place(home.root(), str(home.root()))):
        until(lambda place=place: read(store.claim(digest, {digest: place})).poll().ready)
        assert catalog_of(store).locations(digest) == where


def test_an_artefact_on_a_server_that_is_away_leaves_the_others_served(home, opened, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    here, away = home.make("here", seed=1), home.make("away", seed=2)
    home.registry.register(home.root("away"), "s3://bucket/away")
    shared = home.make("shared", seed=3)
    store = opened({"s3_endpoint_url": "http://127.0.0.1:1", "s3_region": "x", "s3_timeout_s": 0.2})
    assert store.names() == ["here@1", "shared@1"]
    until(lambda: store.refused())
    assert list(store.refused()) == ["away@1"]
    assert store.claim(away.manifest.digest, {}).poll().refused
    assert store.lookup(prompt_for(home, away, "away").hashes) == 0
    assert_served(store, here, prompt_for(home, here, "here"))
    assert_served(store, shared, prompt_for(home, shared, "shared"))
    home.registry.register(home.root("away"))
    store.refresh()
    assert store.refused() == {}
    assert_served(store, away, prompt_for(home, away, "away"))
