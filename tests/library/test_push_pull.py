"""`publish` to an S3 location and `pull`: an artefact travels through S3 and is the same one at the other end, whole or not at all, on both sides."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import Cli
from faulty_proxy import trickle
from making import files_under, make_artifact
from s3 import both

from lmcache_cartridge.artifact.reading import MANIFEST, PAYLOAD
from lmcache_cartridge.errors import SourceError
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.sources import transfer
from lmcache_cartridge.sources.s3 import S3Source


class Remote(NamedTuple):
    """Where an artefact is pushed to."""

    client: Any
    bucket: str

    @property
    def location(self) -> str:
        return f"s3://{self.bucket}/doc"

    def rows(self) -> list[dict[str, Any]]:
        return self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])

    def files(self) -> dict[str, bytes]:
        return {
            row["Key"].removeprefix("doc/"): self.client.get_object(Bucket=self.bucket, Key=row["Key"])["Body"].read()
            for row in self.rows()
        }

    def put(self, data: bytes) -> None:
        """Replace the payload."""
        self.client.put_object(Bucket=self.bucket, Key=f"doc/{PAYLOAD}", Body=data)


@pytest.fixture
def remote(s3_credentials, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_credentials.endpoint)
    return Remote(s3_credentials.client, bucket)


@pytest.fixture
def here(tmp_path):
    return Cli(tmp_path / "here")


@pytest.fixture
def there(tmp_path):
    return Cli(tmp_path / "there")


def _registered(machine: Cli, name: str = "artefact", **arguments: Any) -> Path:
    root = machine.home / name
    make_artifact(root, **({"positions": 80} | arguments))
    machine.json("import", root)
    return root


@pytest.fixture
def pushed(here, remote):
    """An artefact that was pushed."""
    root = _registered(here)
    here.json("publish", "doc", remote.location)
    return root


def _bytes(root: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in files_under(root).items()}


def _pulled(machine: Cli, remote: Remote) -> Path:
    return Path(machine.json("pull", remote.location)["path"])


def _refused(machine: Cli, *words: Any) -> str:
    """Return the last line of what a command says that is refused."""
    last = machine.refused(*words).splitlines()[-1]
    assert last.startswith("lmcache-cartridge: ")
    return last


@both
def test_a_pulled_cartridge_is_the_one_that_was_pushed(here, there, remote):
    root = _registered(here)
    assert here.json("publish", "doc", remote.location)["pushed"] is True
    assert remote.files() == _bytes(root)
    target = _pulled(there, remote)
    assert target == there.home / "cartridges" / "doc" / "1" and _bytes(target) == _bytes(root)
    assert [row["id"] for row in there.json("list")] == ["doc"]
    assert [path.name for path in target.parent.iterdir()] == ["1"]
    os.umask(umask := os.umask(0))
    for path in [target, *target.iterdir()]:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask


@both
def test_a_payload_of_several_parts_and_windows_arrives(here, there, remote, monkeypatch):
    monkeypatch.setattr(transfer, "_WINDOW_BYTES", 10_000_001)
    root = _registered(here, positions=11_000, layers=4, chunk_tokens=256)
    assert (root / PAYLOAD).stat().st_size > 16 << 20, "multipart"
    here.json("publish", "doc", remote.location)
    assert _bytes(_pulled(there, remote)) == _bytes(root)


@pytest.mark.parametrize(("kind", "document"), [("tokens", None), ("trained", list(range(300)))])
def test_every_kind_of_cartridge_travels(here, there, remote, kind, document):
    root = _registered(here, positions=100, kind=kind, document_ids=document)
    here.json("publish", "doc", remote.location)
    assert _bytes(_pulled(there, remote)) == _bytes(root)


def test_the_same_again_is_nothing_to_do(here, there, remote, pushed):
    before = remote.rows()
    assert here.json("publish", "doc", remote.location)["pushed"] is False
    assert remote.rows() == before
    _pulled(there, remote)
    files = files_under(there.home / "cartridges")
    assert there.json("pull", remote.location)["pulled"] is False
    assert files_under(there.home / "cartridges") == files


@both
@pytest.mark.parametrize("lost", [PAYLOAD, "token_ids.npy"])
def test_a_push_completes_one_that_lost_a_file(here, remote, pushed, lost):
    remote.client.delete_object(Bucket=remote.bucket, Key=f"doc/{lost}")
    assert here.json("publish", "doc", remote.location)["pushed"] is True
    assert remote.files() == _bytes(pushed)


def test_other_content_is_not_replaced(here, remote, pushed):
    _registered(here, "two", seed=2, version=2)
    assert "holds doc@1 of other content" in _refused(here, "publish", "doc", remote.location)
    assert remote.files() == _bytes(pushed)


@pytest.mark.parametrize("broken", [MANIFEST, PAYLOAD, "token_ids.npy"])
def test_a_half_push_is_never_seen(here, there, remote, broken, monkeypatch):
    new, upload = _registered(here, "new", seed=1, version=2), S3Source.upload

    def break_down(self: S3Source, location: str, file: str, *arguments: Any) -> None:
        if file == broken:
            raise SourceError("the network went away")
        upload(self, location, file, *arguments)

    with monkeypatch.context() as breaking:
        breaking.setattr(S3Source, "upload", break_down)
        said = _refused(here, "publish", "doc@2", remote.location)
    assert "the network went away" in said
    assert "holds no manifest.json" in _refused(there, "pull", remote.location)
    here.json("publish", "doc@2", remote.location)
    assert _bytes(_pulled(there, remote)) == _bytes(new)


def _nothing_left(machine: Cli) -> None:
    assert files_under(machine.home / "cartridges") == {}
    assert machine.json("list") == []


def test_a_pull_of_wrong_bytes_leaves_nothing(there, remote, pushed):
    sound = (pushed / PAYLOAD).read_bytes()
    for damaged, word in (
        (sound[:9000] + bytes([sound[9000] ^ 1]) + sound[9001:], "chunk"), (sound[:-1], "bytes, its manifest says"),
        (bytes([sound[0] ^ 1]) + sound[1:], "header"),
    ):  # fmt: skip
        remote.put(damaged)
        said = _refused(there, "pull", remote.location)
        assert "doc@1" in said and word in said
        _nothing_left(there)
    remote.put(sound)
    _pulled(there, remote)


def _pull(endpoint: str, location: str, home: Path) -> transfer.Moved:
    source, registry = S3Source(endpoint_url=endpoint), Registry(home / "registry.sqlite")
    try:
        return transfer.pull(location, source, registry, home / "cartridges", progress=lambda *_: None)
    finally:
        source.close()


def test_what_a_killed_pull_left_is_invisible_and_goes_with_the_next(there, remote, pushed, proxy):
    proxy.faults, proxy.always = [None, None, None], trickle(0.05)
    child = multiprocessing.get_context("spawn").Process(
        target=_pull, args=(proxy.endpoint, remote.location, there.home)
    )
    child.start()
    directory = there.home / "cartridges" / "doc"
    while not list(directory.glob(f".1.*/{PAYLOAD}")):
        assert child.is_alive()
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert there.json("list") == []
    assert _pulled(there, remote) == directory / "1"
    assert [path.name for path in directory.iterdir()] == ["1"]


def test_an_id_taken_by_other_content_is_refused_with_what_to_do(there, remote, pushed):
    mine = _registered(there, seed=5)
    said = _refused(there, "pull", remote.location)
    assert "doc@1 is registered with other content" in said and "--id" in said
    pulled = there.json("pull", remote.location, "--id", "theirs")
    assert pulled["name"] == "theirs@1"
    assert (Path(pulled["path"]) / PAYLOAD).read_bytes() == (pushed / PAYLOAD).read_bytes()
    assert there.json("show", "doc")["location"] == str(mine)


def test_an_id_that_is_a_label_or_escapes_is_refused(there, remote, pushed):
    _registered(there, cartridge_id="other")
    there.json("label", "doc", "other")
    assert "doc is a label here" in _refused(there, "pull", remote.location)
    assert "cannot be" in _refused(there, "pull", remote.location, "--id", "../up")


def test_a_cartridge_whose_files_were_lost_is_pulled_again(there, remote, pushed):
    path = _pulled(there, remote)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert there.json("pull", remote.location)["pulled"] is True
    assert _bytes(path) == _bytes(pushed)


def test_what_is_not_there_is_one_line(here, remote):
    _registered(here)
    for words in ("publish", "doc"), ("pull",):
        assert "404 NoSuchBucket" in _refused(here, *words, "s3://no-such/x")
