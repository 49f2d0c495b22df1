"""What every byte source and every tier must do: classes of tests, run by a subclass for each implementation.

A subclass says how to put bytes in and how to ask for them; `has` looks without using what it finds.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks import one_by_one
from invariants import check

from lmcache_cartridge.artifact.bytesource import ByteRange
from lmcache_cartridge.artifact.local import LocalSource
from lmcache_cartridge.errors import SourceNotFound
from lmcache_cartridge.library.index import ChunkKey
from lmcache_cartridge.memory.tier import MemoryTier
from lmcache_cartridge.sources.disk_cache import CopyKey, DiskCache
from lmcache_cartridge.sources.s3 import S3Source

SIZE = 4096
ROOM = 4
"""Chunks of `SIZE` that a tier of these tests has room for."""
ONE, TWO = "ab" * 32, "cd" * 32


def data(digest: str, chunk: int) -> bytes:
    """Return the bytes of a chunk, unlike those of any other."""
    return random.Random(f"{digest}{chunk}").randbytes(SIZE)


class ReadTests(ABC):
    """Of what is read by digest and chunk: a byte source or a tier."""

    @pytest.fixture
    @abstractmethod
    def tier(self):
        """What is tested, empty."""

    @abstractmethod
    def put(self, tier: Any, digest: str, chunk: int) -> None:
        """Have it there, in the tier if there is room."""

    @abstractmethod
    def get(self, tier: Any, digest: str, chunk: int) -> bytes | None:
        """Ask for the bytes by the door that serving uses; None on a miss."""

    def test_what_was_put_in_comes_back_exactly_and_from_its_own_cartridge(self, tier):
        for digest, chunk in ((ONE, 0), (TWO, 0), (TWO, 1)):
            self.put(tier, digest, chunk)
        for digest, chunk in ((ONE, 0), (TWO, 0), (TWO, 1)):
            assert self.get(tier, digest, chunk) == data(digest, chunk)

    def test_what_was_not_put_in_is_a_miss(self, tier):
        self.put(tier, ONE, 0)
        assert self.get(tier, ONE, 1) is None
        assert self.get(tier, TWO, 0) is None
        assert self.get(tier, ONE, 0) == data(ONE, 0), "the control"


class TierTests(ReadTests):
    """Of a tier, verified chunks within a byte budget, here with room for `ROOM` of `SIZE`.

    A chunk that is not resident is a miss, never an error; a resident one is exactly the bytes that were put in. It may
    go at any moment unless somebody holds it, in the tier's own order; while all are held a newcomer stays out.
    """

    @abstractmethod
    def has(self, tier: Any, digest: str, chunk: int) -> bool:
        """Say whether a chunk is resident, without using it."""

    def _resident(self, tier: Any, digest: str = ONE) -> list[int]:
        return [chunk for chunk in range(20) if self.has(tier, digest, chunk)]

    def test_the_end_goes_first_and_the_budget_holds(self, tier):
        for chunk in range(ROOM):
            self.put(tier, ONE, chunk)
        assert self.get(tier, ONE, 0) == data(ONE, 0)
        for chunk in range(ROOM, ROOM + 2):
            self.put(tier, ONE, chunk)
            assert tier.stats().resident_bytes <= tier.stats().budget_bytes == ROOM * SIZE
            check(tier)
        assert self._resident(tier) == [*range(ROOM - 1), ROOM + 1], "of one cartridge the end goes first"
        assert all(self.get(tier, ONE, chunk) is None for chunk in (ROOM - 1, ROOM))

    def test_evicting_drops_a_cartridges_chunks_and_no_others(self, tier):
        for digest in (ONE, TWO):
            for chunk in range(2):
                self.put(tier, digest, chunk)
        assert [tier.evict(ONE), tier.evict(ONE), tier.evict("ef" * 32)] == [2, 0, 0]
        assert (self._resident(tier), self._resident(tier, TWO)) == ([], [0, 1])
        assert self.get(tier, ONE, 0) is None
        check(tier)


class TestDiskCache(TierTests):
    @pytest.fixture
    def tier(self, tmp_path):
        return DiskCache(tmp_path / "cache", ROOM * SIZE)

    def put(self, tier: DiskCache, digest: str, chunk: int) -> None:
        tier.write(CopyKey(digest, chunk, 0, 2), memoryview(data(digest, chunk)))

    def get(self, tier: DiskCache, digest: str, chunk: int) -> bytes | None:
        out = bytearray(SIZE)
        return bytes(out) if tier.read_into(CopyKey(digest, chunk, 0, 2), memoryview(out)) else None

    def has(self, tier: DiskCache, digest: str, chunk: int) -> bool:
        return (tier.root / digest / f"{chunk}-0-2.bin").exists()


class TestMemoryTier(TierTests):
    @pytest.fixture
    def tier(self):
        self.behind: set[ChunkKey] = set()
        tier = MemoryTier(SIZE, ROOM * SIZE, one_by_one(self._load))
        yield tier
        tier.close()
        check(tier)

    def _load(self, key: ChunkKey, out: torch.Tensor) -> None:
        if key not in self.behind:
            raise SourceNotFound(f"{key} is nowhere")
        out.copy_(torch.frombuffer(bytearray(data(*key)), dtype=torch.uint8))

    def put(self, tier: MemoryTier, digest: str, chunk: int) -> None:
        key = ChunkKey(digest, chunk)
        self.behind.add(key)
        if tier.lease([key], 20):
            tier.release(key)
        self.behind.discard(key)

    def get(self, tier: MemoryTier, digest: str, chunk: int) -> bytes | None:
        key = ChunkKey(digest, chunk)
        if not tier.lease([key], 0):
            return None
        (loan,) = tier.lend([key])
        tier.release(key)
        with loan:
            return loan.bytes.numpy().tobytes()

    def has(self, tier: MemoryTier, digest: str, chunk: int) -> bool:
        return tier.resident([ChunkKey(digest, chunk)]) == 1


class SourceTests(ReadTests):
    """Of a byte source, whose directory of each cartridge is at a location."""

    @abstractmethod
    def location(self, digest: str) -> str: ...

    def get(self, tier: Any, digest: str, chunk: int) -> bytes | None:
        out = bytearray(SIZE)
        try:
            tier.read_into(self.location(digest), f"{chunk}.bin", ByteRange(0, SIZE), memoryview(out))
        except SourceNotFound:
            return None
        return bytes(out)


class TestLocalSource(SourceTests):
    @pytest.fixture
    def tier(self, tmp_path):
        self.root = tmp_path
        return LocalSource()

    def location(self, digest: str) -> str:
        return str(self.root / digest)

    def put(self, tier: LocalSource, digest: str, chunk: int) -> None:
        Path(self.location(digest)).mkdir(exist_ok=True)
        (Path(self.location(digest)) / f"{chunk}.bin").write_bytes(data(digest, chunk))


class TestS3Source(SourceTests):
    @pytest.fixture
    def tier(self, s3_credentials, bucket):
        self.client, self.bucket = s3_credentials.client, bucket
        source = S3Source(endpoint_url=s3_credentials.endpoint)
        yield source
        source.close()

    def location(self, digest: str) -> str:
        return f"s3://{self.bucket}/{digest}"

    def put(self, tier: S3Source, digest: str, chunk: int) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{digest}/{chunk}.bin", Body=data(digest, chunk))
