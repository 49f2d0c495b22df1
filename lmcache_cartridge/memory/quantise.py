"""Quantiser: KV of the model's dtype as one byte a number, by the rule that an engine's own op was seen to follow.

Engines do not agree on how a number becomes fp8: of vLLM 0.32 the ops for CPU cut it off towards zero, those for CUDA
round it to the nearest, and each layer may have scales of its own. So nothing is computed here. A 16-bit dtype has
65,536 numbers; `engine/probe.py` has each layer write them all, and what it wrote is the table that numbers are looked up
in. That takes 1.2 to 1.8 ns a number, as long as reading its two bytes from a disk of 1 to 2 GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from blake3 import blake3

from .layout import ChunkShape

NUMBERS = 1 << 16
"""How many numbers a 16-bit dtype has."""


class Rule(NamedTuple):
    """How one layer writes its numbers: the byte for each, by the number's bits as an unsigned integer."""

    keys: bytes
    values: bytes

    def __call__(self, kv: torch.Tensor) -> torch.Tensor:
        """Return K and V, `[2, ...]` of a 16-bit dtype, as the layer would write them: uint8 of the same shape."""
        return torch.stack([_look_up(table, plane) for table, plane in zip(self, kv, strict=True)])


class Quantiser(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of all layers that one process has, in the order of the model."""

    tables: tuple[bytes, ...]
    """Of `NUMBERS` bytes, no two the same."""
    layers: tuple[tuple[int, int], ...]
    """Which table the keys of each layer go by, and which its values."""

    @property
    def digest(self) -> str:
        """What tells it from others: eight hexadecimal digits."""
        return blake3(msgspec.msgpack.encode(self)).hexdigest(4)

    def quantise(self, raw: torch.Tensor, out: torch.Tensor, shape: ChunkShape) -> None:
        """Fill `out`, flat uint8, with a chunk of `shape` in the heads layout; `raw` is it in the model's 16-bit dtype."""
        planes = shape.heads, 2, shape.layers, shape.tokens * shape.head_size
        numbers, bytes_ = raw.numpy().view("u2").reshape(planes), out.numpy().reshape(planes)
        tables = [np.frombuffer(table, "u1") for table in self.tables]
        for layer, rule in enumerate(self.layers):
            for plane, table in enumerate(rule):
                bytes_[:, plane, layer] = tables[table].take(numbers[:, plane, layer])

    def numbers(self, kv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return KV `[2, L, ...]` of a 16-bit `dtype` that the layers write as these bytes."""
        numbers = np.array([[table.find(code) for code in range(256)] for table in self.tables]).astype("u2")
        tables = np.array(self.layers).T[:, :, None]
        return torch.from_numpy(numbers[tables, kv.flatten(2).cpu()]).view(dtype).view(kv.shape)


def quantiser(rules: Sequence[Rule]) -> Quantiser:
    """Return the quantiser of layers with these rules."""
    tables = list(dict.fromkeys(table for rule in rules for table in rule))
    return Quantiser(tuple(tables), tuple((tables.index(rule.keys), tables.index(rule.values)) for rule in rules))


def _look_up(table: bytes, numbers: torch.Tensor) -> torch.Tensor:
    bits = numbers.contiguous().view(torch.uint8).numpy().view("u2")
    return torch.from_numpy(np.frombuffer(table, "u1").take(bits))
