"""Whatever the package waits for outside itself may hang, fail or be full: what is sound is served meanwhile, a store closes,
nothing ends silently, and all is served once the fault has passed.

`PLACES` are the calls that wait for a disk, a mount, a server or another process, as found by reading. A fault is met by the
threads in the background, never by the test's own, and where a call is about an artefact only for those that are `ILL`.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from homes import Home
from making import Made, flip_bit, make_artifact
from s3 import MotoServer
from waiting import run_threads, until

from lmcache_cartridge.artifact import files, reading
from lmcache_cartridge.artifact.local import LocalSource
from lmcache_cartridge.library import entries
from lmcache_cartridge.library.manifest_cache import ManifestCache
from lmcache_cartridge.library.quarantine import Quarantine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.library.workers import Workers, noted
from lmcache_cartridge.memory import loads
from lmcache_cartridge.memory.claims import Claim
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.sources.disk_cache import DiskCache
from lmcache_cartridge.sources.s3 import S3Source

ILL = "unwell"
"""In the name of every artefact whose place is at fault."""
HERE, AWAY = f"{ILL}-here", f"{ILL}-away"


class Place(NamedTuple):
    """A call that waits for the outside."""

    owner: Any
    call: str
    everyone: bool = False
    """Whether the call is about no single artefact, and fails for all."""


ABOUT_ALL = {
    "the registry": Place(Registry, "look", True),
    "the labels that are warm": Place(Registry, "warm", True),
    "the notes of quarantines": Place(Quarantine, "follow", True),
}
"""Of these nothing new is learned; what is known is served."""
AT_START = {
    "a file in a directory": Place(reading, "_read_at_most"),
    "a manifest on S3": Place(S3Source, "read"),
    "the size of a payload on S3": Place(S3Source, "size"),
    "copies of manifests": Place(ManifestCache, "fetch"),
}
WRITTEN = {
    "the disk tier": Place(DiskCache, "_make_room", True),
    "rows kept for the next start": Place(files, "replace", True),
}
NOTE = "a note of a quarantine"
OTHERS = {
    NOTE: Place(files, "replace"),
    "a payload in a directory": Place(LocalSource, "read_into"),
    "a payload on S3": Place(S3Source, "read_into"),
    "a copy in the disk tier": Place(DiskCache, "read_into", True),
}
PLACES = ABOUT_ALL | AT_START | WRITTEN | OTHERS


class Fault:
    """What a place does while it `is_on`, and how often it was met: it raises an error, or hangs until the fault is over."""

    def __init__(self, place: Place, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.is_on, self.met, self._over, self._outlasted = False, 0, threading.Event(), False
        self.place, self._tester = place, threading.current_thread()
        call = getattr(place.owner, place.call)

        def faulty(*arguments: Any, **named: Any) -> Any:
            is_concerned = place.everyone or ILL in str(arguments)
            if self.is_on and threading.current_thread() is not self._tester and is_concerned:
                self.met += 1
                if error is not None:
                    raise error
                self._outlasted |= not self._over.wait(50)
            return call(*arguments, **named)

        monkeypatch.setattr(place.owner, place.call, faulty)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Let it be met for a while."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            self._over.set()
        assert not self._outlasted, "the test waited for what hangs"


BUG, FULL = ZeroDivisionError("a bug"), OSError(errno.ENOSPC, "No space left on device")


class World:
    """A registry with two artefacts that a fault may befall, one in a directory and one on S3, and sound ones."""

    def __init__(self, home: Home, server: MotoServer, bucket: str) -> None:
        self.home, self._server, self._bucket = home, server, bucket
        self.made: dict[str, Made] = {}
        self.damaged = ""
        self.make("resident", "cold", HERE)
        self.push(AWAY)

    def make(self, *names: str) -> None:
        for name in names:
            self.made[name] = self.home.make(name, positions=64, seed=sum(name.encode()))

    def push(self, name: str) -> None:
        root = self.home.path / "pushed" / name
        self.made[name] = make_artifact(root, cartridge_id=name, positions=64, seed=sum(name.encode()))
        for path in root.iterdir():
            self._server.client.upload_file(str(path), self._bucket, f"{name}/{path.name}")
        self.home.registry.register(root, f"s3://{self._bucket}/{name}")

    def change(self) -> None:
        """Register more, in places that are ill and in others."""
        self.make(f"{ILL}-later")
        self.push(f"{ILL}-far")
        self.make("later")

    def open(self, known: int = 4) -> CartridgeStore:
        settings = {
            "reload_s": 0.02, "s3_endpoint_url": self._server.endpoint, "disk_dir": self.home.path / "disk",
            "disk_bytes": 1 << 24, "lookup_timeout_s": 20,
        }  # fmt: skip
        store = self.home.open(settings=settings, chunks=32)
        until(lambda: len(store.names()) >= known)
        return store

    def claims(self, store: CartridgeStore, *names: str) -> list[Claim]:
        return [store.claim(self.made[name].digest, {}) for name in names]

    def serve(self, store: CartridgeStore, *names: str) -> None:
        """Wait until the store knows each of these, look it up and compare its bytes."""
        for name in names:
            until(lambda name=name: f"{name}@1" in store.names())
            self.home.check_served(store, name)


@pytest.fixture
def s3_kind():
    return "moto"


@pytest.fixture
def world(home, s3_credentials, bucket, monkeypatch):
    monkeypatch.setattr(entries, "_KEPT_FROM", 1)  # as if there were thousands
    monkeypatch.setattr(entries, "_MAX_MANIFESTS", 1)  # so that they are read again
    monkeypatch.setattr(entries, "_RETRY_S", 0.5)
    monkeypatch.setattr(loads, "STALLED_S", 0.3)
    monkeypatch.setitem(Workers.__init__.__kwdefaults__, "stalled_s", 0.3)  # type: ignore[misc]
    return World(home, s3_credentials, bucket)


def met(fault: Fault, store: CartridgeStore, world: World) -> list[Claim]:
    """Let a fault be met, by claims and by what is registered meanwhile; return the claims."""
    if fault.place is PLACES[NOTE]:
        flip_bit(world.home.payload(HERE), 5000)
        world.damaged = f"{HERE}@1"
    claims = world.claims(store, HERE, AWAY)
    world.change()
    until(lambda: [claim.poll() for claim in claims] and fault.met)
    return claims


def recovers(store: CartridgeStore, world: World) -> None:
    """All is served that the fault held up, but for what is damaged."""
    until(lambda: len(store.names()) == 7 - (world.damaged in store.refused()))
    claims = world.claims(store, AWAY, f"{ILL}-later", f"{ILL}-far")
    until(lambda: all(claim.poll().ready for claim in claims))
    for claim in claims:
        claim.close()


@pytest.mark.parametrize(
    ("error", "place"),
    [*((error, place) for error in (None, BUG) for place in PLACES), *((FULL, place) for place in WRITTEN)],
)
def test_a_fault_costs_its_own_cartridge_and_is_told_and_a_store_closes(world, place, error, monkeypatch):
    fault, store, other = Fault(PLACES[place], monkeypatch, error), world.open(), world.open()
    world.serve(store, "resident")
    relieve, relieved, before = store.cpu.relieve, [], noted()
    store.cpu.relieve = lambda: relieved.append(1) or relieve()  # type: ignore[func-returns-value]
    with fault.on():
        claims = met(fault, store, world)
        world.serve(store, "resident", "cold", *([] if place in ABOUT_ALL else ["later"]))
        told = [lambda: noted() > before, store.refused, lambda: [claim.poll().problem for claim in claims]]
        until(lambda: error is not BUG or any(tell() for tell in told))
        since = len(relieved)
        until(lambda: len(relieved) > since + 3)  # the keeper goes on
        for claim in claims:
            claim.close()
        run_threads(1, lambda _: other.close(), timeout_s=20)  # it does not wait for what hangs
    recovers(store, world)


@pytest.mark.parametrize("place", AT_START)
def test_a_store_starts_beside_what_hangs(world, place, monkeypatch):
    fault = Fault(AT_START[place], monkeypatch)
    with fault.on():
        store = world.open(known=3)
        world.serve(store, "resident", "cold")
        until(lambda: fault.met)
    until(lambda: len(store.names()) == 4)
