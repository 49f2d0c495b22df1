"""A chunk that is checked part by part, wherever the parts end, gets the verdict that it gets as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from making import Made, heads_bytes, make_artifact, make_fingerprint, make_kv

from lmcache_cartridge.artifact.check import ChunkCheck
from lmcache_cartridge.errors import CorruptChunk, NonFiniteKV

HEADS, HEAD_BYTES = range(1, 3), 2 * 3 * 16 * 64 * 2
SIZE = len(HEADS) * HEAD_BYTES
PARTS = [2, 4096, HEAD_BYTES - 2, HEAD_BYTES, HEAD_BYTES + 2, SIZE]


@pytest.fixture(params=PARTS)
def part_bytes(request):
    return request.param


def _make(root: Path, *, nan_at: tuple[int, ...] | None = None) -> tuple[Made, bytearray]:
    """Return an artefact of three heads, and the bytes of the last two in chunk 1."""
    kv = make_kv(make_fingerprint(kv_heads=3), 32, 0)
    if nan_at:
        kv[nan_at] = float("nan")
    made = make_artifact(root, positions=32, kv_heads=3, kv=kv)
    return made, bytearray(heads_bytes(kv[:, :, 16:])[HEAD_BYTES:])


def _check(made: Made, data: bytearray, part_bytes: int, *, known_finite: bool = False) -> None:
    check = ChunkCheck(made.manifest, 1, HEADS, known_finite=known_finite)
    for start in range(0, SIZE, part_bytes):
        check.update(memoryview(data)[start : start + part_bytes])
    check.finish(memoryview(data), "here")


@pytest.mark.parametrize("at", [0, HEAD_BYTES - 1, HEAD_BYTES, SIZE - 1])
def test_a_changed_byte_is_found_and_its_head_named(tmp_path, part_bytes, at):
    made, data = _make(tmp_path / "doc")
    data[at] ^= 1
    with pytest.raises(CorruptChunk, match=f"cartridge doc@1: chunk 1, KV head {1 + at // HEAD_BYTES} of here"):
        _check(made, data, part_bytes)


@pytest.mark.parametrize("at", [(0, 0, 16, 1, 0), (1, 2, 31, 2, 63)])
def test_nan_is_found_in_the_first_and_in_the_last_number(tmp_path, part_bytes, at):
    made, data = _make(tmp_path / "doc", nan_at=at)
    with pytest.raises(NonFiniteKV, match="cartridge doc@1: chunk 1 of here"):
        _check(made, data, part_bytes)
    _check(made, data, part_bytes, known_finite=True)
    _check(*_make(tmp_path / "sound"), part_bytes)


def test_bytes_that_are_not_the_cartridges_are_corrupt_whatever_numbers_they_make(tmp_path, part_bytes):
    made, data = _make(tmp_path / "doc")
    data[100:102] = b"\xff\x7f"
    with pytest.raises(CorruptChunk):
        _check(made, data, part_bytes)
