"""An artefact holds exactly the KV that was written, and shows every damage."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from making import VOCABULARY, flip_bit, make_artifact, make_ids
from safetensors import safe_open

from lmcache_cartridge.artifact.check import is_finite
from lmcache_cartridge.artifact.reading import PAYLOAD, chunk_range, load_manifest, load_token_ids, verify
from lmcache_cartridge.artifact.writing import INLINE_TOKENS, TOKENS
from lmcache_cartridge.errors import ArtifactError, CorruptChunk, ManifestError, TruncatedPayload
from lmcache_cartridge.memory.layout import DTYPES


@pytest.fixture
def made(tmp_path):
    return make_artifact(tmp_path / "doc", positions=40, chunk_tokens=16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("positions", "chunk_tokens"), [(40, 16), (48, 16), (7, 256), (1, 1)])
def test_the_payload_is_a_safetensors_file_of_exactly_the_kv_written(tmp_path, positions, chunk_tokens, dtype):
    manifest, kv = make_artifact(
        tmp_path / "doc", positions=positions, chunk_tokens=chunk_tokens, dtype=dtype, kv_heads=3, head_size=10
    )
    with safe_open(tmp_path / "doc" / PAYLOAD, framework="pt") as payload:
        names = sorted(payload.keys())
        chunks = [payload.get_tensor(name) for name in names]
    assert names == [f"chunk.{i:05d}" for i in range(manifest.chunks)]
    assert manifest.payload.data_offset_bytes % 4096 == 0, "where direct I/O can read it"
    read_back = torch.cat([chunk.permute(1, 2, 3, 0, 4) for chunk in chunks], dim=2)
    assert read_back.dtype == kv.dtype
    assert torch.equal(read_back, kv)


@pytest.mark.parametrize("positions", [INLINE_TOKENS, INLINE_TOKENS + 1])
def test_token_ids_are_read_back_from_the_manifest_or_a_file(tmp_path, positions):
    manifest, _ = make_artifact(tmp_path / "doc", positions=positions, seed=3)
    assert (tmp_path / "doc" / TOKENS).exists() == (positions > INLINE_TOKENS)
    if positions > INLINE_TOKENS:
        assert np.load(tmp_path / "doc" / TOKENS, allow_pickle=False).tolist() == make_ids(positions, 3)
    ids = load_token_ids(manifest, tmp_path / "doc")
    assert ids.dtype == np.uint32
    assert ids.tolist() == make_ids(positions, 3)


def test_swapped_token_ids_are_found(tmp_path):
    manifest, _ = make_artifact(tmp_path / "doc", positions=100, seed=3)
    np.save(tmp_path / "doc" / TOKENS, np.asarray(make_ids(100, 4), dtype="<u4"))
    with pytest.raises(ArtifactError, match="cartridge doc@1: token ids do not have the digest"):
        load_token_ids(manifest, tmp_path / "doc")
    with pytest.raises(ArtifactError, match="token ids do not have the digest"):
        list(verify(tmp_path / "doc"))


class _Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "empty": lambda path: path.write_bytes(b""),
    "short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "huge": lambda path: path.write_bytes(path.read_bytes() + bytes(1 << 20)),
    "no npy": lambda path: path.write_bytes(b"PK\x03\x04" + path.read_bytes()[4:]),
    "pickle": lambda path: path.write_bytes(pickle.dumps(_Bomb(path.parent / "exploded"))),
    "objects": lambda path: np.save(path, np.asarray([_Bomb(path.parent / "exploded")] * 100), allow_pickle=True),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_token_file_that_is_not_the_one_written_is_refused_and_nothing_in_it_runs(tmp_path, damage):
    manifest, _ = make_artifact(tmp_path / "doc", positions=100, seed=3)
    _DAMAGE[damage](tmp_path / "doc" / TOKENS)
    with pytest.raises(ArtifactError, match="cartridge doc@1"):
        load_token_ids(manifest, tmp_path / "doc")
    assert not (tmp_path / "doc" / "exploded").exists()


def test_the_bomb_of_the_test_above_explodes_when_something_unpickles_it(tmp_path):
    make_artifact(tmp_path / "doc", positions=100, seed=3)
    _DAMAGE["objects"](tmp_path / "doc" / TOKENS)
    np.load(tmp_path / "doc" / TOKENS, allow_pickle=True)
    assert (tmp_path / "doc" / "exploded").exists()


@pytest.mark.parametrize("positions", [40, 100])
def test_a_token_id_outside_the_vocabulary_is_refused(tmp_path, positions):
    ids = make_ids(positions, 0)
    ids[7] = VOCABULARY
    with pytest.raises((ArtifactError, ManifestError), match="outside the model's vocabulary"):
        load_token_ids(make_artifact(tmp_path / "doc", positions=positions, token_ids=ids).manifest, tmp_path / "doc")


@pytest.mark.parametrize("change", [-1, 1, -40_000, None])
def test_a_payload_of_another_size_is_refused_with_both_sizes(made, tmp_path, change):
    payload = tmp_path / "doc" / PAYLOAD
    size = payload.stat().st_size
    os.truncate(payload, size + change) if change else payload.unlink()
    with pytest.raises(TruncatedPayload, match=f"has {size + change if change else 0} bytes, its manifest says {size}"):
        load_manifest(tmp_path / "doc")
    with pytest.raises(TruncatedPayload):
        list(verify(tmp_path / "doc"))


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("where", ["first", "last"])
def test_verify_names_the_chunk_and_head_of_a_flipped_bit(made, tmp_path, chunk, head, where):
    start, end = chunk_range(made.manifest, chunk, range(head, head + 1))
    flip_bit(tmp_path / "doc" / PAYLOAD, start if where == "first" else end - 1)
    done = []
    with pytest.raises(CorruptChunk, match=f"cartridge doc@1: chunk {chunk}, KV head {head} of "):
        done.extend(verify(tmp_path / "doc"))
    assert done == [(i + 1, 3) for i in range(chunk)]


@pytest.mark.parametrize("offset", [0, 8, 100, 4000])
def test_verify_finds_a_changed_header(made, tmp_path, offset):
    flip_bit(tmp_path / "doc" / PAYLOAD, offset)
    with pytest.raises(ArtifactError, match="header"):
        list(verify(tmp_path / "doc"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_infinities_and_nans_of_either_sign_are_found_and_the_largest_numbers_are_not(dtype):
    limits = torch.finfo(DTYPES[dtype])
    for number in (0.0, limits.max, limits.tiny, float("inf"), float("nan")):
        for kv in (torch.full((9,), 0.5), torch.full((9,), -0.5)):
            for sign in (1, -1):
                kv[4] = number
                data = memoryview((sign * kv).to(DTYPES[dtype]).view(torch.uint8).numpy())
                assert is_finite(data, dtype) == (number == number and number != float("inf"))
