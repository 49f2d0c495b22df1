"""Fitting foreign KV to a model: which dimension is what, told by the model's own geometry and never guessed, and canonical
chunks of the model's dtype, every value looked at on the way."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...artifact.model import Fingerprint
from ...errors import ForeignFormatError, ModelMismatch
from ...memory.layout import DTYPES
from .formats import Foreign, Pairs

READINGS = {"HTD": ("heads", "positions"), "THD": ("positions", "heads")}
"""Orders that published formats use, without a batch axis of 1 before and the head size behind."""


def settle(foreign: Foreign, shape: Fingerprint, axes: str | None = None) -> tuple[str, Pairs]:
    """Return the one reading of a checkpoint's tensors that fits the model, and K and V `[p, H, D]` of each layer.

    `axes` names the reading where more than one fits. Raises `ModelMismatch` for another number of layers or heads or
    another head size than the model's; `ForeignFormatError` for tensors that contradict each other, that are larger
    than their file, or that fit two readings.
    """
    if foreign.axes and axes not in (None, foreign.axes):
        raise ForeignFormatError(f"{foreign.source}: a {foreign.form} is {foreign.axes}; leave --axes {axes} out")
    _check_tensors(foreign, shape)
    named = foreign.axes or axes
    wanted = [named] if named else list(READINGS)
    fitting = [reading for reading in wanted if all(_fits(t, reading, shape) for _, t in _tensors(foreign))]
    if not fitting:
        raise ModelMismatch(_misfit(foreign, wanted, shape))
    even = [reading for reading in fitting if not _uneven(foreign, reading)]
    if not even:
        raise ForeignFormatError(f"{foreign.source}: {_uneven(foreign, fitting[0])}")
    if len(even) > 1:
        raise ForeignFormatError(
            f"{foreign.source}: {_where(foreign)} fits heads before positions and positions before heads. Nothing in "
            "the file says which; give --axes HTD or --axes THD"
        )
    return even[0], [_joined(foreign, layer, even[0]) for layer in range(shape.layers)]


def _tensors(foreign: Foreign) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor with its name for people."""
    for segment in foreign.segments:
        for layer, (keys, values) in enumerate(segment):
            yield f"keys of layer {layer}", keys
            yield f"values of layer {layer}", values


def _check_tensors(foreign: Foreign, shape: Fingerprint) -> None:
    for segment in foreign.segments:
        if len(segment) != shape.layers:
            raise ModelMismatch(f"{foreign.source}: KV of {len(segment)} layers; the model has {shape.layers}")
    # A tensor of strides 0 takes no room in the file and all memory when it is copied.
    declared, size = sum(t.numel() * t.itemsize for _, t in _tensors(foreign)), foreign.source.stat().st_size
    if declared > size:
        raise ForeignFormatError(f"{foreign.source}: its tensors declare {declared} bytes, the file has {size}")


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


def _where(foreign: Foreign) -> str:
    return f"keys of layer 0 of shape {tuple(foreign.segments[0][0][0].shape)}"


def _misfit(foreign: Foreign, wanted: list[str], shape: Fingerprint) -> str:
    name, tensor = max(_tensors(foreign), key=lambda found: not any(_fits(found[1], r, shape) for r in wanted))
    sizes = {"H": str(shape.kv_heads), "T": "p", "D": str(shape.head_size)}
    expected = " or ".join(f"(1, {', '.join(sizes[axis] for axis in reading)})" for reading in wanted)
    return (
        f"{foreign.source}: {name} have shape {tuple(tensor.shape)}; a model of {shape.kv_heads} KV heads and head "
        f"size {shape.head_size} has {expected}"
    )


def _joined(foreign: Foreign, layer: int, reading: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V `[p, H, D]` of a layer, the segments one after the other; a view where there is but one."""
    planes = []
    for plane in (0, 1):
        parts = [_squeezed(segment[layer][plane]).detach() for segment in foreign.segments]
        parts = [part.transpose(0, 1) if reading == "HTD" else part for part in parts]
        planes.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return planes[0], planes[1]


class ForeignKV:
    """K and V of each layer as canonical chunks in the model's dtype, every value looked at on the way."""

    def __init__(self, foreign: Foreign, layers: Pairs, shape: Fingerprint, rounding: bool) -> None:
        """`layers` are `[p, H, D]`. Raises `ForeignFormatError` for dtypes that are no floating point KV."""
        self.positions = layers[0][0].shape[0]
        self._source, self._layers, self._rounding = foreign.source, layers, rounding
        self._target = DTYPES[shape.dtype]
        self._rounded = False
        self.source_dtypes = sorted({str(t.dtype).removeprefix("torch.") for pair in layers for t in pair})
        if strange := set(self.source_dtypes) - {*DTYPES, "float64"}:
            raise ForeignFormatError(
                f"{foreign.source}: KV of dtype {', '.join(sorted(strange))}; expected {', '.join(DTYPES)} or float64"
            )
        if not self.positions:
            raise ForeignFormatError(f"{foreign.source}: KV of no position")

    @property
    def dtype(self) -> str:
        """What became of the dtype so far."""
        source, target = " and ".join(self.source_dtypes), str(self._target).removeprefix("torch.")
        if source == target:
            return source
        return f"{source} to {target}, {'rounded' if self._rounded else 'exact'}"

    def chunks(self, size: int) -> Iterator[torch.Tensor]:
        """Yield the canonical KV `[2, L, T, H, D]` of each `size` positions.

        Raises `ForeignFormatError` at a value that is not finite, or that the dtype does not hold and may not round.
        """
        for start in range(0, self.positions, size):
            planes = [
                [self._cast(pair[plane][start : start + size], plane, layer, start)
                 for layer, pair in enumerate(self._layers)]
                for plane in (0, 1)
            ]  # fmt: skip
            yield torch.stack([torch.stack(plane) for plane in planes])

    def _cast(self, part: torch.Tensor, plane: int, layer: int, start: int) -> torch.Tensor:
        cast = part.to(self._target)
        name = f"{self._source}: {'values' if plane else 'keys'} of layer {layer}"
        for stage, found in (("", part), (f" in {str(self._target).removeprefix('torch.')}", cast)):
            if not (finite := torch.isfinite(found)).all():
                position, head, element = (~finite).nonzero()[0].tolist()
                raise ForeignFormatError(
                    f"{name} at position {start + position}, head {head}, element {element}: "
                    f"{found[position, head, element].item()}{stage} is not finite"
                )
        if not torch.equal(cast.to(part.dtype), part):
            if not self._rounding:
                raise ForeignFormatError(
                    f"{name}: {str(part.dtype).removeprefix('torch.')} does not fit into the model's "
                    f"{str(self._target).removeprefix('torch.')} without rounding. PEFT rounds so whenever it runs an "
                    "adapter; --round does it here, --dtype float32 is for engines whose KV is float32"
                )
            self._rounded = True
        return cast
