"""However a chunk's bytes travel, what the engine reads is the KV that was stored, packed as the engine packs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from homes import Home, until
from making import make_artifact, make_fingerprint, sha256_hasher
from s3 import S3Server

from lmcache_cartridge import tiles
from lmcache_cartridge.artifact import load_token_ids
from lmcache_cartridge.store import CartridgeStore

CHUNK, BLOCK, CHUNKS = 256, 128, 4
"""Tokens of a chunk and of a block of vLLM's on CPU, as they are by default."""


def _served(store: CartridgeStore, ids: list[int], tokens: int) -> list[bytes]:
    """Return the chunks that a store lends, all asked for at once."""
    hashes = list(sha256_hasher(tokens)(ids))
    assert store.lookup(hashes) == len(hashes) == len(ids) // tokens
    found = []
    for chunk_hash in hashes:
        with store.lend(chunk_hash) as loan:
            found.append(loan.bytes.numpy().tobytes())
    return found


@pytest.mark.parametrize("layout", [tiles.layout("vec", BLOCK), tiles.layout("vec", BLOCK, blocks=True)])
def test_chunks_that_come_from_s3_together_are_packed(
    tmp_path: Path, s3_credentials: S3Server, bucket: str, layout: str
) -> None:
    model = make_fingerprint(layers=2, head_size=32)
    made = make_artifact(tmp_path / "doc", positions=CHUNKS * CHUNK, chunk_tokens=CHUNK, fingerprint=model)
    for path in (tmp_path / "doc").iterdir():
        s3_credentials.client.upload_file(str(path), bucket, f"doc/{path.name}")
    ids, found = load_token_ids(made.manifest, tmp_path / "doc").tolist(), []
    for place in (None, f"s3://{bucket}/doc"):
        home = Home(tmp_path / ("here" if place is None else "there"))
        home.registry.register(tmp_path / "doc", place)
        settings = {
            "s3_endpoint_url": s3_credentials.endpoint,
            "s3_region": "us-east-1",
            "disk_dir": home.path / "cache",
        }
        store = home.open(fingerprint=model, chunks=CHUNKS, chunk_tokens=CHUNK, layout=layout, settings=settings)
        until(store.names)
        found.append(_served(store, ids, CHUNK))
        home.close()
    assert found[0] == found[1]
