"""Chunks in a row that one request brings are each what they are when loaded alone, and fail alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from making import Made, flip_bit, heads_bytes, make_artifact

from lmcache_cartridge.artifact.bytesource import ByteRange, Seen
from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.artifact.local import LocalSource
from lmcache_cartridge.artifact.reading import PAYLOAD, chunk_range
from lmcache_cartridge.errors import CartridgeError, CorruptChunk, SourceTimeout, TruncatedPayload
from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.layout import ChunkShape, rank_heads
from lmcache_cartridge.memory.loader import ChunkLoader
from lmcache_cartridge.sources.disk_cache import DiskCache

CHUNKS, TOKENS, HEADS = 6, 16, 4
ALL = range(HEADS)


class _Requests:
    """`Sources` in whose requests neighbours come cheaply, that note them and may damage or lose what they bring."""

    def __init__(self, request_bytes: int) -> None:
        self.requests: list[tuple[int, int]] = []
        """First byte and number of buffers of each."""
        self.damaged: set[int] = set()
        """Requests, counted from 0, that bring a wrong byte in their second buffer."""
        self.error: CartridgeError | None = None
        self._request_bytes = request_bytes

    def request_bytes(self, location: str) -> int:
        return self._request_bytes

    def read_into(self, location: str, file: str, where: ByteRange, out: memoryview, seen: Seen) -> None:
        self.requests.append((where.start, 1))
        LocalSource().read_into(location, file, where, out, seen)

    def read_each(self, location: str, file: str, start: int, outs: Sequence[memoryview]) -> None:
        self.requests.append((start, len(outs)))
        if self.error:
            raise self.error
        LocalSource().read_each(location, file, start, outs)
        if len(self.requests) - 1 in self.damaged:
            outs[1][7] ^= 1


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_artifact(tmp_path / "doc", positions=CHUNKS * TOKENS + 5, kv_heads=HEADS, chunk_tokens=TOKENS)


@pytest.fixture
def segment(made: Made, tmp_path: Path) -> Segment:
    return Segment(Cartridge(made.manifest, tmp_path / "doc", str(tmp_path / "doc")), 0)


@pytest.fixture
def chunk_bytes(made: Made) -> int:
    return TOKENS * made.manifest.fingerprint.token_bytes


@pytest.fixture
def sources(chunk_bytes: int) -> _Requests:
    return _Requests(10 * chunk_bytes)


def _loader(
    made: Made, sources: _Requests, *, tokens: int = TOKENS, world: int = 1, layout: str = "heads",
    disk: DiskCache | None = None,
) -> ChunkLoader:  # fmt: skip
    model, heads = made.manifest.fingerprint, rank_heads(HEADS, 0, world)
    shape = ChunkShape(len(heads), model.layers, tokens, model.head_size, model.dtype)
    return ChunkLoader(sources, shape, heads, layout, disk, keep_local=disk is not None)


def _load(loader: ChunkLoader, segment: Segment, first: int, count: int) -> tuple[list, list[bytes]]:
    """Return the outcome of each chunk and its bytes; the memory is scattered and held something else before."""
    outs = [torch.full((loader.shape.size_bytes,), 0xEE, dtype=torch.uint8) for _ in range(count)]
    outcomes = loader.load_run([segment], first, outs)
    return outcomes, [out.numpy().tobytes() for out in outs]


def _expected(made: Made, first: int, count: int) -> list[bytes]:
    return [heads_bytes(made.kv[:, :, chunk * TOKENS : (chunk + 1) * TOKENS]) for chunk in range(first, first + count)]


@pytest.mark.parametrize(("first", "count"), [(0, 6), (2, 3), (4, 2), (5, 1)])
def test_chunks_in_a_row_come_by_one_request(
    made: Made, segment: Segment, sources: _Requests, first: int, count: int
) -> None:
    loader = _loader(made, sources)
    assert _load(loader, segment, first, count) == ([None] * count, _expected(made, first, count))
    assert sources.requests == [(chunk_range(made.manifest, first, ALL).start, count)]
    stats = loader.stats()
    assert (stats.reads, stats.failed, stats.read_bytes) == (1, 0, count * loader.shape.size_bytes)


@pytest.mark.parametrize("layout", ["fused", "vec/8", "vec/8/blocks", "amx/16", "amx/16/blocks"])
def test_chunks_in_a_row_are_packed_as_each_is_when_loaded_alone(
    made: Made, segment: Segment, sources: _Requests, layout: str
) -> None:
    loader = _loader(made, sources, layout=layout)
    alone = torch.empty(3, loader.shape.size_bytes, dtype=torch.uint8)
    for chunk, out in enumerate(alone):
        tiles.pack(made.kv[:, :, chunk * TOKENS : (chunk + 1) * TOKENS], out, loader.shape, layout)
    assert _load(loader, segment, 0, 3) == ([None] * 3, [out.numpy().tobytes() for out in alone])
    assert [count for _, count in sources.requests] == [3]


def test_as_many_are_loaded_together_as_one_request_brings(made: Made, segment: Segment, chunk_bytes: int) -> None:
    half = chunk_bytes // 2
    asked = [0, chunk_bytes, chunk_bytes + half - 1, chunk_bytes + half, 2 * chunk_bytes, 100 * chunk_bytes]
    assert [_loader(made, _Requests(n)).run_of([segment]) for n in asked] == [1, 1, 1, 2, 2, 100]


@pytest.mark.parametrize("how", [{"world": 2}, {"tokens": 32}])
def test_what_does_not_lie_in_a_row_is_loaded_one_by_one(
    made: Made, segment: Segment, sources: _Requests, how: dict
) -> None:
    assert _loader(made, sources, **how).run_of([segment]) == 1
    chain = [segment, segment._replace(offset=made.manifest.positions)]
    assert _loader(made, sources).run_of(chain) == _loader(made, sources).run_of([]) == 1


def test_one_bad_chunk_fails_alone(made: Made, segment: Segment, sources: _Requests) -> None:
    flip_bit(Path(segment.cartridge.location) / PAYLOAD, chunk_range(made.manifest, 2, ALL).start)
    outcomes, data = _load(_loader(made, sources), segment, 1, 4)
    assert [type(outcome) for outcome in outcomes] == [type(None), CorruptChunk, type(None), type(None)]
    assert outcomes[1].digest == made.manifest.digest
    assert data[:1] + data[2:] == _expected(made, 1, 1) + _expected(made, 3, 2)


def test_a_chunk_damaged_on_its_way_is_fetched_once_more(made: Made, segment: Segment, sources: _Requests) -> None:
    sources.damaged = {0}
    loader = _loader(made, sources)
    assert _load(loader, segment, 1, 4) == ([None] * 4, _expected(made, 1, 4))
    assert [count for _, count in sources.requests] == [4, 1]
    assert loader.stats().corrupt == 1


def test_a_payload_that_ends_early_has_the_chunks_before_its_end(
    made: Made, segment: Segment, sources: _Requests
) -> None:
    with (Path(segment.cartridge.location) / PAYLOAD).open("r+b") as payload:
        payload.truncate(chunk_range(made.manifest, 3, ALL).end - 1)
    outcomes, data = _load(_loader(made, sources), segment, 1, 4)
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), TruncatedPayload, TruncatedPayload]
    assert data[:2] == _expected(made, 1, 2)


def test_a_source_that_cannot_be_read_fails_all_at_once_and_is_not_asked_for_each(
    made: Made, segment: Segment, sources: _Requests
) -> None:
    sources.error = SourceTimeout("the server hangs")
    outcomes, _ = _load(_loader(made, sources), segment, 1, 4)
    assert len(sources.requests) == 1
    assert {(type(o), str(o), o.digest) for o in outcomes} == {
        (SourceTimeout, "cartridge doc@1: chunks 1 to 4: the server hangs", made.manifest.digest)
    }


def test_copies_in_the_disk_tier_come_first_and_bad_ones_are_made_anew(
    made: Made, segment: Segment, sources: _Requests, tmp_path: Path
) -> None:
    disk = DiskCache(tmp_path / "cache", 1 << 30)
    loader = _loader(made, sources, disk=disk)
    for damage in (False, False, True):
        if damage:
            flip_bit(disk.root / made.manifest.digest / f"2-0-{HEADS}.bin", 100)
        assert _load(loader, segment, 1, 4) == ([None] * 4, _expected(made, 1, 4))
    assert [count for _, count in sources.requests] == [4, 1], "nothing was asked for in the second round"
    assert disk.stats().resident == 4
