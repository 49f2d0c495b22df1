"""Each byte of a cartridge is read from its source once, however its chunks and the engine's lie to each other."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from homes import STILL, Home
from making import Made, make_fingerprint, make_rope
from waiting import until

from lmcache_cartridge.artifact.local import LocalSource
from lmcache_cartridge.artifact.model import Fingerprint

ROTATED = make_fingerprint(kv_heads=4, rope=msgspec.structs.replace(make_rope(), pairing="half", layers=(0, 1, 2)))


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that were read of each payload."""
    read, counted = LocalSource.read_into, Counter[str]()

    def counting(self: LocalSource, location: str, file: str, where: Any, out: memoryview, seen: Any = None) -> None:
        counted[location] += len(out) if where.start else 0  # not the header
        read(self, location, file, where, out, seen)

    monkeypatch.setattr(LocalSource, "read_into", counting)
    return counted


def _load(home: Home, made: list[Made], fingerprint: Fingerprint, threads: int = 4, **engine: Any) -> int:
    """Have a store load a cartridge or chain whole; return its chunks."""
    given = STILL | {"disk_bytes": 0, "load_threads": threads}
    store = home.open(chunks=200, settings=given, fingerprint=fingerprint, **engine)
    claim = store.claim(".".join(one.manifest.digest for one in made), {})
    until(lambda: claim.poll().ready or claim.poll().refused)
    assert claim.poll().ready, claim.poll()
    claim.close()
    return claim.poll().chunks


@pytest.mark.parametrize("encoding", ["plain", "int8"])
@pytest.mark.parametrize("layout", ["heads", "fused", "vec/16"])
@pytest.mark.parametrize(("engine", "world"), [(16, 1), (64, 1), (256, 1), (512, 1), (16, 2), (256, 4)])
def test_a_cartridge_is_read_once_by_each_rank_for_its_heads(
    home: Home, read_bytes: Counter[str], encoding: str, layout: str, engine: int, world: int
) -> None:
    made = home.make(positions=1024, chunk_tokens=256, fingerprint=ROTATED, encoding=encoding)
    for rank in range(world):
        assert (
            _load(home, [made], ROTATED, chunk_tokens=engine, rank=rank, world=world, layout=layout) == 1024 // engine
        )
    assert read_bytes == {str(home.root()): made.manifest.data_bytes}


@pytest.mark.parametrize(("stored", "engine"), [(16, 16), (256, 16), (16, 64), (256, 256), (100, 16)])
@pytest.mark.parametrize("offset", [128, 136, 137, 300])
def test_a_chain_is_read_once_wherever_its_cartridges_begin(
    home: Home, read_bytes: Counter[str], stored: int, engine: int, offset: int
) -> None:
    made = [
        home.make(name, positions=positions, chunk_tokens=stored, seed=positions, fingerprint=ROTATED)
        for name, positions in [("a", offset), ("b", engine * (700 // engine) - offset)]
    ]
    # A chain's first chunks are those of its first cartridge. Where two threads find out what the two parts need, one could
    # have read so little a chunk before the other asks for it.
    assert _load(home, made, ROTATED, threads=1, chunk_tokens=engine) == 700 // engine
    assert read_bytes == {str(home.root(n)): one.manifest.data_bytes for n, one in zip("ab", made, strict=True)}


def test_stages_of_a_pipeline_read_each_chunk_once_each(home: Home, read_bytes: Counter[str]) -> None:
    made = home.make(positions=1024, chunk_tokens=256, fingerprint=ROTATED)
    for layers in (range(2), range(2, 3)):
        _load(home, [made], ROTATED, layers=layers)
    assert read_bytes == {str(home.root()): 2 * made.manifest.data_bytes}


def test_a_chain_that_comes_while_its_first_cartridge_is_read_shares_the_read(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (
        home.make(name, positions=256, chunk_tokens=256, seed=seed, fingerprint=ROTATED)
        for seed, name in enumerate("ab")
    )
    read, begun, go_on, counted = LocalSource.read_into, threading.Event(), threading.Event(), Counter[str]()

    def gated(self: LocalSource, location: str, file: str, where: Any, out: memoryview, seen: Any = None) -> None:
        counted[Path(location).parent.name] += len(out) if where.start else 0
        if where.start:
            begun.set()
            assert go_on.wait(60)
        read(self, location, file, where, out, seen)

    monkeypatch.setattr(LocalSource, "read_into", gated)
    store = home.open(chunks=200, settings=STILL | {"disk_bytes": 0}, fingerprint=ROTATED)
    alone = store.claim(b.manifest.digest, {})
    alone.poll()
    assert begun.wait(60)
    chain = store.claim(f"{a.manifest.digest}.{b.manifest.digest}", {})
    until(lambda: chain.poll().admitted == 32)
    until(lambda: counted["a"] > 0)
    go_on.set()
    until(lambda: alone.poll().ready and chain.poll().ready)
    assert counted == {"a": a.manifest.data_bytes, "b": b.manifest.data_bytes}
    for claim in (alone, chain):
        claim.close()
