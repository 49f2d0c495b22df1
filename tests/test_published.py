"""A published library: one order of changes for all, seen whole or not at all, followed at the cost of what changed."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from faulty_proxy import FaultyProxy, status
from making import files_under, make_artifact
from waiting import Clock, run_threads, until

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.bytesource import SmallFile
from lmcache_cartridge.errors import (
    CartridgeError,
    CartridgeExists,
    CartridgeNotFound,
    RegistryError,
    SettingsError,
    SourceDenied,
    SourceError,
    SourceNotFound,
)
from lmcache_cartridge.library import log
from lmcache_cartridge.library.changes import Added, Labelled
from lmcache_cartridge.library.looks import Looks
from lmcache_cartridge.library.published import Published
from lmcache_cartridge.library.registry import Registry, RegistryEntry
from lmcache_cartridge.settings import Settings, from_mapping
from lmcache_cartridge.sources.published import Follower, Library
from lmcache_cartridge.sources.s3 import S3Source
from lmcache_cartridge.sources.shelf import DirectoryShelf, S3Shelf
from lmcache_cartridge.sources.sources import Sources

EVERYWHERE = pytest.mark.parametrize("s3_kind", ["directory", "swift", "moto"])
ROUNDS = 50
DIGEST = "ab" * 32


class Flight:
    """Conditional PUTs under way; `wait` returns when those that began before have ended."""

    def __init__(self) -> None:
        self._count, self._changed = 0, threading.Condition()
        self.gate: threading.Barrier | None = None
        """Where publishers meet before they write, so that every round is a race."""

    def create(self, create: Callable[[str, bytes], bool], file: str, data: bytes) -> bool:
        if self.gate is not None and file != log.record_file(0):
            self.gate.wait(30)
        with self._changed:
            self._count += 1
        try:
            return create(file, data)
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def wait(self, _: float = 0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._count, 30)


class Shelf:
    """A shelf before a real one, with its writes counted by a flight, and `settle` waiting for them alone."""

    def __init__(self, inner: Any, flight: Flight) -> None:
        self.inner, self._flight = inner, flight
        self.created: list[str] = []

    def create(self, file: str, data: bytes) -> bool:
        self.created.append(file)
        return self._flight.create(self.inner.create, file, data)

    def replace(self, file: str, data: bytes) -> None:
        self.inner.replace(file, data)

    def remove(self, file: str) -> None:
        self.inner.remove(file)

    def settle(self) -> bool:
        return self.inner.settle()


class Reader:
    """A source that counts what it is asked for; with `may_list` off it denies what is not there, as AWS does."""

    def __init__(self, source: Any, *, may_list: bool = True) -> None:
        self._source, self.may_list, self.asked, self.fails = source, may_list, [], False

    def read(self, location: str, file: str, limit_bytes: int, *, known: str | None = None) -> SmallFile | None:
        self.asked.append(file)
        if self.fails:
            raise SourceError("S3 is down")
        try:
            return self._source.read(location, file, limit_bytes, known=known)
        except SourceNotFound as error:
            if self.may_list:
                raise
            raise SourceDenied(str(error)) from None

    def take(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


class Where(NamedTuple):
    """A library's place, and machines that share it."""

    location: str
    tmp_path: Path
    flight: Flight

    def machine(self, name: str, *, reader: Any = None, writes: bool = True, clock: Any = time.time) -> Published:
        """Return the library as a machine of its own has it."""
        is_s3 = self.location.startswith("s3://")
        source = S3Source() if is_s3 else None
        inner = S3Shelf(self.location, source, pause=self.flight.wait) if source else DirectoryShelf(self.location)
        shelf = Shelf(inner, self.flight)
        path = self.tmp_path / "machines" / name / "copy.sqlite"
        return Published(path, self.location, reader or Sources(source), shelf if writes else None, clock=clock)

    def settings(self, name: str, **values: Any) -> Settings:
        home = self.tmp_path / "machines" / name
        return Settings(home=home, disk_dir=home, library=self.location, **values)


@pytest.fixture
def where(s3_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    if s3_kind == "directory":
        return Where(str(tmp_path / "shared"), tmp_path, Flight())
    server, bucket = request.getfixturevalue("s3_credentials"), request.getfixturevalue("bucket")
    request.getfixturevalue("monkeypatch").setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    return Where(f"s3://{bucket}/library", tmp_path, Flight())


@pytest.fixture
def s3_kind() -> str:
    """Where the library of a test lies that names no place."""
    return "directory"


def made(root: Path, name: str = "doc", version: int = 1, seed: int = 0) -> Path:
    make_artifact(root, positions=16, layers=1, kv_heads=1, cartridge_id=name, version=version, seed=seed)
    return root


def add(library: Published, root: Path, **options: Any) -> None:
    """Write the record of an artefact that was not stored."""
    manifest = reading.load_manifest(root)
    file = log.place(manifest.id, manifest.version, manifest.digest)
    library.register(root, f"{library.location}/{file}", **options)


def names(registry: Registry) -> list[str]:
    return [row.name for row in registry.all()]


@EVERYWHERE
def test_what_is_published_is_seen_by_everybody_and_is_the_same_cartridge(where: Where) -> None:
    root = made(where.tmp_path / "one")
    two = made(where.tmp_path / "two", version=2, seed=1)
    with Library(where.settings("author")) as author:
        author._shelf._pause = where.flight.wait
        manifest = author.publish(root, label="current")
        reader = where.machine("reader", writes=False)
        assert reader.follow() == 1
        row = reader.find("current")
        assert (row.name, row.digest, row.bytes) == ("doc@1", manifest.digest, manifest.payload_bytes)
        assert row.location.startswith(f"{where.location}/cartridges/doc/1/")
        author.publish(two, promote=False)
        assert reader.follow() == 1
        assert reader.find("doc").version == 1
        author.registry.promote("doc@2")
        author.registry.label("current", "doc@2", warm=True)
        author.registry.remove("doc@1")
        assert reader.follow() == 3
        assert (reader.find("doc").version, reader.find("current").version) == (2, 2)
        assert [one.name for one in reader.warm()] == ["doc@2"]
        author.registry.unlabel("current")
        assert (names(reader), reader.follow(), reader.labels()) == (["doc@2"], 1, {})
        assert reader.following().position == 6
        with pytest.raises(RegistryError, match="for reading only"):
            reader.label("mine", "doc")
        stored = {
            file: author._source.read(reader.find("doc").location, file, 1 << 20).data for file in files_under(two)
        }
        assert stored == {file: (two / file).read_bytes() for file in files_under(two)}


@EVERYWHERE
def test_of_two_publishers_of_one_version_one_wins_and_the_other_is_told(where: Where) -> None:
    machines = [where.machine(str(number)) for number in range(2)]
    roots = [[made(where.tmp_path / f"{n}-{v}", version=v + 1, seed=n) for n in range(2)] for v in range(ROUNDS)]

    add(machines[0], made(where.tmp_path / "first", "first"))
    winners: list[list[int]] = []
    for pair in roots:
        won: list[int] = []
        for machine in machines:
            machine.follow()
        where.flight.gate = threading.Barrier(2)

        def publish(number: int, pair: list[Path] = pair, won: list[int] = won) -> None:
            try:
                add(machines[number], pair[number])
            except CartridgeExists as error:
                assert "other content" in str(error)
            else:
                won.append(number)

        run_threads(2, publish)
        where.flight.gate = None
        winners.append(won)
    assert Counter(map(len, winners)) == {1: ROUNDS}
    reader = where.machine("reader")
    assert reader.follow() == ROUNDS + 1
    for version, (won,) in enumerate(winners, 1):
        assert reader.find(f"doc@{version}").digest == reading.load_manifest(roots[version - 1][won]).digest


def test_without_the_condition_both_would_think_that_they_won(where: Where) -> None:
    machines = [where.machine(str(number)) for number in range(2)]
    add(machines[0], made(where.tmp_path / "first", "first"))
    machines[1].follow()
    for machine in machines:
        create, inner = machine._shelf.inner.create, machine._shelf.inner
        machine._shelf.inner.create = lambda file, data, create=create, inner=inner: (
            create(file, data) if file == log.record_file(0) else inner.replace(file, data) or True
        )
    where.flight.gate = threading.Barrier(2)
    run_threads(2, lambda n: add(machines[n], made(where.tmp_path / f"{n}", seed=n)))
    assert {machine.find("doc@1").digest for machine in machines} == {
        reading.load_manifest(where.tmp_path / f"{n}").digest for n in range(2)
    }


def test_whoever_is_overwritten_before_it_looks_again_is_told(where: Where) -> None:
    """A server that lets both PUTs win, as Swift does: the later one stays."""
    one, two = where.machine("one"), where.machine("two")
    add(one, made(where.tmp_path / "first", "first"))
    two.follow()
    mine, other = (made(where.tmp_path / f"{n}", seed=n) for n in range(2))

    def settle() -> bool:
        one._shelf.settle = lambda: False
        (Path(where.location) / log.record_file(2)).unlink()
        add(two, other)
        return True

    one._shelf.settle = settle
    with pytest.raises(CartridgeExists):
        add(one, mine)
    assert one.find("doc").digest == two.find("doc").digest == reading.load_manifest(other).digest


def test_a_record_that_may_yet_be_overwritten_is_not_followed_by_another(where: Where) -> None:
    """A third publisher reads the record of the one who loses before that of the one who wins is there."""
    one, third, reader = where.machine("one"), where.machine("third"), where.machine("reader")
    add(one, made(where.tmp_path / "first", "first"))
    record, written = Path(where.location) / log.record_file(2), dict[str, bytes]()
    for name in ("lost", "won"):
        record.unlink(missing_ok=True)
        add(where.machine(name), made(where.tmp_path / name, name))
        written[name] = record.read_bytes()
    record.write_bytes(written["lost"])

    def settle() -> bool:
        record.write_bytes(written["won"])
        return True

    third._shelf.settle = settle
    add(third, made(where.tmp_path / "third", "third"))
    reader.follow()
    assert (names(reader), reader.following().problem) == (["first@1", "third@1", "won@1"], None)


def test_a_record_that_was_overwritten_after_it_was_read_is_forgotten(where: Where) -> None:
    """As servers do that let two publishers write at once: the first record of both is seen before the second's."""
    add(where.machine("loser"), made(where.tmp_path / "lost", "lost"))
    first = Path(where.location) / log.record_file(1)
    lost = first.read_bytes()
    first.unlink()
    winner = where.machine("winner")
    for name in "ab":
        add(winner, made(where.tmp_path / name, name))
    won = first.read_bytes()
    first.write_bytes(lost)

    class Overwritten(Reader):
        def read(self, location: str, file: str, limit_bytes: int, *, known: str | None = None) -> SmallFile | None:
            if file == log.record_file(2) and file not in self.asked:
                first.write_bytes(won)
            return super().read(location, file, limit_bytes, known=known)

    follower = where.machine("follower", reader=Overwritten(Sources()), writes=False)
    assert (follower.follow(), names(follower), follower.following().problem) == (3, ["a@1", "b@1"], None)


@EVERYWHERE
def test_publishers_of_different_names_all_land_in_one_order(where: Where) -> None:
    machines = [where.machine(str(number)) for number in range(4)]
    roots = [made(where.tmp_path / f"r{n}", f"name-{n}", seed=n) for n in range(12)]
    run_threads(4, lambda n: [add(machines[n], root) for root in roots[n::4]], timeout_s=120)
    readers = [where.machine(f"reader-{n}") for n in range(2)]
    for reader in (*machines, *readers):
        reader.follow()
        assert sorted(names(reader)) == sorted(f"name-{n}@1" for n in range(12))
        assert reader.following().position == 12


def test_a_look_costs_one_request_and_one_more_for_each_change(where: Where) -> None:
    author, reader = where.machine("author"), Reader(Sources())
    follower = where.machine("follower", reader=reader, writes=False)
    add(author, made(where.tmp_path / "a", "a"))
    assert (follower.follow(), reader.take()) == (1, [log.POINTER, *map(log.record_file, (0, 1, 2))])
    assert (follower.follow(), reader.take()) == (0, [log.record_file(2)])
    for name in "bcd":
        add(author, made(where.tmp_path / name, name))
    assert (follower.follow(), reader.take()) == (3, [log.record_file(n) for n in (2, 3, 4, 5)])
    for _ in range(100):
        follower.follow()
    rechecks = reader.asked.count(log.record_file(4))
    assert (len(reader.take()), rechecks) == (101, 1)


def test_who_may_only_read_and_not_list_follows(where: Where) -> None:
    author = where.machine("author")
    reader = Reader(Sources(), may_list=False)
    follower = where.machine("follower", reader=reader, writes=False)
    add(author, made(where.tmp_path / "a", "a"))
    assert (follower.follow(), names(follower)) == (1, ["a@1"])
    add(author, made(where.tmp_path / "b", "b"))
    assert (follower.follow(), follower.follow(), names(follower)) == (1, 0, ["a@1", "b@1"])
    reader.take()
    assert (follower.follow(), len(reader.take())) == (0, 2)
    Path(where.location).rename(where.tmp_path / "away")
    with pytest.raises(SourceDenied):
        follower.follow()
    assert names(follower) == ["a@1", "b@1"]


def test_a_restart_goes_on_where_it_was(where: Where) -> None:
    author = where.machine("author")
    for name in "ab":
        add(author, made(where.tmp_path / name, name))
    where.machine("follower", writes=False).follow()
    add(author, made(where.tmp_path / "c", "c"))
    reader = Reader(Sources())
    again = where.machine("follower", reader=reader, writes=False)
    assert names(again) == ["a@1", "b@1"]
    assert (again.follow(), names(again)) == (1, ["a@1", "b@1", "c@1"])
    assert reader.take() == [log.record_file(n) for n in (2, 3, 4)], "record 2 is compared with what was followed"


def test_what_is_known_is_served_on_while_s3_is_away(where: Where) -> None:
    reader, clock = Reader(Sources()), Clock()
    follower = where.machine("follower", reader=reader, writes=False, clock=clock)
    add(where.machine("author"), made(where.tmp_path / "a", "a"))
    follower.follow()
    reader.fails, clock.now = True, clock.now + 5
    with pytest.raises(SourceError, match="down"):
        follower.follow()
    state = follower.following()
    assert (names(follower), *state[1:]) == (["a@1"], 1, clock.now - 5, "S3 is down")
    reader.fails = False
    follower.follow()
    assert follower.following()[1:] == (1, clock.now, None)


def _text(data: bytes) -> Callable[[dict[str, Any]], bytes]:
    return lambda record: data


def _with(**fields: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda record: json.dumps(record | fields).encode()


def _change(**fields: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda record: json.dumps(record | {"changes": [record["changes"][0] | fields]}).encode()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_text(b""), "damaged or was written by something else"),
        (_text(b"\xff\xfe"), "damaged or was written by something else"),
        (_text(b"[" * 5000), "damaged or was written by something else"),
        (_text(b"{}"), "no part of a library"),
        (_text(b"[1]"), "no part of a library"),
        (_with(format=2), "upgrade lmcache-cartridge"),
        (_with(more=1), "damaged or was written by something else"),
        (_with(previous="00" * 32), "does not follow the record before it"),
        (_with(changes=[{"change": "explode"}]), "damaged or was written by something else"),
        (_with(changes=[{"change": "label", "label": "x", "id": "nobody", "version": 1}]), "contradicts"),
        (_with(changes=[{"change": "remove", "id": "a", "version": 10**18 * 9}]), "is no version"),
        (_change(location="/etc"), "cannot be"),
        (_change(location="../../other/cartridges"), "cannot be"),
        (_change(id="../up"), "damaged or was written by something else"),
        (_change(digest="x"), "cannot be"),
        (_change(kind="program"), "cannot be"),
        (_change(positions=-1), "cannot be"),
        (_change(version=0), "is no version"),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_understood_stops_following_and_nothing_else(
    where: Where, spoil: Callable[[dict[str, Any]], bytes], said: str
) -> None:
    author, follower = where.machine("author"), where.machine("follower", writes=False)
    for name in "abc":
        add(author, made(where.tmp_path / name, name))
        if name == "a":
            follower.follow()
    path = Path(where.location) / log.record_file(2)
    sound = path.read_bytes()
    path.write_bytes(spoil(json.loads(sound)))
    for _ in range(2):
        with pytest.raises(RegistryError, match=said) as error:
            follower.follow()
        assert log.record_file(2) in str(error.value)
        assert (names(follower), follower.following().problem) == (["a@1"], str(error.value))
    with pytest.raises(RegistryError, match=said):  # whoever publishes is told too, and adds nothing
        add(where.machine("other"), made(where.tmp_path / "d", "d"))
    assert not (Path(where.location) / log.record_file(4)).exists()
    path.write_bytes(sound)
    follower.follow()
    assert (names(follower), follower.following().problem) == (["a@1", "b@1", "c@1"], None)


def test_a_snapshot_lets_a_fresh_server_begin_with_few_requests(where: Where) -> None:
    author = where.machine("author")
    for name in range(66):
        author.label(f"label-{name}", "a") if name else add(author, made(where.tmp_path / "a", "a"))
    reader = Reader(Sources())
    fresh = where.machine("fresh", reader=reader, writes=False)
    assert (fresh.follow(), reader.take()) == (
        2, [log.POINTER, log.snapshot_file(64), *map(log.record_file, (64, 65, 66, 67))]
    )  # fmt: skip
    assert (fresh.labels(), fresh.all()) == (author.labels(), author.all())
    assert fresh.current(["a"]) == {"a@1"}
    for name in range(130):
        author.label("moving", "a", warm=name % 2 == 0)
    kept = sorted(path.name for path in (Path(where.location) / "snapshot").iterdir())
    assert kept == [Path(log.snapshot_file(number)).name for number in (128, 192)]


def test_ten_thousand_cartridges_cost_a_fresh_server_four_requests_and_then_one_a_look(where: Where) -> None:
    count = 10_000
    rows = [
        log.Row(
            RegistryEntry(f"c{n:05d}", 1, f"{n:064x}", "prefill", 256, 1 << 20, log.place(f"c{n:05d}", 1, f"{n:064x}"),
                          "2026-11-23T00:00:00Z"),
            n % 2 == 0,
        )
        for n in range(count)
    ]  # fmt: skip
    shelf = DirectoryShelf(where.location)
    shelf.create(log.record_file(0), log.GENESIS)
    author, reader = where.machine("author"), Reader(Sources())
    record = log.Record(1, log.mark(log.GENESIS), "n", "2026-11-23T00:00:00Z", ())
    shelf.create(log.record_file(1), log.encode(record))
    snapshot = log.encode_snapshot(1, log.mark(log.encode(record)), rows, [Labelled("all", "c00000", 1, True)])
    shelf.replace(log.snapshot_file(1), snapshot)
    shelf.replace(log.POINTER, log.encode_pointer(1))
    follower = where.machine("follower", reader=reader, writes=False)
    follower.follow()
    assert len(reader.take()) == 4
    assert (len(follower.all()), follower.find("all").id) == (count, "c00000")
    sequence = follower.changes().sequence
    assert follower.current(["c00000", "c00001"]) == {"c00000@1"}
    for _ in range(3):
        follower.follow()
    assert len(reader.take()) == 3
    author.remove("c00007@1")
    author.promote("c00001@1")
    follower.follow()
    assert len(reader.take()) == 3
    changes = follower.changes(sequence)
    assert (changes.gone, [row.name for row in changes.present], changes.whole) == (
        ["c00007@1"], ["c00001@1"], False
    )  # fmt: skip


def test_a_publisher_that_dies_before_its_record_left_nothing_to_see(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = made(where.tmp_path / "one")
    add(where.machine("other"), made(where.tmp_path / "a", "a"))
    reader = where.machine("reader", writes=False)
    with Library(where.settings("author")) as author:
        with monkeypatch.context() as dying:
            dying.setattr(Published, "register", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                author.publish(root)
        reader.follow()
        assert names(reader) == ["a@1"]
        stored = {path: path.stat().st_ino for path in (Path(where.location) / "cartridges").rglob("*")}
        assert any(path.name == reading.PAYLOAD for path in stored)
        author.publish(root)
        assert stored == {path: path.stat().st_ino for path in (Path(where.location) / "cartridges").rglob("*")}
    reader.follow()
    assert names(reader) == ["a@1", "doc@1"]


def test_a_record_whose_answer_was_lost_is_there_once(where: Where) -> None:
    author = where.machine("author")
    add(author, made(where.tmp_path / "a", "a"))
    create = author._shelf.inner.create

    def lose(file: str, data: bytes) -> bool:
        create(file, data)
        if file != log.record_file(0):
            raise SourceError("the connection failed")
        return False

    settled: list[str] = []
    author._shelf.inner.create = lose
    author._shelf.settle = lambda: settled.append("waited")
    add(author, made(where.tmp_path / "b", "b"))
    assert (names(author), settled) == (["a@1", "b@1"], ["waited"]), "it may come late, in the place of another"
    # A retry of the request that was carried out the first time is told that somebody was first: it was us.
    author._shelf.inner.create = lambda file, data: create(file, data) and False
    add(author, made(where.tmp_path / "c", "c"))
    author._shelf.inner.create = create
    reader = where.machine("reader")
    assert (reader.follow(), names(reader)) == (3, ["a@1", "b@1", "c@1"])


def test_a_write_that_fails_changes_nothing_here_either(where: Where) -> None:
    author = where.machine("author")
    add(author, made(where.tmp_path / "a", "a"))
    create = author._shelf.inner.create

    def fail(file: str, data: bytes) -> bool:
        if file != log.record_file(0):
            raise SourceDenied("these credentials may not write")
        return create(file, data)

    author._shelf.inner.create = fail
    with pytest.raises(SourceDenied):
        author.label("current", "a")
    assert (author.labels(), author.following().position) == ({}, 1)


def test_a_server_that_overwrites_all_the_same_is_refused(where: Where) -> None:
    author = where.machine("author")
    author._shelf.inner.create = lambda file, data: author._shelf.inner.replace(file, data) or True
    with pytest.raises(SourceError, match="overwrites an object although"):
        add(author, made(where.tmp_path / "a", "a"))
    assert not (Path(where.location) / log.record_file(1)).exists()


def test_the_same_again_is_no_record(where: Where) -> None:
    author, root = where.machine("author"), made(where.tmp_path / "a", "a")
    for _ in range(3):
        add(author, root)
    assert author.following().position == 1


def test_a_change_that_cannot_be_is_refused_before_it_is_written(where: Where) -> None:
    one, two = where.machine("one"), where.machine("two")
    add(one, made(where.tmp_path / "a", "a"), label="current")
    with pytest.raises(RegistryError, match="has the label current"):
        two.remove("a@1")
    with pytest.raises(CartridgeExists, match="is a label"):
        add(two, made(where.tmp_path / "current", "current"))
    with pytest.raises(CartridgeExists, match="is the id of a cartridge"):
        two.label("a", "a@1")
    with pytest.raises(CartridgeNotFound):
        two.promote("b@1")
    with pytest.raises(RegistryError, match="cannot be"):
        two.register(where.tmp_path / "a", "/somewhere/else")
    assert two.following().position == 1


def test_a_label_is_pointed_at_what_a_name_means_now(where: Where) -> None:
    one, two = where.machine("one"), where.machine("two")
    add(one, made(where.tmp_path / "a1", "a"))
    two.follow()
    add(one, made(where.tmp_path / "a2", "a", version=2, seed=1))
    assert two.label("current", "a").name == "a@2"


def test_a_library_that_was_made_anew_is_read_anew_and_one_that_is_gone_is_not_believed(where: Where) -> None:
    follower = where.machine("follower", writes=False)
    for name in "ab":
        add(where.machine("author"), made(where.tmp_path / name, name), label=f"old-{name}")
    follower.follow()
    Path(where.location).rename(where.tmp_path / "away")
    fresh = where.machine("follower", writes=False)  # as after a restart
    with pytest.raises(SourceNotFound, match="nothing is published at"):
        fresh.follow()
    assert names(fresh) == ["a@1", "b@1"]
    author = where.machine("author-2")
    add(author, made(where.tmp_path / "b2", "b", seed=5))
    add(author, made(where.tmp_path / "c", "c"))
    sequence = fresh.changes().sequence
    fresh.follow()
    assert (names(fresh), fresh.labels()) == (["b@1", "c@1"], {})
    assert fresh.changes(sequence).gone == ["a@1"]
    # One that never restarts finds out by the hash of the record before, or after some looks.
    add(author, made(where.tmp_path / "d", "d"))
    follower.follow()
    assert names(follower) == ["b@1", "c@1", "d@1"]


def test_a_copy_that_is_damaged_is_made_anew(where: Where) -> None:
    add(where.machine("author"), made(where.tmp_path / "a", "a"))
    follower = where.machine("follower", writes=False)
    follower.follow()
    follower.path.write_bytes(b"no database" * 1000)
    again = where.machine("follower", writes=False)
    assert (again.follow(), names(again)) == (1, ["a@1"])


def test_processes_that_share_a_copy_look_once(where: Where) -> None:
    add(where.machine("author"), made(where.tmp_path / "a", "a"))
    clock, reader = Clock(), Reader(Sources())
    machines = [where.machine("follower", reader=reader, writes=False, clock=clock) for _ in range(3)]
    for machine in machines:
        machine.follow(max_age_s=0.9)
    assert (len(reader.take()), names(machines[2])) == (4, ["a@1"])
    clock.now += 1
    for machine in machines:
        machine.follow(max_age_s=0.9)
    assert len(reader.take()) == 1


def test_nobody_waits_for_a_look_that_hangs(where: Where) -> None:
    add(where.machine("author"), made(where.tmp_path / "a", "a"))
    entered, leave = threading.Event(), threading.Event()

    class Hanging(Reader):
        def read(self, *arguments: Any, **options: Any) -> SmallFile | None:
            entered.set()
            assert leave.wait(30)
            return super().read(*arguments, **options)

    hanging = where.machine("follower", reader=Hanging(Sources()), writes=False)
    thread = threading.Thread(target=hanging.follow)
    thread.start()
    try:
        assert entered.wait(30)
        other = where.machine("follower", writes=False)
        assert (other.follow(wait=False), names(other)) == (0, [])
    finally:
        leave.set()
        thread.join(30)
    assert names(other) == ["a@1"]


def test_a_follower_sees_changes_until_it_is_closed(where: Where) -> None:
    author = where.machine("author")
    follower = Follower(where.settings("server", reload_s=0.01))
    copy = Registry(where.settings("server").registry_path, read_only=True)
    try:
        state = follower.latest
        assert (state.position, state.problem and "nothing is published" in state.problem) == (0, True)
        add(author, made(where.tmp_path / "a", "a"), label="current")
        until(lambda: copy.labels() == {"current": "a@1"})
        author.unlabel("current")
        author.remove("a@1")
        until(lambda: not copy.all() and follower.latest.problem is None)
    finally:
        follower.close()
    add(author, made(where.tmp_path / "b", "b"))
    assert copy.all() == []


@pytest.mark.parametrize("s3_kind", ["swift", "moto"])
def test_a_conditional_put_says_who_was_first(where: Where, proxy: FaultyProxy) -> None:
    source = S3Source(endpoint_url=proxy.endpoint)
    try:
        assert [source.create(where.location, "a", data) for data in (b"first", b"second")] == [True, False]
        assert source.read(where.location, "a", 99).data == b"first"
        proxy.faults = [status(409, "ConditionalRequestConflict")]
        assert source.create(where.location, "b", b"x") is False
        # It was stored, the answer was lost, and botocore asks again: the caller has to look whose it is.
        proxy.faults = [status(500)]
        assert source.create(where.location, "c", b"mine") is False
        assert source.read(where.location, "c", 99).data == b"mine"
        proxy.always = status(403, "AccessDenied")
        with pytest.raises(SourceDenied):
            source.create(where.location, "d", b"x")
    finally:
        source.close()


@pytest.mark.parametrize(
    ("endpoint", "settles"),
    [
        ("https://s3.amazonaws.com", False),
        ("https://s3.eu-west-1.amazonaws.com", False),
        ("https://s3.cn-north-1.amazonaws.com.cn", False),
        ("https://s3.amazonaws.com.example.org", True),
        ("https://minio:9000", True),
        ("http://127.0.0.1:9000", True),
    ],
)
def test_who_does_not_promise_to_decide_in_one_step_is_given_a_second(endpoint: str, settles: bool) -> None:
    waited: list[float] = []
    source = S3Source(endpoint_url=endpoint, region="us-east-1")
    shelf = S3Shelf("s3://bucket/library", source, pause=waited.append)
    try:
        assert (shelf.settle(), waited) == (settles, [1.0] if settles else [])
    finally:
        shelf.close()


@pytest.mark.parametrize(("took_s", "least_s"), [(0.3, 3.0), (3.5, 30.0)])
def test_a_server_that_is_slow_is_given_longer_but_not_for_ever(took_s: float, least_s: float) -> None:
    waited: list[float] = []
    source = S3Source(endpoint_url="http://127.0.0.1:9000", region="us-east-1")
    source.create = lambda *_: time.sleep(took_s) or True  # type: ignore[method-assign]
    shelf = S3Shelf("s3://bucket/library", source, pause=waited.append)
    try:
        assert shelf.create("file", b"") and shelf.settle()
    finally:
        shelf.close()
    assert least_s <= waited[0] <= 30.0


@pytest.mark.parametrize(
    ("written", "read"),
    [("s3://bucket/a/b/", "s3://bucket/a/b"), ("/shared/fleet/", "/shared/fleet"), ("/shared/../fleet", "/fleet")],
)
def test_a_library_has_one_name(written: str, read: str) -> None:
    assert Settings(library=written).library == read


@pytest.mark.parametrize("wrong", ["s3://bucket", "shared/fleet", "", "s3://bucket/../x", "http://x/y", "/a\0b"])
def test_what_is_no_library_is_refused(wrong: str) -> None:
    with pytest.raises(SettingsError, match="library"):
        from_mapping({"library": wrong})


@pytest.mark.parametrize("s3_kind", ["moto"])
def test_a_server_that_knows_nothing_yet_does_not_start_without_its_library(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = where.settings("server").model_copy(update={"library": "s3://no-such-bucket/library"})
    with pytest.raises(SourceNotFound, match="NoSuchBucket"):
        Follower(nowhere)


def test_changes_are_plain_values_that_say_where_an_artefact_lies_in_the_library() -> None:
    added = Added("doc", 3, DIGEST, "prefill", 256, 1 << 20, log.place("doc", 3, DIGEST))
    record = log.Record(1, "00" * 32, "n", "2026-11-23T00:00:00Z", (added, Labelled("current", "doc", 3)))
    assert log.decode(log.encode(record), "x") == record
    assert json.loads(log.encode(record))["changes"][0] == {
        "change": "publish", "id": "doc", "version": 3, "digest": DIGEST, "kind": "prefill", "positions": 256,
        "bytes": 1 << 20, "location": f"cartridges/doc/3/{DIGEST[:16]}", "promote": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "spoil", [lambda d: d[:-9], lambda d: b"", lambda d: b"x" * 99, lambda d: d[:40] + b"\0" + d[41:]]
)
def test_a_snapshot_that_is_damaged_says_so(spoil: Callable[[bytes], bytes]) -> None:
    sound = log.encode_snapshot(3, "00" * 32, [], [Labelled("current", "doc", 3)])
    assert log.decode_snapshot(sound, "x").position == 3
    with pytest.raises(CartridgeError, match="damaged"):
        log.decode_snapshot(spoil(sound), "x")


def test_damage_anywhere_in_a_record_is_noticed_or_changes_nothing_that_matters() -> None:
    added = Added("doc", 3, DIGEST, "prefill", 256, 1 << 20, log.place("doc", 3, DIGEST))
    data = log.encode(log.Record(1, "00" * 32, "n", "2026-11-23T00:00:00Z", (added,)))
    for place in range(len(data)):
        for bit in (1, 4, 32):
            damaged = data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]
            try:
                found = log.decode(damaged, "x")
            except RegistryError:
                continue
            assert msgspec.structs.asdict(found.changes[0])["id"], "it is a record still; its successor's hash tells"


def test_a_publisher_killed_after_its_record_has_published(where: Where) -> None:
    author = where.machine("author")
    add(author, made(where.tmp_path / "a", "a"))
    create = author._shelf.inner.create

    def die(file: str, data: bytes) -> bool:
        if create(file, data) and file != log.record_file(0):
            raise KeyboardInterrupt
        return False

    author._shelf.inner.create = die
    root = made(where.tmp_path / "b", "b")
    with pytest.raises(KeyboardInterrupt):
        add(author, root)
    assert names(author) == ["a@1"], "its own copy has not heard of it"
    again = where.machine("author")
    add(again, root)
    assert (names(again), again.following().position) == (["a@1", "b@1"], 2)


def test_a_process_that_holds_the_copy_is_not_waited_for_for_ever(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_cartridge.library.looks._WAIT_S", 0.05)
    author = where.machine("author")
    with Looks(author.path.with_suffix(".lock")).take(), pytest.raises(RegistryError, match="has held it for 0.05 s"):
        author.follow()


@pytest.mark.parametrize("seed", range(3))
def test_random_changes_by_three_machines_are_what_one_registry_would_have_done(where: Where, seed: int) -> None:
    """Each machine looks now and then; what is refused is refused by a plain registry too, and all copies come out alike."""
    chance = random.Random(seed)
    machines = [where.machine(str(n)) for n in range(3)]
    plain = Registry(where.tmp_path / "plain.sqlite")
    roots = [
        made(where.tmp_path / f"root-{name}{version}-{n}", name, version, seed=n)
        for name in "abc" for version in (1, 2, 3) for n in range(2)
    ]  # fmt: skip
    add(machines[0], roots[0])
    first = reading.load_manifest(roots[0])
    plain.register(roots[0], f"{where.location}/{log.place(first.id, first.version, first.digest)}")

    def change(registry: Registry, kind: str, root: Path, label: str, name: str) -> str:
        try:
            if kind == "add":
                manifest = reading.load_manifest(root)
                file = log.place(manifest.id, manifest.version, manifest.digest)
                registry.register(root, f"{where.location}/{file}", promote=len(label) > 1, label=label)
            elif kind == "label":
                registry.label(label, name, warm=True)
            elif kind == "unlabel":
                registry.unlabel(label)
            else:
                getattr(registry, kind)(name)
        except CartridgeError as error:
            return type(error).__name__
        return "done"

    outcomes: Counter[str] = Counter()
    for _ in range(100):
        kind = chance.choice(["add", "add", "add", "label", "unlabel", "promote", "remove"])
        root, label = chance.choice(roots), chance.choice(["x", "yy", "a"])
        name = f"{chance.choice('abc')}@{chance.randint(1, 3)}"
        expected = change(plain, kind, root, label, name)
        assert change(chance.choice(machines), kind, root, label, name) == expected
        outcomes[expected] += 1
    assert outcomes["done"] > 20 < outcomes.total() - outcomes["done"]
    machines.append(where.machine("fresh", writes=False))
    for machine in machines:
        machine.follow()
        assert [row[:7] for row in machine.all()] == [row[:7] for row in plain.all()]
        assert (machine.labels(), machine.current("abc")) == (plain.labels(), plain.current("abc"))
        assert machine.warm() == machines[0].warm()
