"""An int8 payload: half the bytes, every number within half a step, or an error."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from chunks import in_int8, served
from hypothesis import given, settings
from hypothesis import strategies as st
from making import make_artifact, make_fingerprint, make_kv, make_rope

from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.artifact.check import checksum
from lmcache_cartridge.artifact.int8 import record
from lmcache_cartridge.artifact.manifest import Manifest, content_digest
from lmcache_cartridge.artifact.manifest import decode as decode_manifest
from lmcache_cartridge.artifact.reading import PAYLOAD, chunk_range, verify
from lmcache_cartridge.errors import NonFiniteKV
from lmcache_cartridge.memory.codec import encode
from lmcache_cartridge.memory.layout import DTYPES, to_heads

CHUNK = 16


def _load(manifest: Manifest, root: Path, chunk: int) -> torch.Tensor:
    return served([Segment(Cartridge(manifest, root, str(root)), 0)], CHUNK, chunk)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "doc"


@pytest.fixture
def made(root):
    return make_artifact(root, positions=80, chunk_tokens=CHUNK, kv_heads=4, encoding="int8").manifest


@settings(max_examples=100, deadline=None, derandomize=True)
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
    found, kv = in_int8(kv, shape, tokens).double(), kv.double()
    eps = torch.finfo(DTYPES[dtype]).eps
    step = (kv[0].amax(1, keepdim=True) - kv[0].amin(1, keepdim=True)) / 254
    limit = step / 2 + kv[0].abs().amax(1, keepdim=True) * (eps + 2**-22) + torch.finfo(DTYPES[dtype]).smallest_normal
    assert ((found[0] - kv[0]).abs() <= limit).all()
    step = kv[1].abs().amax(3, keepdim=True) / 127
    limit = step / 2 + kv[1].abs() * eps + step * (eps + 2**-22) + torch.finfo(DTYPES[dtype]).smallest_normal
    assert ((found[1] - kv[1]).abs() <= limit).all()


def test_a_record_lies_as_releases_of_the_format_write_it():
    shape = make_fingerprint(layers=2, kv_heads=1, head_size=4)
    kv = make_kv(shape, 3, 0)
    record = torch.frombuffer(bytearray(encode(to_heads(kv), shape)), dtype=torch.uint8)
    *steps, codes = record.split([2 * 4 * 4, 2 * 4 * 4, 2 * 3 * 4, 2 * 2 * 3 * 4])
    step, middle, of_value = (part.view(torch.float32).view(2, -1, 1) for part in steps)
    keys, values = codes.view(torch.int8).view(2, 2, 3, 4).float()
    found = torch.stack([keys * step.mT + middle.mT, values * of_value]).bfloat16()
    assert torch.equal(found, in_int8(kv, shape, 3)[..., 0, :])


def _signed(manifest: Manifest, **changes: object) -> bytes:
    draft = msgspec.structs.replace(manifest, **changes)
    return msgspec.structs.replace(draft, digest=content_digest(draft)).encode()


def _forged(root: Path, made: Manifest, field: str, number: float) -> Manifest:
    """Write a number over one of chunk 2, head 1, and give the artefact a manifest with the checksum of what is there now."""
    where = chunk_range(made, 2, range(1, 2))
    data = bytearray((root / PAYLOAD).read_bytes())
    at = where.start + record(made.fingerprint, CHUNK).fields[field][1] + 8
    data[at : at + 4] = np.float32(number).tobytes()
    (root / PAYLOAD).write_bytes(data)
    sums = [list(row) for row in made.payload.checksums]
    sums[2][1] = checksum(bytes(data[where.start : where.end]))
    payload = msgspec.structs.replace(made.payload, checksums=tuple(map(tuple, sums)))
    (root / "manifest.json").write_bytes(signed := _signed(made, payload=payload))
    return decode_manifest(signed, "here")


@pytest.mark.parametrize("field", ["key_step", "key_middle", "value_step"])
@pytest.mark.parametrize("number", [float("nan"), float("-inf"), 3e38])
def test_steps_that_are_not_finite_or_lead_beyond_the_dtype_are_refused(made, root, field, number):
    before = _load(made, root, 2)
    assert not torch.equal(_load(_forged(root, made, field, 0.5), root, 2), before), "the control"
    if field == "key_middle" and number == 3e38:
        number *= 1.13  # by itself at the very end of bfloat16, and past it with any code
    manifest = _forged(root, made, field, number)
    with pytest.raises(NonFiniteKV, match="chunk 2 of .* holds NaN or infinity"):
        list(verify(root))
    with pytest.raises(NonFiniteKV, match="chunk 2 of "):
        _load(manifest, root, 2)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_what_int8_cannot_hold_is_refused_when_it_is_made(dtype):
    shape, largest = make_fingerprint(dtype=dtype), torch.finfo(DTYPES[dtype]).max
    for plane, number in itertools.product((0, 1), (float("nan"), float("inf"), float("-inf"), largest)):
        kv = make_kv(shape, 16, 0)
        kv[plane, 1, 3, 1, 5] = number
        with pytest.raises(NonFiniteKV, match=f"too near to the largest {dtype}"):
            encode(to_heads(kv), shape)
        kv[plane, 1, 3, 1, 5] = 0.98 * largest
        assert in_int8(kv, shape, 16).isfinite().all()
