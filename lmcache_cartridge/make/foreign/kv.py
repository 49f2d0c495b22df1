"""ForeignKV: a checkpoint's K and V as canonical chunks of the model's dtype, every value looked at on the way."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...artifact.fingerprint import Fingerprint
from ...errors import ForeignFormatError
from ...memory.layout import DTYPES
from .found import Foreign, Pairs


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

    def chunks(self, size: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first position, canonical KV `[2, L, T, H, D]`) of each `size` positions.

        Raises `ForeignFormatError` at a value that is not finite, or that the dtype does not hold and may not round.
        """
        for start in range(0, self.positions, size):
            planes = [
                [self._cast(pair[plane][start : start + size], plane, layer, start)
                 for layer, pair in enumerate(self._layers)]
                for plane in (0, 1)
            ]  # fmt: skip
            yield start, torch.stack([torch.stack(plane) for plane in planes])

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
