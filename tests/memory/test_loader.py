"""A loaded chunk is exactly the KV that was stored, for any chunk size, layout and rank, or an error."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from chunks import copied, load
from making import Made, flip_bit, heads_bytes, make_artifact, make_fingerprint, make_rope

from lmcache_cartridge.artifact import check
from lmcache_cartridge.artifact.bytesource import ByteRange, Seen
from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.artifact.check import is_finite
from lmcache_cartridge.artifact.local import LocalSource
from lmcache_cartridge.artifact.reading import MANIFEST, PAYLOAD, chunk_range
from lmcache_cartridge.errors import (
    ArtifactError,
    CorruptChunk,
    OverBudget,
    ReplacedArtifact,
    SourceError,
    SourceNotFound,
    TruncatedPayload,
    WrongDtype,
    WrongShape,
)
from lmcache_cartridge.memory import loader as loader_module
from lmcache_cartridge.memory.layout import VIEWS, ChunkShape, rank_heads
from lmcache_cartridge.memory.loader import ChunkLoader
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


def _loader(
    made: Made, tokens: int, *, rank: int = 0, world: int = 1, layout: str = "heads", source: object = None,
    disk: DiskCache | None = None,
) -> ChunkLoader:  # fmt: skip
    model = made.manifest.fingerprint
    heads = rank_heads(model.kv_heads, rank, world)
    shape = ChunkShape(len(heads), model.layers, tokens, model.head_size, model.dtype)
    return ChunkLoader(source or Sources(), shape, heads, layout, disk, keep_local=True)


def _load(loader: ChunkLoader, made: Made, root: Path, chunk: int) -> torch.Tensor:
    """Return the loaded bytes; the memory held something else before."""
    out = torch.full((loader.shape.size_bytes,), 0xEE, dtype=torch.uint8)
    load(loader, [Segment(Cartridge(made.manifest, root, str(root)), 0)], chunk, out)
    return out


def _reassemble(made: Made, root: Path, tokens: int, *, world: int, layout: str) -> torch.Tensor:
    """Return the KV of all ranks' whole chunks, canonical; replicated heads must agree."""
    whole = POSITIONS // tokens * tokens
    result = torch.full_like(made.kv[:, :, :whole], float("nan"))
    for rank, chunk in itertools.product(range(world), range(POSITIONS // tokens)):
        loader = _loader(made, tokens, rank=rank, world=world, layout=layout)
        heads = rank_heads(made.manifest.fingerprint.kv_heads, rank, world)
        loaded = VIEWS[layout](_load(loader, made, root, chunk), loader.shape)
        place = result[:, :, chunk * tokens : (chunk + 1) * tokens, heads.start : heads.stop]
        assert torch.isnan(place).all() or torch.equal(place, loaded), "replicas of a head differ"
        place[:] = loaded
    return result


@pytest.mark.parametrize("layout", sorted(VIEWS))
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("stored", "engine"),
    [(16, 16), (16, 32), (16, 80), (32, 16), (80, 16), (48, 16), (24, 16), (16, 24), (7, 16), (256, 16), (1, 16)],
)
def test_the_chunks_of_all_ranks_together_are_the_original_kv(tmp_path, stored, engine, kv_heads, world, layout):
    made = make_artifact(
        tmp_path / "doc", positions=POSITIONS, chunk_tokens=stored, kv_heads=kv_heads, layers=2, head_size=8
    )
    whole = POSITIONS // engine * engine
    found = _reassemble(made, tmp_path / "doc", engine, world=world, layout=layout)
    assert torch.equal(found, made.kv[:, :, :whole])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", sorted(VIEWS))
def test_every_dtype_is_loaded_exactly(tmp_path, dtype, layout):
    made = make_artifact(tmp_path / "doc", positions=POSITIONS, chunk_tokens=32, dtype=dtype)
    assert torch.equal(_reassemble(made, tmp_path / "doc", 16, world=2, layout=layout), made.kv)


@pytest.fixture
def made(tmp_path):
    return make_artifact(tmp_path / "doc", positions=POSITIONS, kv_heads=4)


def test_a_chunk_as_it_is_stored_is_read_once_straight_into_the_callers_memory(made, tmp_path):
    source = _Counting()
    loader = _loader(made, 16, source=source)
    out = torch.empty(loader.shape.size_bytes, dtype=torch.uint8)
    load(loader, [Segment(Cartridge(made.manifest, tmp_path / "doc", str(tmp_path / "doc")), 0)], 3, out)
    assert source.addresses == [out.data_ptr()]
    assert source.reads == [chunk_range(made.manifest, 3, range(4))]


def _disk_file(disk: DiskCache, made: Made, chunk: int) -> Path:
    return disk.root / made.manifest.digest / f"{chunk}-0-4.bin"


def test_a_corrupt_piece_of_the_disk_tier_is_read_again_from_the_source(made, tmp_path):
    disk, source = DiskCache(tmp_path / "cache", 1 << 20), _Counting()
    loader = _loader(made, 16, source=source, disk=disk)
    first = _load(loader, made, tmp_path / "doc", 1)
    flip_bit(_disk_file(disk, made, 1), 5000)
    assert torch.equal(_load(loader, made, tmp_path / "doc", 1), first)
    assert len(source.reads) == 2
    assert _disk_file(disk, made, 1).read_bytes() == first.numpy().tobytes(), "the sound bytes are kept instead"
    _load(loader, made, tmp_path / "doc", 1)
    assert len(source.reads) == 2
    flip_bit(_disk_file(disk, made, 1), 0)
    (tmp_path / "doc" / PAYLOAD).unlink()
    with pytest.raises(SourceError):
        _load(loader, made, tmp_path / "doc", 1)
    assert not _disk_file(disk, made, 1).exists(), "it is never served"


def test_a_corrupt_chunk_of_the_source_is_not_kept_in_the_disk_tier(made, tmp_path):
    disk = DiskCache(tmp_path / "cache", 1 << 20)
    flip_bit(tmp_path / "doc" / PAYLOAD, chunk_range(made.manifest, 1, range(4)).start)
    with pytest.raises(CorruptChunk):
        _load(_loader(made, 16, disk=disk), made, tmp_path / "doc", 1)
    assert disk.stats().resident_bytes == 0


def test_ranks_share_a_disk_tier_without_mixing_their_heads(made, tmp_path):
    disk = DiskCache(tmp_path / "cache", 1 << 20)
    for _ in range(2):
        for rank in range(2):
            loaded = _load(_loader(made, 16, rank=rank, world=2, disk=disk), made, tmp_path / "doc", 0)
            assert loaded.numpy().tobytes() == heads_bytes(made.kv[:, :, :16, 2 * rank : 2 * rank + 2])
    assert disk.stats().hits == 2


def test_no_load_waits_for_the_disk_tier_and_what_it_has_no_time_for_is_not_kept(made, tmp_path, monkeypatch):
    disk, away = DiskCache(tmp_path / "cache", 1 << 20), threading.Event()
    write = disk.write
    monkeypatch.setattr(disk, "write", lambda *arguments: away.wait(60) and write(*arguments))
    loader = _loader(made, 16, disk=disk)
    size = loader.shape.size_bytes
    monkeypatch.setattr(loader_module, "_MAX_UNWRITTEN_BYTES", 2 * size)
    segments, slot = [Segment(Cartridge(made.manifest, tmp_path / "doc", str(tmp_path / "doc")), 0)], torch.empty(0)
    for chunk in range(3):  # into one slot: the copy is of the bytes as they were
        slot = torch.empty(size, dtype=torch.uint8) if chunk == 0 else slot
        load(loader, segments, chunk, slot, wait=False)
    assert disk.stats().resident == 0
    away.set()
    copied(loader)
    assert [_disk_file(disk, made, chunk).exists() for chunk in range(3)] == [True, True, False]
    assert _disk_file(disk, made, 0).read_bytes() == heads_bytes(made.kv[:, :, :16])


def test_no_more_than_a_limit_is_allocated_to_cut_chunks_from(tmp_path, monkeypatch):
    made = make_artifact(tmp_path / "doc", positions=POSITIONS, kv_heads=4, chunk_tokens=POSITIONS)
    assert _load(_loader(made, 16), made, tmp_path / "doc", 1) is not None
    monkeypatch.setattr("lmcache_cartridge.memory.loader.MAX_SCRATCH_BYTES", made.manifest.payload_bytes // 2)
    with pytest.raises(OverBudget, match="cartridge doc@1: chunk 0 is stored as"):
        _load(_loader(made, 16), made, tmp_path / "doc", 1)


# Each thing that may be wrong has its own error, which names cartridge, chunk and file.


def _swap_payload(made: Made, root: Path, **other: object) -> None:
    """Put the payload of another artefact of the same size in the place of this one's."""
    shape = {"positions": POSITIONS, "kv_heads": 4, "seed": 9} | other
    make_artifact(root.parent / "other", **shape)
    (root.parent / "other" / PAYLOAD).replace(root / PAYLOAD)


def _replace(made: Made, root: Path) -> None:
    _swap_payload(made, root)
    (root.parent / "other" / MANIFEST).replace(root / MANIFEST)


def _header(root: Path, old: bytes, new: bytes) -> None:
    """Edit the header of a payload and damage the chunk behind it, as another file in its place would."""
    data = (root / PAYLOAD).read_bytes()
    assert old in data[:4096] and len(old) == len(new)  # noqa: PT018
    (root / PAYLOAD).write_bytes(data[:4096].replace(old, new, 1) + bytes(len(data) - 4096))


def _directory(made: Made, root: Path) -> None:
    (root / PAYLOAD).unlink()
    (root / PAYLOAD).mkdir()


_DAMAGE = {
    "truncated": (TruncatedPayload, lambda made, root: os.truncate(root / PAYLOAD, 5000)),
    "missing": (SourceNotFound, lambda made, root: (root / PAYLOAD).unlink()),
    "a directory": (SourceError, _directory),
    "replaced": (ReplacedArtifact, _replace),
    "replaced payload": (CorruptChunk, _swap_payload),
    "wrong shape": (WrongShape, lambda made, root: _header(root, b"[4,2,3,16,64]", b"[4,2,3,64,16]")),
    "wrong dtype": (WrongDtype, lambda made, root: _header(root, b"BF16", b"FP16")),
    "no header": (
        ArtifactError,
        lambda made, root: (root / PAYLOAD).write_bytes(bytes((root / PAYLOAD).stat().st_size)),
    ),
    "flipped bit": (
        CorruptChunk,
        lambda made, root: flip_bit(root / PAYLOAD, chunk_range(made.manifest, 0, range(1)).end - 1),
    ),
}


@pytest.mark.parametrize("engine", [16, 32])
@pytest.mark.parametrize("damage", _DAMAGE)
def test_every_damage_has_its_own_error_that_names_cartridge_chunk_and_file(made, tmp_path, damage, engine):
    expected, spoil = _DAMAGE[damage]
    spoil(made, tmp_path / "doc")
    with pytest.raises(expected) as caught:
        _load(_loader(made, engine), made, tmp_path / "doc", 0)
    assert type(caught.value) is expected
    assert caught.value.digest == made.manifest.digest
    message = str(caught.value)
    assert "cartridge doc@1: chunk 0" in message
    assert str(tmp_path / "doc" / PAYLOAD) in message


class _Flaky(_Counting):
    """Sources whose first reads are damaged on their way."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def read_into(self, location: str, file: str, where: ByteRange, out: memoryview, seen: Seen) -> None:
        def damage(part: memoryview) -> None:
            if len(self.reads) <= self.bad:
                out[7] ^= 1
            seen(part)

        super().read_into(location, file, where, out, damage)


def test_a_chunk_damaged_on_its_way_is_fetched_once_more_and_no_oftener(made, tmp_path):
    source = _Flaky(bad=1)
    loader = _loader(made, 16, source=source)
    assert _load(loader, made, tmp_path / "doc", 1).numpy().tobytes() == heads_bytes(made.kv[:, :, 16:32])
    assert len(source.reads) == 2
    stats = loader.stats()
    assert (stats.reads, stats.failed, stats.corrupt) == (2, 0, 1)
    assert stats.read_bytes == 2 * loader.shape.size_bytes
    source = _Flaky(bad=2)
    with pytest.raises(CorruptChunk):
        _load(_loader(made, 16, source=source), made, tmp_path / "doc", 1)
    assert len(source.reads) == 2


def test_nan_is_looked_for_once_for_each_of_the_last_cartridges(tmp_path, monkeypatch):
    monkeypatch.setattr(loader_module, "_MAX_FINITE", 2)
    looked: list[int] = []
    monkeypatch.setattr(check, "is_finite", lambda part, dtype: looked.append(len(part)) or is_finite(part, dtype))
    made = [make_artifact(tmp_path / f"d{seed}", positions=POSITIONS, seed=seed) for seed in range(3)]
    loader = _loader(made[0], 16)

    def looks(number: int) -> int:
        before = len(looked)
        _load(loader, made[number], tmp_path / f"d{number}", 0)
        return len(looked) - before

    assert [looks(n) for n in (0, 0, 1, 1, 0, 2, 1, 2)] == [1, 0, 1, 0, 0, 1, 0, 0]
    assert looks(0) == 1, "the first of three was forgotten"


@pytest.mark.parametrize("layout", sorted(VIEWS))
@pytest.mark.parametrize("rotating", [(0, 1, 2, 3), (1, 3)])
def test_stages_have_together_what_one_engine_has_in_a_chain_too(tmp_path, layout, rotating):
    """Layers that rotate are known by their number in the model, whichever stage has them."""
    rope = msgspec.structs.replace(make_rope(), pairing="half", layers=rotating)
    model, root = msgspec.structs.replace(make_fingerprint(layers=4), rope=(rope,)), tmp_path / "doc"
    made = make_artifact(root, positions=POSITIONS, chunk_tokens=16, fingerprint=model)
    cartridge = Cartridge(made.manifest, root, str(root))
    chain = [Segment(cartridge, 0), Segment(cartridge, POSITIONS)]

    def loaded(layers: range) -> torch.Tensor:
        shape = ChunkShape(model.kv_heads, len(layers), 32, model.head_size, model.dtype)
        loader = ChunkLoader(Sources(), shape, range(model.kv_heads), layout, layers=layers)
        outs = [torch.full((shape.size_bytes,), 0xEE, dtype=torch.uint8) for _ in range(2 * POSITIONS // 32)]
        for chunk, out in enumerate(outs):
            load(loader, chain, chunk, out)
        return torch.cat([VIEWS[layout](out, shape) for out in outs], dim=2)

    whole = loaded(range(4))
    assert torch.equal(torch.cat([loaded(range(1)), loaded(range(1, 4))], dim=1), whole)
    moved = (whole[0, :, POSITIONS:] != whole[0, :, :POSITIONS]).flatten(1).any(1)
    assert tuple(moved.nonzero().flatten().tolist()) == rotating
