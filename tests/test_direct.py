"""Large cold files are read past the page cache, and what is read is the same as ever."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from making import flip_bit, make_artifact, make_fingerprint, make_rope
from waiting import until

from lmcache_cartridge.artifact import direct, local
from lmcache_cartridge.artifact.bytesource import ByteRange
from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.artifact.local import LocalSource
from lmcache_cartridge.artifact.reading import PAYLOAD
from lmcache_cartridge.errors import CorruptChunk, TruncatedPayload
from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.layout import VIEWS, ChunkShape, rank_heads
from lmcache_cartridge.memory.loader import ChunkLoader
from lmcache_cartridge.memory.slab import slab
from lmcache_cartridge.sources.disk_cache import CopyKey, DiskCache
from lmcache_cartridge.sources.sources import Sources

CONTENT = np.random.default_rng(1).bytes(3 * (1 << 20) + 777)
SIZE = len(CONTENT)
preadv = os.preadv


class Disk:
    """A disk of direct reads only, whatever file system the files are on: it takes nothing that is not aligned."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []
        """Offset and length of each direct read."""
        self.most_bytes = 1 << 40
        """What a read brings at most, but for the rest of a page."""
        self.error: OSError | None = None
        self._direct: set[int] = set()

    def set_direct(self, descriptor: int, on: bool) -> None:
        (self._direct.add if on else self._direct.discard)(descriptor)

    def preadv(self, descriptor: int, into: Sequence[memoryview], at: int) -> int:
        if descriptor not in self._direct:
            return preadv(descriptor, into, at)
        if self.error:
            raise self.error
        (out,) = into
        address = np.frombuffer(out, np.uint8).ctypes.data
        if at % 512 or len(out) % 512 or address % 512:
            raise OSError(errno.EINVAL, "not aligned")
        self.reads.append((at, len(out)))
        return preadv(descriptor, [out[: max(self.most_bytes, direct.PAGE)]], at)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Every read is one of a disk, cold, and large enough."""
    made = Disk()
    monkeypatch.setattr(direct, "LEAST_BYTES", 1)
    monkeypatch.setattr(direct, "_refused", set())
    monkeypatch.setattr(direct, "_is_cold", lambda *_: True)
    monkeypatch.setattr(direct, "_set_direct", made.set_direct)
    monkeypatch.setattr(os, "major", lambda device: 8)
    monkeypatch.setattr(os, "preadv", made.preadv)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "payload"
    path.write_bytes(CONTENT)
    return path


def _read(file: Path, start: int, end: int, *, shift: int = 0, steps: bool = True) -> bytes:
    """Return what a read brings to memory `shift` bytes after a page; it leaves what is around that, and shows all."""
    memory = slab(end - start + shift + 1).fill_(0xEE).numpy()
    shown = bytearray()
    where, out = ByteRange(start, end), memoryview(memory)[shift:-1]
    LocalSource().read_into(str(file.parent), file.name, where, out, shown.extend if steps else None)
    assert not steps or shown == out
    assert memory[-1] == 0xEE and (memory[:shift] == 0xEE).all()
    return bytes(out)


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("shift", [0, 64, 512, 4095])
@pytest.mark.parametrize(
    ("start", "end"),
    [
        (0, SIZE), (0, 8192), (4096, 1 << 21), (4096, SIZE - 1), (1, SIZE), (777, 2_500_000), (8191, 8193), (5, 6),
        (SIZE - 1, SIZE), (SIZE // 4096 * 4096, SIZE), (2 << 20, SIZE),
    ],
)  # fmt: skip
def test_any_range_fills_any_memory(disk: Disk, file: Path, start: int, end: int, shift: int, steps: bool) -> None:
    assert _read(file, start, end, shift=shift, steps=steps) == CONTENT[start:end]
    assert disk.reads


@pytest.mark.parametrize("start", [0, 4096, 1000])
@pytest.mark.parametrize("most", [4096, 12_000, 70_000])
def test_short_reads_are_gone_on_with(disk: Disk, file: Path, start: int, most: int) -> None:
    disk.most_bytes = most
    assert _read(file, start, 500_000) == CONTENT[start:500_000]


def test_what_is_aligned_is_read_once_in_whole_steps(disk: Disk, file: Path) -> None:
    assert _read(file, 4096, 3 << 20) == CONTENT[4096 : 3 << 20]
    assert disk.reads == [(4096, 2 << 20), (4096 + (2 << 20), (1 << 20) - 4096)]


@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("start", [0, 4096, 777, SIZE - 1, SIZE, SIZE + 10_000])
def test_a_range_beyond_the_end_is_truncated(disk: Disk, file: Path, start: int, shift: int) -> None:
    with pytest.raises(TruncatedPayload, match=f"payload ends at byte {max(start, SIZE)}"):
        _read(file, start, SIZE + 20_000, shift=shift)


def test_chunks_in_a_row_are_read_one_after_the_other(disk: Disk, file: Path) -> None:
    outs = [memoryview(bytearray(size)) for size in (5000, 1, 200_000, 4096)]
    LocalSource().read_each(str(file.parent), file.name, 100, outs)
    assert b"".join(outs) == CONTENT[100 : 100 + sum(map(len, outs))]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP])
@pytest.mark.parametrize("at", ["open", "read"])
def test_where_direct_reads_are_refused_the_page_cache_serves_and_one_line_says_so(
    disk: Disk, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: str, number: int
) -> None:
    caplog.set_level(logging.INFO)
    error = OSError(number, "refused")
    if at == "read":
        disk.error = error
    else:
        monkeypatch.setattr(direct, "_set_direct", _raising(error))
    for _ in range(3):
        assert _read(file, 4096, SIZE) == CONTENT[4096:]
    assert len([r for r in caplog.records if "page cache" in r.getMessage()]) == 1


def _raising(error: OSError) -> Callable[[int, bool], None]:
    def refuse(descriptor: int, on: bool) -> None:
        raise error

    return refuse


def test_other_errors_of_a_disk_are_errors(disk: Disk, file: Path) -> None:
    disk.error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(local.SourceError, match="Input/output"):
        _read(file, 0, SIZE)


LAYOUTS = [*sorted(VIEWS), tiles.layout("vec", 16), tiles.layout("amx", 16, blocks=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("encoding", "world"), [("plain", 1), ("plain", 2), ("int8", 1), ("int8", 2)])
def test_every_layout_of_every_rank_has_the_same_bytes_with_and_without(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, encoding: str, world: int
) -> None:
    """Stored and engine chunks of several sizes, none of whole pages, two cartridges in a row, of a payload each."""
    rope = msgspec.structs.replace(make_rope(), pairing="half", layers=(0, 1, 2))
    model = msgspec.structs.replace(make_fingerprint(), rope=rope)
    positions, segments, offset = 83, [], 0
    for name, stored in (("first", 16), ("second", 24)):
        root = tmp_path / name
        made = make_artifact(
            root, positions=positions, chunk_tokens=stored, seed=stored, encoding=encoding, fingerprint=model
        )
        segments.append(Segment(Cartridge(made.manifest, root, str(root)), offset))
        offset += positions

    def loaded(segments: Sequence[Segment], tokens: int) -> Iterator[bytes]:
        for rank in range(world):
            heads = rank_heads(model.kv_heads, rank, world)
            shape = ChunkShape(len(heads), model.layers, tokens, model.head_size, model.dtype)
            loader = ChunkLoader(Sources(), shape, heads, layout)
            for chunk in range((segments[-1].offset + positions) // tokens):
                out = torch.full((shape.size_bytes,), 0xEE, dtype=torch.uint8)
                loader.load(segments, chunk, out)
                yield out.numpy().tobytes()

    for tokens, what in itertools.product((16, 32), (segments[:1], segments)):
        disk.reads.clear()
        found = list(loaded(what, tokens))
        assert disk.reads
        with monkeypatch.context() as patch:
            patch.setattr(direct, "begin", lambda *_: None)
            assert found == list(loaded(what, tokens))


def test_a_file_that_changes_while_it_is_read_is_told_by_its_checksums(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "doc"
    made = make_artifact(root, positions=64, chunk_tokens=16)
    payload = made.manifest.payload
    monkeypatch.setattr(local, "_STEP_BYTES", 4096)
    inner, size = disk.preadv, made.manifest.head_bytes(0) * made.manifest.fingerprint.kv_heads
    assert size > 4096, "a chunk is read in steps"

    def and_change(descriptor: int, into: Sequence[memoryview], at: int) -> int:
        if at == payload.data_offset_bytes:
            flip_bit(root / PAYLOAD, at + size - 1)
        return inner(descriptor, into, at)

    monkeypatch.setattr(os, "preadv", and_change)
    model = made.manifest.fingerprint
    shape = ChunkShape(model.kv_heads, model.layers, 16, model.head_size, model.dtype)
    loader = ChunkLoader(Sources(), shape, range(model.kv_heads), "heads")
    out = torch.empty(shape.size_bytes, dtype=torch.uint8)
    segments = [Segment(Cartridge(made.manifest, root, str(root)), 0)]
    monkeypatch.setattr(loader, "_diagnose", lambda *_: None)
    loader.load(segments, 1, out)
    loader.load(segments, 0, out)  # the second time brings the bit back
    flip_bit(root / PAYLOAD, payload.data_offset_bytes)
    with pytest.raises(CorruptChunk):
        loader.load(segments, 0, out)


@pytest.mark.parametrize("size", [100, 4096, 70_001])
def test_copies_of_the_disk_tier_are_read_so_too(disk: Disk, tmp_path: Path, size: int) -> None:
    cache, key, data = DiskCache(tmp_path, 1 << 20), CopyKey("a" * 64, 0, 0, 2), CONTENT[:size]
    cache.write(key, memoryview(data))
    disk.reads.clear()
    out = bytearray(size)
    assert cache.read_into(key, memoryview(out)) and out == data
    assert disk.reads
    flip_bit(next(tmp_path.glob("*/*.bin")), 5)
    assert cache.read_into(key, memoryview(out)) and out != data, "it is for the loader's check to tell"
    assert not cache.read_into(key, memoryview(bytearray(size + 1)))


def _is_direct(file: Path, size: int = SIZE, start: int = 0) -> bool:
    """Return whether a read would be direct now."""
    with file.open("rb") as opened:
        before = fcntl.fcntl(opened, fcntl.F_GETFL)
        read = direct.begin(opened.fileno(), start, memoryview(bytearray(size)))
        assert fcntl.fcntl(opened, fcntl.F_GETFL) == (before | os.O_DIRECT if read else before)
        return read is not None


def _drop(file: Path) -> None:
    """Write a file's pages to the disk and take them out of the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_what_is_cold_is_read_directly_once_and_then_finds_its_place_in_the_page_cache(file: Path) -> None:
    """With the real system calls. Where the temporary directory is in memory, nothing is direct, and nothing differs."""
    on_disk = os.major(file.stat().st_dev) != 0
    assert not _is_direct(file), "it was just written"
    until(lambda: _drop(file) or _is_direct(file) == on_disk)  # pages that a core has just put in stay for a moment
    assert not _is_direct(file, direct.LEAST_BYTES - 1), "it is small"
    assert not _is_direct(file, SIZE + (1 << 20)), "the file is shorter"
    for start, end in ((0, SIZE), (777, SIZE - 777), (4096, 3 << 20)):
        until(lambda: _drop(file) or _is_direct(file) == on_disk)
        assert _read(file, start, end) == CONTENT[start:end]
        until(lambda start=start, end=end: not _is_direct(file, end - start, start))  # the trace is read meanwhile
        assert _read(file, start, end) == CONTENT[start:end]
