"""`.pt` files that requests name: imported once, by a child that can do no harm, and had again; whatever is wrong is said."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from families import FAMILIES, make_model
from making import make_artifact
from waiting import Clock

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.errors import UnsupportedModel
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import read_kv
from lmcache_cartridge.serve import imported
from lmcache_cartridge.serve.imported import Imports, Served
from lmcache_cartridge.serve.request import Reference, Refusal, shorten
from lmcache_cartridge.serve.resolve import NeedsReading, Resolver
from lmcache_cartridge.settings import from_mapping

_COPY = """
import os, pathlib, shutil, sys, time
ready, path, name, home, log = sys.argv[1:]
with open(log, "a") as file:
    file.write("x")
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
    """Children that copy an artefact which is ready, and count."""

    def command(self, path: Path, name: str, home: Path, memory_bytes: int) -> list[str]:
        return [
            sys.executable,
            "-S",
            "-c",
            _COPY,
            f"{self.model}/ready",
            str(path),
            name,
            str(home),
            f"{self.model}/log",
        ]

    def count(self) -> int:
        log = Path(self.model) / "log"
        return len(log.read_text()) if log.exists() else 0


class Home:
    def __init__(self, path: Path, **settings: Any) -> None:
        self.path, self.files = path, path / "files"
        self.files.mkdir()
        self.settings = from_mapping(
            {"home": path / "home", "disk_dir": path / "cache", "roots": [str(self.files)]} | settings
        )
        (path / "model").mkdir()
        make_artifact(path / "model/ready", positions=32, cartridge_id="ready")
        self.served = Fake(str(path / "model"), "bfloat16", 16)
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


def _refusal(call: Callable[[], Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


def test_a_file_is_imported_once_and_again_when_it_has_changed(home):
    path, resolver = home.file("x.pt"), home.resolver()
    assert [_ask(resolver, path) for _ in range(3)] == ["ready@1"] * 3
    assert _ask(home.resolver(), path) == "ready@1", "another process, or the next start"
    assert home.served.count() == 1
    path.write_text("good, and another")
    assert _ask(resolver, path) == "ready@1"
    assert home.served.count() == 2
    other = home.served._replace(dtype="float16")
    _ask(home.resolver(Fake(*other)), path)
    assert home.served.count() == 3, "another engine has another one"
    assert [row.digest for row in resolver.imports.rows()] == [reading.load_manifest(home.path / "model/ready").digest]


def test_a_request_that_may_not_wait_is_told_that_there_is_something_to_read(home):
    reference = Reference(id=str(home.file("x.pt")))
    with pytest.raises(NeedsReading):
        home.resolver().resolve([reference], {})
    assert home.served.count() == 0


def test_a_path_outside_says_which_setting_is_missing_and_not_whether_something_is_there(home):
    (home.path / "secret.pt").write_text("good")
    (home.files / "link.pt").symlink_to(home.path / "secret.pt")
    resolver, said = home.resolver(), set()
    for path in (home.path / "secret.pt", home.path / "nothing.pt", home.files / "no.pt", home.files / "link.pt"):
        refusal = _refusal(lambda path=path: _ask(resolver, path))
        said.add((refusal.status, str(refusal).replace(repr(shorten(str(path))), "")))
    assert said == {(404, "no cartridge is at  under the setting `roots`")}
    nowhere = Resolver(from_mapping({"home": home.settings.home}))
    for reference, setting in (
        (str(home.files / "x.pt"), "roots"),
        ("s3://b/x.pt", "buckets"),
        ("s3://b/x", "buckets"),
    ):
        assert f"under the setting `{setting}`, which is empty" in str(_refusal(lambda r=reference: _ask(nowhere, r)))
    assert home.served.count() == 0


def test_what_was_refused_is_not_tried_again_for_a_while_unless_it_changes(home):
    path, resolver = home.file("x.pt", "bad"), home.resolver()
    refusals = [_refusal(lambda: _ask(resolver, path)) for _ in range(3)]
    assert {(r.status, str(r)) for r in refusals} == {
        (422, f"{shorten(str(path))!r} cannot be imported: it is bad, like shadow")
    }
    assert home.served.count() == 1
    home.clock.now += 61
    _refusal(lambda: _ask(resolver, path))
    assert home.served.count() == 2
    path.write_text("good")
    assert _ask(resolver, path) == "ready@1"


@pytest.mark.parametrize(("what", "why"), [("hang", "more than 0.5 s"), ("die", "the import failed")])
def test_a_child_that_hangs_or_dies_costs_its_own_import(home, what, why):
    resolver = home.resolver()
    resolver.imports = Imports(home.settings, resolver.imports._source, deadline_s=0.5 if what == "hang" else 60)
    resolver.imports.served = home.served
    assert why in str(_refusal(lambda: _ask(resolver, home.file("x.pt", what))))
    left = [path.name for path in (home.settings.cache_dir / "imported").iterdir() if not path.name.startswith(".lock")]
    assert left == [], "nothing unfinished stays"


def test_a_child_has_a_limit_of_memory_before_it_loads_anything(home):
    imports = Imports(home.settings, home.resolver().imports._source, memory_bytes=48 << 20)
    imports.served = Served(str(MODEL_DIR), "bfloat16", 256)
    assert "the import failed" in str(_refusal(lambda: imports.of_file(home.file("x.pt"), "'x'")))


def test_however_many_want_a_file_it_is_imported_once_and_few_at_a_time(home):
    resolvers = [home.resolver(), home.resolver()]  # as of two processes
    path = home.file("x.pt")
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda number: _ask(resolvers[number % 2], path), range(8)))
    assert (set(names), home.served.count()) == ({"ready@1"}, 1)


def test_a_file_that_would_wait_behind_many_others_is_told_to_come_again(home):
    resolver, path = home.resolver(), home.file("x.pt")
    waiting = resolver.imports._waiting
    taken = 0
    while waiting.acquire(blocking=False):
        taken += 1
    refusal = _refusal(lambda: _ask(resolver, path))
    assert (refusal.status, refusal.retry_after_s, home.served.count()) == (503, 5, 0)
    for _ in range(taken):
        waiting.release()
    assert _ask(resolver, path) == "ready@1"


def test_a_file_that_changes_while_it_is_imported_is_not_kept(home, monkeypatch):
    path, resolver = home.file("x.pt"), home.resolver()
    imported_ = Imports._import

    def change(*args: Any) -> Path:
        made = imported_(*args)
        path.write_text("good now")
        return made

    monkeypatch.setattr(Imports, "_import", change)
    refusal = _refusal(lambda: _ask(resolver, path))
    assert (refusal.status, refusal.retry_after_s) == (503, 2)
    monkeypatch.undo()
    assert _ask(resolver, path) == "ready@1"
    assert home.served.count() == 2


def test_the_least_recently_used_leave_and_what_is_in_use_stays(tmp_path):
    size = _size(Home(tmp_path).path / "model/ready")
    (tmp_path / "two").mkdir()
    home = Home(tmp_path / "two", imported_bytes=2 * size + 100)
    resolver = home.resolver()
    for name in "ab":
        _ask(resolver, home.file(f"{name}.pt"))
    refusal = _refusal(lambda: _ask(resolver, home.file("c.pt", "good" * 100)))
    assert (refusal.status, refusal.retry_after_s) == (503, 60), "both were used within the hour"
    roots = {row.id[0]: Path(row.location) for row in _by_root(resolver)}
    for age_s, root in enumerate(roots.values()):
        os.utime(root, (time.time() - 9000 - age_s,) * 2)
    _ask(resolver, home.files / "a.pt")  # which notes that it is used
    _ask(resolver, home.file("c.pt", "good" * 100))
    there = [root for root in (home.settings.cache_dir / "imported").iterdir() if (root / reading.MANIFEST).exists()]
    assert len(there) == 2
    assert home.served.count() == 3
    _ask(resolver, home.files / "a.pt")
    assert home.served.count() == 3, "it stayed"


def _by_root(resolver: Resolver) -> list[Any]:
    return [
        row._replace(id=Path(key).name) for key in resolver.imports._rows if (row := resolver.imports._rows.get(key))
    ]


def _size(root: Path) -> int:
    return sum(path.stat().st_size for path in root.iterdir())


def test_where_nothing_can_be_imported_it_is_said(home):
    path, resolver = home.file("x.pt"), home.resolver()
    resolver.imports.served = None
    assert "no .pt files are imported here" in str(_refusal(lambda: _ask(resolver, path)))
    off = Resolver(from_mapping(home.settings.model_dump() | {"imported_bytes": 0}))
    off.imports.served = home.served
    assert "by the setting imported_bytes" in str(_refusal(lambda: _ask(off, path)))
    small = Resolver(from_mapping(home.settings.model_dump() | {"imported_bytes": 2}))
    small.imports.served = home.served
    assert "more than the setting imported_bytes" in str(_refusal(lambda: _ask(small, path)))


def test_secrets_of_the_server_do_not_come_to_the_child(home, monkeypatch):
    seen: dict[str, str] = {}
    popen = imported.subprocess.Popen

    def spy(command: Any, **options: Any) -> Any:
        seen.update(options["env"])
        return popen(command, **options)

    monkeypatch.setattr(imported.subprocess, "Popen", spy)
    for name in ("VLLM_API_KEY", "AWS_SESSION_TOKEN", "LMCACHE_CARTRIDGE_SALT_SECRET"):
        monkeypatch.setenv(name, "x")
    _ask(home.resolver(), home.file("x.pt"))
    assert "PATH" in seen
    assert not {"VLLM_API_KEY", "AWS_SESSION_TOKEN", "LMCACHE_CARTRIDGE_SALT_SECRET"} & seen.keys()


@pytest.mark.parametrize("s3_kind", ["moto"])
def test_an_object_on_s3_is_imported_and_followed(s3_credentials, bucket, tmp_path):
    home = Home(tmp_path, buckets=[f"{bucket}/team"], s3_endpoint_url=s3_credentials.endpoint, s3_part_bytes=1 << 16)
    place = f"s3://{bucket}/team/x.pt"
    resolver = home.resolver()

    def put(text: str) -> None:
        s3_credentials.client.put_object(Bucket=bucket, Key="team/x.pt", Body=text.encode())

    refusal = _refusal(lambda: _ask(resolver, place))
    assert (refusal.status, "no cartridge is at" in str(refusal)) == (404, True)
    assert "setting `buckets`" in str(_refusal(lambda: _ask(resolver, f"s3://{bucket}/other/x.pt")))
    put("good" * 50_000)
    assert [_ask(resolver, place) for _ in range(2)] == ["ready@1"] * 2
    assert home.served.count() == 1
    put("bad")
    assert _ask(resolver, place) == "ready@1", "it is not asked about again so soon"
    assert "it is bad" in str(_refusal(lambda: _ask(resolver, place, force_redownload=True)))
    put("good again")
    home.clock.now += 11
    assert _ask(resolver, place) == "ready@1"
    assert home.served.count() == 3
    s3_credentials.client.delete_object(Bucket=bucket, Key="team/x.pt")
    home.clock.now += 11
    assert _refusal(lambda: _ask(resolver, place)).status == 404


# What the child really does.


@pytest.fixture(scope="module")
def model():
    return CausalModel(str(MODEL_DIR))


def test_a_models_config_alone_tells_its_fingerprint(model):
    light = CausalModel(str(MODEL_DIR), weights=False)
    assert light.fingerprint == model.fingerprint
    assert light.context_tokens == model.context_tokens
    assert {each.device.type for each in light.model.parameters()} == {"meta"}, "no weights in memory"
    assert light.ordinary_ids().tolist() == model.ordinary_ids().tolist()


def test_import_without_comparing_takes_kv_as_it_is(model, tmp_path, capsys):
    kv, ids = foreign.random_kv(64), list(range(5, 69))
    torch.save({"token_ids": ids, "kv_cache": list(zip(*foreign.htd(kv), strict=True))}, tmp_path / "x.pt")
    home, path = str(tmp_path / "home"), str(tmp_path / "x.pt")
    assert main(["import", path, "--model", str(MODEL_DIR), "--no-compare", "--id", "x", "--home", home]) == 0
    assert "not compared with the model" in capsys.readouterr().out
    root = Registry(Path(home) / "registry.sqlite").find("x").local_root()
    manifest = reading.load_manifest(root)
    assert (manifest.kind, manifest.canary, manifest.fingerprint) == ("trained", None, model.fingerprint)
    assert torch.equal(read_kv(manifest, root), kv)
    assert reading.load_document_ids(manifest, root).tolist() == ids
    assert reading.load_token_ids(manifest, root).tolist() != ids, "identity tokens"


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_nothing_in_a_file_runs_or_unpacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = Home(tmp_path / "home" if (tmp_path / "home").mkdir() is None else tmp_path)
    torch.save({"token_ids": [5], "kv_cache": _Runs()}, home.files / "runs.pt")
    with zipfile.ZipFile(home.files / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\0" * (64 << 20))
    resolver = home.resolver(Served(str(MODEL_DIR), "bfloat16", 256))
    said: dict[str, str] = {}

    def ask(name: str) -> None:
        said[name] = str(_refusal(lambda: _ask(resolver, home.files / name)))

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("runs.pt", "bomb.pt")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "it wants posix.system, which may run anything" in said["runs.pt"]
    assert "its archive is compressed" in said["bomb.pt"]
    assert not list(tmp_path.rglob("ran"))
    assert json.dumps(said).count(str(tmp_path)) == 2, "each names the path that the client sent, and no other"


@pytest.mark.parametrize(
    ("family", "what"), [("llama4", "another order in engines"), ("deepseek-v2", "latent vectors")]
)
def test_kv_that_engines_have_otherwise_is_refused_without_the_model_too(tmp_path, family, what):
    model = CausalModel(str(make_model(tmp_path / "model", FAMILIES[family]())), weights=False)
    with pytest.raises(UnsupportedModel, match=what):
        model.need_values("import")
    CausalModel(str(MODEL_DIR), weights=False).need_values("import")
