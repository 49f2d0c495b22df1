"""A quarantine is seen by every process until it is lifted, and noting one never raises."""

from __future__ import annotations

from functools import partial

import pytest
from homes import STILL, Home
from making import flip_bit
from s3 import S3Server, both
from waiting import until

from lmcache_cartridge.artifact.cartridge import Place
from lmcache_cartridge.artifact.reading import MANIFEST, PAYLOAD, chunk_range
from lmcache_cartridge.library.quarantine import Note, Quarantine, name_of
from lmcache_cartridge.memory.store import CartridgeStore

DIGEST = "ab" * 32


def test_what_caused_a_quarantine_is_remembered_until_it_is_lifted(tmp_path):
    quarantine, where = Quarantine(tmp_path), "s3://bucket/a b"
    assert quarantine.put(DIGEST, "/mnt/\udcff is corrupt", where) is True
    assert Quarantine(tmp_path).notes() == {name_of(DIGEST, where): Note("/mnt/\\udcff is corrupt", where)}
    quarantine.lift(DIGEST, "/elsewhere")
    assert quarantine.reason(DIGEST, where) and quarantine.reason(DIGEST, "/elsewhere") is None
    quarantine.put(DIGEST, "two\nlines", "/other")
    quarantine.drop(name_of(DIGEST, where))
    assert quarantine.notes() == {name_of(DIGEST, "/other"): Note("two\nlines", "/other")}
    quarantine.lift(DIGEST)
    assert list(tmp_path.iterdir()) == []


class _Remote:
    """A trained cartridge on S3 whose payload is wrong, and servers that found that out."""

    def __init__(self, home: Home, server: S3Server, bucket: str) -> None:
        self.home, self.made = home, home.make(kind="trained", positions=64)
        home.registry.remove("doc")
        self.location = f"s3://{bucket}/doc"
        self.quarantine = home.quarantine
        self.put = partial(server.client.upload_file, Bucket=bucket)
        self.put(str(home.root() / MANIFEST), Key=f"doc/{MANIFEST}")
        flip_bit(home.payload(), chunk_range(self.made.manifest, 3, range(1)).start)
        self.put(str(home.payload()), Key=f"doc/{PAYLOAD}")
        self.settings = {"s3_endpoint_url": server.endpoint, "s3_region": "us-east-1", "disk_dir": home.path / "cache"}

    def repair(self) -> None:
        flip_bit(self.home.payload(), chunk_range(self.made.manifest, 3, range(1)).start)
        self.put(str(self.home.payload()), Key=f"doc/{PAYLOAD}")

    def open(self) -> CartridgeStore:
        return self.home.open(settings=STILL | self.settings)

    def claim(self, store: CartridgeStore) -> str | None:
        """Claim the cartridge by its location until it is there, or return why it will not be."""
        digest = self.made.digest
        claim = store.claim(digest, {digest: Place(self.home.root(), self.location)})
        until(lambda: claim.poll().ready or claim.poll().refused)
        claim.close()
        return claim.poll().refused

    def serves(self, store: CartridgeStore) -> None:
        assert self.claim(store) is None
        self.home.check_served(store)


@pytest.fixture
def remote(home, s3_credentials, bucket):
    return _Remote(home, s3_credentials, bucket)


@both
@pytest.mark.parametrize("restart", [False, True])
def test_a_copy_on_s3_that_was_repaired_is_served_again_once_it_was_verified(remote, restart):
    store = remote.open()
    assert "cartridge doc@1: chunk 3" in remote.claim(store)
    store = remote.open() if restart else store
    assert "cartridge doc@1: chunk 3" in remote.claim(store)
    remote.repair()
    remote.quarantine.lift(remote.made.digest, remote.location)  # as `verify` does
    store.refresh()
    remote.serves(store)
    assert remote.quarantine.notes() == {}


def test_evicting_lifts_what_a_copy_on_s3_caused_and_nothing_else(remote):
    store, digest = remote.open(), remote.made.digest
    assert remote.claim(store)
    remote.repair()
    store.evict(digest)
    remote.serves(store)
    remote.quarantine.put(digest, "chunk 3 is corrupt", remote.location)
    remote.quarantine.put(digest, "it answers wrongly", str(remote.home.root()))
    for _ in range(2):
        store.refresh()
        store.evict(digest)
    assert remote.quarantine.reason(digest) == "it answers wrongly"
