"""`.pt` files that requests name: imported once, by a child that can do no harm, and had again; whatever is wrong is said."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from making import make_artifact, make_fingerprint
from waiting import Clock

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.serve import imported
from lmcache_cartridge.serve.imported import Imports, Served
from lmcache_cartridge.serve.request import Reference, Refusal, shorten
from lmcache_cartridge.serve.resolve import Resolver
from lmcache_cartridge.settings import from_mapping

_COPY = """
import os, pathlib, shutil, sys, time
ready, path, name, home, log = sys.argv[1:]
with open(log, "a") as file:
    print(*os.environ, file=file)
text = pathlib.Path(path).read_text()
if text == "hang":
    time.sleep(600)
if text == "die":
    os.kill(os.getpid(), 9)
if text.startswith("bad"):
    sys.exit(f"lmcache-cartridge: {path}: it is bad, like /etc/shadow")
shutil.copytree(ready, f"{home}/cartridges/{name}/1")
"""


class Fake(Served):
    """Children that copy an artefact which is ready, and note the names of their variables."""

    def command(self, path: Path, name: str, home: Path, memory_bytes: int) -> list[str]:
        words = [f"{self.model}/ready", path, name, home, f"{self.model}/log"]
        return [sys.executable, "-S", "-c", _COPY, *map(str, words)]

    def children(self) -> list[str]:
        log = Path(self.model) / "log"
        return log.read_text().splitlines() if log.exists() else []

    def count(self) -> int:
        return len(self.children())


class Home:
    def __init__(self, path: Path, **settings: Any) -> None:
        self.path, self.files = path, path / "files"
        self.files.mkdir()
        self.settings = from_mapping(
            {"home": path / "home", "disk_dir": path / "cache", "roots": [str(self.files)]} | settings
        )
        (path / "model").mkdir()
        make_artifact(path / "model/ready", positions=32, cartridge_id="ready")
        self.served = Fake(str(path / "model"), "bfloat16", 16, make_fingerprint())
        self.clock = Clock()

    def resolver(self, served: Served | None = None) -> Resolver:
        resolver = Resolver(self.settings, self.clock)
        resolver.imports.served = served or self.served
        return resolver

    def file(self, name: str, text: str = "good") -> Path:
        path = self.files / name
        path.write_text(text)
        return path


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


def _ask(resolver: Resolver, path: Path | str, **options: Any) -> str:
    return resolver.resolve([Reference(id=str(path), **options)]).names


def _refused(resolver: Resolver, path: Path | str, **options: Any) -> tuple[int, float | None, str]:
    """Return the status with which a file is refused, after how long to come again, and the words."""
    with pytest.raises(Refusal) as caught:
        _ask(resolver, path, **options)
    return caught.value.status, caught.value.retry_after_s, str(caught.value)


def test_a_file_is_imported_once_and_again_when_it_has_changed(home, monkeypatch):
    secrets = {"VLLM_API_KEY", "AWS_SESSION_TOKEN", "LMCACHE_CARTRIDGE_SALT_SECRET"}
    for name in secrets:
        monkeypatch.setenv(name, "x")
    path, resolver = home.file("x.pt"), home.resolver()
    assert [_ask(each, path) for each in (resolver, resolver, home.resolver())] == ["ready@1"] * 3
    assert home.served.count() == 1, "for another process, or the next start, too"
    path.write_text("good, and another")
    assert _ask(resolver, path) == "ready@1"
    assert home.served.count() == 2
    other = home.served._replace(dtype="float16")
    _ask(home.resolver(Fake(*other)), path)
    children = home.served.children()
    assert len(children) == 3, "another engine has another one"
    assert all("PATH" in seen.split() and not secrets & set(seen.split()) for seen in children)


def test_what_was_refused_is_not_tried_again_for_a_while_unless_it_changes(home):
    path, resolver = home.file("x.pt", "bad"), home.resolver()
    told = f"{shorten(str(path))!r} cannot be imported: it is bad, like shadow"
    assert [_refused(resolver, path) for _ in range(2)] == [(422, None, told)] * 2
    assert home.served.count() == 1
    home.clock.move(61)
    _refused(resolver, path)
    assert home.served.count() == 2
    path.write_text("good")
    assert _ask(resolver, path) == "ready@1"


@pytest.mark.parametrize(("what", "why"), [("hang", "more than 0.5 s"), ("die", "the import failed")])
def test_a_child_that_hangs_or_dies_costs_its_own_import(home, what, why, monkeypatch):
    monkeypatch.setattr(imported, "DEADLINE_S", 0.5 if what == "hang" else 60)
    resolver = home.resolver()
    assert why in _refused(resolver, home.file("x.pt", what))[2]
    left = [path.name for path in (home.settings.cache_dir / "imported").iterdir() if not path.name.startswith(".lock")]
    assert left == [], "nothing unfinished stays"


def test_a_child_has_a_limit_of_memory_before_it_loads_anything(home, monkeypatch):
    resolver = home.resolver(Served(str(MODEL_DIR), "bfloat16", 256, make_fingerprint()))
    monkeypatch.setattr(imported, "MEMORY_BYTES", 48 << 20)
    assert "the import failed" in _refused(resolver, home.file("x.pt"))[2]


def test_a_file_that_changes_while_it_is_imported_is_not_kept(home, monkeypatch):
    path, resolver = home.file("x.pt"), home.resolver()
    made = Imports._import
    with monkeypatch.context() as patched:
        patched.setattr(Imports, "_import", lambda *given: (made(*given), path.write_text("good now"))[0])
        assert _refused(resolver, path)[:2] == (503, 2)
    assert _ask(resolver, path) == "ready@1"
    assert home.served.count() == 2


def test_the_least_recently_used_leave_and_what_is_in_use_stays(tmp_path):
    make_artifact(tmp_path / "sized", positions=32, cartridge_id="ready")
    size = sum(path.stat().st_size for path in (tmp_path / "sized").iterdir())
    home = Home(tmp_path, imported_bytes=2 * size + 100)
    resolver, other = home.resolver(), home.file("c.pt", "good" * 100)

    def made() -> list[Path]:
        return [file.parent for file in (home.settings.cache_dir / "imported").glob(f"*/{reading.MANIFEST}")]

    for name in "ab":
        _ask(resolver, home.file(f"{name}.pt"))
    assert _refused(resolver, other)[:2] == (503, 60), "both were used within the hour"
    for root in made():
        os.utime(root, (time.time() - 9000,) * 2)
    _ask(resolver, home.files / "a.pt")  # which notes that it is used
    _ask(resolver, other)
    assert (len(made()), home.served.count()) == (2, 3)
    _ask(resolver, home.files / "a.pt")
    assert home.served.count() == 3, "it stayed"


def test_where_nothing_can_be_imported_it_is_said(home):
    path = home.file("x.pt")
    for most, why in ((0, "by the setting imported_bytes"), (2, "more than the setting imported_bytes")):
        resolver = Resolver(from_mapping(home.settings.model_dump() | {"imported_bytes": most}))
        resolver.imports.served = home.served
        assert why in _refused(resolver, path)[2]
    home.settings.cache_dir.mkdir(parents=True, exist_ok=True)
    (home.settings.cache_dir / "imported").touch()  # no directory, as on a disk that takes none
    assert _refused(home.resolver(), path)[:2] == (503, 30)


@pytest.mark.parametrize("s3_kind", ["moto"])
def test_an_object_on_s3_is_imported_and_followed(s3_credentials, bucket, tmp_path):
    home = Home(tmp_path, buckets=[f"{bucket}/team"], s3_endpoint_url=s3_credentials.endpoint, s3_part_bytes=1 << 16)
    place = f"s3://{bucket}/team/x.pt"
    resolver = home.resolver()

    def put(text: str) -> None:
        s3_credentials.client.put_object(Bucket=bucket, Key="team/x.pt", Body=text.encode())

    assert [_refused(resolver, each)[0] for each in (place, f"s3://{bucket}/other/x.pt")] == [404, 404]
    put("good" * 50_000)
    assert [_ask(resolver, place) for _ in range(2)] == ["ready@1"] * 2
    put("bad")
    assert "it is bad" in _refused(resolver, place)[2]
    put("good again")
    assert _ask(resolver, place) == "ready@1"
    assert home.served.count() == 3
    s3_credentials.client.delete_object(Bucket=bucket, Key="team/x.pt")
    assert _refused(resolver, place)[0] == 404
