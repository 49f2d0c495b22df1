"""A start that finds what an earlier one knew answers as one that reads everything, whatever became of the file or the artefacts."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from homes import Clock, Home, assert_served, chunk_bytes, lent, prompt_for, read, until
from making import flip_bit, make_artifact, make_fingerprint, make_ids, make_rope, run_threads, sha256_hasher

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.cartridge import Place
from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.artifact.reading import MANIFEST
from lmcache_cartridge.library import backlog, catalog, reader
from lmcache_cartridge.library.quarantine import Quarantine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.library.snapshot import Row, Snapshot
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.settings import Settings

GRACE_S = 50.0


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep snapshots of a few cartridges too."""
    monkeypatch.setattr(catalog, "_SNAPSHOT_FROM", 1)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    yield home
    home.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(home: Home, clock: Clock) -> Callable[..., CartridgeStore]:
    """Return a function that opens a store that looks for changes only when told to."""

    def open_store(**engine: object) -> CartridgeStore:
        settings = {"reload_s": 0, "lease_s": GRACE_S, "disk_dir": home.path / "cache", "disk_bytes": 0}
        return home.open(settings=settings, clock=clock, **engine)

    return open_store


def _snapshot(home: Home) -> Path:
    (path,) = (home.path / "cache" / "index").glob("*.rows")
    return path


def _start_once(opened: Callable[..., CartridgeStore], **engine: object) -> None:
    """Start a store and end it, so that its snapshot is there for the next."""
    store = opened(**engine)
    until(store._catalog._snapshot.path.exists)
    store.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list of the manifests that are read from now on."""
    found, load = [], reading.load_manifest

    def counted(root: Path, *args: object, **kwargs: object) -> object:
        found.append(root)
        return load(root, *args, **kwargs)

    monkeypatch.setattr(reading, "load_manifest", counted)
    return found


# What it is for.


def test_a_second_start_reads_no_manifest_until_its_cartridge_is_asked_for(
    home: Home, opened: Callable, reads: list[Path]
) -> None:
    made = {name: home.make(name, seed=seed) for seed, name in enumerate("abc")}
    made["t"] = home.make("t", kind="trained", positions=64, seed=7)
    _start_once(opened)
    reads.clear()
    store = opened()
    assert store.names() == ["a@1", "b@1", "c@1", "t@1"]
    assert reads == []
    for name, one in made.items():
        assert_served(store, one, prompt_for(home, one, name))
        assert reads == [home.root(name)], "it was read more than once, or not to confirm the row"
        reads.clear()


def test_only_what_changed_since_is_read(home: Home, opened: Callable, reads: list[Path]) -> None:
    made = {name: home.make(name, seed=seed) for seed, name in enumerate("abc")}
    _start_once(opened)
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


def test_what_is_made_for_others_is_refused_with_the_same_words_and_not_read_again(
    home: Home, opened: Callable, reads: list[Path]
) -> None:
    home.make("good", seed=1)
    home.make("foreign", seed=2, layers=4)
    home.make("trained", seed=3, kind="trained", positions=64)
    home.make("tail", seed=4, kind="trained", positions=72)
    first = opened(allow_trained=False)
    until(first._catalog._snapshot.path.exists)
    first.close()
    reads.clear()
    store = opened(allow_trained=False)
    assert (store.refused(), store.names()) == (first.refused(), ["good@1"])
    assert sorted(store.refused()) == ["foreign@1", "tail@1", "trained@1"]
    assert store.claim(_digest(home, "foreign"), {}).poll().mismatch
    assert reads == [home.root("foreign")], "for its digest, by this test"
    reads.clear()
    assert sorted(opened(allow_trained=True).names()) == ["good@1", "trained@1"]
    assert len(reads) == 4, "another engine took the first one's word"


def _digest(home: Home, name: str) -> str:
    return reading.load_manifest(home.root(name)).digest


def test_what_was_damaged_is_read_at_every_start(home: Home, opened: Callable) -> None:
    home.make("good", seed=1)
    made = home.make("bad", seed=2)
    away = home.payload("bad").rename(home.path / "away")
    _start_once(opened)
    away.rename(home.payload("bad"))
    assert_served(opened(), made, prompt_for(home, made, "bad"))


def test_few_cartridges_are_read_at_every_start(
    home: Home, opened: Callable, monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    home.make()
    _start_once(opened)
    monkeypatch.setattr(catalog, "_SNAPSHOT_FROM", 2)
    reads.clear()
    opened()
    assert reads == [home.root()]


def test_manifests_of_what_is_used_stay_and_of_others_are_read_again(
    home: Home, opened: Callable, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MAX_MANIFESTS", 2)
    made = {name: home.make(name, seed=seed) for seed, name in enumerate("abc")}
    _start_once(opened)
    store = opened()
    reads.clear()
    for name in "abaca":
        assert_served(store, made[name], prompt_for(home, made[name], name))
        store.evict(made[name].manifest.digest)
    assert reads == [home.root(name) for name in "abc"]
    assert_served(store, made["b"], prompt_for(home, made["b"], "b"))
    assert reads[3:] == [home.root("b")]


def test_a_chain_of_what_was_not_read_yet_is_served(home: Home, opened: Callable) -> None:
    shape = make_fingerprint(rope=msgspec.structs.replace(make_rope(), pairing="half"))
    made = [home.make(name, positions=32, seed=seed, fingerprint=shape) for seed, name in enumerate("ab")]
    _start_once(opened, fingerprint=shape)
    tag = ".".join(one.manifest.digest for one in made)
    claim = read(opened(fingerprint=shape).claim(tag, {}))
    until(lambda: claim.poll().ready)
    assert claim.poll().chunks == 4
    claim.close()


# Another engine, another registry.


@pytest.mark.parametrize("what", ["hasher", "seed", "chunk", "model", "registry"])
def test_a_snapshot_of_another_engine_or_registry_is_not_taken(
    home: Home, opened: Callable, reads: list[Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    made = home.make(positions=64)
    _start_once(opened)
    reads.clear()
    hasher, engine = sha256_hasher(16), {}
    if what == "hasher":
        hasher = lambda ids: (h ^ 5 for h in sha256_hasher(16)(ids))  # noqa: E731
    elif what == "seed":
        hasher = lambda ids: list(sha256_hasher(16)([7] * 16 + ids))[1:]  # noqa: E731
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


def test_two_registries_that_share_a_cache_directory_have_a_snapshot_each(
    home: Home, opened: Callable, reads: list[Path], tmp_path: Path
) -> None:
    home.make()
    _start_once(opened)
    other = Home(tmp_path / "other")
    other.make("another", seed=1)
    store = other.open(settings={"reload_s": 0, "disk_dir": home.path / "cache", "disk_bytes": 0})
    until(store._catalog._snapshot.path.exists)
    other.close()
    reads.clear()
    assert opened().names() == ["doc@1"]
    assert reads == []


def test_a_registry_put_back_from_a_backup_is_followed_at_the_next_start(home: Home, opened: Callable) -> None:
    old = home.make("old", seed=1)
    backup = shutil.copytree(home.path, home.path.with_name("backup")) / "registry.sqlite"
    new = home.make("new", seed=2)
    _start_once(opened)
    for file in home.path.glob("registry.sqlite*"):
        file.unlink()
    shutil.copy(backup, home.registry.path)
    home.registry = Registry(home.registry.path)
    other = make_artifact(home.path / "other", positions=72, cartridge_id="new", seed=3)
    home.registry.register(home.path / "other")
    store = opened()
    assert sorted(store.names()) == ["new@1", "old@1"]
    assert_served(store, old, prompt_for(home, old, "old"))
    assert store.lookup(prompt_for(home, new, "new").hashes) == 0
    shutil.copytree(home.path / "other", home.root("new"), dirs_exist_ok=True)
    assert_served(store, other, prompt_for(home, other, "new"))


def test_what_was_quarantined_since_is_not_served(home: Home, opened: Callable) -> None:
    made = home.make()
    _start_once(opened)
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
@pytest.mark.parametrize("by", ["lookup", "claim"])
def test_what_was_damaged_since_is_refused_when_it_is_asked_for_as_it_would_have_been_at_the_start(
    home: Home, opened: Callable, clock: Clock, how: str, kind: str, by: str
) -> None:
    made = home.make(kind=kind, positions=80 if kind == "trained" else 72)
    other = home.make("other", seed=2)
    prompt = prompt_for(home, made)
    _start_once(opened)
    sound = shutil.copytree(home.root(), home.path / "sound")
    damage, reason = _DAMAGE[how]
    damage(home)
    store = opened()
    assert store.names() == ["doc@1", "other@1"], "nobody looked yet"
    if by == "lookup":
        assert store.lookup(prompt.hashes, prompt.tag) == 0
    else:
        claim = store.claim(made.manifest.digest, {})
        until(lambda: claim.poll().refused)
        assert reason in claim.poll().refused
        claim.close()
    assert list(store.refused()) == ["doc@1"]
    assert reason in store.refused()["doc@1"]
    assert store.names() == ["other@1"]
    assert Quarantine(Settings(home=home.path).quarantine_dir).digests() == set()
    assert store.lookup(prompt.hashes, prompt.tag) == store.resident(prompt.hashes, prompt.tag) == 0
    assert store.claim(made.manifest.digest, {}).poll().refused
    assert_served(store, other, prompt_for(home, other, "other"))
    shutil.rmtree(home.root(), ignore_errors=True)
    shutil.copytree(sound, home.root())
    store.refresh()
    assert list(store.refused()) == ["doc@1"], "it was read again at once"
    clock.now += backlog._RETRY_S
    store._catalog._backlog._rest_until = 0
    store.refresh()
    until(lambda: not store.refused())
    until(lambda: store.stats().loading == 0)  # a lookup now would share the failure of those loads
    assert_served(store, made, prompt)


def test_documents_that_begin_alike_stand_in_for_one_that_is_gone(home: Home, opened: Callable) -> None:
    made = [home.make(name, seed=1, positions=72, token_ids=make_ids(72, 1)) for name in "a"]
    twin = home.make("b", seed=1, positions=80, token_ids=make_ids(72, 1) + make_ids(8, 2))
    _start_once(opened)
    shutil.rmtree(home.root("b"))
    store, prompt = opened(), prompt_for(home, twin._replace(manifest=made[0].manifest), "a")
    assert store.lookup(prompt.hashes) == 0
    assert list(store.refused()) == ["b@1"]
    until(lambda: store.stats().loading == 0)  # a lookup now would share the failure of those loads
    assert store.lookup(prompt.hashes) == 4
    for chunk_hash in prompt.hashes[:4]:
        assert store.release(chunk_hash)


def test_what_was_promised_is_delivered_though_its_artefact_is_gone(
    home: Home, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MAX_MANIFESTS", 1)
    made, other = home.make(seed=1), home.make("other", seed=2)
    store, prompt = opened(), prompt_for(home, made)
    assert store.lookup(prompt.hashes[:2]) == 2
    assert_served(store, other, prompt_for(home, other, "other"))
    shutil.rmtree(home.root())
    assert store.lookup(prompt.hashes) == 2
    assert list(store.refused()) == ["doc@1"]
    for chunk_hash in prompt.hashes[:2]:
        for _ in range(2):
            with store.lend(chunk_hash) as loan:
                assert loan.bytes.numel()
            assert store.release(chunk_hash)
    assert store.stats().leased == 0


# A snapshot that is wrong.


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
    "an unknown refusal": lambda rows: [msgspec.structs.replace(r, refusal=("SystemExit", "bad")) for r in rows],
    "each other's places": _swap("location"),
    "each other's digests": _swap("digest"),
    "none": lambda rows: [],
    "twice": lambda rows: [*rows, *rows],
}


@pytest.mark.parametrize("how", _WRONG)
def test_rows_that_are_wrong_cost_a_miss_at_most_and_never_an_answer(
    home: Home, opened: Callable, clock: Clock, how: str
) -> None:
    made = {name: home.make(name, seed=seed) for seed, name in enumerate("ab")}
    made["t"] = home.make("t", kind="trained", positions=64, seed=3)
    prompts = {name: prompt_for(home, one, name) for name, one in made.items()}
    _start_once(opened)
    snapshot = opened()._catalog._snapshot  # which writes one with the right checksum
    snapshot.save(_WRONG[how](snapshot.load()))
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
        until(lambda: store.stats().loading == 0)
        claim.close()
    assert store.lookup(prompts["t"].hashes) == 0, "identity tokens alone were answered"
    clock.now += backlog._RETRY_S
    store._catalog._backlog._rest_until = 0
    store.refresh()
    until(lambda: len(store._catalog._backlog) == 0)
    for name, one in made.items():
        assert_served(store, one, prompts[name])
    assert store.lookup(prompts["t"].hashes) == 0
    store = opened()
    for name, one in made.items():
        assert_served(store, one, prompts[name])


def _flip(at: float) -> Callable[[Path], None]:
    return lambda path: flip_bit(path, int(at * (path.stat().st_size - 1)))


_BROKEN: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "its head only": lambda path: os.truncate(path, 44),
    "a byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a byte long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a bit of its head": _flip(0),
    "a bit of its key": lambda path: flip_bit(path, 20),
    "a bit of its checksum": lambda path: flip_bit(path, 50),
    "a bit in the middle": _flip(0.6),
    "its last bit": _flip(1),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("how", _BROKEN)
def test_a_broken_snapshot_is_as_none_and_is_made_again(
    home: Home, opened: Callable, reads: list[Path], how: str
) -> None:
    made = home.make()
    _start_once(opened)
    _BROKEN[how](_snapshot(home))
    reads.clear()
    store = opened()
    assert reads == [home.root()]
    assert_served(store, made, prompt_for(home, made))
    if how != "a directory":
        until(store._catalog._snapshot.load)
        store.close()
        reads.clear()
        opened()
        assert reads == []


def test_rows_of_another_form_are_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshot = Snapshot(tmp_path, ["facts"])
    snapshot.save([["a digest", 5, None, "prefill", "many", b""]])
    with caplog.at_level(logging.WARNING):
        assert snapshot.load() == []
    assert "is not understood" in caplog.text


def test_where_no_snapshot_can_be_written_everything_is_served_all_the_same(
    home: Home, opened: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    made = home.make()
    (home.path / "cache").write_text("not a directory")
    with caplog.at_level(logging.WARNING, "lmcache_cartridge.library.snapshot"):
        store = opened()
        assert_served(store, made, prompt_for(home, made))
        until(lambda: caplog.records)
    assert "the next start reads all artefacts" in caplog.text


# Who writes it.


def _row(number: int, count: int) -> Row:
    return Row(f"{number:064x}", f"/somewhere/{number}", None, "prefill", 256 * count, bytes(8 * count))


def test_whoever_reads_while_others_write_gets_one_whole_snapshot(tmp_path: Path) -> None:
    sizes = [100, 2000, 300]
    rows = {size: [_row(number, size % 7) for number in range(size)] for size in sizes}

    def work(number: int) -> None:
        snapshot = Snapshot(tmp_path, 1)
        for _ in range(30):
            if number < len(sizes):
                snapshot.save(rows[sizes[number]])
            elif found := snapshot.load():
                assert found == rows[len(found)]

    run_threads(6, work)
    assert [path.suffix for path in tmp_path.iterdir()] == [".rows"]


def _write_forever(directory: Path, size: int) -> None:
    snapshot = Snapshot(directory, 1)
    rows = [_row(number, size % 7) for number in range(size)]
    while True:
        snapshot.save(rows)


def test_a_writer_that_is_killed_leaves_a_whole_snapshot(tmp_path: Path) -> None:
    snapshot = Snapshot(tmp_path, 1)
    for turn in range(5):
        size = 20_000 + turn
        process = multiprocessing.get_context("fork").Process(target=_write_forever, args=(tmp_path, size))
        process.start()
        until(lambda: len(snapshot.load()) == size)  # noqa: B023
        process.kill()
        process.join()
        assert snapshot.load() == [_row(number, size % 7) for number in range(size)]
    for path in tmp_path.glob("*.partial"):
        os.utime(path, (0, 0))
    snapshot.save([])
    assert [path.suffix for path in tmp_path.iterdir()] == [".rows"]


def test_what_nobody_reads_any_more_is_removed(tmp_path: Path) -> None:
    old, used, new = (Snapshot(tmp_path, facts) for facts in ("old", "used", "new"))
    for snapshot in (old, used):
        snapshot.save([_row(1, 1)])
        os.utime(snapshot.path, (0, 0))
    used.load()
    new.save([_row(2, 1)])
    assert (old.load(), used.load(), new.load()) == ([], [_row(1, 1)], [_row(2, 1)])


def test_a_snapshot_is_written_again_once_enough_is_new(
    home: Home, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_SNAPSHOT_SHARE", 2)
    for seed, name in enumerate("abcd"):
        home.make(name, seed=seed)
    store = opened()
    until(lambda: len(store._catalog._snapshot.load()) == 4)
    for count, expected in ((1, 4), (2, 4), (3, 4), (4, 8)):
        home.make(f"more-{count}", seed=10 + count)
        store.refresh()
        until(lambda: store._catalog._backlog._round.done())
        assert len(store._catalog._snapshot.load()) == expected


# The first start.


def test_what_a_start_has_no_time_for_is_read_in_the_background_and_can_be_claimed_at_once(
    home: Home, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "_PATIENCE_S", -1.0)
    made = {name: home.make(name, seed=seed) for seed, name in enumerate("ab")}
    monkeypatch.setattr(backlog.Backlog, "read_on", lambda self, needed=False: None)
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


def test_what_was_removed_before_it_was_read_never_comes(
    home: Home, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "_PATIENCE_S", -1.0)
    read_on = backlog.Backlog.read_on
    monkeypatch.setattr(backlog.Backlog, "read_on", lambda self, needed=False: None)
    gone, stays = home.make("gone", seed=1), home.make("stays", seed=2)
    store = opened()
    home.registry.remove("gone")
    monkeypatch.setattr(backlog.Backlog, "read_on", read_on)
    store.refresh()
    until(lambda: store.names() == ["stays@1"])
    assert store.lookup(prompt_for(home, gone, "gone").hashes) == 0
    assert_served(store, stays, prompt_for(home, stays, "stays"))


@pytest.mark.parametrize("what", ["removed", "given to other content"])
def test_what_was_removed_or_replaced_while_it_was_read_is_not_served(
    home: Home, opened: Callable, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(backlog, "_PATIENCE_S", -1.0)
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
    store.refresh()
    goes_on.set()
    until(lambda: store._catalog._backlog._round.done())
    store.refresh()
    until(lambda: store._catalog._backlog._round.done())
    assert store.lookup(prompt_for(home, old).hashes) == 0
    if what == "removed":
        assert (store.names(), store._catalog._rows) == ([], {})
    else:
        assert (store.names(), list(store._catalog._rows)) == (["doc@1"], [new.manifest.digest])


def test_a_first_start_says_how_far_it_is(
    home: Home, opened: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backlog, "_PATIENCE_S", -1.0)
    monkeypatch.setattr(backlog, "_PROGRESS_S", 0.0)
    for seed, name in enumerate("abc"):
        home.make(name, seed=seed)
    with caplog.at_level(logging.INFO, "lmcache_cartridge.library.backlog"):
        store = opened()
        until(lambda: len(store.names()) == 3)
        store.close()
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "3 cartridges are still to be read; that goes on in the background"
    assert "2 of 3 cartridges are read" in said
    assert said[-1] == "3 cartridges are read"


def test_what_cannot_be_read_for_a_moment_is_tried_again_by_itself(
    home: Home, opened: Callable, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    made = home.make()
    away = home.root().rename(home.path / "away")
    with caplog.at_level(logging.WARNING, "lmcache_cartridge.library.catalog"):
        store = opened()
        for _ in range(3):
            store.refresh()
            clock.now += backlog._RETRY_S
            store._catalog._backlog._rest_until = 0
            store.refresh()
            until(lambda: store._catalog._backlog._round.done())
            assert list(store.refused()) == ["doc@1"]
    assert len(caplog.records) == 1, "it complained again and again"
    away.rename(home.root())
    clock.now += backlog._RETRY_S
    store._catalog._backlog._rest_until = 0
    store.refresh()
    until(lambda: store.names() == ["doc@1"])
    assert store.refused() == {}
    assert_served(store, made, prompt_for(home, made))


def test_an_error_that_nobody_thought_of_costs_its_own_cartridge_and_no_other(
    home: Home, opened: Callable, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    clock.now += backlog._RETRY_S
    until(lambda: (store.refresh(), len(store.names()) == 3)[1])  # it rests for as long as reading took
    assert_served(store, made["b"], prompt_for(home, made["b"], "b"))


def test_reading_again_what_cannot_be_read_rests_longer_than_it_works(
    home: Home, opened: Callable, clock: Clock
) -> None:
    home.make()
    shutil.rmtree(home.root())
    store = opened()
    unread = store._catalog._backlog
    clock.now += backlog._RETRY_S
    store.refresh()
    until(lambda: unread._round.done())
    before = unread._round
    clock.now += backlog._RETRY_S
    unread._rest_until = float("inf")
    store.refresh()
    assert unread._round is before
