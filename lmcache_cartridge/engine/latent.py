"""Latent: whether an engine's layers cache latent vectors of multi-head latent attention as an artefact has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..artifact.model import Fingerprint
from ..errors import UnsupportedEngine
from . import host


def check_latents(kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], shape: Fingerprint) -> None:
    """Raise `UnsupportedEngine` unless every layer is seen to write a row for each token: latent vector, then rotary key."""
    for name, cache in kv_caches.items():
        rows = cache[:, 0] if cache.dim() == 4 and cache.shape[1] == 1 else cache
        if rows.dim() != 3 or rows.shape[2] != shape.head_size or str(rows.dtype).removeprefix("torch.") != shape.dtype:
            raise UnsupportedEngine(
                f"the KV cache of layer {name} is {cache.dtype} {list(cache.shape)}, not {shape.dtype} rows of "
                f"{shape.head_size}; remove --kv-cache-dtype"
            )
        _check_rows(name, rows, layers.get(name))


def _check_rows(name: str, cache: torch.Tensor, layer: Any) -> None:
    """Raise `UnsupportedEngine` unless the layer writes known latent vectors and keys as the rows of two blocks."""
    latent = host.latent_size(layer)
    if latent is None:
        raise UnsupportedEngine(f"the attention backend of layer {name} has no op to write latent vectors")
    blocks, (_, block, size) = torch.zeros_like(cache[:2]), cache.shape
    rows = torch.randn(2 * block, size, generator=torch.Generator().manual_seed(1)).to(cache.dtype).to(cache.device)
    slots = torch.cat([torch.arange(block, 2 * block), torch.arange(block)]).to(cache.device)
    try:
        host.write_latents(layer, rows[:, :latent].contiguous(), rows[:, None, latent:].contiguous(), blocks, slots)
    except Exception as error:
        raise UnsupportedEngine(f"layer {name} cannot write to its KV cache: {error}") from error
    if not torch.equal(blocks.flip(0).flatten(0, 1), rows):
        raise UnsupportedEngine(f"layer {name} writes something else into its KV cache than rows of what it is given")
