"""Tiles: how vLLM's CPU attention packs the KV of one block and head, and how a chunk is packed so.

vLLM >= 0.26 keeps `[block, head, token, 2 * size]`, and LMCache's multiprocess server moves chunks of it as
`[layer, token, head, 2 * size]`. On CPU those last dimensions are names only: the memory of one block and head is a
region of keys and then one of values, each packed for the instruction set (vLLM 0.32, `cpu_attn.py`).

A layout of tiles is named by their kind and by the tokens of a block, `vec/128`, and lies as LMCache's server moves it; or
it is `vec/128/blocks`, `[layer, block, head, tile]`, where a block of a layer is one run of bytes, as it is in the engine.

vec     keys `[size][token]`; values `[token][size]`. Where the instruction set is `vec` or `vec16`
amx     keys `[token / 16][size / 2][16 tokens][2]`; values `[size / 16][token / 2][16 of size][2 tokens]`
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .layout import HELD, VIEWS, ChunkShape


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

_PAIRS = {1: torch.int16, 2: torch.int32, 4: torch.int64}
"""Words of two elements, by the bytes of one."""
KINDS = tuple(_PACKS)
WORD = torch.int64
"""As which LMCache's server moves whole blocks: torch copies element by element, and 192 MiB of it in two thirds of the
processor time of `bfloat16`."""


def layout(kind: str, block_tokens: int, *, blocks: bool = False) -> str:
    """Return the name of the layout of tiles of `kind` in blocks of `block_tokens`: `vec/128`, or `vec/128/blocks`."""
    return f"{kind}/{block_tokens}" + ("/blocks" if blocks else "")


def is_tiled(name: str) -> bool:
    """Whether a layout is one of tiles, which no view can show as canonical KV."""
    return name.partition("/")[0] in _PACKS


def has_blocks(name: str) -> bool:
    """Whether a layout has the blocks of a layer as runs of bytes, which are moved as `WORD`s."""
    return is_tiled(name) and _parse(name)[2]


def fits(shape: ChunkShape, name: str) -> bool:
    """Whether chunks of `shape` are made of whole tiles of layout `name`."""
    kind, block, _ = _parse(name)
    step = 1 if kind == "vec" else 16
    return not (shape.tokens % block or block % step or shape.head_size % step)


def pack(canonical: torch.Tensor, out: torch.Tensor, shape: ChunkShape, name: str) -> None:
    """Fill `out`, flat uint8 of `shape.size_bytes`, with canonical KV `[2, L, T, H, D]` in layout `name`.

    That may be one of `layout.VIEWS` too. Raises `RuntimeError` unless it `fits`.
    """
    if not is_tiled(name):
        VIEWS[name](out, shape)[:] = canonical
        return
    in_blocks = _parse(name)[2]
    tiles = out if in_blocks else torch.empty_like(out)
    for region, packed in _regions(canonical, tiles, shape, name):
        region.copy_(packed)
    if not in_blocks:
        rows = _rows(tiles, shape, name)
        out.view(rows.dtype).view(rows.shape).copy_(rows)


def unpack(packed: torch.Tensor, shape: ChunkShape, name: str) -> torch.Tensor:
    """Return canonical KV `[2, L, T, H, D]` of flat uint8 in a layout of tiles; a new tensor. Of one of `layout.VIEWS`: a view.

    Raises `RuntimeError` unless it `fits`.
    """
    if not is_tiled(name):
        return VIEWS[name](packed, shape)
    canonical = torch.empty(
        2, shape.layers, shape.tokens, shape.heads, shape.head_size, dtype=HELD[shape.dtype], device=packed.device
    )
    tiles = packed
    if not _parse(name)[2]:
        tiles = torch.empty_like(packed)
        rows = _rows(tiles, shape, name)
        rows.copy_(packed.view(rows.dtype).view(rows.shape))
    for region, place in _regions(canonical, tiles, shape, name):
        place.copy_(region)
    return canonical


def _parse(name: str) -> tuple[str, int, bool]:
    """Return the kind, the tokens of a block, and whether a layout has whole blocks."""
    kind, block, *blocks = name.split("/")
    return kind, int(block), blocks == ["blocks"]


def _regions(
    canonical: torch.Tensor, tiles: torch.Tensor, shape: ChunkShape, name: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return parts of the keys and of the values of `[L, block, H, tile]`, each with the view of canonical KV that fills it.

    Torch would move the pairs of `amx` element by element. Keys, which are pairs in canonical KV too, go as words of two, and
    values in two parts, the first of each pair and the second: that takes a quarter of the time.
    """
    kind, block, _ = _parse(name)
    halves = tiles.view(HELD[shape.dtype]).view(shape.layers, -1, shape.heads, 2, block * shape.head_size).unbind(3)
    packed = _PACKS[kind](*canonical.unflatten(2, (-1, block)).transpose(3, 4))  # of [L, T / block, H, block, D]
    keys, values = [(half.unflatten(-1, view.shape[3:]), view) for half, view in zip(halves, packed, strict=True)]
    if kind == "amx":
        pair = _PAIRS[canonical.element_size()]
        tile, view = keys
        parts = zip(*(half.unbind(-1) for half in values), strict=True)
        return [(tile.view(pair)[..., 0], view.view(pair)[..., 0]), *parts]
    return [keys, values]


def _rows(tiles: torch.Tensor, shape: ChunkShape, name: str) -> torch.Tensor:
    """View `[L, block, H, tile]` as `[L, block, token, H, 2 * D]`: what vLLM calls the memory of its tiles."""
    named = (shape.layers, -1, shape.heads, _parse(name)[1], 2 * shape.head_size)
    return tiles.view(HELD[shape.dtype]).view(named).transpose(2, 3)
