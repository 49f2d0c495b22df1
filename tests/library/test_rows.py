"""A start with the rows of an earlier one answers as one that reads everything, whatever became of file and artefacts."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from homes import Home, catalog_of, chunk_bytes, claimed, lent
from making import flip_bit, make_artifact, make_fingerprint, make_ids, sha256_hasher
from waiting import until

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.cartridge import Place
from lmcache_cartridge.library import entries
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.library.rows import Row
from lmcache_cartridge.memory.store import CartridgeStore


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Keep the rows of a few cartridges too."""
    monkeypatch.setattr(entries, "_KEPT_FROM", 1)


@pytest.fixture
def opened(home, opened):
    """Return the function that opens a store, which keeps its rows under the home."""

    def open_store(where: Path = home.path, **engine: Any) -> CartridgeStore:
        return opened({"home": where, "disk_dir": home.path / "cache", "disk_bytes": 0}, **engine)

    return open_store


def _start_once(home: Home, opened: Callable[..., CartridgeStore], **engine: object) -> Path:
    """Start a store and end it, and return the file of its rows, which is there for the next."""
    store, directory = opened(**engine), home.path / "cache" / "index"
    until(lambda: list(directory.glob("*.rows")))
    store.close()
    (file,) = directory.glob("*.rows")
    return file


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


def _make(home: Home, names: str) -> None:
    for seed, name in enumerate(names):
        home.make(name, seed=seed)


def test_only_what_changed_since_is_read(home, opened, reads):
    _make(home, "abc")
    _start_once(home, opened)
    home.registry.remove("a")
    home.registry.register(shutil.copytree(home.root("b"), home.path / "elsewhere"))
    home.make("d", seed=9)
    reads.clear()
    store = opened()
    assert sorted(store.names()) == ["b@1", "c@1", "d@1"]
    assert sorted(reads) == sorted([home.path / "elsewhere", home.root("d")])
    shutil.rmtree(home.root("b"))
    home.check_served(store, *"cd")
    assert store.lookup(home.prompt("a").hashes) == 0
    assert store.lookup(list(sha256_hasher(16)(make_ids(72, 1)))) == 4


# Another engine, another registry.


@pytest.mark.parametrize("what", ["hasher", "chunk", "model", "registry"])
def test_rows_of_another_engine_or_registry_are_not_taken(home, opened, reads, monkeypatch, what):
    made, chunk, engine = home.make(positions=64), 32 if what == "chunk" else 16, {}
    _start_once(home, opened)
    hasher = sha256_hasher(chunk)
    if what == "hasher":
        hasher = lambda ids: (h ^ 5 for h in sha256_hasher(16)(ids))  # noqa: E731
    elif what == "model":
        engine = {"fingerprint": msgspec.structs.replace(make_fingerprint(), weights_digest=None)}
    elif what == "registry":
        engine = {"where": home.path / "other"}
        Registry(home.path / "other" / "registry.sqlite").register(home.root())
    monkeypatch.setattr("making.sha256_hasher", lambda chunk_tokens: hasher)
    reads.clear()
    store = opened(chunk_tokens=chunk, **engine)
    assert reads == [home.root()]
    assert store.lookup(list(hasher(make_ids(64, 0)))) == made.manifest.positions // chunk


# Artefacts that are not what they were.


def _replace(home: Home) -> None:
    shutil.rmtree(home.root())
    make_artifact(home.root(), positions=72, seed=5, token_ids=make_ids(72, 0))


_DAMAGE: dict[str, tuple[Callable[[Home], None], str]] = {
    "replaced": (_replace, "was replaced after it was registered"),
    "gone": (lambda home: shutil.rmtree(home.root()), "is this the directory of a cartridge"),
    "payload cut short": (lambda home: os.truncate(home.payload(), 5000), "has 5000 bytes"),
    "other token ids": (lambda home: flip_bit(home.root() / "token_ids.npy", 200), "do not have the digest"),
}


@pytest.mark.parametrize("how", _DAMAGE)
@pytest.mark.parametrize("kind", ["prefill", "trained"])
def test_what_was_damaged_since_is_refused_when_it_is_asked_for_as_it_would_have_been_at_the_start(
    home, opened, how, kind
):
    made = home.make(kind=kind, positions=80 if kind == "trained" else 72)
    home.make("other", seed=2)
    prompt = home.prompt()
    _start_once(home, opened)
    damage, reason = _DAMAGE[how]
    damage(home)
    store = opened()
    assert store.names() == ["doc@1", "other@1"], "nobody looked yet"
    assert store.lookup(prompt.hashes, prompt.tag) == 0
    assert list(store.refused()) == ["doc@1"]
    assert reason in store.refused()["doc@1"]
    assert store.names() == ["other@1"]
    assert not home.quarantine.follow()
    assert store.lookup(prompt.hashes, prompt.tag) == store.resident(prompt.hashes, prompt.tag) == 0
    assert reason in store.claim(made.digest, {}).poll().refused
    home.check_served(store, "other")


# Rows that are wrong.


def _recalled(path: Path) -> list[Row]:
    return msgspec.msgpack.decode(path.read_bytes(), type=list[Row])


def _each(change: Callable[[Row], dict[str, Any]]) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [msgspec.structs.replace(row, **change(row)) for row in rows]


def _swap(field: str) -> Callable[[list[Row]], list[Row]]:
    def change(rows: list[Row]) -> list[Row]:
        values = [getattr(row, field) for row in (rows[1], rows[0], *rows[2:])]
        return [msgspec.structs.replace(row, **{field: value}) for row, value in zip(rows, values, strict=True)]

    return change


_WRONG: dict[str, Callable[[list[Row]], list[Row]]] = {
    "hashes of each other": _swap("hashes"),
    "hashes in another order": _each(lambda row: {"hashes": row.hashes[8:16] + row.hashes[:8] + row.hashes[16:]}),
    "another kind": _each(lambda row: {"kind": "prefill" if row.kind == "trained" else "trained"}),
    "tokens only": _each(lambda row: {"kind": "tokens", "hashes": b""}),
    "odd hashes": _each(lambda row: {"hashes": row.hashes[:-3]}),
    "each other's places": _swap("location"),
}


@pytest.mark.parametrize("how", _WRONG)
def test_rows_that_are_wrong_cost_a_miss_at_most_and_never_an_answer(home, opened, clock, how):
    _make(home, "ab")
    home.make("t", kind="trained", positions=64, seed=3)
    prompts = {name: home.prompt(name) for name, one in home.made.items()}
    file = _start_once(home, opened)
    file.write_bytes(msgspec.msgpack.encode(_WRONG[how](_recalled(file))))
    store = opened()
    for name, prompt in prompts.items():
        for tag in {None, prompt.tag}:
            found = store.lookup(prompt.hashes, tag)
            assert found in (0, prompt.whole)
            for chunk, chunk_hash in enumerate(prompt.hashes[:found]):
                assert lent(store, chunk_hash, tag) == chunk_bytes(home.made[name], chunk)
                assert store.release(chunk_hash, tag)
        claim = store.claim(home.made[name].digest, {})
        claim.poll()
        until(lambda: store.cpu.stats().loading == 0)
        claim.close()
    assert store.lookup(prompts["t"].hashes) == 0, "identity tokens alone were answered"
    clock.now += entries._RETRY_S
    store.refresh()
    until(lambda: len(store.names()) == 3)
    for each in (store, opened()):
        home.check_served(each, *"abt")
        assert each.lookup(prompts["t"].hashes) == 0


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.truncate(path, path.stat().st_size - 1)])
def test_a_broken_file_is_as_none_and_is_made_again(home, opened, reads, spoil):
    home.make()
    spoil(_start_once(home, opened))
    for expected in ([home.root()], []):
        reads.clear()
        store = opened()
        assert reads == expected
        home.check_served(store)
        store.close()


# The first start.


def test_what_a_start_has_no_time_for_is_read_in_the_background_and_can_be_claimed_at_once(home, opened, monkeypatch):
    monkeypatch.setattr(entries, "_AT_ONCE_S", -1.0)
    _make(home, "ab")
    monkeypatch.setattr(entries.Entries, "_begin", lambda self, one: Future())
    store = opened()
    assert store.names() == []
    digest = home.made["b"].digest
    claim = claimed(store, digest, {digest: Place(home.root("b"), str(home.root("b")))})
    claim.close()
    monkeypatch.undo()
    store.refresh()
    until(lambda: sorted(store.names()) == ["a@1", "b@1"])
    home.check_served(store, *"ab")


def test_what_was_given_other_content_while_it_was_read_is_not_served(home, opened, monkeypatch):
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
    make_artifact(home.path / "new", positions=72, seed=2)
    home.registry.register(home.path / "new")
    prompt = home.prompt()
    store.refresh()
    goes_on.set()
    until(lambda: store.refresh() or store.names())
    store.close()  # the first read is over
    assert store.lookup(prompt.hashes) == 0
    assert not catalog_of(store).knows(old.digest)
    assert store.names() == ["doc@1"]
