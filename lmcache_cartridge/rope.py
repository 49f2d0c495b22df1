"""Moving keys to other positions: the exact RoPE shift."""

from __future__ import annotations

import torch

from .errors import UnsupportedModel
from .fingerprint import Rope


def check_shift(rope: Rope | None) -> None:
    """Raise `UnsupportedModel` where keys cannot be moved exactly: no rotary embedding, or pairs that are not known."""
    if rope is None:
        raise UnsupportedModel("the model has no rotary embedding, so its keys cannot be moved to other positions")
    if rope.pairing is None:
        raise UnsupportedModel("it is not known which dimensions of this model's keys rotate together")


def shift_keys(keys: torch.Tensor, rope: Rope | None, offset: int) -> torch.Tensor:
    """Return keys `[..., head_size]` of positions j as those of positions j + `offset`; a new tensor, same dtype.

    A stored key is R(j) k, and R(offset) R(j) k = R(j + offset) k (Su et al. 2021, arXiv:2104.09864, eq. 14): a
    rotation by angles that do not depend on j, computed in float32. A factor on cos and sin (yarn) is in the key
    already and stays. Dimensions beyond `rotary_dim` are copied. Raises `UnsupportedModel` where the shift is not
    exact: no rotary embedding, or pairs that are not known.
    """
    if offset == 0:
        return keys.clone()
    check_shift(rope)
    angles = offset * torch.tensor(rope.inv_freq, dtype=torch.float64)
    cos, sin = angles.cos().float(), angles.sin().float()
    rotated, rest = keys[..., : rope.rotary_dim].float(), keys[..., rope.rotary_dim :]
    if rope.pairing == "half":
        first, second = rotated.chunk(2, dim=-1)
        moved = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
        moved = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([moved.to(keys.dtype), rest], dim=-1)
