"""What is pushed and pulled is the same cartridge, whole or not at all, on both sides."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faulty_proxy import flipped, reset, trickle
from making import files_under, flip_bit, make_artifact, make_fingerprint
from s3 import S3Server, both
from waiting import run_threads, until

from lmcache_cartridge.artifact.manifest import Provenance
from lmcache_cartridge.artifact.reading import MANIFEST, PAYLOAD
from lmcache_cartridge.artifact.writing import ArtifactWriter
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.errors import SourceError
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.sources import s3, transfer
from lmcache_cartridge.sources.s3 import S3Source


class _Ran(NamedTuple):
    status: int
    out: str
    err: str


class _Machine:
    """A machine with a home of its own, and the bucket that all of them share."""

    def __init__(self, home: Path, server: S3Server, bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.home, self.server, self.bucket, self._capsys = home, server, bucket, capsys
        self.location = f"s3://{bucket}/cartridges/doc"

    def __call__(self, *argv: str | Path) -> _Ran:
        self._capsys.readouterr()
        status = main([*map(str, argv), "--home", str(self.home)])
        return _Ran(status, *self._capsys.readouterr())

    def at(self, endpoint: str, *argv: str | Path) -> _Ran:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
            return self(*argv)

    def transfer(self, *argv: str | Path) -> _Ran:
        return self.at(self.server.endpoint, *argv)

    def json(self, *argv: str | Path) -> Any:
        ran = (
            self.transfer(*argv, "--format", "json")
            if argv[0] in ("publish", "pull")
            else self(*argv, "--format", "json")
        )
        assert (ran.status, ran.err) == (0, "")
        return json.loads(ran.out)

    def remote_files(self) -> dict[str, bytes]:
        client = self.server.client
        names = [row["Key"] for row in client.list_objects_v2(Bucket=self.bucket).get("Contents", [])]
        return {name: client.get_object(Bucket=self.bucket, Key=name)["Body"].read() for name in names}


@pytest.fixture
def here(s3_credentials, bucket, tmp_path, capsys):
    return _Machine(tmp_path / "here", s3_credentials, bucket, capsys)


@pytest.fixture
def there(s3_credentials, bucket, tmp_path, capsys):
    return _Machine(tmp_path / "there", s3_credentials, bucket, capsys)


def _registered(machine: _Machine, name: str = "artefact", **arguments: Any) -> Path:
    root = machine.home / name
    make_artifact(root, **({"positions": 80} | arguments))
    machine.json("import", root)
    return root


def _bytes(root: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in files_under(root).items()}


def _one_line(ran: _Ran, *words: str) -> None:
    assert ran.status == 1
    assert ran.out == ""
    last = ran.err.splitlines()[-1]
    assert last.startswith("lmcache-cartridge: ")
    for word in words:
        assert word in last


@both
def test_a_pulled_cartridge_is_the_one_that_was_pushed(here, there):
    root = _registered(here)
    digest = json.loads((root / MANIFEST).read_bytes())["digest"]
    assert here.json("publish", "doc", here.location) == {
        "name": "doc@1", "digest": digest, "location": here.location, "pushed": True,
    }  # fmt: skip
    assert here.remote_files() == {f"cartridges/doc/{name}": content for name, content in _bytes(root).items()}
    target = there.home / "cartridges" / "doc" / "1"
    assert there.json("pull", here.location) == {
        "name": "doc@1", "digest": digest, "path": str(target), "pulled": True, "promoted": True,
    }  # fmt: skip
    assert _bytes(target) == _bytes(root)
    assert [row["digest"] for row in there.json("list")] == [digest]
    assert there.json("verify", "doc")[0]["sound"]
    assert [path.name for path in target.parent.iterdir()] == ["1"]
    os.umask(umask := os.umask(0))
    for path in [target, *target.iterdir()]:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask


@both
def test_a_payload_of_several_parts_and_windows_arrives(here, there, monkeypatch):
    monkeypatch.setattr(transfer, "_WINDOW_BYTES", 10_000_001)
    root = _registered(here, positions=20_000, layers=4, chunk_tokens=256)
    assert (root / PAYLOAD).stat().st_size > 2 * (16 << 20), "multipart"
    here.json("publish", "doc", here.location)
    assert _bytes(Path(there.json("pull", here.location)["path"])) == _bytes(root)


@pytest.mark.parametrize("kind", ["tokens", "trained", "few ids"])
def test_every_kind_of_cartridge_travels(here, there, kind, tmp_path):
    import numpy as np

    root, count = tmp_path / "a", 8 if kind == "few ids" else 100
    ids = np.arange(count, dtype="<u4")
    shape = make_fingerprint()
    with ArtifactWriter(
        root, cartridge_id="doc", version=3, kind="tokens" if kind == "tokens" else "trained", fingerprint=shape,
        token_ids=ids, document_ids=None if kind == "tokens" else np.arange(3 * count, dtype="<u4"), chunk_tokens=count,
    ) as writer:  # fmt: skip
        if kind != "tokens":
            writer.write(bytes(count * shape.token_bytes))
        writer.commit(Provenance(tool="tests", created="2026-01-01T00:00:00Z"))
    here.json("import", root)
    here.json("publish", "doc@3", here.location)
    assert _bytes(Path(there.json("pull", here.location)["path"])) == _bytes(root)


def test_the_same_again_is_nothing_to_do(here, there):
    root = _registered(here)
    here.json("publish", "doc", here.location)
    before = {
        row["Key"]: row["LastModified"] for row in here.server.client.list_objects_v2(Bucket=here.bucket)["Contents"]
    }
    assert here.json("publish", "doc", here.location)["pushed"] is False
    after = {
        row["Key"]: row["LastModified"] for row in here.server.client.list_objects_v2(Bucket=here.bucket)["Contents"]
    }
    assert after == before
    assert here.json("pull", here.location) == {
        "name": "doc@1", "digest": here.json("list")[0]["digest"], "path": str(root), "pulled": False,
        "promoted": True,
    }  # fmt: skip
    there.json("pull", here.location)
    files = files_under(there.home / "cartridges")
    assert there.json("pull", here.location)["pulled"] is False
    assert files_under(there.home / "cartridges") == files


@both
def test_a_push_completes_one_that_lost_a_file(here):
    root = _registered(here)
    for lost in (PAYLOAD, "token_ids.npy", MANIFEST):
        here.json("publish", "doc", here.location)
        here.server.client.delete_object(Bucket=here.bucket, Key=f"cartridges/doc/{lost}")
        assert here.json("publish", "doc", here.location)["pushed"] is True
        assert here.remote_files()[f"cartridges/doc/{lost}"] == (root / lost).read_bytes()


def test_other_content_is_replaced_by_force_only(here, there):
    _registered(here, "one", seed=1)
    here.json("publish", "doc", here.location)
    before = here.remote_files()
    new = _registered(here, "two", seed=2, version=2)
    _one_line(here.transfer("publish", "doc", here.location), "holds doc@1 of other content", "--force")
    assert here.remote_files() == before
    here.json("publish", "doc", here.location, "--force")
    assert _bytes(Path(there.json("pull", here.location)["path"])) == _bytes(new)


def test_a_corrupt_cartridge_is_not_pushed(here):
    root = _registered(here)
    flip_bit(root / PAYLOAD, 9000)
    _one_line(here.transfer("publish", "doc", here.location), "cartridge doc@1: chunk")
    assert here.remote_files() == {}


@pytest.mark.parametrize("broken", [MANIFEST, PAYLOAD, "token_ids.npy"])
@pytest.mark.parametrize("force", [False, True])
def test_a_half_push_is_never_seen(here, there, broken, force, monkeypatch):
    if force:
        _registered(here, "old", seed=9)
        here.json("publish", "doc", here.location)
    _registered(here, "new", seed=1, version=2)
    upload = S3Source.upload

    def break_down(self: S3Source, location: str, file: str, *arguments: Any) -> None:
        if file == broken:
            raise SourceError("the network went away")
        upload(self, location, file, *arguments)

    monkeypatch.setattr(S3Source, "upload", break_down)
    _one_line(here.transfer("publish", "doc@2", here.location, *["--force"] * force), "the network went away")
    _one_line(there.transfer("pull", here.location), "holds no manifest.json")
    monkeypatch.undo()
    for name, value in here.server.environment.items():
        monkeypatch.setenv(name, value)
    here.json("publish", "doc@2", here.location)
    there.json("pull", here.location)


def _nothing_left(machine: _Machine) -> None:
    assert files_under(machine.home / "cartridges") == {}
    assert machine.json("list") == []


def test_a_pull_of_wrong_bytes_leaves_nothing(here, there):
    _registered(here)
    here.json("publish", "doc", here.location)
    key = f"cartridges/doc/{PAYLOAD}"
    sound = here.remote_files()[key]
    for damaged, word in (
        (sound[:9000] + bytes([sound[9000] ^ 1]) + sound[9001:], "chunk"), (sound[:-1], "bytes, its manifest says"),
        (bytes([sound[0] ^ 1]) + sound[1:], "header"),
    ):  # fmt: skip
        here.server.client.put_object(Bucket=here.bucket, Key=key, Body=damaged)
        _one_line(there.transfer("pull", here.location), "doc@1", word)
        _nothing_left(there)
    here.server.client.put_object(Bucket=here.bucket, Key=key, Body=sound)
    there.json("pull", here.location)


def test_a_pull_that_breaks_leaves_nothing_and_the_next_succeeds(here, there, proxy, monkeypatch):
    monkeypatch.setattr(s3, "_LONGEST_BACKOFF_S", 0.01)
    _registered(here)
    here.json("publish", "doc", here.location)
    for faults in ([None, reset], [None, None, None, flipped]):
        proxy.faults, proxy.always = list(faults), None if flipped in faults else reset
        ran = there.at(proxy.endpoint, "pull", here.location)
        assert ran.status == 1
        _nothing_left(there)
    proxy.always, proxy.faults = None, []
    assert there.at(proxy.endpoint, "pull", here.location).status == 0


def test_pulls_at_the_same_time_download_once(here, there, proxy):
    _registered(here)
    here.json("publish", "doc", here.location)
    source, registry = S3Source(endpoint_url=proxy.endpoint), Registry(there.home / "registry.sqlite")
    done = []
    run_threads(4, lambda _: done.append(
        transfer.pull(here.location, source, registry, there.home / "cartridges", progress=lambda *_: None)
    ))  # fmt: skip
    assert sorted(pulled.changed for pulled in done) == [False, False, False, True]
    assert len({pulled.root for pulled in done}) == 1
    source.close()


def _pull_slowly(endpoint: str, location: str, home: Path) -> None:
    source = S3Source(endpoint_url=endpoint)
    transfer.pull(location, source, Registry(home / "registry.sqlite"), home / "cartridges", progress=lambda *_: None)


def test_what_a_killed_pull_left_is_invisible_and_goes_with_the_next(here, there, proxy):
    _registered(here)
    here.json("publish", "doc", here.location)
    proxy.faults, proxy.always = [None, None, None], trickle(0.05)
    child = multiprocessing.get_context("spawn").Process(
        target=_pull_slowly, args=(proxy.endpoint, here.location, there.home)
    )
    child.start()
    directory = there.home / "cartridges" / "doc"
    while not list(directory.glob(f".1.*/{PAYLOAD}")):
        assert child.is_alive()
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert there.json("list") == []
    there.json("pull", here.location)
    assert [path.name for path in directory.iterdir()] == ["1"]


def test_an_id_taken_by_other_content_is_refused_with_what_to_do(here, there):
    root = _registered(here)
    here.json("publish", "doc", here.location)
    mine = _registered(there, seed=5)
    _one_line(there.transfer("pull", here.location), "doc@1 is registered with other content", "--id")
    pulled = there.json("pull", here.location, "--id", "theirs")
    assert pulled["name"] == "theirs@1"
    assert (Path(pulled["path"]) / PAYLOAD).read_bytes() == (root / PAYLOAD).read_bytes()
    assert json.loads((Path(pulled["path"]) / MANIFEST).read_bytes())["id"] == "theirs"
    assert there.json("show", "doc")["location"] == str(mine)
    assert there.json("verify", "theirs")[0]["sound"]


def test_an_id_that_is_a_label_or_a_directory_is_refused_before_anything_is_downloaded(here, there):
    _registered(here)
    here.json("publish", "doc", here.location)
    _registered(there, cartridge_id="other")
    there.json("label", "doc", "other")
    _one_line(there.transfer("pull", here.location), "doc is a label here", "--id")
    make_artifact(there.home / "cartridges" / "third" / "1", positions=80, seed=7, cartridge_id="third")
    _one_line(there.transfer("pull", here.location, "--id", "third"), "exists with other content", "--id")
    (there.home / "cartridges" / "fourth").mkdir()
    _one_line(there.transfer("pull", here.location, "--id", "../up"), "cannot be a cartridge id")


def test_a_cartridge_whose_files_were_lost_is_pulled_again(here, there):
    root = _registered(here)
    here.json("publish", "doc", here.location)
    path = Path(there.json("pull", here.location)["path"])
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert there.json("pull", here.location)["pulled"] is True
    assert _bytes(path) == _bytes(root)


def test_a_cartridge_is_verified_where_it_lies_and_every_connection_is_closed(here, there, proxy, monkeypatch):
    _registered(here)
    here.json("publish", "doc", here.location)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    assert there("import", here.location).status == 0
    kept, init = [], S3Source.__init__
    monkeypatch.setattr(S3Source, "__init__", lambda self, **how: kept.append(self) or init(self, **how))
    proxy.open_most = proxy.open_now
    assert there.json("verify", "doc") == [{"name": "doc@1", "sound": True, "problem": None}]
    assert kept and proxy.open_most > 0, "it was not read through the proxy; kept, since going out of use closes"
    until(lambda: proxy.open_now == 0)


def test_what_is_not_there_is_one_line(here):
    _registered(here)
    _one_line(here.transfer("publish", "nobody", here.location), "nobody")
    _one_line(here.transfer("publish", "doc", "s3://no-such-bucket/x"), "404 NoSuchBucket")
    _one_line(here.transfer("pull", "s3://no-such-bucket/x"), "404 NoSuchBucket")
    _one_line(here.transfer("pull", here.location), "is this where a cartridge was pushed?")
    _one_line(here.at("http://key:hush@x", "pull", here.location), "credentials do not belong")
