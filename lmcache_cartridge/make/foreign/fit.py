"""Fitting foreign KV to a model: which dimension is what, told by the model's own geometry and never guessed, and canonical
KV in the model's dtype, every value looked at on the way."""

from __future__ import annotations

from collections.abc import Iterator
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
    axes: str
    """The reading of its axes."""
    source_dtypes: list[str]
    dtype: str
    """What became of the dtype: `float32 to bfloat16, rounded`."""


def fit(foreign: Foreign, shape: Fingerprint, axes: str | None = None, *, rounding: bool = False) -> Fitted:
    """Return a checkpoint's KV by the one reading of its tensors that fits the model, frozen positions first.

    `axes` names the reading where more than one fits; `rounding` allows a dtype that does not hold every value. Raises
    `ModelMismatch` for another number of layers or heads or another head size than the model's; `ForeignFormatError` for
    tensors that contradict each other, that are larger than their file, that fit two readings, or that are no KV: of other
    dtypes, not finite, or of no position.
    """
    reading = _reading(foreign, shape, axes)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for _, tensor in _tensors(foreign)})
    if strange := set(dtypes) - {*DTYPES, "float64"}:
        raise ForeignFormatError(
            f"{foreign.source}: KV of dtype {', '.join(sorted(strange))}; expected {', '.join(DTYPES)} or float64"
        )
    positions = sum(_squeezed(segment[0][0]).shape[reading.index("T")] for segment in foreign.segments)
    if not positions:
        raise ForeignFormatError(f"{foreign.source}: KV of no position")
    size = (2, shape.layers, positions, shape.kv_heads, shape.head_size)
    kv, is_exact = torch.empty(size, dtype=DTYPES[shape.dtype]), True
    for plane, name in enumerate(("keys", "values")):
        for layer in range(shape.layers):
            parts = [_squeezed(segment[layer][plane]).detach() for segment in foreign.segments]
            whole = torch.cat([part.transpose(0, 1) if reading == "HTD" else part for part in parts])
            where, kv[plane, layer] = f"{foreign.source}: {name} of layer {layer}", whole
            _check_finite(whole, where)
            _check_finite(kv[plane, layer], where, f" in {shape.dtype}")
            is_exact &= (is_same := torch.equal(kv[plane, layer].to(whole.dtype), whole))
            if not is_same and not rounding:
                raise ForeignFormatError(
                    f"{where}: {str(whole.dtype).removeprefix('torch.')} does not fit into the model's {shape.dtype} "
                    "without rounding. PEFT rounds so whenever it runs an adapter; --round does it here, --dtype float32 "
                    "is for engines whose KV is float32"
                )
    source = " and ".join(dtypes)
    became = source if source == shape.dtype else f"{source} to {shape.dtype}, {'exact' if is_exact else 'rounded'}"
    return Fitted(kv, reading, dtypes, became)


def _check_finite(found: torch.Tensor, where: str, stage: str = "") -> None:
    finite = torch.isfinite(found)
    if not finite.all():
        position, head, element = (~finite).nonzero()[0].tolist()
        raise ForeignFormatError(
            f"{where} at position {position}, head {head}, element {element}: "
            f"{found[position, head, element].item()}{stage} is not finite"
        )


def _reading(foreign: Foreign, shape: Fingerprint, axes: str | None) -> str:
    """Return the one order of axes that all tensors have."""
    source = foreign.source
    if foreign.axes and axes not in (None, foreign.axes):
        raise ForeignFormatError(f"{source}: a {foreign.form} is {foreign.axes}; leave --axes {axes} out")
    for segment in foreign.segments:
        if len(segment) != shape.layers:
            raise ModelMismatch(f"{source}: KV of {len(segment)} layers; the model has {shape.layers}")
    tensors = list(_tensors(foreign))
    # A tensor of strides 0 takes no room in the file and all memory when it is copied.
    declared, size = sum(t.numel() * t.itemsize for _, t in tensors), source.stat().st_size
    if declared > size:
        raise ForeignFormatError(f"{source}: its tensors declare {declared} bytes, the file has {size}")
    named = foreign.axes or axes
    wanted = [named] if named else list(READINGS)
    fitting = [reading for reading in wanted if all(_fits(t, reading, shape) for _, t in tensors)]
    if not fitting:
        misfits = (each for each in tensors if not any(_fits(each[1], reading, shape) for reading in wanted))
        name, tensor = next(misfits, tensors[-1])  # the last of layers that are each of another reading
        sizes = {"H": str(shape.kv_heads), "T": "p", "D": str(shape.head_size)}
        expected = " or ".join(f"(1, {', '.join(sizes[axis] for axis in reading)})" for reading in wanted)
        raise ModelMismatch(
            f"{source}: {name} have shape {tuple(tensor.shape)}; a model of {shape.kv_heads} KV heads and head "
            f"size {shape.head_size} has {expected}"
        )
    uneven = {reading: _uneven(foreign, reading) for reading in fitting}
    even = [reading for reading in fitting if uneven[reading] is None]
    if not even:
        raise ForeignFormatError(f"{source}: {uneven[fitting[0]]}")
    if len(even) > 1:
        raise ForeignFormatError(
            f"{source}: keys of layer 0 of shape {tuple(tensors[0][1].shape)} fits heads before positions and positions "
            "before heads. Nothing in the file says which; give --axes HTD or --axes THD"
        )
    return even[0]


def _tensors(foreign: Foreign) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor with its name for people."""
    for segment in foreign.segments:
        for layer, (keys, values) in enumerate(segment):
            yield f"keys of layer {layer}", keys
            yield f"values of layer {layer}", values


def _squeezed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[0] if tensor.ndim == 4 and tensor.shape[0] == 1 else tensor


def _fits(tensor: torch.Tensor, reading: str, shape: Fingerprint) -> bool:
    found = _squeezed(tensor).shape
    return len(found) == 3 and found[reading.index("H")] == shape.kv_heads and found[2] == shape.head_size


def _uneven(foreign: Foreign, reading: str) -> str | None:
    """Return how the layers of a segment differ in positions, if they do."""
    for segment in foreign.segments:
        lengths = [_squeezed(t).shape[reading.index("T")] for pair in segment for t in pair]
        if strange := [i for i, length in enumerate(lengths) if length != lengths[0]]:
            plane = "values" if strange[0] % 2 else "keys"
            return f"{plane} of layer {strange[0] // 2} have {lengths[strange[0]]} positions, the first {lengths[0]}"
    return None
