"""The catalog follows the registry and the quarantine while it serves, and disturbs nobody who was there before."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from homes import GRACE_S, Home, assert_served, catalog_of, chunk_bytes, lent, prompt_for, read
from making import Made, flip_bit, make_artifact, make_fingerprint, make_ids, make_kv, make_rope
from waiting import Clock, run_threads, until

from lmcache_cartridge.artifact.cartridge import Place
from lmcache_cartridge.artifact.reading import MANIFEST, PAYLOAD, chunk_range
from lmcache_cartridge.errors import RegistryError
from lmcache_cartridge.library.quarantine import Quarantine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.library.workers import noted
from lmcache_cartridge.settings import Settings

# What is registered while serving.


@pytest.mark.parametrize("kind", ["prefill", "trained"])
def test_what_is_registered_while_serving_is_served_from_the_next_look_on(
    home: Home, opened: Callable, kind: str
) -> None:
    first = home.make("first", seed=1)
    store = opened()
    assert_served(store, first, prompt_for(home, first, "first"))
    second = home.make("second", kind=kind, positions=64, seed=2)
    prompt, before = prompt_for(home, second, "second"), store.cpu.stats()
    assert store.lookup(prompt.hashes, prompt.tag) == 0
    store.refresh()
    assert store.names() == ["first@1", "second@1"]
    assert store.cpu.stats() == before, "what is resident was touched"
    assert_served(store, second, prompt)
    assert_served(store, first, prompt_for(home, first, "first"))
    assert store.cpu.stats().misses == 8, "the first was loaded again"


def test_bad_cartridges_that_are_registered_leave_the_others_served(home: Home, opened: Callable) -> None:
    good = home.make("good", seed=1)
    store = opened()
    for number, name in enumerate(("gone", "short", "foreign", "later")):
        home.make(name, seed=number + 2, **({"layers": 4} if name == "foreign" else {}))
    shutil.rmtree(home.root("gone"))
    (home.root("short") / MANIFEST).write_bytes(b"{}")
    store.refresh()
    assert store.names() == ["good@1", "later@1"]
    assert sorted(store.refused()) == ["foreign@1", "gone@1", "short@1"]
    assert "another model" in store.refused()["foreign@1"]
    assert_served(store, good, prompt_for(home, good, "good"))


def test_a_bad_cartridge_is_served_once_it_is_registered_again_in_order(home: Home, opened: Callable) -> None:
    made = home.make()
    away = home.root().rename(home.path / "away")
    store = opened()
    assert list(store.refused()) == ["doc@1"]
    away.rename(home.root())
    home.registry.register(home.root())
    store.refresh()
    until(lambda: (store.names(), store.refused()) == (["doc@1"], {}))
    assert_served(store, made, prompt_for(home, made))


def test_lookups_of_what_is_there_are_right_while_others_come_and_go(home: Home, opened: Callable) -> None:
    made = home.make()
    for name in "abc":
        home.make(name, seed=ord(name))
        home.registry.remove(name)
    store, prompt = opened(), prompt_for(home, made)

    def work(number: int) -> None:
        for turn in range(15):
            if number == 0:
                home.registry.register(home.root("abc"[turn % 3]))
                store.refresh()
                home.registry.remove("abc"[turn % 3])
            else:
                assert store.lookup(prompt.hashes) == 4
                assert lent(store, prompt.hashes[3]) is not None
                for chunk_hash in prompt.hashes[:4]:
                    assert store.release(chunk_hash)

    run_threads(4, work)
    store.refresh()
    assert store.names() == ["doc@1"]


def test_numbers_are_the_lengths_of_what_the_status_lists(home: Home, opened: Callable) -> None:
    made = {name: home.make(name, seed=seed) for seed, name in enumerate("abcd")}
    home.make("twin", seed=0)
    home.make("foreign", layers=4, seed=9)
    shutil.rmtree(home.root("b"))
    Quarantine(Settings(home=home.path).quarantine_dir).put(made["a"].manifest.digest, "corrupt")
    store = opened()
    store.pin(made["c"].manifest.digest)
    claim = store.claim(made["d"].manifest.digest, {})
    until(lambda: claim.poll().ready)
    until(lambda: store.cpu.stats().loading == 0)
    for removed in (("b", "twin"), ("d",), ()):
        status, numbers = store.status(), store.numbers()
        assert {key: len(status[key]) for key in ("refused", "pinned", "loading")} == {
            key: numbers[key] for key in ("refused", "pinned", "loading")
        }
        assert status["served"] == numbers["served"] == len(store.names())
        assert numbers["tiers"].keys() == status["tiers"].keys()
        assert (numbers["rank"], numbers["quarantined"]) == (status["rank"], status["quarantined"])
        for name in removed:
            home.registry.remove(name)
        store.refresh()
    assert (numbers["served"], numbers["refused"]) == (1, 2)
    claim.close()


# What is removed.


def test_what_was_removed_is_missed_by_those_who_do_not_name_it(home: Home, opened: Callable) -> None:
    made, other = home.make(seed=1), home.make("other", seed=2)
    store, prompt = opened(), prompt_for(home, made)
    assert_served(store, made, prompt)
    home.registry.remove("doc")
    assert store.lookup(prompt.hashes) == 4, "nobody looked yet"
    for chunk_hash in prompt.hashes[:4]:
        store.release(chunk_hash)
    store.refresh()
    assert (store.names(), store.refused()) == (["other@1"], {})
    assert store.lookup(prompt.hashes) == 0
    assert store.resident(prompt.hashes) == 0
    assert store.lend(prompt.hashes[0]) is None
    assert store.cpu.stats().resident == 0, "what nobody relies on was not evicted"
    assert_served(store, other, prompt_for(home, other, "other"))


def test_what_was_promised_before_a_removal_is_delivered(home: Home, opened: Callable) -> None:
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
def test_a_request_that_has_a_removed_cartridge_is_served_to_its_end(
    home: Home, opened: Callable, clock: Clock, kind: str
) -> None:
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


def test_a_chain_with_a_removed_cartridge_is_forgotten_with_it(home: Home, opened: Callable, clock: Clock) -> None:
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


def test_what_was_removed_and_registered_again_is_served_as_ever(home: Home, opened: Callable, clock: Clock) -> None:
    made = home.make()
    store, prompt = opened(), prompt_for(home, made)
    home.registry.remove("doc")
    store.refresh()
    home.registry.register(home.root())
    store.refresh()
    assert store.names() == ["doc@1"]
    clock.now += 2 * GRACE_S
    store.refresh()
    assert store.names() == ["doc@1"]
    assert_served(store, made, prompt)


def test_what_was_removed_and_registered_again_between_two_looks_was_never_away(home: Home, opened: Callable) -> None:
    made = home.make()
    store = opened()
    assert_served(store, made, prompt_for(home, made))
    store.pin(made.manifest.digest)
    home.registry.remove("doc")
    home.registry.register(home.root())
    store.refresh()
    assert store.cpu.stats().resident == 4
    assert store.status()["pinned"] == [made.manifest.digest]


@pytest.mark.parametrize("looks_between", [0, 1])
def test_a_name_given_to_other_content_serves_that_and_lets_the_old_one_go(
    home: Home, opened: Callable, clock: Clock, looks_between: int
) -> None:
    old = home.make(seed=1)
    store, old_prompt = opened(), prompt_for(home, old)
    assert_served(store, old, old_prompt)
    home.registry.remove("doc")
    for _ in range(looks_between):
        store.refresh()
    root = home.path / "elsewhere"
    new = make_artifact(root, positions=72, seed=2)
    home.registry.register(root)
    store.refresh()
    assert store.names() == ["doc@1"]
    assert store.lookup(old_prompt.hashes) == 0
    assert store.cpu.stats().resident == 0, "the old content was not evicted"
    home.registry.register(shutil.copytree(root, home.root(), dirs_exist_ok=True))
    assert_served(store, new, prompt_for(home, new))
    clock.now += GRACE_S
    store.refresh()
    assert [catalog_of(store).knows(one.manifest.digest) for one in (old, new)] == [False, True]


def test_what_is_removed_and_registered_again_where_it_is_not_sound_is_refused(
    home: Home, opened: Callable, clock: Clock
) -> None:
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


def test_content_with_two_names_stays_until_the_last_is_removed(home: Home, opened: Callable) -> None:
    made = home.make("one", token_ids=make_ids(72, 0))
    home.make("two", token_ids=make_ids(72, 0))
    store, prompt = opened(), prompt_for(home, made, "one")
    home.registry.remove("one")
    store.refresh()
    assert store.names() == ["two@1"]
    assert_served(store, made, prompt)
    home.registry.remove("two")
    store.refresh()
    assert store.lookup(prompt.hashes) == 0


def _alike(home: Home) -> tuple[Made, Made]:
    """Make two documents with the same first two chunks."""
    kv = [make_kv(make_fingerprint(), 64, seed) for seed in range(2)]
    kv[1][:, :, :32] = kv[0][:, :, :32]
    return tuple(
        home.make(name, positions=64, token_ids=make_ids(32, 0) + make_ids(32, 1 + seed), kv=kv[seed])
        for seed, name in enumerate(("a", "b"))
    )


@pytest.mark.parametrize("removed", ["a", "b"])
def test_removing_one_of_two_documents_that_begin_alike_leaves_the_other_whole(
    home: Home, opened: Callable, clock: Clock, removed: str
) -> None:
    made = dict(zip("ab", _alike(home), strict=True))
    left = "b" if removed == "a" else "a"
    store = opened()
    home.registry.remove(removed)
    store.refresh()
    assert_served(store, made[left], prompt_for(home, made[left], left))
    shared = prompt_for(home, made[removed], removed).hashes
    assert store.lookup(shared) == 2
    for chunk_hash in shared[:2]:
        assert store.release(chunk_hash)
    home.registry.remove(left)
    store.refresh()
    assert store.lookup(prompt_for(home, made[left], left).hashes) == 0
    clock.now += GRACE_S
    store.refresh()
    assert not any(catalog_of(store).index.has(one.manifest.digest) for one in made.values())
    for name in "ba":
        home.registry.register(home.root(name))
        store.refresh()
    for name in "ab":
        assert_served(store, made[name], prompt_for(home, made[name], name))


# What is moved.


def test_labels_that_move_need_no_look_and_warm_ones_bring_their_cartridge(home: Home, opened: Callable) -> None:
    made = [home.make(name, seed=seed) for seed, name in enumerate("ab")]
    store = opened()
    home.registry.label("current", "a", warm=True)
    assert store.cpu.stats().resident == 0
    store.refresh()
    until(lambda: store.cpu.stats().resident == 4)
    home.registry.label("current", "b", warm=True)
    store.refresh()
    until(lambda: store.cpu.stats().resident == 8)
    assert store.status()["resident"]["cpu"] == {one.manifest.digest: 4 for one in made}


def test_a_cartridge_that_moved_is_read_at_its_new_place(home: Home, opened: Callable) -> None:
    made = home.make()
    store, prompt = opened(), prompt_for(home, made)
    home.registry.register(shutil.copytree(home.root(), home.path / "elsewhere"))
    store.refresh()
    home.root().rename(home.path / "away")
    assert store.names() == ["doc@1"]
    assert store.lookup(prompt.hashes) == 4
    assert lent(store, prompt.hashes[0]) is not None


def test_a_cartridge_that_moved_to_a_bad_place_is_served_from_the_old_one(home: Home, opened: Callable) -> None:
    made = home.make()
    store = opened()
    elsewhere = shutil.copytree(home.root(), home.path / "elsewhere")
    home.registry.register(elsewhere)
    shutil.rmtree(elsewhere)
    store.refresh()
    assert_served(store, made, prompt_for(home, made))


# A registry in trouble.


def _delete(path: Path) -> None:
    for file in path.parent.glob("registry.sqlite*"):
        file.unlink()


def _corrupt(path: Path) -> None:
    _delete(path)
    path.write_bytes(b"no database at all" * 999)


@pytest.mark.parametrize(("spoil", "message"), [(_delete, "is gone"), (_corrupt, "not a database")])
def test_what_was_served_is_served_on_without_its_registry_and_later_changes_are_followed(
    home: Home, opened: Callable, spoil: Callable, message: str
) -> None:
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


def test_a_registry_that_is_locked_is_a_complaint_and_no_more(home: Home, opened: Callable) -> None:
    made = home.make(seed=1)
    db = sqlite3.connect(home.registry.path, isolation_level=None)
    db.execute("PRAGMA journal_mode = DELETE")
    store = opened()
    db.execute("BEGIN EXCLUSIVE")
    connect = sqlite3.connect
    try:
        with pytest.MonkeyPatch.context() as patch:  # the ten seconds a reader waits would all pass here
            patch.setattr(sqlite3, "connect", lambda *args, **kwargs: connect(*args, **(kwargs | {"timeout": 0.01})))
            with pytest.raises(RegistryError, match="locked"):
                store.refresh()
    finally:
        db.execute("ROLLBACK")
        db.close()
    assert_served(store, made, prompt_for(home, made))
    home.make("later", seed=2)
    store.refresh()
    assert store.names() == ["doc@1", "later@1"]


def test_the_keeper_complains_now_and_then_and_goes_on(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    home.make(seed=1)
    store = home.open(settings={"reload_s": 0.01})
    away = home.registry.path.rename(home.path / "away")
    with caplog.at_level(logging.WARNING, "lmcache_cartridge.library.workers"):
        before = noted()
        until(lambda: noted() > before + 8)
    assert 3 <= len(caplog.records) <= 5  # of nine and more
    assert caplog.records[0].getMessage() == f"cartridge-keeper goes on: registry {home.registry.path} is gone"
    away.rename(home.registry.path)
    home.make("later", seed=2)
    until(lambda: store.names() == ["doc@1", "later@1"])


@pytest.mark.parametrize("place", ["refresh", "poll", "relieve"])
def test_the_keeper_outlives_an_error_that_nobody_thought_of(
    home: Home, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_older_backup_put_back_is_followed(home: Home, opened: Callable) -> None:
    made = home.make("old", seed=1)
    backup = shutil.copytree(home.path, home.path.with_name("backup")) / "registry.sqlite"
    home.make("new", seed=2)
    home.registry.label("current", "new")
    store = opened()
    assert sorted(store.names()) == ["new@1", "old@1"]
    assert_served(store, made, prompt_for(home, made, "old"))
    for file in home.path.glob("registry.sqlite*"):
        file.unlink()
    shutil.copy(backup, home.registry.path)
    before = store.cpu.stats()
    store.refresh()
    assert store.names() == ["old@1"]
    assert store.cpu.stats() == before, "what is in both was touched"
    home.registry = Registry(home.registry.path)
    home.make("newer", seed=3)
    store.refresh()
    assert store.names() == ["newer@1", "old@1"]


# The quarantine.


def test_a_quarantine_by_another_process_is_followed_and_its_end_too(home: Home, opened: Callable) -> None:
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


def test_a_quarantine_of_its_own_is_lifted_by_others(home: Home, opened: Callable) -> None:
    made = home.make()
    store, prompt = opened(), prompt_for(home, made)
    flip_bit(home.payload(), chunk_range(made.manifest, 0, range(1)).start)
    assert store.lookup(prompt.hashes) == 0
    store.refresh()
    assert list(store.refused()) == ["doc@1"], "a look alone lifts nothing"
    until(lambda: store.cpu.stats().loading == 0)  # a lookup now would share the failure of those loads
    flip_bit(home.payload(), chunk_range(made.manifest, 0, range(1)).start)
    Quarantine(Settings(home=home.path).quarantine_dir).lift(made.manifest.digest)
    store.refresh()
    assert_served(store, made, prompt)


def test_a_quarantine_that_could_not_be_noted_stays(home: Home, opened: Callable) -> None:
    made = home.make()
    (home.path / "quarantine").write_text("not a directory")
    store = opened()
    flip_bit(home.payload(), chunk_range(made.manifest, 0, range(1)).start)
    assert store.lookup(prompt_for(home, made).hashes, made.manifest.digest) == 0
    for _ in range(2):
        store.refresh()
        assert list(store.refused()) == ["doc@1"]


def test_a_quarantine_put_before_its_cartridge_is_registered_counts(home: Home, opened: Callable) -> None:
    store = opened()
    made = home.make()
    Quarantine(Settings(home=home.path).quarantine_dir).put(made.manifest.digest, "corrupt")
    store.refresh()
    assert store.refused() == {"doc@1": "quarantined: corrupt"}


def test_a_cartridge_that_was_forgotten_meanwhile_is_quarantined_all_the_same(home: Home, opened: Callable) -> None:
    store = opened()
    catalog_of(store).quarantine("ab" * 32, "corrupt", "/gone")
    assert Quarantine(Settings(home=home.path).quarantine_dir).reason("ab" * 32) == "corrupt"


# What is named by path, and what lies on S3.


def test_a_document_named_by_its_path_answers_its_tag_and_no_plain_prompt(home: Home, opened: Callable) -> None:
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
def test_what_was_named_by_its_path_is_forgotten_when_nobody_uses_it(
    home: Home, opened: Callable, clock: Clock, sound: bool
) -> None:
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
    assert str(catalog.refusal(digest)) == "a cartridge of it is not there", "why it was refused is not forgotten"


def test_a_claim_by_path_alone_keeps_its_cartridge_for_the_grace(home: Home, opened: Callable, clock: Clock) -> None:
    made = make_artifact(home.root(), positions=72)
    digest, place = made.manifest.digest, Place(home.root(), str(home.root()))
    store = opened()
    for _ in range(3):
        read(store.claim(digest, {digest: place})).close()
        clock.now += GRACE_S - 1
        store.refresh()
        assert catalog_of(store).knows(digest)


def test_what_is_used_by_its_path_outlives_its_removal(home: Home, opened: Callable, clock: Clock) -> None:
    made = home.make(kind="trained", positions=64)
    store, place = opened(), {made.manifest.digest: Place(home.root(), str(home.root()))}
    home.registry.remove("doc")
    store.refresh()
    clock.now += GRACE_S - 1
    claim = read(store.claim(made.manifest.digest, place))
    clock.now += GRACE_S - 1
    store.refresh()
    assert_served(store, made, prompt_for(home, made))
    claim.close()
    clock.now += GRACE_S
    store.refresh()
    assert store.claim(made.manifest.digest, {}).poll().refused
    again = read(store.claim(made.manifest.digest, place))
    until(lambda: again.poll().ready)
    again.close()


def test_an_artefact_on_a_server_that_is_away_leaves_the_others_served(
    home: Home, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_two_names_that_swap_their_contents_between_two_looks_disturb_neither(home: Home, opened: Callable) -> None:
    made = [home.make(name, seed=seed) for seed, name in enumerate("ab")]
    store = opened()
    for one, name in zip(made, "ab", strict=True):
        assert_served(store, one, prompt_for(home, one, name))
        home.registry.remove(name)
    for seed, name in enumerate("ba"):
        home.registry.register(_root_of(home.path / "swapped" / name, name, seed))
    store.refresh()
    assert sorted(store.names()) == ["a@1", "b@1"]
    assert store.cpu.stats().resident == 8, "what is still registered was evicted"
    for one, name in zip(made, "ab", strict=True):
        assert_served(store, one, prompt_for(home, one, name))


def _root_of(root: Path, name: str, seed: int) -> Path:
    make_artifact(root, positions=72, cartridge_id=name, seed=seed)
    return root
