"""An int8 payload: half the bytes, every number within half a step, or an error."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import torch
from chunks import in_int8
from hypothesis import given, settings
from hypothesis import strategies as st
from making import make_artifact, make_fingerprint, make_kv, make_rope

from lmcache_cartridge.artifact.check import ChunkCheck, checksum
from lmcache_cartridge.artifact.int8 import record
from lmcache_cartridge.errors import NonFiniteKV
from lmcache_cartridge.memory.codec import encode
from lmcache_cartridge.memory.layout import DTYPES, to_heads


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


@pytest.mark.parametrize("field", ["key_step", "key_middle", "value_step"])
@pytest.mark.parametrize("number", [0.5, float("nan"), float("-inf"), 3e38])
def test_steps_that_are_not_finite_or_lead_beyond_the_dtype_are_refused(tmp_path, field, number):
    made = make_artifact(tmp_path / "doc", positions=16, chunk_tokens=16, encoding="int8").manifest
    heads = np.zeros(2, record(made.fingerprint, 16))
    if field == "key_middle" and number == 3e38:
        number *= 1.13  # by itself at the very end of bfloat16, and past it with any code
        heads["key_step"] = 1e36
    heads[field][1].flat[3] = number
    data = heads.view("u1").data
    sums = (tuple(checksum(head.tobytes()) for head in heads),)
    check = ChunkCheck(
        msgspec.structs.replace(made, payload=msgspec.structs.replace(made.payload, checksums=sums)), 0, range(2)
    )
    check.update(data)
    if number == 0.5:
        check.finish(data, "here")
        return
    with pytest.raises(NonFiniteKV, match="chunk 0 of here holds NaN or infinity"):
        check.finish(data, "here")


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
