"""However a chunk's bytes travel, what the engine reads is the KV that was stored, in the engine's layout."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from chunks import copied, in_int8
from homes import STILL, catalog_of
from making import Made, make_artifact, make_fingerprint
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
CASES = [
    (64, "heads"), (256, "heads"), (128, "fused"), (64, "vec/64"), (256, "vec/128"), (128, "vec/128/blocks"),
    (256, "vec/128/blocks"), (64, "amx/64/blocks"), (256, "amx/128"),
]  # fmt: skip
"""Chunks of 64 are half a block of vLLM's default on CPU, of 128 one, of 256 two; LMCache's default is 256."""


class _Stored(NamedTuple):
    made: Made
    root: Path
    remote: str
    kv: torch.Tensor


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request):
    return request.param


@pytest.fixture
def s3_kind():
    return "moto"


@pytest.fixture
def stored(case, tmp_path, s3_credentials, bucket):
    """Cartridges of every kind and payload in the engine's chunks, and some in odd ones, in directories and on S3."""
    kinds = [*itertools.product(("plain", "int8"), ("prefill", "trained"), case[:1])]
    found = []
    for number, (encoding, kind, tokens) in enumerate([*kinds, ("plain", "prefill", ODD), ("int8", "trained", ODD)]):
        root = tmp_path / str(number)
        made = make_artifact(
            root, positions=POSITIONS, chunk_tokens=tokens, kind=kind, fingerprint=MODEL, seed=number, encoding=encoding
        )
        s3_credentials.client.upload_file(str(root / PAYLOAD), bucket, f"{number}/{PAYLOAD}")
        kv = made.kv if encoding == "plain" else in_int8(made.kv, MODEL, tokens)
        found.append(_Stored(made, root, f"s3://{bucket}/{number}", kv))
    return found


@pytest.fixture
def open_store(home, case, s3_credentials):
    """Return a function that opens a store with memory for one cartridge, so that each pushes out the one before."""
    tokens, layout = case
    given = STILL | {
        "s3_endpoint_url": s3_credentials.endpoint, "s3_region": "us-east-1", "disk_dir": home.path / "cache"
    }  # fmt: skip
    return lambda **settings: home.open(
        fingerprint=MODEL, chunks=POSITIONS // tokens, chunk_tokens=tokens, layout=layout, settings=given | settings
    )


def _check(store: CartridgeStore, one: _Stored, location: str, at_once: int) -> None:
    """Have a cartridge loaded, one chunk or two at a time, or all, and compare each with what it must be."""
    manifest, tokens = one.made.manifest, store.engine.chunk_tokens
    hashes, tag = list(store.engine.hasher(load_token_ids(manifest, one.root).tolist())), manifest.digest
    claim = store.claim(tag, {tag: Place(one.root, location)})
    if at_once > 2:
        until(lambda: claim.poll().ready)
    else:
        until(lambda: catalog_of(store).index.has(tag))  # nothing of it loads before a poll
        claim.close()
    for chunk, chunk_hash in enumerate(hashes):
        if at_once == 2 and chunk % 2 == 0 and manifest.kind == "prefill":
            assert store.lookup(hashes[: chunk + 2], tag) == chunk + 2
        with store.lend(chunk_hash, tag) as loan:
            expected = torch.empty_like(loan.bytes)
            tiles.pack(one.kv[:, :, chunk * tokens :][:, :, :tokens], expected, store.shape, store.engine.layout)
            assert torch.equal(loan.bytes, expected)
    claim.close()
    copied(store._loader)
    for chunk_hash in hashes:
        while store.release(chunk_hash, tag):
            pass


@pytest.mark.parametrize(("local_copies", "at_once"), [(False, 1), (True, 2), (False, 99)])
def test_from_a_directory(stored, open_store, local_copies, at_once):
    store = open_store(disk_local=local_copies, disk_bytes=1 << 30 if local_copies else 0)
    for each in stored:
        _check(store, each, str(each.root), at_once)


def test_from_s3_from_its_copies_on_disk_and_after_a_restart(stored, open_store):
    reads = []
    for store in (open_store(), open_store()):
        for each in stored * 2:
            _check(store, each, each.remote, 99)
            reads.append(store.tiers()["source"]["reads"])
    first, again, restarted = reads[:6], reads[6:12], reads[12:]
    assert min(first) > 0
    assert set(again) == {first[-1]}, "the copies are used"
    assert set(restarted) == {0}


def test_from_s3_in_small_parts_without_copies(stored, open_store):
    store = open_store(s3_part_bytes=PART, disk_bytes=0)
    for each, at_once in zip(stored, (1, 99, 2) * 2, strict=True):
        _check(store, each, each.remote, at_once)
