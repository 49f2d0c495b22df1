"""A store that follows a published library: what is published is served, what is removed is not, and one fault is one cartridge's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from homes import CHUNK, Home, Prompt, assert_served
from making import Made, make_artifact, make_ids, sha256_hasher
from waiting import until

from lmcache_cartridge.artifact.reading import load_token_ids
from lmcache_cartridge.errors import RegistryError
from lmcache_cartridge.library.published import INDEX
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.settings import Settings
from lmcache_cartridge.sources.published import Library
from lmcache_cartridge.sources.s3 import S3Source


class Fleet:
    """An author's machine, and servers that follow what it publishes."""

    def __init__(self, home: Home, path: Path, location: str) -> None:
        self._home, self._path, self.location = home, path, location
        self.library = Library(Settings(home=path / "author", disk_dir=path / "author", library=location))

    def make(self, name: str, **options: Any) -> Made:
        root = self._path / "made" / name / str(options.get("version", 1))
        made = make_artifact(root, cartridge_id=name, positions=72, **options)
        self.library.publish(root)
        return made

    def prompt(self, made: Made) -> Prompt:
        root = self._path / "made" / made.manifest.id / str(made.manifest.version)
        ids = load_token_ids(made.manifest, root).tolist()
        return Prompt(list(sha256_hasher(CHUNK)(ids + make_ids(2 * CHUNK, 99))), 72 // CHUNK, None)

    def server(self, name: str = "server", **settings: Any) -> CartridgeStore:
        own = {"disk_dir": self._path / name, "library": self.location, "reload_s": 0.05}
        return self._home.open(settings=own | settings)


@pytest.fixture
def fleet(home, tmp_path):
    fleet = Fleet(home, tmp_path, str(tmp_path / "shared"))
    yield fleet
    fleet.library.close()


def test_servers_serve_what_is_published_and_stop_with_what_is_removed(fleet, home):
    one = fleet.make("one")
    home.make("local", seed=9)
    servers = [fleet.server(f"server-{n}") for n in range(2)]
    for server in servers:
        until(lambda server=server: server.names() == ["one@1"])
        assert_served(server, one, fleet.prompt(one))
    two = fleet.make("two", seed=1)
    newer = fleet.make("one", version=2, seed=2)
    for server in servers:
        until(lambda server=server: len(server.names()) == 3)
        assert_served(server, two, fleet.prompt(two))
        assert_served(server, newer, fleet.prompt(newer))
    fleet.library.registry.remove("one@1")
    for server in servers:
        until(lambda server=server: "one@1" not in server.names())
        assert server.lookup(fleet.prompt(one).hashes) == 0
        assert_served(server, newer, fleet.prompt(newer))


def test_what_was_known_is_served_after_a_restart_without_the_library(fleet, tmp_path):
    made = fleet.make("one")
    fleet.server().close()
    index = Path(fleet.location) / INDEX
    sound = index.read_bytes()
    index.write_bytes(b"damaged")
    assert_served(fleet.server(), made, fleet.prompt(made))
    with pytest.raises(RegistryError, match="damaged"):
        fleet.server("fresh")
    index.unlink()
    assert_served(fleet.server(), made, fleet.prompt(made))
    index.write_bytes(sound)
    assert fleet.server("fresh").names() == ["one@1"]


@pytest.fixture
def s3_kind():
    """Swift cannot be published to."""
    return "moto"


@pytest.fixture
def s3_fleet(home, tmp_path, s3_credentials, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_credentials.endpoint)
    fleet = Fleet(home, tmp_path, f"s3://{bucket}/library")
    yield fleet
    fleet.library.close()


def test_a_server_writes_nothing_to_the_library(s3_fleet, monkeypatch):
    made = s3_fleet.make("one")

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a server wrote")

    for name in ("upload", "swap", "delete"):
        monkeypatch.setattr(S3Source, name, refuse)
    server = s3_fleet.server()
    until(lambda: server.names() == ["one@1"])
    assert_served(server, made, s3_fleet.prompt(made))
    with pytest.raises(AssertionError):  # the test would see it
        s3_fleet.library.registry.label("current", "one")
    assert Registry(s3_fleet.library.registry.path, read_only=True).labels() == {}
