"""Each byte of a cartridge is read from its source once, however its chunks and the engine's lie to each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from homes import STILL
from making import make_fingerprint, make_rope
from waiting import until

from lmcache_cartridge.artifact.local import LocalSource

ROTATED = make_fingerprint(kv_heads=4, rope=msgspec.structs.replace(make_rope(), pairing="half", layers=(0, 1, 2)))


@pytest.fixture
def read_bytes(monkeypatch):
    """Bytes that were read of each payload."""
    read, counted = LocalSource.read_into, Counter[str]()

    def counting(self: LocalSource, location: str, file: str, where: Any, out: memoryview, seen: Any = None) -> None:
        counted[location] += len(out) if where.start else 0  # not the header
        read(self, location, file, where, out, seen)

    monkeypatch.setattr(LocalSource, "read_into", counting)
    return counted


@pytest.mark.parametrize(
    ("parts", "stored", "engine", "encoding", "layout", "world"),
    [
        ([1024], 256, 16, "plain", "heads", 1), ([1024], 256, 512, "plain", "fused", 1), ([1024], 256, 16, "plain", "vec/16", 2),
        ([1024], 256, 256, "int8", "heads", 4), ([1024], 256, 16, "int8", "fused", 1), ([137, 551], 16, 16, "plain", "heads", 1),
        ([136, 552], 256, 16, "plain", "heads", 1), ([300, 340], 16, 64, "plain", "heads", 1),
        ([300, 388], 100, 16, "plain", "heads", 1),
    ],
)  # fmt: skip
def test_each_rank_reads_its_heads_once_wherever_cartridges_begin(
    home, read_bytes, parts, stored, engine, encoding, layout, world
):
    made = {
        home.root(name): home.make(
            name, positions=positions, chunk_tokens=stored, seed=positions, fingerprint=ROTATED, encoding=encoding
        ).manifest
        for name, positions in zip("ab", parts, strict=False)
    }
    # A chain's first chunks are those of its first cartridge. Where two threads find out what the two parts need, one could
    # have read so little a chunk before the other asks for it.
    settings = STILL | {"disk_bytes": 0, "load_threads": 1 if len(parts) > 1 else 4}
    for rank in range(world):
        store = home.open(
            chunks=200,
            settings=settings,
            fingerprint=ROTATED,
            chunk_tokens=engine,
            rank=rank,
            world=world,
            layout=layout,
        )
        claim = store.claim(".".join(manifest.digest for manifest in made.values()), {})
        until(lambda claim=claim: claim.poll().ready or claim.poll().refused)
        assert claim.poll().ready and claim.poll().chunks == sum(parts) // engine
        claim.close()
    assert read_bytes == {str(root): manifest.data_bytes for root, manifest in made.items()}
