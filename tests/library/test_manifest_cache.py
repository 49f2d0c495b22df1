"""A cached copy is whole, private and never changes; it is as new as asked for, and stands in where S3 is away."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from faulty_proxy import FaultyProxy, reset, silence, status
from making import Made, files_under, make_artifact, make_ids
from s3 import S3Server, both
from waiting import run_threads, until

from lmcache_cartridge.artifact.reading import MANIFEST, PAYLOAD, load_manifest, load_token_ids
from lmcache_cartridge.errors import (
    ArtifactError,
    ManifestError,
    SourceDenied,
    SourceError,
    SourceNotFound,
    TruncatedPayload,
)
from lmcache_cartridge.library.manifest_cache import ManifestCache
from lmcache_cartridge.sources.s3 import S3Source
from lmcache_cartridge.sources.sources import Sources


class _Remote:
    """An artefact on S3 behind a proxy that counts and breaks requests, and ways to change it."""

    def __init__(self, proxy: FaultyProxy, server: S3Server, bucket: str, tmp_path: Path) -> None:
        self.proxy, self.client, self.bucket, self._tmp_path = proxy, server.client, bucket, tmp_path
        self.location = f"s3://{bucket}/some/doc"
        self.sources = Sources(S3Source(endpoint_url=proxy.endpoint, attempts=4, backoff_s=0.01))
        self.directory = tmp_path / "manifests"

    def put(self) -> Made:
        """Store an artefact."""
        root = self._tmp_path / "artefact"
        made = make_artifact(root, positions=80)
        for path in root.iterdir():
            self.put_file(path.name, path.read_bytes())
        return made

    def put_file(self, file: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"some/doc/{file}", Body=data)

    def cache(self) -> ManifestCache:
        return ManifestCache(self.directory, self.sources)

    def requests(self) -> int:
        """Return how many requests there were since the last call."""
        count = len(self.proxy.requests)
        self.proxy.requests.clear()
        return count


@pytest.fixture
def remote(s3_credentials, bucket, tmp_path):
    with FaultyProxy(s3_credentials.port) as proxy:
        remote = _Remote(proxy, s3_credentials, bucket, tmp_path)
        yield remote
        remote.sources.close()


@both
def test_a_copy_is_private_and_holds_manifest_and_ids_but_no_payload(remote):
    made = remote.put()
    copy = remote.cache().fetch(remote.location)
    assert sorted(files_under(copy)) == [MANIFEST, "token_ids.npy"]
    for path in [remote.directory, *remote.directory.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    manifest = load_manifest(copy, made.digest, payload=False)
    assert manifest == made.manifest
    assert load_token_ids(manifest, copy).tolist() == make_ids(80, 0)
    with pytest.raises(TruncatedPayload):
        load_manifest(copy)


@both
def test_s3_is_asked_again_only_after_the_age_or_by_force(remote):
    remote.put()
    cache = remote.cache()
    copy = cache.fetch(remote.location)
    assert remote.requests() == 3, "manifest, size of the payload, ids"
    assert cache.fetch(remote.location) == copy
    assert remote.requests() == 0
    time.sleep(0.05)
    assert cache.fetch(remote.location, max_age_s=0.01) == copy
    assert remote.requests() == 1, "the same manifest"
    assert cache.fetch(remote.location, force=True) == copy
    assert remote.requests() == 2, "the same manifest, and the payload's size"


def test_without_s3_the_known_copy_stands_in(remote, caplog):
    remote.put()
    cache = remote.cache()
    copy = cache.fetch(remote.location)
    for fault in (status(500), reset):
        remote.proxy.always = fault
        assert cache.fetch(remote.location, max_age_s=0) == copy
    remote.requests()
    assert (cache.fetch(remote.location), remote.requests()) == (copy, 0), "not for every request"
    assert remote.location in caplog.text
    with pytest.raises(SourceError):
        cache.fetch(remote.location, force=True)
    remote.proxy.always = None
    assert cache.fetch(remote.location, force=True) == copy


def test_a_slow_s3_holds_up_one_who_asks_and_no_other(remote):
    remote.put()
    cache = ManifestCache(remote.directory, Sources(S3Source(endpoint_url=remote.proxy.endpoint, timeout_s=30)))
    copy = cache.fetch(remote.location)
    remote.requests()
    remote.proxy.always = silence
    asking = threading.Thread(target=cache.fetch, args=(remote.location,), kwargs={"max_age_s": 0})
    asking.start()
    until(remote.requests)
    assert cache.fetch(remote.location, max_age_s=0) == cache.known(remote.location) == copy
    assert cache.known(remote.location, 0)
    assert asking.is_alive()
    remote.proxy.always = None
    asking.join(30)
    assert not asking.is_alive()


@pytest.mark.parametrize(("code", "kind"), [(404, SourceNotFound), (403, SourceDenied)])
def test_what_was_removed_or_is_denied_now_is_not_served_from_the_copy(remote, code, kind):
    remote.put()
    cache = remote.cache()
    cache.fetch(remote.location)
    remote.proxy.always = status(code, "X")
    with pytest.raises(kind):
        cache.fetch(remote.location, max_age_s=0)


def test_an_artefact_that_is_not_sound_makes_no_copy(remote):
    remote.put()
    root = remote.directory.parent / "artefact"
    payload, ids, manifest = ((root / file).read_bytes() for file in (PAYLOAD, "token_ids.npy", MANIFEST))
    for file, sound, data, kind, words in (
        (PAYLOAD, payload, payload[:-1], TruncatedPayload, f"{remote.location}/{PAYLOAD} has {len(payload) - 1} bytes"),
        ("token_ids.npy", ids, ids[:-1] + bytes([ids[-1] ^ 1]), ArtifactError, "token ids do not have the digest"),
        ("token_ids.npy", ids, ids + bytes(5000), SourceError, "more than the"),
        (MANIFEST, manifest, manifest[:-20], ManifestError, f"{remote.location}/{MANIFEST}"),
    ):  # fmt: skip
        remote.put_file(file, data)
        with pytest.raises(kind, match=words):
            remote.cache().fetch(remote.location)
        assert not list(remote.directory.glob("*/*"))
        remote.put_file(file, sound)
    assert remote.cache().fetch(remote.location)


def test_threads_and_processes_get_the_same_copy(remote):
    remote.put()
    caches = [remote.cache() for _ in range(4)]  # as many processes would; they share nothing but the directory
    found: list[Path] = []
    run_threads(16, lambda i: found.append(caches[i % 4].fetch(remote.location)), timeout_s=60)
    assert (len(found), len(set(found))) == (16, 1)
    assert sorted(files_under(remote.directory)) == [
        str((found[0] / file).relative_to(remote.directory)) for file in (MANIFEST, "token_ids.npy")
    ]


def test_copies_that_nobody_asks_for_are_removed_after_a_month(remote):
    remote.put()
    cache = remote.cache()
    copy = cache.fetch(remote.location)

    for days, keep, left in ((29, (), copy), (40, (remote.location,), copy), (40, (), None)):
        for path in (copy, copy.parent):
            os.utime(path, (0, time.time() - days * 86400))
        cache.prune(keep)
        assert remote.cache().known(remote.location) == left
    assert load_manifest(cache.fetch(remote.location), payload=False)
