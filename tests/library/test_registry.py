"""The registry finds what was registered, never changes a version, and is only read when serving."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from making import files_under, flip_bit, make_artifact
from waiting import run_threads

from lmcache_cartridge.artifact.reading import PAYLOAD, load_manifest
from lmcache_cartridge.errors import (  # fmt: skip
    ArtifactError,
    CartridgeExists,
    CartridgeNotFound,
    ManifestError,
    RegistryError,
    TruncatedPayload,
)
from lmcache_cartridge.library.registry import Registry


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "home" / "registry.sqlite")


@pytest.fixture
def make(tmp_path):
    """Return the function that makes an artefact, and returns where."""

    def make(name: str = "doc", version: int = 1, seed: int = 0) -> Path:
        root = tmp_path / "artefacts" / f"{name}-{version}-{seed}"
        make_artifact(root, positions=16, layers=1, cartridge_id=name, version=version, seed=seed)
        return root

    return make


def _names(rows: list) -> list[str]:
    return [row.name for row in rows]


def test_an_id_stays_where_it_is_until_a_version_is_promoted(registry, make):
    registry.register(make())
    registry.label("stable", "doc")
    second = make("doc", 2)
    registry.register(second, promote=False)
    assert (registry.find("doc").name, registry.find("doc@2").name) == ("doc@1", "doc@2")
    registry.register(second)  # the same again is no change
    assert registry.current(["doc", "other"]) == {"doc@1"}

    assert registry.promote("doc@2").name == "doc@2"
    assert (registry.find("doc").name, registry.find("stable").name) == ("doc@2", "doc@1")
    assert registry.promote("stable").name == registry.find("doc").name == "doc@1"
    for version in (10, 9):
        registry.register(make("doc", version))
    assert registry.current(["doc"]) == {registry.find("doc").name} == {"doc@10"}
    for version in (10, 9):
        registry.remove(f"doc@{version}")
    assert registry.find("doc").name == "doc@1", "what was taken back stays so"


@pytest.mark.parametrize(
    "name",
    ["nobody", "doc@2", "doc@", "doc@-1", "", "doc@1@1", "doc' OR 1=1 --", "doc@" + "9" * 5000],
)
def test_a_name_that_stands_for_nothing_is_not_found(registry, name, make):
    registry.register(make())
    with pytest.raises(CartridgeNotFound, match="lmcache-cartridge list"):
        registry.find(name)
    with pytest.raises(CartridgeNotFound):
        registry.label("current", name)


def test_of_two_that_register_other_content_as_one_version_at_once_one_is_refused(registry, make):
    roots = [make("doc", seed=seed) for seed in range(2)]
    refused = []
    # Both come to look for the version before either may write it.
    blocker = sqlite3.connect(registry.path, check_same_thread=False)
    blocker.execute("BEGIN IMMEDIATE")

    def work(number: int) -> None:
        if number == 2:
            time.sleep(0.3)
            blocker.close()
            return
        try:
            registry.register(roots[number])
        except CartridgeExists:
            refused.append(number)

    run_threads(3, work)
    assert len(refused) == 1
    found = registry.find("doc")
    assert found.location == str(roots[1 - refused[0]].resolve())
    assert found.digest == load_manifest(Path(found.location)).digest


def test_next_version_is_newer_than_what_lies_there(registry, tmp_path, make):
    for name in ("3", ".4.partial", "x", "9" * 30):
        (tmp_path / "doc" / name).mkdir(parents=True)
    assert registry.next_version("doc", tmp_path) == 4
    assert registry.next_version("other", tmp_path) == 1
    registry.register(make("doc", 7))
    assert registry.next_version("doc", tmp_path) == 8


_READ = """
import os, resource, signal, sys
from pathlib import Path
from lmcache_cartridge.errors import RegistryError
from lmcache_cartridge.library.registry import Registry
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file may grow, as on a full disk
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    print(Registry(Path(sys.argv[1]), read_only=True).find("doc").name)
except RegistryError as error:
    print(error)
"""


def _read_apart(path: Path) -> str:
    """Return what another user finds who may write nothing, and has a full disk."""
    ran = subprocess.run([sys.executable, "-c", _READ, path], capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout.strip()


@pytest.fixture
def elsewhere():
    """A directory that any user may read, and none but ours write."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)


def test_a_reader_that_may_not_write_sees_what_another_user_writes(elsewhere, make):
    path = elsewhere / "registry.sqlite"
    registry = Registry(path)
    registry.register(make())
    elsewhere.chmod(0o555)
    assert _read_apart(path) == "doc@1"
    elsewhere.chmod(0o755)
    registry.register(make("doc", 2))
    elsewhere.chmod(0o555)
    assert _read_apart(path) == "doc@2"


_DIE = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_spill = 1")
db.execute("PRAGMA cache_size = 1")
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE cartridges SET kind = 'trained'")
db.execute("CREATE TABLE filler AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 5000) "
           "SELECT randomblob(500) FROM n")
os._exit(0)
"""


def test_a_tool_that_is_killed_while_it_writes_costs_nothing_but_a_look(registry, make):
    registry.register(make())
    before = registry.path.read_bytes()
    subprocess.run([sys.executable, "-c", _DIE, registry.path], check=True, timeout=60)
    assert registry.path.read_bytes() != before, "nothing was written before it was killed"
    reader = Registry(registry.path, read_only=True)
    with pytest.raises(RegistryError, match="killed while it wrote. Run `lmcache-cartridge list` once"):
        reader.all()
    assert [row.kind for row in Registry(registry.path).all()] == ["prefill"]
    assert [row.kind for row in reader.all()] == ["prefill"]


def test_an_unsound_artefact_is_not_registered(registry, make, tmp_path):
    root = make()
    (root / PAYLOAD).write_bytes(b"")
    with pytest.raises(TruncatedPayload):
        registry.register(root)
    big = tmp_path / "big"
    make_artifact(big, positions=100, layers=1)
    flip_bit(big / "token_ids.npy", 200)
    with pytest.raises(ArtifactError, match="doc@1"):
        registry.register(big)
    assert registry.all() == []


@pytest.mark.parametrize(("version", "todo", "read_only"), [(99, "upgrade", True), (3, "restore a copy", False)])
def test_a_registry_of_another_schema_is_refused_and_left_alone(registry, version, todo, read_only):
    db = sqlite3.connect(registry.path)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    before = files_under(registry.path.parent)
    with pytest.raises(RegistryError, match=f"has schema {version}, this release knows 5; {todo}"):
        Registry(registry.path, read_only=read_only).all()
    assert files_under(registry.path.parent) == before


def test_an_id_is_no_label_and_a_label_no_id_though_it_follows_the_same_rule(registry, make):
    registry.register(make())
    registry.label("current", "doc")
    with pytest.raises(CartridgeExists, match="current is a label already"):
        registry.register(make("current"))
    with pytest.raises(CartridgeExists, match="cannot be a label"):
        registry.label("doc", "doc")
    with pytest.raises(ManifestError, match="cannot be a cartridge id"):
        registry.label("../x", "doc")
    assert (registry.find("current").name, registry.labels()) == ("doc@1", {"current": "doc@1"})


def test_a_look_tells_what_there_is_where_anything_changed(registry, make, tmp_path):
    roots = {name: make(name) for name in "abc"}
    for name in "ab":
        registry.register(roots[name])
    known, rows = registry.look()
    assert (_names(rows), registry.look(known)) == (["a@1", "b@1"], None)
    moved = shutil.copytree(roots["a"], tmp_path / "moved")
    for change, given in (
        (registry.register, [roots["c"]]), (registry.register, [moved]), (registry.remove, ["b"]), (registry.label, ["x", "a"])
    ):  # fmt: skip
        stamp = registry.path.stat().st_mtime_ns
        change(*given)
        os.utime(registry.path, ns=(stamp, stamp))  # within one tick of the file system's clock
        now, rows = registry.look(known)
        assert now != known and registry.look(now) is None
        known = now
    assert {row.name: row.location for row in rows} == {"a@1": str(moved), "c@1": str(roots["c"])}


def test_a_missing_file_is_empty_at_first_and_an_error_for_those_who_knew_it(registry, tmp_path):
    reader = Registry(tmp_path / "none.sqlite", read_only=True)
    known, rows = reader.look()
    assert (rows, reader.look(known), reader.warm()) == ([], None, [])
    known, _ = registry.look()
    registry.path.unlink()
    with pytest.raises(RegistryError, match="is gone"):
        registry.look(known)
