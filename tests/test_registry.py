"""The registry finds what was registered, never changes a version, and is only read when serving."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from making import flip_bit, kept_files, make_artifact, run_threads

from lmcache_cartridge.artifact import PAYLOAD, load_manifest
from lmcache_cartridge.errors import (
    ArtifactError,
    CartridgeExists,
    CartridgeNotFound,
    ManifestError,
    RegistryError,
    TruncatedPayload,
)  # fmt: skip
from lmcache_cartridge.registry import Registry


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "home" / "registry.sqlite")


def _make(tmp_path: Path, name: str, version: int = 1, seed: int = 0) -> Path:
    root = tmp_path / "artefacts" / f"{name}-{version}-{seed}"
    make_artifact(root, positions=16, layers=1, cartridge_id=name, version=version, seed=seed)
    return root


def test_a_registered_cartridge_is_found_with_everything_its_manifest_says(registry: Registry, tmp_path: Path) -> None:
    root = _make(tmp_path, "doc")
    manifest = registry.register(root)
    assert manifest == load_manifest(root)
    found = registry.find("doc")
    assert found[:6] == ("doc", 1, manifest.digest, "prefill", 16, manifest.payload.size_bytes)
    assert found.location == str(root.resolve())
    assert found.name == "doc@1"
    assert found.registered.endswith("Z")


def test_an_id_means_its_newest_version_and_id_at_version_that_one(registry: Registry, tmp_path: Path) -> None:
    for version in (2, 10, 9):
        registry.register(_make(tmp_path, "doc", version))
    assert registry.find("doc").version == 10
    assert registry.find("doc@9").version == 9
    assert registry.find("doc@2").version == 2


def test_a_label_means_the_version_it_points_at_even_when_there_is_a_newer_one(
    registry: Registry, tmp_path: Path
) -> None:
    registry.register(_make(tmp_path, "doc", 1))
    assert registry.label("stable", "doc").name == "doc@1"
    registry.register(_make(tmp_path, "doc", 2))
    assert registry.find("stable").name == "doc@1"
    assert registry.label("copy", "stable").name == "doc@1"
    assert registry.labels() == {"copy": "doc@1", "stable": "doc@1"}


def test_a_label_cannot_take_the_id_of_a_cartridge(registry: Registry, tmp_path: Path) -> None:
    registry.register(_make(tmp_path, "doc"))
    registry.register(_make(tmp_path, "other"))
    with pytest.raises(CartridgeExists, match="cannot be a label"):
        registry.label("other", "doc")
    assert registry.labels() == {}


def test_a_label_that_moves_points_at_one_version_only(registry: Registry, tmp_path: Path) -> None:
    for version in (1, 2):
        registry.register(_make(tmp_path, "doc", version))
        registry.label("current", f"doc@{version}")
    assert registry.labels() == {"current": "doc@2"}


def test_a_label_is_never_missing_while_it_moves(registry: Registry, tmp_path: Path) -> None:
    for version in (1, 2):
        registry.register(_make(tmp_path, "doc", version))
    registry.label("current", "doc@1")
    reader, done, seen = Registry(registry.path, read_only=True), threading.Event(), set()

    def work(number: int) -> None:
        if number == 0:
            for move in range(50):
                registry.label("current", f"doc@{2 - move % 2}")
                time.sleep(0.005)  # lets readers in
            done.set()
        while not done.is_set():
            seen.add(reader.find("current").version)

    run_threads(4, work)
    assert seen == {1, 2}


@pytest.mark.parametrize("label", ["", "../x", "a@1", ".hidden"])
def test_a_label_follows_the_rule_for_ids(registry: Registry, tmp_path: Path, label: str) -> None:
    registry.register(_make(tmp_path, "doc"))
    with pytest.raises(ManifestError, match="cannot be a cartridge id"):
        registry.label(label, "doc")


@pytest.mark.parametrize(
    "name",
    ["nobody", "doc@2", "doc@", "doc@x", "doc@-1", "@1", "", "doc@1@1", "doc' OR 1=1 --", "doc@99999999999999999999",
     "doc@" + "9" * 5000],
)  # fmt: skip
def test_a_name_that_stands_for_nothing_is_not_found(registry: Registry, tmp_path: Path, name: str) -> None:
    registry.register(_make(tmp_path, "doc"))
    with pytest.raises(CartridgeNotFound, match="lmcache-cartridge list"):
        registry.find(name)
    with pytest.raises(CartridgeNotFound):
        registry.label("current", name)


def test_registering_the_same_artefact_twice_changes_nothing(registry: Registry, tmp_path: Path) -> None:
    root = _make(tmp_path, "doc")
    registry.register(root)
    before = registry.all()
    registry.register(root)
    assert registry.all() == before
    assert len(before) == 1


def test_a_moved_artefact_can_be_registered_at_its_new_place(registry: Registry, tmp_path: Path) -> None:
    root = _make(tmp_path, "doc")
    registry.register(root)
    registry.register(shutil.copytree(root, tmp_path / "elsewhere"))
    assert [row.location for row in registry.all()] == [str(tmp_path / "elsewhere")]


def test_other_content_under_a_taken_version_is_refused(registry: Registry, tmp_path: Path) -> None:
    manifest = registry.register(_make(tmp_path, "doc", seed=1))
    with pytest.raises(CartridgeExists, match=r"doc@1 is registered with other content"):
        registry.register(_make(tmp_path, "doc", seed=2))
    assert registry.find("doc").digest == manifest.digest


def test_of_two_that_register_other_content_as_one_version_at_once_one_is_refused(
    registry: Registry, tmp_path: Path
) -> None:
    roots = [_make(tmp_path, "doc", seed=seed) for seed in range(2)]
    refused = []

    def work(number: int) -> None:
        try:
            registry.register(roots[number])
        except CartridgeExists:
            refused.append(number)

    # Both come to look for the version before either may write it.
    blocker = sqlite3.connect(registry.path)
    blocker.execute("BEGIN IMMEDIATE")
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    blocker.rollback()
    blocker.close()
    for thread in threads:
        thread.join(20)
    assert len(refused) == 1
    found = registry.find("doc")
    assert found.location == str(roots[1 - refused[0]].resolve())
    assert found.digest == load_manifest(Path(found.location)).digest


def test_next_version_counts_from_the_newest(registry: Registry, tmp_path: Path) -> None:
    assert registry.next_version("doc") == 1
    registry.register(_make(tmp_path, "doc", 7))
    assert registry.next_version("doc") == 8
    assert registry.next_version("other") == 1


def test_an_unsound_artefact_is_not_registered(registry: Registry, tmp_path: Path) -> None:
    root = _make(tmp_path, "doc")
    (root / PAYLOAD).write_bytes(b"")
    with pytest.raises(TruncatedPayload):
        registry.register(root)
    with pytest.raises(ManifestError):
        registry.register(tmp_path / "nowhere")
    big = make_artifact(tmp_path / "big", positions=100, layers=1)
    flip_bit(tmp_path / "big" / "token_ids.npy", 200)
    with pytest.raises(ArtifactError, match=big.manifest.name):
        registry.register(tmp_path / "big")
    assert registry.all() == []


def test_a_read_only_registry_of_a_missing_file_is_empty_and_makes_none(tmp_path: Path) -> None:
    reader = Registry(tmp_path / "home" / "registry.sqlite", read_only=True)
    assert (reader.all(), reader.labels(), reader.next_version("doc")) == ([], {}, 1)
    with pytest.raises(CartridgeNotFound):
        reader.find("doc")
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_registry_writes_nothing(registry: Registry, tmp_path: Path) -> None:
    registry.register(_make(tmp_path, "doc"))
    registry.label("current", "doc")
    before = kept_files(tmp_path / "home")
    reader = Registry(registry.path, read_only=True)
    assert [row.name for row in reader.all()] == ["doc@1"]
    assert reader.find("current").name == "doc@1"
    assert reader.labels() == {"current": "doc@1"}
    assert kept_files(tmp_path / "home") == before
    assert list(before) == ["registry.sqlite"]


def test_a_read_only_registry_refuses_to_write(registry: Registry, tmp_path: Path) -> None:
    registry.register(_make(tmp_path, "doc"))
    before = kept_files(tmp_path / "home")
    reader = Registry(registry.path, read_only=True)
    with pytest.raises(RegistryError, match="readonly"):
        reader.register(_make(tmp_path, "other"))
    with pytest.raises(RegistryError, match="readonly"):
        reader.label("current", "doc")
    assert kept_files(tmp_path / "home") == before


def test_a_reader_sees_what_is_registered_after_it_was_opened(registry: Registry, tmp_path: Path) -> None:
    reader = Registry(registry.path, read_only=True)
    registry.register(_make(tmp_path, "doc"))
    assert [row.name for row in reader.all()] == ["doc@1"]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_registry_of_a_newer_release_is_refused_and_left_alone(registry: Registry, read_only: bool) -> None:
    db = sqlite3.connect(registry.path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    before = kept_files(registry.path.parent)
    with pytest.raises(RegistryError, match=r"has schema 99, this release knows 2; upgrade"):
        Registry(registry.path, read_only=read_only).all()
    assert kept_files(registry.path.parent) == before


def test_a_registry_of_an_older_schema_is_not_upgraded_by_a_reader(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "registry.sqlite").close()
    (tmp_path / "registry.sqlite").touch()
    with pytest.raises(RegistryError, match="older schema 0"):
        Registry(tmp_path / "registry.sqlite", read_only=True).all()
    assert (tmp_path / "registry.sqlite").stat().st_size == 0


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    "content", [b"no database at all" * 999, b"SQLite format 3\0" + bytes(4080)], ids=["text", "zeros"]
)
def test_a_file_that_is_no_registry_gives_a_registry_error(tmp_path: Path, content: bytes, read_only: bool) -> None:
    path = tmp_path / "registry.sqlite"
    path.write_bytes(content)
    with pytest.raises(RegistryError, match=str(path)):
        Registry(path, read_only=read_only).all()
    assert path.read_bytes() == content


def test_a_registry_damaged_in_its_middle_gives_a_registry_error(registry: Registry, tmp_path: Path) -> None:
    registry.register(_make(tmp_path, "doc"))
    with registry.path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (registry.path.stat().st_size - 4096))
    with pytest.raises(RegistryError, match="malformed"):
        Registry(registry.path, read_only=True).all()


def test_a_home_that_is_a_file_gives_a_registry_error(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("not a directory")
    with pytest.raises(RegistryError, match="home"):
        Registry(tmp_path / "home" / "registry.sqlite")


def test_a_name_that_is_no_text_gives_a_registry_error(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="surrogates"):
        registry.find("doc\udcff")


def test_eight_threads_that_create_and_fill_one_registry_lose_nothing(tmp_path: Path) -> None:
    roots = [[_make(tmp_path, f"doc-{number}", version) for version in (1, 2, 3)] for number in range(8)]
    for attempt in range(5):
        path = tmp_path / f"home-{attempt}" / "registry.sqlite"

        def work(number: int, path: Path = path) -> None:
            registry = Registry(path)
            for root in roots[number]:
                registry.register(root)
            registry.label(f"label-{number}", f"doc-{number}@2")

        run_threads(8, work)
        assert [row.name for row in Registry(path, read_only=True).all()] == [
            f"doc-{number}@{version}" for number in range(8) for version in (1, 2, 3)
        ]
        assert len(Registry(path).labels()) == 8


def test_servers_read_while_a_tool_holds_a_write_open(registry: Registry, tmp_path: Path) -> None:
    registry.register(_make(tmp_path, "doc"))
    writer = sqlite3.connect(registry.path, isolation_level=None)
    try:
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("UPDATE cartridges SET kind = 'trained'")
        assert [row.kind for row in Registry(registry.path, read_only=True).all()] == ["prefill"]
    finally:
        writer.execute("ROLLBACK")
        writer.close()


def test_an_id_that_is_a_label_already_is_refused(registry: Registry, tmp_path: Path) -> None:
    registry.register(_make(tmp_path, "doc"))
    registry.label("current", "doc")
    with pytest.raises(CartridgeExists, match="current is a label already"):
        registry.register(_make(tmp_path, "current"))
    assert registry.find("current").name == "doc@1"
