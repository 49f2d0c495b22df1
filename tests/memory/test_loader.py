"""A loaded chunk is exactly the KV that was stored, for any chunk size, layout and rank, or an error."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import torch
from chunks import copied, in_int8, load
from hypothesis import given, settings
from hypothesis import strategies as st
from making import Made, flip_bit, make_artifact, make_fingerprint, make_rope

from lmcache_cartridge.artifact.bytesource import ByteRange, Seen
from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.artifact.local import LocalSource
from lmcache_cartridge.artifact.reading import PAYLOAD, chunk_range
from lmcache_cartridge.errors import (
    CorruptChunk,
    OverBudget,
    SourceError,
    TruncatedPayload,
)
from lmcache_cartridge.memory import loader as loader_module
from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.layout import DTYPES, VIEWS, ChunkShape, rank_heads
from lmcache_cartridge.memory.loader import ChunkLoader
from lmcache_cartridge.memory.rope import shift
from lmcache_cartridge.sources.disk_cache import DiskCache
from lmcache_cartridge.sources.sources import Sources

POSITIONS = 80


class _Counting:
    """`Sources` that note what was read and into which memory."""

    def __init__(self) -> None:
        self.reads: list[ByteRange] = []
        self.addresses: list[int] = []

    def read_into(self, location: str, file: str, where: ByteRange, out: memoryview, seen: Seen) -> None:
        self.reads.append(where)
        self.addresses.append(torch.frombuffer(out, dtype=torch.uint8).data_ptr())
        LocalSource().read_into(location, file, where, out, seen)


def _loader(made: Made, tokens: int = 16, *, rank: int = 0, world: int = 1, layout: str = "heads",
            source: object = None, disk: DiskCache | None = None) -> ChunkLoader:  # fmt: skip
    model = made.manifest.fingerprint
    heads = rank_heads(model.kv_heads, rank, world)
    shape = ChunkShape(len(heads), model.layers, tokens, model.head_size, model.dtype)
    return ChunkLoader(source or Sources(), shape, heads, layout, disk, keep_local=True)


def _segments(made: Made, root: Path, *offsets: int) -> list[Segment]:
    return [Segment(Cartridge(made.manifest, root, str(root)), offset) for offset in offsets or (0,)]


def _load(loader: ChunkLoader, segments: list[Segment], chunk: int) -> torch.Tensor:
    """Return the loaded bytes; the memory held something else before."""
    out = torch.full((loader.shape.size_bytes,), 0xEE, dtype=torch.uint8)
    load(loader, segments, chunk, out)
    return out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    stored=st.sampled_from([1, 7, 16, 24, 48, 80, 256]), engine=st.sampled_from([16, 24, 32, 80]),
    kv_heads=st.sampled_from([1, 2, 4]), world=st.sampled_from([1, 2, 4]), layout=st.sampled_from(["heads", "fused", "vec/8"]),
    dtype=st.sampled_from(sorted(DTYPES)), encoding=st.sampled_from(["plain", "int8"]),
)  # fmt: skip
def test_the_chunks_of_all_ranks_together_are_the_original_kv(stored, engine, kv_heads, world, layout, dtype, encoding):
    """Read from where they are stored, and from copies in the disk tier."""
    model = make_fingerprint(layers=2, kv_heads=kv_heads, head_size=8, dtype=dtype)
    with TemporaryDirectory() as root:
        made = make_artifact(
            Path(root) / "doc", positions=POSITIONS, chunk_tokens=stored, fingerprint=model, encoding=encoding
        )
        kv = made.kv if encoding == "plain" else in_int8(made.kv, model, stored)
        for rank, chunk in itertools.product(range(world), range(POSITIONS // engine)):
            heads, disk = rank_heads(kv_heads, rank, world), DiskCache(Path(root) / "cache", 1 << 20)
            loader = _loader(made, engine, rank=rank, world=world, layout=layout, disk=disk)
            for _ in range(2):
                loaded = tiles.unpack(_load(loader, _segments(made, Path(root) / "doc"), chunk), loader.shape, layout)
                assert torch.equal(loaded, kv[:, :, chunk * engine : (chunk + 1) * engine, heads.start : heads.stop])
            assert disk.stats().hits


@pytest.fixture
def root(tmp_path):
    return tmp_path / "doc"


@pytest.fixture
def made(root):
    return make_artifact(root, positions=POSITIONS, kv_heads=4)


@pytest.fixture
def segments(made, root):
    return _segments(made, root)


@pytest.fixture
def disk(tmp_path):
    return DiskCache(tmp_path / "cache", 1 << 20)


def test_a_chunk_as_it_is_stored_is_read_once_straight_into_the_callers_memory(made, segments):
    source, out = _Counting(), torch.empty(made.manifest.head_bytes(3) * 4, dtype=torch.uint8)
    load(_loader(made, source=source), segments, 3, out)
    assert source.addresses == [out.data_ptr()]
    assert source.reads == [chunk_range(made.manifest, 3, range(4))]


def _disk_file(disk: DiskCache, made: Made, chunk: int) -> Path:
    return disk.root / made.digest / f"{chunk}-0-4.bin"


def test_a_corrupt_piece_of_the_disk_tier_is_read_again_from_the_source(made, root, segments, disk):
    source = _Counting()
    loader = _loader(made, source=source, disk=disk)
    first = _load(loader, segments, 1)
    flip_bit(_disk_file(disk, made, 1), 5000)
    assert torch.equal(_load(loader, segments, 1), first)
    assert len(source.reads) == 2
    assert _disk_file(disk, made, 1).read_bytes() == first.numpy().tobytes(), "the sound bytes are kept instead"
    _load(loader, segments, 1)
    assert len(source.reads) == 2
    flip_bit(_disk_file(disk, made, 1), 0)
    (root / PAYLOAD).unlink()
    with pytest.raises(SourceError):
        _load(loader, segments, 1)
    assert not _disk_file(disk, made, 1).exists(), "it is never served"


def test_no_load_waits_for_the_disk_tier_and_what_it_has_no_time_for_is_not_kept(made, segments, disk, monkeypatch):
    away, write, loader = threading.Event(), disk.write, _loader(made, disk=disk)
    monkeypatch.setattr(disk, "write", lambda *given: away.wait(60) and write(*given))
    slot = torch.empty(loader.shape.size_bytes, dtype=torch.uint8)
    monkeypatch.setattr(loader_module, "_MAX_UNWRITTEN_BYTES", 2 * len(slot))
    for chunk in range(3):
        load(loader, segments, chunk, slot, wait=False)
    away.set()
    copied(loader)
    assert disk.stats().promoted == 2


def test_no_more_than_a_limit_is_allocated_to_cut_chunks_from(root, monkeypatch):
    made = make_artifact(root, positions=POSITIONS, chunk_tokens=POSITIONS)
    _load(_loader(made), _segments(made, root), 1)
    monkeypatch.setattr(loader_module, "MAX_SCRATCH_BYTES", made.manifest.payload_bytes // 2)
    with pytest.raises(OverBudget, match="cartridge doc@1: chunk 0 is stored as"):
        _load(_loader(made), _segments(made, root), 1)


# Each thing that may be wrong has its own error, which names cartridge, chunk and file.


_DAMAGE = {
    "truncated": (TruncatedPayload, lambda made, root: os.truncate(root / PAYLOAD, 5000)),
    "flipped bit": (
        CorruptChunk,
        lambda made, root: flip_bit(root / PAYLOAD, chunk_range(made.manifest, 0, range(1)).end - 1),
    ),
}


@pytest.mark.parametrize(("engine", "encoding"), [(16, "plain"), (32, "int8")])
@pytest.mark.parametrize("damage", _DAMAGE)
def test_every_damage_has_its_own_error_that_names_cartridge_chunk_and_file(tmp_path, damage, engine, encoding):
    root, (expected, spoil) = tmp_path / "doc", _DAMAGE[damage]
    made = make_artifact(root, positions=POSITIONS, kv_heads=4, encoding=encoding)
    spoil(made, root)
    with pytest.raises(expected, match="cartridge doc@1: chunk 0") as caught:
        _load(_loader(made, engine), _segments(made, root), 0)
    assert (type(caught.value), caught.value.digest) == (expected, made.digest)
    assert str(root / PAYLOAD) in str(caught.value)


@pytest.mark.parametrize("layout", sorted(VIEWS))
@pytest.mark.parametrize(("rotating", "encoding"), [((0, 1, 2, 3), "int8"), ((1, 3), "plain")])
def test_stages_have_together_what_one_engine_has_and_later_cartridges_of_a_chain_are_rotated(
    root, layout, rotating, encoding
):
    """Layers that rotate are known by their number in the model, whichever stage has them."""
    rope = msgspec.structs.replace(make_rope(), pairing="half", layers=rotating)
    model = msgspec.structs.replace(make_fingerprint(layers=4), rope=(rope,))
    made = make_artifact(root, positions=POSITIONS, chunk_tokens=16, fingerprint=model, encoding=encoding)
    kv = made.kv if encoding == "plain" else in_int8(made.kv, model, 16)
    stages = []
    for layers in (range(1), range(1, 4)):
        shape = ChunkShape(model.kv_heads, len(layers), 32, model.head_size, model.dtype)
        loader = ChunkLoader(Sources(), shape, range(model.kv_heads), layout, layers=layers)
        outs = [_load(loader, _segments(made, root, 0, POSITIONS), chunk) for chunk in range(2 * POSITIONS // 32)]
        stages.append(torch.cat([VIEWS[layout](out, shape) for out in outs], dim=2))
    assert torch.equal(torch.cat(stages, dim=1), torch.cat([kv, shift(kv, model, POSITIONS)], dim=2))
