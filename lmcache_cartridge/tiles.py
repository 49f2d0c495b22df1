"""Tiles: how vLLM's CPU attention packs the KV of one block and head, and how a chunk is packed so.

vLLM >= 0.26 keeps `[block, head, token, 2 * size]`, and LMCache's multiprocess server moves chunks of it as
`[layer, token, head, 2 * size]`. On CPU those last dimensions are names only: the memory of one block and head is a
region of keys and then one of values, each packed for the instruction set (vLLM 0.32, `cpu_attn.py`).

vec     keys `[size][token]`; values `[token][size]`. Where the instruction set is `vec` or `vec16`
amx     keys `[token / 16][size / 2][16 tokens][2]`; values `[size / 16][token / 2][16 of size][2 tokens]`
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .layout import DTYPES, ChunkShape


def _vec(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys.transpose(-1, -2), values


def _amx(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys = keys.unflatten(-2, (-1, 16)).unflatten(-1, (-1, 2))  # [token / 16, 16, size / 2, 2]
    values = values.unflatten(-2, (-1, 2)).unflatten(-1, (-1, 16))  # [token / 2, 2, size / 16, 16]
    return keys.transpose(-2, -3), values.movedim((-2, -4, -1, -3), (-4, -3, -2, -1))


_PACKS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "vec": _vec,
    "amx": _amx,
}
"""Each takes K and V as `[..., token, size]` of one block and returns both as views in the order they are packed."""

KINDS = tuple(_PACKS)


def layout(kind: str, block_tokens: int) -> str:
    """Return the name of the layout of tiles of `kind` in blocks of `block_tokens`: `vec/128`."""
    return f"{kind}/{block_tokens}"


def is_tiled(name: str) -> bool:
    """Whether a layout is one of tiles, which no view can show as canonical KV."""
    return name.partition("/")[0] in _PACKS


def fits(shape: ChunkShape, name: str) -> bool:
    """Whether chunks of `shape` are made of whole tiles of layout `name`."""
    kind, _, block = name.partition("/")
    step = 1 if kind == "vec" else 16
    return not (shape.tokens % int(block) or int(block) % step or shape.head_size % step)


def pack(canonical: torch.Tensor, out: torch.Tensor, shape: ChunkShape, name: str) -> None:
    """Fill `out`, flat uint8 of `shape.size_bytes`, with canonical KV `[2, L, T, H, D]` in the tiles of layout `name`.

    Raises `ValueError` where the chunk is not made of whole tiles.
    """
    kind, _, tokens = name.partition("/")
    block = int(tokens)
    if not fits(shape, name):
        raise ValueError(f"chunks of {shape.tokens} tokens and heads of {shape.head_size} are no whole tiles of {name}")
    blocks = (shape.layers, shape.tokens // block, shape.heads)
    tiles = torch.empty((2, *blocks, block * shape.head_size), dtype=DTYPES[shape.dtype])
    keys, values = canonical.unflatten(2, (-1, block)).transpose(3, 4)  # [L, T / block, H, block, D]
    for region, packed in zip(tiles, _PACKS[kind](keys, values), strict=True):
        region.view(packed.shape).copy_(packed)
    # One tile, keys before values, fills the memory that vLLM calls `[token, 2 * size]`.
    named = tiles.movedim(0, 3).reshape(*blocks, block, 2 * shape.head_size).transpose(2, 3)
    out.view(DTYPES[shape.dtype]).view(named.shape).copy_(named)
