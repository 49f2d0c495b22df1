"""However a chunk's bytes travel, what the engine reads is the KV that was stored, in the engine's layout."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from chunks import copied, in_int8
from homes import Home, catalog_of
from making import Made, make_artifact, make_fingerprint, sha256_hasher
from s3 import S3Server
from waiting import until

from lmcache_cartridge.artifact.cartridge import Place
from lmcache_cartridge.artifact.reading import PAYLOAD, load_token_ids
from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.store import CartridgeStore

MODEL = make_fingerprint(layers=2, head_size=32)
POSITIONS = 512
ODD = 96
"""Tokens of stored chunks that no engine's chunk is made of."""
PART = 1 << 16
"""Bytes of a request to S3 where a chunk of 256 is larger than one, and one of 64 half of one."""
KINDS = ("prefill", "trained")
ENCODINGS = ("plain", "int8")
SIZES = (64, 128, 256)


class _Stored(NamedTuple):
    made: Made
    root: Path
    remote: str
    kv: torch.Tensor


class _Travels:
    """Cartridges of every kind, payload and stored chunk, in directories and on S3, and stores that serve them."""

    def __init__(self, server: S3Server, root: Path) -> None:
        self.server, self._root, self._bucket = server, root, "travels"
        self._stored: dict[tuple, _Stored] = {}
        server.client.create_bucket(Bucket=self._bucket)
        for number, case in enumerate(itertools.product(ENCODINGS, KINDS, (*SIZES, ODD))):
            self._stored[case] = self._store(number, *case)

    def _store(self, number: int, encoding: str, kind: str, stored: int) -> _Stored:
        root, name = self._root / "made" / str(number), f"{encoding}-{kind}-{stored}"
        made = make_artifact(
            root, positions=POSITIONS, chunk_tokens=stored, kind=kind, fingerprint=MODEL, seed=number, encoding=encoding
        )
        self.server.client.upload_file(str(root / PAYLOAD), self._bucket, f"{name}/{PAYLOAD}")
        kv = made.kv if encoding == "plain" else in_int8(made.kv, MODEL, stored)
        return _Stored(made, root, f"s3://{self._bucket}/{name}", kv)

    def of(self, tokens: int) -> list[_Stored]:
        """Return cartridges of every kind and payload in chunks of `tokens`, and some in odd ones."""
        same = [self._stored[case] for case in itertools.product(ENCODINGS, KINDS, [tokens])]
        return [*same, self._stored["plain", "prefill", ODD], self._stored["int8", "trained", ODD]]


class _Way:
    """A store of an engine, with memory for one cartridge, so that each pushes out the one before."""

    def __init__(self, travels: _Travels, home: Home, tokens: int, layout: str, **settings: object) -> None:
        given = {
            "s3_endpoint_url": travels.server.endpoint, "s3_region": "us-east-1", "disk_dir": home.path / "cache",
            "reload_s": 0, "device_bytes": 0,
        }  # fmt: skip
        self._tokens, self._layout, self._chunks = tokens, layout, POSITIONS // tokens
        self.store: CartridgeStore = home.open(
            fingerprint=MODEL, chunks=self._chunks, chunk_tokens=tokens, layout=layout,
            settings=given | settings,
        )  # fmt: skip

    def check(self, stored: _Stored, location: str, at_once: int) -> None:
        """Have a cartridge loaded, so many chunks at once, and compare each with what it must be."""
        manifest = stored.made.manifest
        ids = load_token_ids(manifest, stored.root).tolist()
        hashes, tag = list(sha256_hasher(self._tokens)(ids)), manifest.digest
        assert len(hashes) == self._chunks
        claim = self.store.claim(tag, {tag: Place(stored.root, location)})
        if at_once >= len(hashes):
            until(lambda: claim.poll().ready)
        else:
            until(lambda: catalog_of(self.store).index.has(tag))  # nothing of it loads before a poll
            claim.close()
        for first in range(0, len(hashes), at_once):
            if 1 < at_once < len(hashes) and manifest.kind == "prefill":
                assert self.store.lookup(hashes[: first + at_once], tag) == min(first + at_once, len(hashes))
            for chunk in range(first, min(first + at_once, len(hashes))):
                self._compare(hashes[chunk], tag, stored.kv[:, :, chunk * self._tokens :][:, :, : self._tokens])
        claim.close()
        copied(self.store._loader)
        for chunk_hash in hashes:
            while self.store.release(chunk_hash, tag):
                pass

    def _compare(self, chunk_hash: int, tag: str, kv: torch.Tensor) -> None:
        with self.store.lend(chunk_hash, tag) as loan:
            expected = torch.empty_like(loan.bytes)
            tiles.pack(kv, expected, self.store.shape, self._layout)
            assert torch.equal(loan.bytes, expected)

    def reads(self) -> int:
        return self.store.tiers()["source"]["reads"]


@pytest.fixture(scope="module")
def travels(s3_server, tmp_path_factory):
    return _Travels(s3_server, tmp_path_factory.mktemp("travels"))


CASES = [
    (64, "heads"), (256, "heads"), (128, "fused"), (64, "vec/64"), (256, "vec/128"), (128, "vec/128/blocks"),
    (256, "vec/128/blocks"), (64, "amx/64/blocks"), (256, "amx/128"),
]  # fmt: skip
"""Chunks of 64 are half a block of vLLM's default on CPU, of 128 one, of 256 two; LMCache's default is 256."""


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request):
    return request.param


@pytest.fixture
def open_way(travels, s3_credentials, home, case):
    return lambda **settings: _Way(travels, home, *case, **settings)


@pytest.mark.parametrize(("local_copies", "at_once"), [(False, 1), (True, 2), (False, 99)])
def test_from_a_directory(travels, open_way, case, local_copies, at_once):
    way = open_way(disk_local=local_copies, disk_bytes=1 << 30 if local_copies else 0)
    for each in travels.of(case[0]):
        way.check(each, str(each.root), at_once)


def test_from_s3_from_its_copies_on_disk_and_after_a_restart(travels, open_way, case):
    stored, reads = travels.of(case[0]), []
    for way in (open_way(), open_way()):
        for each in stored * 2:
            way.check(each, each.remote, 99)
            reads.append(way.reads())
    first, again, restarted = reads[: len(stored)], reads[len(stored) : 2 * len(stored)], reads[2 * len(stored) :]
    assert min(first) > 0
    assert set(again) == {first[-1]}, "the copies are used"
    assert set(restarted) == {0}


def test_from_s3_in_small_parts_without_copies(travels, open_way, case):
    way = open_way(s3_part_bytes=PART, disk_bytes=0)
    stored = travels.of(case[0])[CASES.index(case) % 2 :: 2]
    for each, at_once in zip(stored, (1, 99, 2), strict=True):
        way.check(each, each.remote, at_once)
