"""Fitting foreign KV to a model: which dimension is what, told by the model's own geometry and never guessed, and canonical
KV in the model's dtype, every value looked at on the way."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...artifact.model import Fingerprint
from ...errors import ForeignFormatError, ModelMismatch
from ...memory.layout import DTYPES
from .formats import Foreign

READINGS = ("HTD", "THD")
"""Orders that published formats use: heads, positions (T), head size; without a batch axis of 1 before."""


class Fitted(NamedTuple):
    """KV that fits a model."""

    kv: torch.Tensor
    """Canonical, `[2, L, T, H, D]` in the model's dtype."""
    frozen: int
    """How many leading positions are a frozen segment's."""
    source_dtypes: list[str]


def fit(foreign: Foreign, shape: Fingerprint, *, rounding: bool = False) -> Fitted:
    """Return a checkpoint's KV by the one reading of its tensors that fits the model, frozen positions first.

    `rounding` allows a dtype that does not hold every value. Raises `ModelMismatch` for another number of layers or heads or
    another head size than the model's, or positions that differ between layers; `ForeignFormatError` for tensors that are
    larger than their file, that fit two readings, or that are no KV: of other dtypes, not finite, or of no position.
    """
    tensors = [tensor for segment in foreign.segments for pair in segment for tensor in pair]
    # A tensor of strides 0 takes no room in the file and all memory when it is copied.
    declared, size = sum(t.numel() * t.itemsize for t in tensors), foreign.source.stat().st_size
    if declared > size:
        raise ForeignFormatError(f"{foreign.source}: its tensors declare {declared} bytes, the file has {size}")
    reading = _reading(foreign, shape)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    if strange := set(dtypes) - {*DTYPES, "float64"}:
        raise ForeignFormatError(
            f"{foreign.source}: KV of dtype {', '.join(sorted(strange))}; expected {', '.join(DTYPES)} or float64"
        )
    lengths = [_squeezed(segment[0][0]).shape[reading.index("T")] for segment in foreign.segments]
    if not sum(lengths):
        raise ForeignFormatError(f"{foreign.source}: KV of no position")
    canonical = (2, shape.layers, sum(lengths), shape.kv_heads, shape.head_size)
    kv = torch.empty(canonical, dtype=DTYPES[shape.dtype])
    for plane, name in enumerate(("keys", "values")):
        for layer in range(shape.layers):
            parts = [_squeezed(segment[layer][plane]).detach() for segment in foreign.segments]
            whole = torch.cat([part.transpose(0, 1) if reading == "HTD" else part for part in parts])
            where, kv[plane, layer] = f"{foreign.source}: {name} of layer {layer}", whole
            if not kv[plane, layer].isfinite().all():
                raise ForeignFormatError(f"{where} are not finite in {shape.dtype}")
            if not rounding and not torch.equal(kv[plane, layer].to(whole.dtype), whole):
                raise ForeignFormatError(
                    f"{where}: {str(whole.dtype).removeprefix('torch.')} does not fit into the model's {shape.dtype} "
                    "without rounding. PEFT rounds so whenever it runs an adapter; --round does it here, --dtype float32 "
                    "is for engines whose KV is float32"
                )
    return Fitted(kv, sum(lengths[:-1]), dtypes)


def _reading(foreign: Foreign, shape: Fingerprint) -> str:
    """Return the one order of axes that all tensors have."""
    wanted = [foreign.axes] if foreign.axes else READINGS
    shapes = [{tuple(_squeezed(t).shape) for pair in segment for t in pair} for segment in foreign.segments]
    layers = {len(segment) for segment in foreign.segments}
    fitting = [reading for reading in wanted if all(_fits(each, reading, shape) for each in shapes)]
    if not fitting or layers != {shape.layers}:
        found = " and ".join(
            f"{len(segment)} layers of {sorted(each)[:4]}"
            for segment, each in zip(foreign.segments, shapes, strict=True)
        )
        sizes = {"H": str(shape.kv_heads), "T": "p", "D": str(shape.head_size)}
        expected = " or ".join(f"({', '.join(sizes[axis] for axis in reading)})" for reading in wanted)
        raise ModelMismatch(
            f"{foreign.source}: KV of {found}; the model has {shape.layers} of {expected}, p the same in all"
        )
    if len(fitting) > 1:
        raise ForeignFormatError(
            f"{foreign.source}: KV of {shapes[0]} fits heads before positions and positions before heads, and nothing in the "
            "file says which"
        )
    return fitting[0]


def _squeezed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[0] if tensor.ndim == 4 and tensor.shape[0] == 1 else tensor


def _fits(shapes: set[tuple[int, ...]], reading: str, shape: Fingerprint) -> bool:
    """Whether a segment's tensors have one shape, which is the model's but for the positions."""
    at = reading.index("T")
    return len(shapes) == 1 and all(each[:at] + each[at + 1 :] == (shape.kv_heads, shape.head_size) for each in shapes)
