"""A published library: one index object that many change and all follow, seen whole or not at all."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faulty_proxy import status
from making import files_under, make_artifact
from s3 import both
from waiting import run_threads

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.bytesource import SmallFile
from lmcache_cartridge.errors import (
    CartridgeError,
    RegistryError,
    SettingsError,
    SourceDenied,
    SourceError,
    SourceNotFound,
)
from lmcache_cartridge.library.published import INDEX, Published
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.settings import Settings, from_mapping
from lmcache_cartridge.sources import transfer
from lmcache_cartridge.sources.locks import locked
from lmcache_cartridge.sources.published import Follower, Library
from lmcache_cartridge.sources.s3 import S3Source
from lmcache_cartridge.sources.sources import Sources
from lmcache_cartridge.sources.writers import DirectoryWriter, S3Writer

EVERYWHERE = pytest.mark.parametrize("s3_kind", ["directory", "moto"])


class Writer:
    """A writer before a real one, whose `swap` can be replaced and meets others at a gate."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.swap_as = inner, inner.swap
        self.gate: threading.Barrier | None = None
        """Where publishers meet before they write first, so that every round is a race."""

    def check(self) -> None:
        self.inner.check()

    def swap(self, file: str, data: bytes, known: str | None) -> str | None:
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.wait(30)
        return self.swap_as(file, data, known)


class Reader:
    """A source that counts what it is asked for."""

    def __init__(self, source: Any) -> None:
        self._source, self.asked, self.fails = source, [], False

    def read(self, location: str, file: str, limit_bytes: int, *, known: str | None = None) -> SmallFile | None:
        self.asked.append(file)
        if self.fails:
            raise SourceError("S3 is down")
        return self._source.read(location, file, limit_bytes, known=known)

    def take(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


class Where(NamedTuple):
    """A library's place, and machines that share it."""

    location: str
    tmp_path: Path

    def machine(self, name: str, *, reader: Any = None, writes: bool = True, clock: Any = time.time) -> Published:
        """Return the library as a machine of its own has it."""
        is_s3 = self.location.startswith("s3://")
        source = S3Source() if is_s3 else None
        writer = Writer(S3Writer(self.location, source) if source else DirectoryWriter(self.location))
        path = self.tmp_path / "machines" / name / "copy.sqlite"
        return Published(path, self.location, reader or Sources(source), writer if writes else None, clock=clock)

    def settings(self, name: str, **values: Any) -> Settings:
        home = self.tmp_path / "machines" / name
        return Settings(home=home, disk_dir=home, library=self.location, **values)


@pytest.fixture
def where(s3_kind, request, tmp_path):
    if s3_kind == "directory":
        return Where(str(tmp_path / "shared"), tmp_path)
    server, bucket = request.getfixturevalue("s3_credentials"), request.getfixturevalue("bucket")
    request.getfixturevalue("monkeypatch").setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    return Where(f"s3://{bucket}/library", tmp_path)


@pytest.fixture
def s3_kind():
    """Where the library of a test lies that names no place."""
    return "directory"


def made(root: Path, name: str = "doc", version: int = 1, seed: int = 0) -> Path:
    make_artifact(root, positions=16, layers=1, kv_heads=1, cartridge_id=name, version=version, seed=seed)
    return root


def add(library: Published, root: Path, **options: Any) -> None:
    """Publish an artefact that was not stored."""
    library.register(root, library.place(reading.load_manifest(root)), **options)


def index_of(where: Where) -> dict[str, Any]:
    return json.loads(gzip.decompress((Path(where.location) / INDEX).read_bytes()))


def write_index(where: Where, index: dict[str, Any]) -> None:
    (Path(where.location) / INDEX).write_bytes(gzip.compress(json.dumps(index).encode()))


def names(registry: Registry) -> list[str]:
    return [row.name for row in registry.all()]


@EVERYWHERE
def test_what_is_published_is_seen_by_everybody_and_is_the_same_cartridge(where):
    root = made(where.tmp_path / "one")
    two = made(where.tmp_path / "two", version=2, seed=1)
    with Library(where.settings("author")) as author:
        manifest = author.publish(root, label="current")
        reader = where.machine("reader", writes=False)
        assert reader.follow()
        row = reader.find("current")
        assert (row.name, row.digest, row.bytes) == ("doc@1", manifest.digest, manifest.payload_bytes)
        assert row.location == f"{where.location}/cartridges/doc/1/{manifest.digest[:16]}"
        author.publish(two, promote=False)
        assert reader.follow()
        assert reader.find("doc").version == 1
        author.registry.promote("doc@2")
        author.registry.label("current", "doc@2", warm=True)
        author.registry.remove("doc@1")
        assert reader.follow()
        assert (reader.find("doc").version, reader.find("current").version) == (2, 2)
        assert [one.name for one in reader.warm()] == ["doc@2"]
        author.registry.unlabel("current")
        assert (names(reader), reader.follow(), reader.labels()) == (["doc@2"], True, {})
        assert (reader.follow(), reader.following().position) == (False, 7)
        with pytest.raises(RegistryError, match="for reading only"):
            reader.label("mine", "doc")
        stored = {
            file: author._source.read(reader.find("doc").location, file, 1 << 20).data for file in files_under(two)
        }
        assert stored == {file: (two / file).read_bytes() for file in files_under(two)}


@EVERYWHERE
def test_two_processes_publish_and_remove_a_thousand_times_and_lose_nothing(where):
    script = Path(__file__).parents[1] / "publishing.py"
    homes = [where.tmp_path / "machines" / f"author-{number}" for number in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, script, where.location, home, str(number), "500"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, home in enumerate(homes)
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        left = [json.loads(process.communicate(timeout=850)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
    reader = where.machine("fresh", writes=False)
    reader.follow()
    expected = sorted(left[0] + left[1])
    assert [name for name in names(reader) if name.startswith("own-")] == expected
    assert reader.following().position > 700, "the rest was done already, or there was nothing to remove"
    with Library(where.settings("checker")) as library:
        for row in reader.all():  # what a row says is there, and sound
            copy = where.tmp_path / "copies" / row.id
            copy.mkdir(parents=True)
            author = "author-1" if row.id.startswith("own-1") else "author-0"
            for file in files_under(where.tmp_path / "machines" / author / "made" / row.id):
                (copy / file).write_bytes(library._source.read(row.location, file, 1 << 20).data)
            assert list(reading.verify(copy)) and reading.load_manifest(copy).digest == row.digest


@pytest.mark.parametrize("blind", [False, True])
@EVERYWHERE
def test_of_two_changes_at_once_one_is_lost_only_without_the_condition(where, blind):
    """Both publishers have read the index before either writes it."""
    machines, gate, lock = [where.machine(str(n)) for n in range(2)], threading.Barrier(2), threading.Lock()
    roots = [made(where.tmp_path / f"r{n}", f"name-{n}", seed=n) for n in range(2)]

    def whatever_is_there(inner: Any, file: str, data: bytes) -> str | None:
        with lock:
            return inner.swap(file, data, inner._source.revision(where.location, file))

    for machine in machines:
        machine.begin()
        machine._writer.gate = gate
        if blind:
            machine._writer.swap_as = lambda file, data, known, inner=machine._writer.inner: whatever_is_there(
                inner, file, data
            )
    run_threads(2, lambda n: add(machines[n], roots[n]))
    reader = where.machine("fresh", writes=False)
    reader.follow()
    assert len(names(reader)) == (1 if blind else 2)


def test_a_publisher_deletes_nothing_that_another_just_stored(where, monkeypatch):
    """A part of the artefact is missing, and one publisher puts it right while another is about to (H8)."""
    root = made(where.tmp_path / "one")
    manifest = reading.load_manifest(root)
    one, other = (DirectoryWriter(where.location) for _ in range(2))
    target = Path(where.machine("author").place(manifest))
    one.store(root, manifest, str(target), lambda *_: None)
    (target / reading.PAYLOAD).unlink()
    holds, seen = transfer.holds, list[bool]()

    def interleaved(place: Path, wanted: Any) -> bool:
        answer = holds(place, wanted)
        if not seen:
            seen.append(answer)
            other.store(root, manifest, str(target), lambda *_: None)
            seen.append(holds(place, wanted))
            monkeypatch.setattr(shutil, "rmtree", watched)
        return answer

    def watched(path: Path, **options: Any) -> None:
        rmtree(path, **options)
        seen.append(holds(target, manifest))

    rmtree = shutil.rmtree
    monkeypatch.setattr(transfer, "holds", interleaved)
    one.store(root, manifest, str(target), lambda *_: None)
    assert seen[0] is False and all(seen[1:]) and len(seen) > 2
    assert sorted(path.name for path in target.parent.iterdir()) == [target.name], "and leaves nothing beside it"


@pytest.mark.parametrize("s3_kind", ["moto"])
def test_a_push_deletes_no_manifest_of_the_same_content(where):
    root = made(where.tmp_path / "one")
    source = S3Source()
    deleted: list[str] = []
    told: list[tuple[str, int, int]] = []
    source.delete = lambda location, file: deleted.append(file)  # type: ignore[method-assign]
    try:
        place = f"{where.location}/here"
        transfer.push(root, place, source, force=False, progress=lambda *how_far: told.append(how_far))
        size = (root / reading.PAYLOAD).stat().st_size
        assert told[-1] == (reading.PAYLOAD, size, size)
        S3Source.delete(source, place, reading.PAYLOAD)
        assert transfer.push(root, place, source, force=False, progress=lambda *_: None).changed
        assert not deleted and source.size(place, reading.PAYLOAD)
    finally:
        source.close()


def _text(data: bytes) -> Callable[[dict[str, Any]], bytes]:
    return lambda index: gzip.compress(data)


def _with(**fields: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda index: gzip.compress(json.dumps(index | fields).encode())


def _row(place: int, value: Any) -> Callable[[dict[str, Any]], bytes]:
    def spoil(index: dict[str, Any]) -> bytes:
        index["cartridges"][0][place] = value
        return _with()(index)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda index: b"", "damaged or was written by something else"),
        (lambda index: b"x" * 99, "damaged or was written by something else"),
        (lambda index: _with()(index)[:-9], "damaged or was written by something else"),
        (_text(b"\xff\xfe"), "damaged or was written by something else"),
        (_text(b"[" * 5000), "damaged or was written by something else"),
        (_text(b"{}"), "damaged or was written by something else"),
        (_with(format=3), "has format 3, this release knows 2; upgrade lmcache-cartridge"),
        (_with(format=1), "has format 1, this release knows 2; publish its cartridges again"),
        (_with(more=1), "damaged or was written by something else"),
        (_with(labels=[["x", "nobody", 1, False]]), "one with a label is not there"),
        (_with(labels=[["../x", "a", 1, False]]), "cannot be a cartridge id"),
        (_row(0, "../up"), "cannot be a cartridge id"),
        (_row(0, "b"), "twice"),
        (_row(1, 0), "damaged or was written by something else"),
        (_row(1, 10**18 * 9), "damaged or was written by something else"),
        (_row(2, "x"), "damaged or was written by something else"),
        (_row(3, "program"), "damaged or was written by something else"),
        (_row(4, -1), "damaged or was written by something else"),
    ],
)  # fmt: skip
def test_an_index_that_cannot_be_understood_stops_following_and_nothing_else(where, spoil, said):
    author, follower = where.machine("author"), where.machine("follower", writes=False)
    add(author, made(where.tmp_path / "a", "a"))
    follower.follow()
    add(author, made(where.tmp_path / "b", "b"))
    path = Path(where.location) / INDEX
    sound = path.read_bytes()
    path.write_bytes(spoil(index_of(where)))
    spoilt = path.read_bytes()
    for _ in range(2):
        with pytest.raises(RegistryError, match=said) as error:
            follower.follow()
        assert INDEX in str(error.value) and "\n" not in str(error.value)
        assert (names(follower), follower.following().problem) == (["a@1"], str(error.value))
    with pytest.raises(RegistryError, match=said):  # whoever publishes is told too, and replaces nothing
        add(where.machine("other"), made(where.tmp_path / "d", "d"))
    assert path.read_bytes() == spoilt
    path.write_bytes(sound)
    follower.follow()
    assert (names(follower), follower.following().problem) == (["a@1", "b@1"], None)


def test_ten_thousand_cartridges_are_one_request_and_so_is_a_change(where):
    count = 10_000
    author = where.machine("author")
    author.begin()
    rows = [
        [f"c{n:05d}", 1, f"{n:064x}", "prefill", 256, 1 << 20, "2026-11-23T00:00:00Z", n % 2 == 0] for n in range(count)
    ]
    write_index(where, index_of(where) | {"cartridges": rows, "labels": [["all", "c00000", 1, True]]})
    assert (Path(where.location) / INDEX).stat().st_size < 1 << 20
    reader = Reader(Sources())
    follower = where.machine("follower", reader=reader, writes=False)
    follower.follow()
    assert (len(follower.all()), follower.find("all").id) == (count, "c00000")
    before = set(follower.all())
    assert follower.current(["c00000", "c00001"]) == {"c00000@1"}
    follower.follow()
    author.remove("c00007@1")
    author.promote("c00001@1")
    follower.follow()
    assert reader.take() == [INDEX] * 3
    assert {row.name for row in before ^ set(follower.all())} == {"c00007@1", "c00001@1"}
    assert follower.current(["c00001"]) == {"c00001@1"}


def test_a_publisher_that_dies_before_its_change_left_nothing_to_see(where, monkeypatch):
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


def test_a_change_whose_answer_was_lost_is_made_once(where):
    author = where.machine("author")
    for version in (1, 2, 3):
        add(author, made(where.tmp_path / str(version), "a", version, seed=version))
    writer, other = author._writer, where.machine("other")
    meanwhile: list[Callable[[], Any]] = []

    def lose(file: str, data: bytes, known: str | None) -> str | None:
        revision = writer.inner.swap(file, data, known)
        while meanwhile:
            meanwhile.pop()()
        if revision is None:
            return None
        raise SourceError("the connection failed")

    writer.swap_as = lose
    assert author.remove("a").name == "a@3", "and not the next older one too"
    assert names(author) == ["a@1", "a@2"]
    meanwhile.append(lambda: add(other, made(where.tmp_path / "b", "b")))
    author.label("current", "a@2")
    writer.swap_as = lambda *arguments: writer.inner.swap(*arguments) and None  # botocore asked again, and was too late
    author.label("other", "a@1")
    reader = where.machine("reader")
    reader.follow()
    assert (names(reader), reader.labels()) == (["a@1", "a@2", "b@1"], {"current": "a@2", "other": "a@1"})


def test_a_write_that_fails_changes_nothing_here_either(where):
    author = where.machine("author")
    add(author, made(where.tmp_path / "a", "a"))
    for error in (SourceDenied("these credentials may not write"), SourceError("S3 is away")):

        def fail(*_: Any, error: SourceError = error) -> None:
            raise error

        author._writer.swap_as = fail
        with pytest.raises(type(error), match=str(error)):
            author.label("current", "a")
        assert (author.labels(), author.following().position) == ({}, 1)


@both
def test_where_two_writers_cannot_know_of_each_other_nobody_publishes(s3_kind, where, monkeypatch):
    """Swift answers 501 to the condition; a server that looks first and writes later lets more than one win."""
    root = made(where.tmp_path / "a", "a")
    if s3_kind == "moto":
        together = threading.Barrier(8)

        def looks_first(self: S3Source, location: str, file: str, data: bytes, known: str | None) -> str | None:
            is_first = self.revision(location, file) == known
            together.wait(30)
            if not is_first:
                return None
            self.upload(location, file, BytesIO(data))
            return self.revision(location, file)

        monkeypatch.setattr(S3Source, "swap", looks_first)
    said = "8 of 8 at once were told" if s3_kind == "moto" else "501"
    with Library(where.settings("author")) as author:
        with pytest.raises(SourceError, match=said) as error:
            author.publish(root)
        assert "does not decide between conditional writes (If-Match)" in str(error.value)
        with pytest.raises(SourceNotFound):
            author.registry.follow()
        with pytest.raises(SourceNotFound):
            author._source.size(f"{where.location}/cartridges/a/1", "manifest.json")
    # It is as good as any for cartridges by themselves.
    source = S3Source()
    try:
        transfer.push(root, f"{where.location}/mine", source, force=False, progress=lambda *_: None)
        home = where.tmp_path / "home"
        pulled = transfer.pull(
            f"{where.location}/mine", source, Registry(home / "r.sqlite"), home / "cartridges", progress=lambda *_: None
        )
        assert pulled.manifest.digest == reading.load_manifest(root).digest
    finally:
        source.close()


def test_a_library_that_was_made_anew_is_read_anew_and_one_that_is_gone_is_not_believed(where):
    follower = where.machine("follower", writes=False)
    for name in "ab":
        add(where.machine("author"), made(where.tmp_path / name, name), label=f"old-{name}")
    follower.follow()
    Path(where.location).rename(where.tmp_path / "away")
    with pytest.raises(SourceNotFound, match="nothing is published at"):
        follower.follow()
    assert names(follower) == ["a@1", "b@1"]
    author = where.machine("author")  # whose copy is of the old one
    add(author, made(where.tmp_path / "b2", "b", seed=5))
    follower.follow()
    assert (names(follower), names(author), follower.labels()) == (["b@1"], ["b@1"], {})


def test_indexes_of_one_size_written_within_one_tick_have_different_revisions(where):
    writer, revision = DirectoryWriter(where.location), None
    revisions = []
    for number in range(200):
        revision = writer.swap(INDEX, b"%04d" % number, revision)
        revisions.append(revision)
    assert None not in revisions and len(set(revisions)) == 200
    assert writer.swap(INDEX, b"late", revisions[-2]) is None
    assert writer.swap(INDEX, b"new", None) is None


def test_a_copy_that_is_damaged_is_made_anew(where):
    add(where.machine("author"), made(where.tmp_path / "a", "a"))
    follower = where.machine("follower", writes=False)
    follower.follow()
    follower.path.write_bytes(b"no database" * 1000)
    again = where.machine("follower", writes=False)
    assert (again.follow(), names(again)) == (True, ["a@1"])


def test_nobody_waits_for_a_look_that_hangs_nor_goes_back_to_what_it_read(where):
    author = where.machine("author")
    add(author, made(where.tmp_path / "a", "a"))
    read, leave = threading.Event(), threading.Event()

    class Hanging(Reader):
        def read(self, *arguments: Any, **options: Any) -> SmallFile | None:
            found = super().read(*arguments, **options)
            read.set()
            assert leave.wait(30)
            return found

    hanging = where.machine("follower", reader=Hanging(Sources()), writes=False)
    thread = threading.Thread(target=hanging.follow)
    thread.start()
    try:
        assert read.wait(30)
        add(author, made(where.tmp_path / "b", "b"))
        other = where.machine("follower", writes=False)
        assert (other.follow(), names(other)) == (True, ["a@1", "b@1"])
    finally:
        leave.set()
        thread.join(30)
    assert names(other) == ["a@1", "b@1"]


@pytest.mark.parametrize("s3_kind", ["moto"])
def test_a_conditional_put_says_who_was_first(where, proxy):
    source = S3Source(endpoint_url=proxy.endpoint)
    try:
        first = source.swap(where.location, "a", b"first", None)
        assert first == source.revision(where.location, "a") != source.swap(where.location, "a", b"second", first)
        assert source.swap(where.location, "a", b"third", first) is None is source.swap(where.location, "a", b"x", None)
        assert source.read(where.location, "a", 99).data == b"second"
        proxy.faults = [status(409, "ConditionalRequestConflict")]
        assert source.swap(where.location, "b", b"x", None) is None
        # It was stored, the answer was lost, and botocore asks again: the caller has to look whose it is.
        proxy.faults = [status(500)]
        assert source.swap(where.location, "c", b"mine", None) is None
        assert source.read(where.location, "c", 99).data == b"mine"
        proxy.always = status(403, "AccessDenied")
        with pytest.raises(SourceDenied):
            source.swap(where.location, "d", b"x", None)
    finally:
        source.close()


@pytest.mark.parametrize("wrong", ["s3://bucket", "shared/fleet", "", "s3://bucket/../x", "http://x/y", "/a\0b"])
def test_what_is_no_library_is_refused(wrong):
    with pytest.raises(SettingsError, match="library"):
        from_mapping({"library": wrong})


@pytest.mark.parametrize("s3_kind", ["moto"])
def test_a_server_that_knows_nothing_yet_does_not_start_without_its_library(where):
    nowhere = where.settings("server").model_copy(update={"library": "s3://no-such-bucket/library"})
    with pytest.raises(SourceNotFound, match="NoSuchBucket"):
        Follower(nowhere)


def test_a_publisher_that_was_stopped_in_a_directory_holds_up_others_for_a_while_only(where, monkeypatch):
    monkeypatch.setattr("lmcache_cartridge.sources.writers._WAIT_S", 0.05)
    author = where.machine("author")
    add(author, made(where.tmp_path / "a", "a"))
    with locked(Path(where.location) / "library.lock"), pytest.raises(SourceError, match="held it for 0.05 s"):
        author.label("current", "a")
    author.label("current", "a")


@pytest.mark.parametrize("seed", range(3))
def test_random_changes_by_three_machines_are_what_one_registry_would_have_done(where, seed):
    """Each machine looks now and then; what is refused is refused by a plain registry too, and all copies come out alike."""
    chance = random.Random(seed)
    machines = [where.machine(str(n)) for n in range(3)]
    plain = Registry(where.tmp_path / "plain.sqlite")
    roots = [
        made(where.tmp_path / f"root-{name}{version}-{n}", name, version, seed=n)
        for name in "abc" for version in (1, 2, 3) for n in range(2)
    ]  # fmt: skip

    def change(registry: Registry, kind: str, root: Path, label: str, name: str) -> str:
        try:
            if kind == "add":
                place = machines[0].place(reading.load_manifest(root))
                registry.register(root, place, promote=len(label) > 1, label=label)
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
        assert [row._replace(registered="") for row in machine.all()] == [
            row._replace(registered="") for row in plain.all()
        ]
        assert (machine.labels(), machine.current("abc")) == (plain.labels(), plain.current("abc"))
        assert machine.warm() == machines[0].warm()


@EVERYWHERE
def test_what_is_withdrawn_is_gone_with_its_labels_and_files_and_nothing_of_others(where):
    """Also from where it was stored and never listed, since its publisher was killed."""
    root, other = made(where.tmp_path / "one", name="one"), made(where.tmp_path / "other", name="one", seed=1)
    with Library(where.settings("author")) as author:
        manifest = author.publish(root, label="current")
        row, unlisted = author.registry.find("one"), reading.load_manifest(other)
        author.registry.label("again", "one@1")
        author._writer.store(other, unlisted, author.registry.place(unlisted), lambda *_: None)
        author.withdraw(unlisted)
        assert set(author.registry.labels()) == {"current", "again"}
        assert author._source.read(row.location, reading.MANIFEST, 1 << 20).data == manifest.encode()
        reader = where.machine("reader", writes=False)
        reader.follow()
        for _ in range(2):
            author.withdraw(row)
            for location in (row.location, author.registry.place(unlisted)):
                for file in files_under(root):
                    with pytest.raises(SourceNotFound):
                        author._source.size(location, file)
        reader.follow()
        assert (names(reader), reader.labels()) == ([], {})
    if where.location.startswith("/"):
        assert {path.name for path in Path(where.location).iterdir()} <= {INDEX, "library.lock"}


def test_who_may_not_write_in_a_directory_hears_so_before_anything_is_published(where):
    Path(where.location).write_text("no directory")
    with Library(where.settings("author")) as author, pytest.raises(SourceError, match="shared"):
        author.registry.begin()
