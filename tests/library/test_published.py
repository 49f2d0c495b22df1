"""A published library: one index object that many change and all follow, seen whole or not at all."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import Cli
from faulty_proxy import status
from homes import CHUNK, STILL, Prompt, assert_served
from making import flip_bit, make_artifact, make_ids, sha256_hasher
from s3 import both

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.errors import (
    CorruptChunk,
    RegistryError,
    SettingsError,
    SourceError,
    SourceNotFound,
)
from lmcache_cartridge.library.published import INDEX, Published
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.settings import Settings, from_mapping
from lmcache_cartridge.sources import transfer
from lmcache_cartridge.sources.locks import locked
from lmcache_cartridge.sources.published import Library
from lmcache_cartridge.sources.s3 import S3Source
from lmcache_cartridge.sources.sources import Sources
from lmcache_cartridge.sources.writers import DirectoryWriter, S3Writer

EVERYWHERE = pytest.mark.parametrize("s3_kind", ["directory", "moto"])


class Where(NamedTuple):
    """A library's place, and machines that share it."""

    location: str
    tmp_path: Path

    def machine(self, name: str, *, writes: bool = True) -> Published:
        """Return the library as a machine of its own has it."""
        source = S3Source() if self.location.startswith("s3://") else None
        writer = S3Writer(self.location, source) if source else DirectoryWriter(self.location)
        path = self.tmp_path / "machines" / name / "copy.sqlite"
        return Published(path, self.location, Sources(source), writer if writes else None)

    def settings(self, name: str) -> Settings:
        home = self.tmp_path / "machines" / name
        return Settings(home=home, disk_dir=home, library=self.location)

    @property
    def index(self) -> Path:
        return Path(self.location) / INDEX


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
    return json.loads(gzip.decompress(where.index.read_bytes()))


def packed(index: Any) -> bytes:
    return gzip.compress(json.dumps(index).encode(), mtime=0)


def names(registry: Registry) -> list[str]:
    return [row.name for row in registry.all()]


@EVERYWHERE
def test_a_cartridge_that_is_not_sound_is_not_published(where):
    root = made(where.tmp_path / "one")
    flip_bit(root / reading.PAYLOAD, (root / reading.PAYLOAD).stat().st_size - 1)
    with Library(where.settings("author")) as author:
        with pytest.raises(CorruptChunk, match="chunk 0"):
            author.publish(root)
        assert author.registry.all() == []


@EVERYWHERE
def test_two_processes_publish_and_remove_a_thousand_times_and_lose_nothing(where):
    script = Path(__file__).parents[1] / "publishing.py"
    homes = [where.tmp_path / "machines" / f"author-{number}" for number in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, script, where.location, home, str(number), "500"], stdout=subprocess.PIPE, text=True
        )
        for number, home in enumerate(homes)
    ]
    try:
        left = [json.loads(process.communicate(timeout=850)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    reader = where.machine("fresh", writes=False)
    reader.follow()
    assert [name for name in names(reader) if name.startswith("own-")] == sorted(left[0] + left[1])
    assert reader.following.position > 700, "the rest was done already, or there was nothing to remove"
    checked = Cli(where.tmp_path / "checker").json("verify", *names(reader), "--library", where.location)
    assert all(row["sound"] for row in checked), "what a row says is there"


def test_a_publisher_deletes_nothing_that_another_just_stored(where, monkeypatch):
    """A part of the artefact is missing, and one publisher puts it right while another is about to (H8)."""
    root = made(where.tmp_path / "one")
    manifest = reading.load_manifest(root)
    one, other = (DirectoryWriter(where.location) for _ in range(2))
    target = Path(where.machine("author").place(manifest))
    one.store(root, manifest, str(target), lambda *_: None)
    (target / reading.PAYLOAD).unlink()
    fetch, rmtree, held = transfer.fetch, shutil.rmtree, list[bool]()

    def watched(path: Path, **options: Any) -> None:
        rmtree(path, **options)
        held.append(transfer.holds(target, manifest))

    def second(*given: Any) -> None:
        monkeypatch.setattr(transfer, "fetch", fetch)
        other.store(root, manifest, str(target), lambda *_: None)
        monkeypatch.setattr(shutil, "rmtree", watched)
        fetch(*given)

    monkeypatch.setattr(transfer, "fetch", second)
    one.store(root, manifest, str(target), lambda *_: None)
    assert held and all(held)
    assert [*target.parent.iterdir()] == [target], "and leaves nothing beside it"


def _row(place: int, value: Any) -> dict[str, Any]:
    """Return an index's cartridges, of which one has a wrong field."""
    row = ["a", 1, "ab" * 32, "prefill", 16, 4096, "2026-11-23T00:00:00Z", True]
    row[place] = value
    return {"cartridges": [row, ["b", *row[1:]]]}


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        *(
            (spoilt, "damaged or was written by something else")
            for spoilt in (
                b"x" * 99, packed({"format": 2})[:-9], gzip.compress(b"[" * 5000, mtime=0), _row(0, "../up"),
                {"labels": [["../x", "a", 1, False]]},
            )
        ),
        ({"format": 3}, "upgrade lmcache-cartridge"),
        ({"labels": [["x", "nobody", 1, False]]}, "FOREIGN KEY"),
        (_row(0, "b"), "UNIQUE"),
    ],
)  # fmt: skip
def test_an_index_that_cannot_be_understood_stops_following_and_nothing_else(where, spoilt, said):
    author, follower = where.machine("author"), where.machine("follower", writes=False)
    add(author, made(where.tmp_path / "a", "a"))
    follower.follow()
    sound = where.index.read_bytes()
    spoilt = spoilt if isinstance(spoilt, bytes) else packed(index_of(where) | spoilt)
    where.index.write_bytes(spoilt)
    with pytest.raises(RegistryError, match=said) as error:
        follower.follow()
    assert (names(follower), follower.following.problem) == (["a@1"], str(error.value))
    with pytest.raises(RegistryError, match=said):  # whoever publishes is told too, and replaces nothing
        author.remove("a")
    assert where.index.read_bytes() == spoilt
    where.index.write_bytes(sound)
    author.remove("a")
    follower.follow()
    assert (names(follower), follower.following.problem) == ([], None)


def test_a_change_whose_answer_was_lost_is_made_once(where):
    author = where.machine("author")
    for version in (1, 2, 3):
        add(author, made(where.tmp_path / str(version), "a", version, seed=version))
    writer, other = author._writer, where.machine("other")
    meanwhile: list[Callable[[], Any]] = []
    swap = writer.swap

    def lose(file: str, data: bytes, known: str | None) -> str | None:
        revision = swap(file, data, known)
        while meanwhile:
            meanwhile.pop()()
        if revision is None:
            return None
        raise SourceError("the connection failed")

    writer.swap = lose
    assert author.remove("a").name == "a@3", "and not the next older one too"
    assert names(author) == ["a@1", "a@2"]
    meanwhile.append(lambda: add(other, made(where.tmp_path / "b", "b")))
    author.label("current", "a@2")
    writer.swap = lambda *arguments: swap(*arguments) and None  # botocore asked again, and was too late
    author.label("other", "a@1")
    reader = where.machine("reader")
    reader.follow()
    assert (names(reader), reader.labels()) == (["a@1", "a@2", "b@1"], {"current": "a@2", "other": "a@1"})


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


@pytest.mark.parametrize("s3_kind", ["moto"])
@pytest.mark.parametrize("answer", [status(409, "ConditionalRequestConflict"), status(500)], ids=["conflict", "lost"])
def test_a_conditional_put_that_may_not_have_been_the_first_says_so(where, proxy, answer):
    """Where its answer was lost botocore asks again, and it was stored: the caller has to look whose it is."""
    source = S3Source(endpoint_url=proxy.endpoint)
    proxy.faults = [answer]
    assert source.swap(where.location, "a", b"mine", None) is None
    source.close()


@pytest.mark.parametrize("wrong", ["s3://bucket", "shared/fleet", "", "s3://bucket/../x", "http://x/y", "/a\0b"])
def test_what_is_no_library_is_refused(wrong):
    with pytest.raises(SettingsError, match="library"):
        from_mapping({"library": wrong})


def test_what_was_known_is_served_after_a_restart_without_the_library_and_what_is_registered_here_is_not(where, home):
    home.make("local", seed=9)
    root = where.tmp_path / "one"
    one = make_artifact(root, cartridge_id="one", positions=72)
    with Library(where.settings("author")) as author:
        author.publish(root)
    prompt = Prompt(list(sha256_hasher(CHUNK)(make_ids(72, 0) + make_ids(2 * CHUNK, 99))), 72 // CHUNK, None)

    def server(name: str = "server") -> CartridgeStore:
        return home.open(settings=STILL | {"disk_dir": where.tmp_path / name, "library": where.location})

    server().close()
    sound = where.index.read_bytes()
    where.index.write_bytes(b"damaged")
    assert_served(server(), one, prompt)
    with pytest.raises(RegistryError, match="damaged"):
        server("fresh")
    where.index.unlink()
    assert_served(server(), one, prompt)
    where.index.write_bytes(sound)
    assert server("fresh").names() == ["one@1"]


def test_a_publisher_that_was_stopped_in_a_directory_holds_up_others_for_a_while_only(where, monkeypatch):
    monkeypatch.setattr("lmcache_cartridge.sources.writers._WAIT_S", 0.05)
    author = where.machine("author")
    add(author, made(where.tmp_path / "a", "a"))
    with locked(Path(where.location) / "library.lock"), pytest.raises(SourceError, match="held it for 0.05 s"):
        author.label("current", "a")
    author.label("current", "a")
