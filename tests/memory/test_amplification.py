"""Each byte of a cartridge is read from its source once, however its chunks and the engine's lie to each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from homes import STILL, Home
from making import Made, make_fingerprint, make_rope
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


def _load(home: Home, made: list[Made], threads: int = 4, **engine: Any) -> int:
    """Have a store load a cartridge or chain whole; return its chunks."""
    given = STILL | {"disk_bytes": 0, "load_threads": threads}
    store = home.open(chunks=200, settings=given, fingerprint=ROTATED, **engine)
    claim = store.claim(".".join(one.manifest.digest for one in made), {})
    until(lambda: claim.poll().ready or claim.poll().refused)
    assert claim.poll().ready, claim.poll()
    claim.close()
    return claim.poll().chunks


@pytest.mark.parametrize(
    ("encoding", "layout", "engine", "world"),
    [
        ("plain", "heads", 16, 1), ("plain", "heads", 256, 1), ("plain", "fused", 512, 1), ("plain", "vec/16", 16, 2),
        ("int8", "heads", 256, 4), ("int8", "fused", 16, 1), ("int8", "vec/16", 64, 1),
    ],
)  # fmt: skip
def test_a_cartridge_is_read_once_by_each_rank_for_its_heads(home, read_bytes, encoding, layout, engine, world):
    made = home.make(positions=1024, chunk_tokens=256, fingerprint=ROTATED, encoding=encoding)
    for rank in range(world):
        loaded = _load(home, [made], chunk_tokens=engine, rank=rank, world=world, layout=layout)
        assert loaded == 1024 // engine
    assert read_bytes == {str(home.root()): made.manifest.data_bytes}


@pytest.mark.parametrize(
    ("stored", "engine", "offset"),
    [(16, 16, 128), (16, 16, 137), (256, 16, 136), (16, 64, 300), (256, 256, 137), (100, 16, 300), (100, 16, 137)],
)
def test_a_chain_is_read_once_wherever_its_cartridges_begin(home, read_bytes, stored, engine, offset):
    made = [
        home.make(name, positions=positions, chunk_tokens=stored, seed=positions, fingerprint=ROTATED)
        for name, positions in [("a", offset), ("b", engine * (700 // engine) - offset)]
    ]
    # A chain's first chunks are those of its first cartridge. Where two threads find out what the two parts need, one could
    # have read so little a chunk before the other asks for it.
    assert _load(home, made, threads=1, chunk_tokens=engine) == 700 // engine
    assert read_bytes == {str(home.root(n)): one.manifest.data_bytes for n, one in zip("ab", made, strict=True)}
