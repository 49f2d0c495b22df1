"""Moving keys to other positions: the exact RoPE shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..artifact.hf_config import head_size, rope_parameters
from ..artifact.model import Fingerprint, Rope, Rotation, check_shift


def default_frequencies(config: Mapping[str, Any], kind: str | None = None) -> list[float]:
    """Return the frequencies of a config whose RoPE is of the default type, maybe partial, rounded as models round.

    `kind` is that of the layers, where each has its own: one of `rope_kinds`.
    """
    parameters = rope_parameters(config, kind)
    size = round(head_size(config) * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return (1.0 / parameters["rope_theta"] ** exponents).tolist()


def shift(kv: torch.Tensor, shape: Fingerprint, offset: int) -> torch.Tensor:
    """Return canonical KV `[planes, L, ..., D]` of positions j as that of positions j + `offset`; a new tensor, same dtype.

    The keys of each of the model's L layers move by its own rotation. Layers that do not rotate their keys are copied, there a
    key is the same at every position, and so are latent vectors before a rotary key, and values. Raises `UnsupportedModel` as
    `check_shift` does, unless `offset` is 0.
    """
    if offset == 0:
        return kv.clone()
    check_shift(shape.rope)
    keys, latent = kv[0], shape.latent or 0
    keys = torch.cat([keys[..., :latent], _rotated(keys[..., latent:], shape.rope, offset)], dim=-1)
    return torch.cat([keys[None], kv[1:]])


def _rotated(keys: torch.Tensor, rope: Rope, offset: int) -> torch.Tensor:
    if rope[0].layers == tuple(range(len(keys))):
        return rotate(keys, rope[0], offset)
    moved = keys.clone()
    for each in rope:
        rotating = list(each.layers or ())
        moved[rotating] = rotate(keys[rotating], each, offset)
    return moved


def rotate(keys: torch.Tensor, rope: Rotation, offset: int) -> torch.Tensor:
    """Return keys `[..., head_size]` of layers that rotate as `rope` itself says, moved by `offset`; new, same dtype.

    A stored key is R(j) k, and R(offset) R(j) k = R(j + offset) k (Su et al. 2021, arXiv:2104.09864, eq. 14): a
    rotation by angles that do not depend on j, computed in float32. A factor on cos and sin (yarn) is in the key
    already and stays. Dimensions beyond `rotary_dim` are copied.
    """
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
