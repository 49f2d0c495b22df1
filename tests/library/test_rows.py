"""A start with the rows of an earlier one answers as one that reads everything, whatever became of file and artefacts."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec
import pytest
from homes import Home, assert_served, catalog_of, chunk_bytes, lent, prompt_for, read
from making import flip_bit, make_artifact, make_fingerprint, make_ids, make_rope, sha256_hasher
from waiting import until

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.cartridge import Place
from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.artifact.reading import MANIFEST
from lmcache_cartridge.library import entries
from lmcache_cartridge.library.quarantine import Quarantine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.library.rows import Row
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.settings import Settings


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Keep the rows of a few cartridges too."""
    monkeypatch.setattr(entries, "_KEPT_FROM", 1)


@pytest.fixture
def opened(home, opened):
    """Return the function that opens a store, which keeps its rows under the home."""
    return partial(opened, {"disk_dir": home.path / "cache", "disk_bytes": 0})


def _kept(home: Home) -> list[Path]:
    return list((home.path / "cache" / "index").glob("*.rows"))


def _recalled(path: Path) -> list[Row]:
    return msgspec.msgpack.decode(path.read_bytes(), type=list[Row])


def _start_once(home: Home, opened: Callable[..., CartridgeStore], **engine: object) -> CartridgeStore:
    """Start a store and end it, so that its rows are there for the next."""
    store = opened(**engine)
    until(lambda: _kept(home))
    store.close()
    return store


@pytest.fixture
def reads(monkeypatch):
    """Return the list of the manifests that are read from now on."""
    found, load = [], reading.load_manifest

    def counted(root: Path, *args: object, **kwargs: object) -> object:
        found.append(root)
        return load(root, *args, **kwargs)

    monkeypatch.setattr(reading, "load_manifest", counted)
    return found


# What it is for.


def test_only_what_changed_since_is_read(home, opened, reads):
    made = {name: home.make(name, seed=seed) for seed, name in enumerate("abc")}
    _start_once(home, opened)
    home.registry.remove("a")
    home.registry.register(shutil.copytree(home.root("b"), home.path / "elsewhere"))
    made["d"] = home.make("d", seed=9)
    reads.clear()
    store = opened()
    assert sorted(store.names()) == ["b@1", "c@1", "d@1"]
    assert sorted(reads) == sorted([home.path / "elsewhere", home.root("d")])
    shutil.rmtree(home.root("b"))
    for name in "cd":
        assert_served(store, made[name], prompt_for(home, made[name], name))
    assert store.lookup(prompt_for(home, made["a"], "a").hashes) == 0
    assert store.lookup(list(sha256_hasher(16)(make_ids(72, 1)))) == 4


def test_what_is_made_for_others_is_refused_at_every_start(home, opened):
    home.make("good", seed=1)
    home.make("foreign", seed=2, layers=4)
    home.make("trained", seed=3, kind="trained", positions=64)
    first = _start_once(home, opened, allow_trained=False)
    store = opened(allow_trained=False)
    assert (store.refused(), store.names()) == (first.refused(), ["good@1"])
    assert sorted(store.refused()) == ["foreign@1", "trained@1"]
    assert store.claim(reading.load_manifest(home.root("foreign")).digest, {}).poll().mismatch
    assert sorted(opened(allow_trained=True).names()) == ["good@1", "trained@1"], "another engine took its word"


def test_manifests_of_what_is_used_stay_and_of_others_are_read_again(home, opened, reads, monkeypatch):
    monkeypatch.setattr(entries, "_MAX_MANIFESTS", 2)
    made = {name: home.make(name, seed=seed) for seed, name in enumerate("abc")}
    _start_once(home, opened)
    store = opened()
    reads.clear()
    for name in "abaca":
        assert_served(store, made[name], prompt_for(home, made[name], name))
        store.evict(made[name].manifest.digest)
    assert reads == [home.root(name) for name in "abc"]
    assert_served(store, made["b"], prompt_for(home, made["b"], "b"))
    assert reads[3:] == [home.root("b")]


def test_a_chain_of_what_was_not_read_yet_is_served(home, opened):
    shape = make_fingerprint(rope=msgspec.structs.replace(make_rope(), pairing="half"))
    made = [home.make(name, positions=32, seed=seed, fingerprint=shape) for seed, name in enumerate("ab")]
    _start_once(home, opened, fingerprint=shape)
    tag = ".".join(one.manifest.digest for one in made)
    claim = read(opened(fingerprint=shape).claim(tag, {}))
    until(lambda: claim.poll().ready)
    assert claim.poll().chunks == 4
    claim.close()


# Another engine, another registry.


@pytest.mark.parametrize("what", ["hasher", "seed", "chunk", "model", "registry"])
def test_rows_of_another_engine_or_registry_are_not_taken(home, opened, reads, monkeypatch, what):
    made = home.make(positions=64)
    _start_once(home, opened)
    reads.clear()
    hasher, engine = sha256_hasher(16), {}
    if what == "hasher":
        hasher = lambda ids: (h ^ 5 for h in sha256_hasher(16)(ids))  # noqa: E731
    elif what == "seed":
        hasher = lambda ids: list(sha256_hasher(16)([7] * 16 + list(ids)))[1:]  # noqa: E731
    elif what == "chunk":
        hasher, engine = sha256_hasher(32), {"chunk_tokens": 32}
    elif what == "model":
        engine = {"fingerprint": msgspec.structs.replace(make_fingerprint(), weights_digest=None)}
    else:
        monkeypatch.setattr(home, "path", home.path.rename(home.path.with_name("moved")))
        home.registry = Registry(home.path / "registry.sqlite")
        home.registry.register(home.root())
        reads.clear()
    monkeypatch.setattr("making.sha256_hasher", lambda chunk_tokens: hasher)
    store = opened(**engine)
    assert reads == [home.root()]
    ids = reading.load_token_ids(made.manifest, home.root()).tolist()
    assert store.lookup(list(hasher(ids))) == 64 // engine.get("chunk_tokens", 16)


def test_what_was_quarantined_since_is_not_served(home, opened):
    made = home.make()
    _start_once(home, opened)
    Quarantine(Settings(home=home.path).quarantine_dir).put(made.manifest.digest, "corrupt")
    store = opened()
    assert (store.names(), store.refused()) == ([], {"doc@1": "quarantined: corrupt"})
    assert store.lookup(prompt_for(home, made).hashes) == 0


# Artefacts that are not what they were.


def _replace(home: Home) -> None:
    ids = make_ids(72, 0)
    make_artifact(home.path / "other", positions=72, seed=5, token_ids=ids)
    shutil.rmtree(home.root())
    shutil.move(home.path / "other", home.root())


_DAMAGE: dict[str, tuple[Callable[[Home], None], str]] = {
    "replaced": (_replace, "was replaced after it was registered"),
    "gone": (lambda home: shutil.rmtree(home.root()), "is this the directory of a cartridge"),
    "no manifest": (lambda home: (home.root() / MANIFEST).unlink(), "is this the directory of a cartridge"),
    "another manifest": (lambda home: (home.root() / MANIFEST).write_text("{}"), "not a cartridge manifest"),
    "payload cut short": (lambda home: os.truncate(home.payload(), 5000), "has 5000 bytes"),
    "other token ids": (lambda home: flip_bit(home.root() / "token_ids.npy", 200), "do not have the digest"),
}


@pytest.mark.parametrize("how", _DAMAGE)
@pytest.mark.parametrize("kind", ["prefill", "trained"])
def test_what_was_damaged_since_is_refused_when_it_is_asked_for_as_it_would_have_been_at_the_start(
    home, opened, how, kind
):
    made = home.make(kind=kind, positions=80 if kind == "trained" else 72)
    other = home.make("other", seed=2)
    prompt = prompt_for(home, made)
    _start_once(home, opened)
    damage, reason = _DAMAGE[how]
    damage(home)
    store = opened()
    assert store.names() == ["doc@1", "other@1"], "nobody looked yet"
    assert store.lookup(prompt.hashes, prompt.tag) == 0
    assert list(store.refused()) == ["doc@1"]
    assert reason in store.refused()["doc@1"]
    assert store.names() == ["other@1"]
    assert Quarantine(Settings(home=home.path).quarantine_dir).notes() == {}
    assert store.lookup(prompt.hashes, prompt.tag) == store.resident(prompt.hashes, prompt.tag) == 0
    assert reason in store.claim(made.manifest.digest, {}).poll().refused
    assert_served(store, other, prompt_for(home, other, "other"))


# Rows that are wrong.


def _swap(field: str) -> Callable[[list[Row]], list[Row]]:
    def change(rows: list[Row]) -> list[Row]:
        one, other, *rest = rows
        return [
            msgspec.structs.replace(one, **{field: getattr(other, field)}),
            msgspec.structs.replace(other, **{field: getattr(one, field)}),
            *rest,
        ]

    return change


_WRONG: dict[str, Callable[[list[Row]], list[Row]]] = {
    "hashes of each other": _swap("hashes"),
    "hashes of nothing": lambda rows: [msgspec.structs.replace(r, hashes=bytes(len(r.hashes))) for r in rows],
    "hashes in another order": lambda rows: [
        msgspec.structs.replace(r, hashes=r.hashes[8:16] + r.hashes[:8] + r.hashes[16:]) for r in rows
    ],
    "another length": lambda rows: [msgspec.structs.replace(r, positions=79) for r in rows],
    "another kind": lambda rows: [
        msgspec.structs.replace(r, kind="prefill" if r.kind == "trained" else "trained") for r in rows
    ],
    "tokens only": lambda rows: [msgspec.structs.replace(r, kind="tokens", hashes=b"") for r in rows],
    "fewer hashes": lambda rows: [msgspec.structs.replace(r, hashes=r.hashes[:-8]) for r in rows],
    "odd hashes": lambda rows: [msgspec.structs.replace(r, hashes=r.hashes[:-3]) for r in rows],
    "each other's places": _swap("location"),
    "each other's digests": _swap("digest"),
    "none": lambda rows: [],
}


@pytest.mark.parametrize("how", _WRONG)
def test_rows_that_are_wrong_cost_a_miss_at_most_and_never_an_answer(home, opened, clock, how):
    made = {name: home.make(name, seed=seed) for seed, name in enumerate("ab")}
    made["t"] = home.make("t", kind="trained", positions=64, seed=3)
    prompts = {name: prompt_for(home, one, name) for name, one in made.items()}
    _start_once(home, opened)
    (file,) = _kept(home)
    rows = _recalled(file)
    assert len(rows) == 3
    file.write_bytes(msgspec.msgpack.encode(_WRONG[how](rows)))
    store = opened()
    for name, prompt in prompts.items():
        for tag in {None, prompt.tag}:
            found = store.lookup(prompt.hashes, tag)
            assert found in (0, prompt.whole)
            for chunk, chunk_hash in enumerate(prompt.hashes[:found]):
                assert lent(store, chunk_hash, tag) == chunk_bytes(made[name], chunk)
                assert store.release(chunk_hash, tag)
        claim = store.claim(made[name].manifest.digest, {})
        claim.poll()
        until(lambda: store.cpu.stats().loading == 0)
        claim.close()
    assert store.lookup(prompts["t"].hashes) == 0, "identity tokens alone were answered"
    clock.now += entries._RETRY_S
    store.refresh()
    until(lambda: len(store.names()) == len(made))
    for name, one in made.items():
        assert_served(store, one, prompts[name])
    assert store.lookup(prompts["t"].hashes) == 0
    store = opened()
    for name, one in made.items():
        assert_served(store, one, prompts[name])


def _flip(at: float) -> Callable[[Path], None]:
    return lambda path: flip_bit(path, int(at * (path.stat().st_size - 1)))


_BROKEN: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "its head only": lambda path: os.truncate(path, 9),
    "a byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "something else": lambda path: path.write_bytes(b"no rows" * 999),
    "a bit of its head": _flip(0),
    "rows of another form": lambda path: path.write_bytes(msgspec.msgpack.encode([(1, 2)])),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("how", _BROKEN)
def test_a_broken_file_is_as_none_and_is_made_again(home, opened, reads, how, caplog):
    made = home.make()
    _start_once(home, opened)
    (file,) = _kept(home)
    _BROKEN[how](file)
    reads.clear()
    store = opened()
    assert_served(store, made, prompt_for(home, made))
    assert reads == [home.root()]
    store.close()
    assert len([record for record in caplog.records if record.name.endswith("library.rows")]) == (how == "a directory")
    if how != "a directory":
        reads.clear()
        opened()
        assert reads == []


@pytest.mark.parametrize("where", ["index", "cache"])
def test_where_no_rows_can_be_written_everything_is_served_all_the_same_and_that_is_said_once(
    home, opened, caplog, where
):
    made = home.make()
    path = home.path / "cache" / ("index" if where == "index" else "")
    path.parent.mkdir(exist_ok=True)
    path.write_text("not a directory")
    with caplog.at_level(logging.WARNING, "lmcache_cartridge.library.rows"):
        store = opened()
        assert_served(store, made, prompt_for(home, made))
        home.make("more", seed=1)
        store.refresh()
        until(lambda: caplog.records)
        store.close()
    assert ["cannot be written" in record.getMessage() for record in caplog.records] == [True]


def test_what_nobody_reads_any_more_is_removed(home, opened):
    made = home.make()
    old = home.path / "cache" / "index" / "old.rows"
    old.parent.mkdir(parents=True)
    old.touch()
    os.utime(old, (0, 0))
    _start_once(home, opened)
    assert not old.exists()
    (file,) = _kept(home)
    os.utime(file, (0, 0))
    opened()
    assert file.stat().st_mtime > 0
    assert [row.digest for row in _recalled(file)] == [made.manifest.digest]


# The first start.


def test_what_a_start_has_no_time_for_is_read_in_the_background_and_can_be_claimed_at_once(home, opened, monkeypatch):
    monkeypatch.setattr(entries, "_AT_ONCE_S", -1.0)
    made = {name: home.make(name, seed=seed) for seed, name in enumerate("ab")}
    monkeypatch.setattr(entries.Entries, "_begin", lambda self, request: Future())
    store = opened()
    assert (store.names(), store.refused()) == ([], {})
    digest = made["b"].manifest.digest
    claim = read(store.claim(digest, {digest: Place(home.root("b"), str(home.root("b")))}))
    until(lambda: claim.poll().ready)
    claim.close()
    monkeypatch.undo()
    store.refresh()
    until(lambda: sorted(store.names()) == ["a@1", "b@1"])
    for name, one in made.items():
        assert_served(store, one, prompt_for(home, one, name))


@pytest.mark.parametrize("what", ["removed", "given to other content"])
def test_what_was_removed_or_replaced_while_it_was_read_is_not_served(home, opened, monkeypatch, what):
    monkeypatch.setattr(entries, "_AT_ONCE_S", -1.0)
    read, goes_on, load = threading.Event(), threading.Event(), reading.load_manifest

    def slow(root: Path, *args: object, **kwargs: object) -> object:
        manifest = load(root, *args, **kwargs)
        if threading.current_thread().name.startswith("cartridge-manifest"):
            read.set()
            assert goes_on.wait(20)
        return manifest

    old = home.make(seed=1)
    monkeypatch.setattr(reading, "load_manifest", slow)
    store = opened()
    assert read.wait(20)
    home.registry.remove("doc")
    if what != "removed":
        new = make_artifact(home.path / "new", positions=72, seed=2)
        home.registry.register(home.path / "new")
    prompt = prompt_for(home, old)
    store.refresh()
    goes_on.set()
    until(lambda: what == "removed" or store.refresh() or store.names())
    store.close()  # the first read is over
    assert store.lookup(prompt.hashes) == 0
    assert not catalog_of(store).knows(old.manifest.digest)
    assert store.names() == ([] if what == "removed" else ["doc@1"])
    assert what == "removed" or catalog_of(store).knows(new.manifest.digest)


def test_an_error_that_nobody_thought_of_costs_its_own_cartridge_and_no_other(home, opened, clock, monkeypatch):
    made = {name: home.make(name, seed=seed) for seed, name in enumerate("abc")}
    load = reading.load_token_ids

    def broken(manifest: Manifest, root: Path) -> object:
        if root == home.root("b"):
            raise ZeroDivisionError("a bug")
        return load(manifest, root)

    monkeypatch.setattr(reading, "load_token_ids", broken)
    store = opened()
    assert sorted(store.names()) == ["a@1", "c@1"]
    for name in "ac":
        assert_served(store, made[name], prompt_for(home, made[name], name))
    monkeypatch.undo()
    clock.now += entries._RETRY_S
    until(lambda: (store.refresh(), len(store.names()) == 3)[1])  # it rests for as long as reading took
    assert_served(store, made["b"], prompt_for(home, made["b"], "b"))


def test_what_cannot_be_read_is_tried_again_less_and_less_often_with_one_complaint(home, opened, clock, reads, caplog):
    made = home.make()
    away = home.root().rename(home.path / "away")
    reads.clear()
    first, longest = entries._RETRY_S, entries._LONGEST_RETRY_S
    with caplog.at_level(logging.WARNING, "lmcache_cartridge.library.entries"):
        store = opened()
        assert reads == [home.root()]
        waits = ((first - 1, 1), (1, 2), (first, 2), (first, 3), (longest, 4), (longest, 5), (longest - 1, 5))
        for after_s, tries in waits:
            clock.now += after_s
            store.refresh()
            until(lambda tries=tries: len(reads) == tries and not catalog_of(store)._reads._running)
            assert list(store.refused()) == ["doc@1"]
    assert len(caplog.records) == 1
    away.rename(home.root())
    clock.now += 1
    store.refresh()
    until(lambda: store.names() == ["doc@1"])
    assert store.refused() == {}
    assert_served(store, made, prompt_for(home, made))
