"""An int8 payload: half the bytes, every number within half a step, each rank's heads by themselves, or an error."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from chunks import load
from hypothesis import given, settings
from hypothesis import strategies as st
from making import Made, flip_bit, make_artifact, make_fingerprint, make_kv, make_rope

from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.artifact.check import checksum
from lmcache_cartridge.artifact.int8 import is_finite, record
from lmcache_cartridge.artifact.manifest import Manifest, content_digest, head_bytes
from lmcache_cartridge.artifact.manifest import decode as decode_manifest
from lmcache_cartridge.artifact.model import Fingerprint
from lmcache_cartridge.artifact.reading import PAYLOAD, chunk_range, verify
from lmcache_cartridge.errors import CorruptChunk, ManifestError, NonFiniteKV
from lmcache_cartridge.memory.codec import decode, encode
from lmcache_cartridge.memory.layout import DTYPES, VIEWS, ChunkShape, rank_heads, to_heads
from lmcache_cartridge.memory.loader import ChunkLoader
from lmcache_cartridge.memory.rope import shift_keys
from lmcache_cartridge.sources.disk_cache import DiskCache
from lmcache_cartridge.sources.sources import Sources

POSITIONS, CHUNK = 80, 16


def _through(kv: torch.Tensor, shape: Fingerprint) -> torch.Tensor:
    """Return canonical KV of one chunk encoded and decoded."""
    packed = encode(to_heads(kv), shape)
    out = torch.full((kv.numel() * kv.itemsize,), 0xEE, dtype=torch.uint8)
    decode(packed, out, shape, kv.shape[2])
    return VIEWS["heads"](out, ChunkShape(kv.shape[3], shape.layers, kv.shape[2], shape.head_size, shape.dtype))


def _loaded(made: Made, root: Path, chunk: int, *, tokens: int = CHUNK, rank: int = 0, world: int = 1,
            layout: str = "heads", sources: object = None, disk: DiskCache | None = None) -> torch.Tensor:  # fmt: skip
    model = made.manifest.fingerprint
    heads = rank_heads(model.kv_heads, rank, world)
    shape = ChunkShape(len(heads), model.layers, tokens, model.head_size, model.dtype)
    loader = ChunkLoader(sources or Sources(), shape, heads, layout, disk, keep_local=True)
    out = torch.full((shape.size_bytes,), 0xEE, dtype=torch.uint8)
    load(loader, [Segment(Cartridge(made.manifest, root, str(root)), 0)], chunk, out)
    return VIEWS[layout](out, shape)


def _served(made: Made, root: Path) -> torch.Tensor:
    """Return the canonical KV of the whole chunks of an artefact as a single rank is served it."""
    return torch.cat([_loaded(made, root, chunk) for chunk in range(made.manifest.positions // CHUNK)], dim=2)


@pytest.fixture
def made(tmp_path):
    rope = msgspec.structs.replace(make_rope(), pairing="half")
    shape = make_fingerprint(kv_heads=4, rope=rope)
    return make_artifact(tmp_path / "doc", positions=POSITIONS, chunk_tokens=CHUNK, fingerprint=shape, encoding="int8")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 3), tokens=st.integers(1, 40), heads=st.integers(1, 3), size=st.integers(1, 40),
    dtype=st.sampled_from(sorted(DTYPES)), seed=st.integers(0, 99), scale=st.sampled_from([1e-4, 0.1, 1.0, 100.0]),
    offset=st.sampled_from([0.0, 0.0, -30.0, 500.0]),
)  # fmt: skip
def test_no_number_moves_by_more_than_half_a_step_and_the_rounding_of_its_dtype(
    layers, tokens, heads, size, dtype, seed, scale, offset
):
    shape = make_fingerprint(layers=layers, kv_heads=heads, head_size=size, dtype=dtype, rope=make_rope())
    kv = scale * make_kv(shape, tokens, seed)
    kv[0] += offset
    found, kv = _through(kv, shape).double(), kv.double()
    eps = torch.finfo(DTYPES[dtype]).eps
    step = (kv[0].amax(1, keepdim=True) - kv[0].amin(1, keepdim=True)) / 254
    limit = step / 2 + kv[0].abs().amax(1, keepdim=True) * (eps + 2**-22) + torch.finfo(DTYPES[dtype]).smallest_normal
    assert ((found[0] - kv[0]).abs() <= limit).all()
    step = kv[1].abs().amax(3, keepdim=True) / 127
    limit = step / 2 + kv[1].abs() * eps + step * (eps + 2**-22) + torch.finfo(DTYPES[dtype]).smallest_normal
    assert ((found[1] - kv[1]).abs() <= limit).all()


@pytest.mark.parametrize("layout", sorted(VIEWS))
@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [16, 8, 32, 24])
def test_the_chunks_of_all_ranks_together_are_the_kv_that_one_rank_gets(made, tmp_path, tokens, world, layout):
    root = tmp_path / "doc"
    whole = _served(made, root)
    for rank, chunk in itertools.product(range(world), range(POSITIONS // tokens)):
        heads = rank_heads(4, rank, world)
        expected = whole[:, :, chunk * tokens : (chunk + 1) * tokens, heads.start : heads.stop]
        assert torch.equal(_loaded(made, root, chunk, tokens=tokens, rank=rank, world=world, layout=layout), expected)


@pytest.mark.parametrize("offset", [0, POSITIONS])
def test_a_later_cartridge_of_a_chain_is_rotated_after_it_is_decoded(made, tmp_path, offset):
    root, model = tmp_path / "doc", made.manifest.fingerprint
    shape = ChunkShape(4, model.layers, CHUNK, model.head_size, model.dtype)
    out = torch.empty(shape.size_bytes, dtype=torch.uint8)
    segments = [Segment(Cartridge(made.manifest, root, str(root)), at) for at in (0, POSITIONS)]
    load(ChunkLoader(Sources(), shape, range(4), "heads"), segments, (offset + 2 * CHUNK) // CHUNK, out)
    keys, values = _served(made, root)[:, :, 2 * CHUNK : 3 * CHUNK]
    expected = shift_keys(keys, model, offset) if offset else keys
    assert torch.equal(VIEWS["heads"](out, shape), torch.stack([expected, values]))


@pytest.mark.parametrize("field", ["key_step", "key_middle", "value_step", "codes"])
@pytest.mark.parametrize("head", [0, 3])
def test_damage_anywhere_in_a_record_is_found(made, tmp_path, field, head):
    root = tmp_path / "doc"
    within = record(made.manifest.fingerprint, CHUNK).fields[field][1]
    flip_bit(root / PAYLOAD, chunk_range(made.manifest, 2, range(head, head + 1)).start + within)
    with pytest.raises(CorruptChunk, match=f"chunk 2, KV head {head} of "):
        list(verify(root))
    with pytest.raises(CorruptChunk, match=f"chunk 2, KV head {head} of "):
        _loaded(made, root, 2)
    _loaded(made, root, 1)


def _forged(root: Path, made: Made, field: str, number: float, chunk: int = 2, head: int = 1) -> Manifest:
    """Write a number over one of a record and give the artefact a manifest with the checksum of what is there now."""
    shape, where = made.manifest.fingerprint, chunk_range(made.manifest, chunk, range(head, head + 1))
    data = bytearray((root / PAYLOAD).read_bytes())
    at = where.start + record(shape, CHUNK).fields[field][1] + 8
    data[at : at + 4] = np.float32(number).tobytes()
    (root / PAYLOAD).write_bytes(data)
    sums = [list(row) for row in made.manifest.payload.checksums]
    sums[chunk][head] = checksum(bytes(data[where.start : where.end]))
    payload = msgspec.structs.replace(made.manifest.payload, checksums=tuple(map(tuple, sums)))
    draft = msgspec.structs.replace(made.manifest, payload=payload)
    manifest = msgspec.structs.replace(draft, digest=content_digest(draft))
    (root / "manifest.json").write_bytes(manifest.encode())
    return manifest


@pytest.mark.parametrize("field", ["key_step", "key_middle", "value_step"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 3e38, -3e38])
def test_steps_that_are_not_finite_or_lead_beyond_the_dtype_are_refused(made, tmp_path, field, number):
    root = tmp_path / "doc"
    if field == "key_middle" and abs(number) == 3e38:
        number *= 1.13  # by itself at the very end of bfloat16, and past it with any code
    manifest = _forged(root, made, field, number)
    with pytest.raises(NonFiniteKV, match="chunk 2 of .* holds NaN or infinity"):
        list(verify(root))
    with pytest.raises(NonFiniteKV, match="chunk 2 of "):
        _loaded(Made(manifest, made.kv), root, 2)


def test_other_steps_that_are_finite_are_read_so_that_the_forgery_above_is_what_was_refused(made, tmp_path):
    before = _loaded(made, tmp_path / "doc", 2)
    manifest = _forged(tmp_path / "doc", made, "value_step", 0.5)
    assert len(list(verify(tmp_path / "doc"))) == 5
    changed = _loaded(Made(manifest, made.kv), tmp_path / "doc", 2) != before
    assert changed.any(-1).nonzero().tolist() == [[1, 0, 2, 1]], "value_step[0, 2] of head 1"


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_what_int8_cannot_hold_is_refused_when_it_is_made(dtype):
    shape, largest = make_fingerprint(dtype=dtype), torch.finfo(DTYPES[dtype]).max
    for plane, number in itertools.product((0, 1), (float("nan"), float("inf"), float("-inf"), largest)):
        kv = make_kv(shape, 16, 0)
        kv[plane, 1, 3, 1, 5] = number
        with pytest.raises(NonFiniteKV, match=f"too near to the largest {dtype}"):
            encode(to_heads(kv), shape)
        kv[plane, 1, 3, 1, 5] = 0.98 * largest
        assert _through(kv, shape).isfinite().all()
        packed = encode(to_heads(kv), shape)
        assert is_finite(packed, shape, 16)


def _edited(manifest: Manifest, encoding: object, *, signed: bool = True) -> bytes:
    document = json.loads(manifest.encode())
    document["payload"]["encoding"] = encoding
    if signed and isinstance(encoding, str):
        draft = msgspec.json.decode(json.dumps(document).encode(), type=Manifest)
        document["digest"] = content_digest(draft)
    return json.dumps(document).encode()


@pytest.mark.parametrize("encoding", ["fp4", "INT8", "", "int8 ", "../x", None, 8, True, ["int8"], {}])
def test_an_unknown_encoding_is_refused_by_its_name(made, encoding):
    with pytest.raises(ManifestError, match=r"that this release knows: .* at `\$\.payload\.encoding`"):
        decode_manifest(_edited(made.manifest, encoding, signed=False), "here")


def test_a_plain_payload_called_int8_is_refused_even_with_the_right_digest(tmp_path):
    plain = make_artifact(tmp_path / "doc", positions=POSITIONS).manifest
    with pytest.raises(ManifestError, match="its geometry needs"):
        decode_manifest(_edited(plain, "int8"), "here")
    with pytest.raises(ManifestError, match="its geometry needs|digest"):
        decode_manifest(_edited(plain, "int8", signed=False), "here")


def test_a_head_larger_than_numpy_can_describe_is_refused_from_the_manifest(made):
    forged = msgspec.structs.replace(
        made.manifest,
        positions=CHUNK,
        fingerprint=msgspec.structs.replace(made.manifest.fingerprint, layers=9, head_size=(1 << 24) - 1),
    )
    payload = msgspec.structs.replace(made.manifest.payload, checksums=made.manifest.payload.checksums[:1])
    size = payload.data_offset_bytes + 4 * head_bytes(forged.fingerprint, CHUNK, "int8")
    tokens = msgspec.structs.replace(forged.tokens, count=CHUNK, file=None, inline=(1,) * CHUNK)
    forged = msgspec.structs.replace(forged, tokens=tokens, payload=msgspec.structs.replace(payload, size_bytes=size))
    forged = msgspec.structs.replace(forged, digest=content_digest(forged))
    with pytest.raises(ManifestError, match="a head of an int8 chunk has .* bytes, over 2 GiB"):
        decode_manifest(forged.encode(), "here")
