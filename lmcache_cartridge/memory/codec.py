"""Codec: heads of a chunk between the model's dtype and int8 records."""

from __future__ import annotations

import numpy as np
import torch

from ..artifact import int8
from ..artifact.model import Fingerprint
from ..errors import NonFiniteKV
from .layout import DTYPES

_GROUP = 1 << 17
"""Numbers decoded at a time, so that what is between int8 and the dtype stays in the processor's cache."""


def encode(kv: torch.Tensor, shape: Fingerprint) -> memoryview:
    """Return heads `[H, 2, L, T, D]` of a model of `shape` as int8 records.

    Raises `NonFiniteKV` for a NaN, an infinity, or numbers so near to the dtype's largest that a code could exceed it.
    """
    tokens = kv.shape[3]
    heads = np.empty(len(kv), int8.record(shape, tokens))
    keys, values = kv.float().unbind(1)
    high, low = keys.amax(2), keys.amin(2)
    step, middle = high / 254 - low / 254, high / 2 + low / 2  # their difference may be beyond float32
    heads["key_step"], heads["key_middle"] = step.numpy(), middle.numpy()
    heads["codes"][:, 0] = _codes(keys - middle[:, :, None], step[:, :, None])
    step = values.abs().amax(3) / 127
    heads["value_step"] = step.numpy()
    heads["codes"][:, 1] = _codes(values, step[..., None])
    packed = heads.view("u1").data
    if not int8.is_finite(packed, shape, tokens):
        raise NonFiniteKV(f"its KV holds NaN, infinity, or numbers too near to the largest {shape.dtype} for int8")
    return packed


def _codes(numbers: torch.Tensor, step: torch.Tensor) -> np.ndarray:
    """Return how many steps each number is; 0 where the step is, since all its numbers are the same."""
    return (numbers / step).nan_to_num_(0.0).round_().clamp_(-127, 127).numpy().astype("i1")


def decode(packed: memoryview, out: torch.Tensor, shape: Fingerprint, tokens: int) -> None:
    """Fill `out`, flat uint8, with heads in the stored layout and the model's dtype; allocates a few layers of one."""
    heads = np.frombuffer(packed, int8.record(shape, tokens))
    steps, middles, value_steps = (
        torch.from_numpy(heads[name].copy()) for name in ("key_step", "key_middle", "value_step")
    )
    codes = torch.from_numpy(heads["codes"])
    kv = out.view(DTYPES[shape.dtype]).view(codes.shape)
    group = max(1, _GROUP // (tokens * shape.head_size))
    for head in range(len(heads)):
        for first in range(0, shape.layers, group):
            here = slice(first, first + group)
            keys = codes[head, 0, here] * steps[head, here, None]
            kv[head, 0, here] = keys.add_(middles[head, here, None])
            kv[head, 1, here] = codes[head, 1, here] * value_steps[head, here, :, None]
