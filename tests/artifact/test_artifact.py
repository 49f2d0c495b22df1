"""An artefact appears whole or not at all, is written once, holds exactly the KV that was written, and shows every damage."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from making import flip_bit, heads_bytes, make_artifact, make_fingerprint, make_ids, make_kv
from safetensors import safe_open

from lmcache_cartridge.artifact import files
from lmcache_cartridge.artifact.check import ChunkCheck, is_finite
from lmcache_cartridge.artifact.manifest import Manifest, Provenance
from lmcache_cartridge.artifact.reading import PAYLOAD, chunk_range, load_manifest, load_token_ids, verify
from lmcache_cartridge.artifact.writing import TOKENS, ArtifactWriter
from lmcache_cartridge.errors import (
    ArtifactError,
    CartridgeExists,
    CorruptChunk,
    NonFiniteKV,
    TruncatedPayload,
)
from lmcache_cartridge.memory.layout import DTYPES


@pytest.fixture
def root(tmp_path):
    return tmp_path / "doc"


@pytest.fixture
def made(root):
    return make_artifact(root, positions=40, chunk_tokens=16)


# What is written.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("positions", "chunk_tokens"), [(40, 16), (48, 16), (7, 256), (1, 1)])
def test_the_payload_is_a_safetensors_file_of_exactly_the_kv_written(root, positions, chunk_tokens, dtype):
    manifest, kv = make_artifact(
        root, positions=positions, chunk_tokens=chunk_tokens, dtype=dtype, kv_heads=3, head_size=10
    )
    with safe_open(root / PAYLOAD, framework="pt") as payload:
        names = sorted(payload.keys())
        chunks = [payload.get_tensor(name).permute(1, 2, 3, 0, 4) for name in names]
    assert names == [f"chunk.{i:05d}" for i in range(manifest.chunks)]
    assert manifest.payload.data_offset_bytes % 4096 == 0, "where direct I/O can read it"
    torch.testing.assert_close(torch.cat(chunks, dim=2), kv, rtol=0, atol=0)


SHAPE = make_fingerprint(layers=1, kv_heads=1, head_size=8)
CHUNKS = [bytes(tokens * SHAPE.token_bytes) for tokens in (16, 16, 8)]


def _writer(root: Path) -> ArtifactWriter:
    """Return what writes `CHUNKS`."""
    return ArtifactWriter(
        root, cartridge_id="doc", version=1, kind="prefill", fingerprint=SHAPE, token_ids=np.arange(40), chunk_tokens=16
    )  # fmt: skip


def _commit(writer: ArtifactWriter) -> Manifest:
    return writer.commit(Provenance(tool="tests", created="2026-01-01T00:00:00Z"))


def test_an_artefact_is_to_the_byte_what_releases_of_its_format_write_and_appears_when_it_is_committed(root):
    """A digest that changes makes every cartridge there is another one: raise the format's major version then."""
    with _writer(root) as writer:
        for chunk in CHUNKS:
            writer.write(chunk)
            assert not root.exists()
        made = _commit(writer)
        assert load_manifest(root) == made
    assert [*root.parent.iterdir()] == [root]
    assert b"encoding" not in made.encode() and b"latent" not in made.encode()
    assert made.digest == "74b9b33da383cc4b2a86e955587b1d4759df8e47aee4770c3f0b070b812bfeaa"


def test_a_disk_that_fills_up_leaves_nothing_behind(root):
    """A limit on the size of files stands in for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OSError, match="too large"), _writer(root) as writer:
            for chunk in CHUNKS:
                writer.write(chunk)
            _commit(writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*root.parent.iterdir()] == []


def test_of_two_writers_at_the_same_place_the_second_is_refused_at_once_or_at_its_end(root):
    with pytest.raises(CartridgeExists, match="appeared"), _writer(root) as slower:
        for chunk in CHUNKS:
            slower.write(chunk)
        made = make_artifact(root, positions=40)
        with pytest.raises(CartridgeExists, match="written once"):
            _writer(root)
        _commit(slower)
    assert [*root.parent.iterdir()] == [root]
    assert load_manifest(root) == made.manifest


def test_an_artefact_is_on_the_disk_by_its_name(root, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").readlink()), fsync(fd)))
    make_artifact(root, positions=40)
    assert synced[-1] == root.parent


def test_a_file_whose_write_fails_stays_what_it_was_and_nothing_is_left(tmp_path):
    def parts() -> object:
        yield b"half"
        assert path.read_bytes() == b"before", "nobody sees it half-made"
        raise KeyError

    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(KeyError):
        files.replace(path, parts())
    assert path.read_bytes() == b"before"
    assert [*tmp_path.iterdir()] == [path]


# What is damaged.


class _Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "huge": lambda path: path.write_bytes(path.read_bytes() + bytes(1 << 20)),
    "other ids": lambda path: np.save(path, np.asarray(make_ids(100, 4), dtype="<u4")),
    "objects": lambda path: np.save(path, np.asarray([_Bomb(path.parent / "exploded")] * 100), allow_pickle=True),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_token_file_that_is_not_the_one_written_is_refused_and_nothing_in_it_runs(root, damage):
    manifest, _ = make_artifact(root, positions=100, seed=3)
    _DAMAGE[damage](root / TOKENS)
    for read in (lambda: load_token_ids(manifest, root), lambda: list(verify(root))):
        with pytest.raises(ArtifactError, match="cartridge doc@1"):
            read()
    assert not (root / "exploded").exists()


@pytest.mark.parametrize("change", [-1, 1, None])
def test_a_payload_of_another_size_is_refused_with_both_sizes(made, root, change):
    payload = root / PAYLOAD
    size = payload.stat().st_size
    os.truncate(payload, size + change) if change else payload.unlink()
    with pytest.raises(TruncatedPayload, match=f"has {size + change if change else 0} bytes, its manifest says {size}"):
        load_manifest(root)


@pytest.mark.parametrize(("chunk", "head", "at"), [(0, 0, 0), (1, 1, 0), (2, 0, -1)])
def test_verify_names_the_chunk_and_head_of_a_flipped_bit(made, root, chunk, head, at):
    flip_bit(root / PAYLOAD, range(*chunk_range(made.manifest, chunk, range(head, head + 1)))[at])
    done = []
    with pytest.raises(CorruptChunk, match=f"cartridge doc@1: chunk {chunk}, KV head {head} of "):
        done.extend(verify(root))
    assert done == [(i + 1, 3) for i in range(chunk)]


HEADS, HEAD_BYTES = range(1, 3), 2 * 3 * 16 * 64 * 2
SIZE = len(HEADS) * HEAD_BYTES


def _make(root: Path, nan_at: tuple[int, ...] | None = None) -> tuple[Manifest, bytearray]:
    """Return the manifest of an artefact of three heads, and the bytes of the last two in chunk 1."""
    kv = make_kv(make_fingerprint(kv_heads=3), 32, 0)
    if nan_at:
        kv[nan_at] = float("nan")
    manifest, _ = make_artifact(root, positions=32, kv_heads=3, kv=kv)
    return manifest, bytearray(heads_bytes(kv[:, :, 16:])[HEAD_BYTES:])


def _check(made: Manifest, data: bytearray, part_bytes: int) -> None:
    check = ChunkCheck(made, 1, HEADS)
    for start in range(0, SIZE, part_bytes):
        check.update(memoryview(data)[start : start + part_bytes])
    check.finish(memoryview(data), "here")


@pytest.mark.parametrize("part_bytes", [2, 4096, HEAD_BYTES - 2, HEAD_BYTES + 2, SIZE])
def test_changed_bytes_and_nan_are_found_in_parts_of_any_size_and_their_head_named(tmp_path, part_bytes):
    made, data = _make(tmp_path / "sound")
    _check(made, data, part_bytes)
    for at in (0, HEAD_BYTES - 2, HEAD_BYTES, SIZE - 2):
        wrong = data.copy()
        wrong[at : at + 2] = b"\xff\x7f"  # NaN, and changed first of all
        with pytest.raises(CorruptChunk, match=f"cartridge doc@1: chunk 1, KV head {1 + at // HEAD_BYTES} of here"):
            _check(made, wrong, part_bytes)
    for at in ((0, 0, 16, 1, 0), (1, 2, 31, 2, 63)):
        made, data = _make(tmp_path / str(at), at)
        with pytest.raises(NonFiniteKV, match="cartridge doc@1: chunk 1 of here"):
            _check(made, data, part_bytes)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.lists(st.floats(width=32), min_size=1))
def test_infinities_and_nans_are_found_and_the_largest_numbers_are_not(dtype, numbers):
    largest = torch.finfo(DTYPES[dtype]).max
    for each in (numbers, [largest], [-largest]):
        kv = torch.tensor(each).to(DTYPES[dtype])
        assert is_finite(memoryview(kv.view(torch.uint8).numpy()), dtype) == kv.isfinite().all()
