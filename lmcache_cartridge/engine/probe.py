"""Probe: how an attention layer writes its KV cache, found by letting it write known KV into blocks of our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedEngine
from ..memory import tiles
from ..memory.layout import ChunkShape
from ..memory.quantise import NUMBERS, Rule
from . import host


def written_layout(
    kv_caches: Mapping[str, torch.Tensor],
    layers: Mapping[str, Any],
    *,
    in_blocks: bool = False,
    rules: Mapping[str, Written] | None = None,
) -> str:
    """Return the layout in which every layer is seen to write: `fused`, or one of `tiles`.

    `kv_caches` are the engine's, `[blocks, heads, block, 2 * size]` for each layer, and are only looked at; `rules` are
    what `written_rules` found of quantised ones. With
    `in_blocks` it is the layout of `tiles` that is, byte for byte, what every layer writes into whole blocks. Raises
    `UnsupportedEngine` where they are not all written in one layout that is known, nothing is guessed, and with
    `in_blocks` where a block's memory is not one run.
    """
    found = {
        _layer_layout(name, cache, layers.get(name), in_blocks, (rules or {}).get(name))
        for name, cache in kv_caches.items()
    }
    if len(found) != 1:
        raise UnsupportedEngine(f"the layers write their KV in {len(found)} layouts: {', '.join(sorted(found))}")
    return found.pop()


class Written(NamedTuple):
    """How a layer is seen to write a quantised cache."""

    rule: Rule
    dtype: torch.dtype
    """Of the KV that it is given."""


def written_rules(
    kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Written]:
    """Return how each layer writes KV of `dtype` into a cache of one byte a number; the caches are only looked at.

    Holds on any device. Raises `UnsupportedEngine` where what is written depends on anything but the number: a scale that
    is found for each token or head as it comes.
    """
    if dtype.itemsize != 2:
        raise UnsupportedEngine(
            f"the KV cache is quantised and the model computes in {dtype}: how an engine quantises is found by giving it "
            "every number of a 16-bit dtype. Start it with --dtype bfloat16, or remove --kv-cache-dtype"
        )
    return {name: Written(_rule(name, cache, layers.get(name), dtype), dtype) for name, cache in kv_caches.items()}


def _rule(name: str, cache: torch.Tensor, layer: Any, dtype: torch.dtype) -> Rule:
    _check_probed(name, cache)
    where = places(name, cache, layer, dtype)
    block, _, heads, size = where.shape
    numbers = torch.arange(NUMBERS).to(torch.uint16).view(dtype)
    codes: list[torch.Tensor] = []
    for given in numbers.split(2 * block * heads * size):
        kv = torch.zeros(2 * block * heads * size, dtype=dtype)
        kv[: len(given)] = given
        seen = _write(cache, layer, kv.view(1, 1, -1, heads, size).expand(2, -1, -1, -1, -1)).flatten(1)[:, where]
        codes.append(seen.transpose(0, 2).transpose(1, 2).flatten(1)[:, : len(given)])  # [2, all that was given]
    keys, values = torch.cat(codes, dim=1).numpy()
    rule, kv = Rule(keys.tobytes(), values.tobytes()), some_kv(cache, dtype)
    seen = _write(cache, layer, kv).flatten(1)[:, where].transpose(0, 2).transpose(1, 2)
    if not torch.equal(seen.flatten(1), rule(kv).flatten(1)):
        raise UnsupportedEngine(
            f"layer {name} quantises its KV by more than each number: by scales that it finds as KV comes, or one for each "
            "head. Give --kv-cache-dtype fp8_e4m3 or fp8_e5m2 with one scale a layer, or remove it"
        )
    return rule


def places(name: str, cache: torch.Tensor, layer: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return where a layer's op puts each number of one block: its place in `cache[i].flatten()`, as `[block, 2, H, D]`.

    With `dtype`, that of KV, the cache is quantised: then all that is known is that 0 stays 0 and the largest number does
    not become it. Holds for any layout and device. Raises `UnsupportedEngine` where the op does not give every number a place of
    its own, the same in every block.
    """
    _, heads, block, double = cache.shape
    count = block * heads * double
    number = torch.arange(count).view(block, 2, heads, double // 2)
    found = torch.zeros(2, count, dtype=torch.int64)
    bits, one = (8, 1.0) if dtype is None else (1, torch.finfo(dtype).max)  # bfloat16 holds whole numbers up to 256
    for digit in range(0, count.bit_length(), bits):
        codes = ((number >> digit & 2**bits - 1) * one).to(dtype or cache.dtype).transpose(0, 1)[:, None]
        seen = _write(cache, layer, codes.repeat(1, 1, 2, 1, 1)).flatten(1)
        found += (seen if dtype is None else seen != 0).to(torch.int64) << digit
    place = found.argsort(dim=1)
    if not torch.equal(found.sort(dim=1).values, torch.arange(count).expand(2, -1)) or not torch.equal(*place):
        raise UnsupportedEngine(f"layer {name} writes other KV into its cache than it is given")
    return place[0].view(number.shape)


def some_kv(cache: torch.Tensor, dtype: torch.dtype | None = None, seed: int = 1) -> torch.Tensor:
    """Return random KV of two blocks of a cache, `[2, 1, T, H, D]`, of its dtype unless another is given."""
    _, heads, block, double = cache.shape
    kv = torch.randn((2, 1, 2 * block, heads, double // 2), generator=torch.Generator().manual_seed(seed))
    return kv.to(dtype or cache.dtype)


def _check_probed(name: str, cache: torch.Tensor) -> None:
    if cache.dim() != 4:
        raise UnsupportedEngine(f"the KV cache of layer {name} is {list(cache.shape)} and cannot be probed")


def _layer_layout(name: str, cache: torch.Tensor, layer: Any, in_blocks: bool, written: Written | None) -> str:
    _check_probed(name, cache)
    if in_blocks and not cache.is_contiguous():
        raise UnsupportedEngine(f"the blocks of layer {name} are not in one run of memory")
    _, heads, block, double = cache.shape
    shape = ChunkShape(heads, 1, 2 * block, double // 2, str(cache.dtype).removeprefix("torch."))
    kv = some_kv(cache, written and written.dtype)
    seen = _write(cache, layer, kv)
    if written:
        kv = written.rule(kv)
    if not in_blocks:
        seen = seen.transpose(1, 2)  # LMCache's view of them
    seen = seen.contiguous().view(torch.uint8).flatten()
    matching = [known for known in _known(shape, block, in_blocks) if torch.equal(seen, _packed(kv, shape, known))]
    if len(matching) != 1:
        raise UnsupportedEngine(
            f"{layer.impl.__class__.__name__} writes KV in a layout that is not known (block {block}, head size "
            f"{shape.head_size}, {shape.dtype}), which is filled in-process only, by its own op"
        )
    return matching[0]


def _write(cache: torch.Tensor, layer: Any, kv: torch.Tensor) -> torch.Tensor:
    """Have the layer write `kv` into two blocks like the cache's, the second first; return them in order."""
    blocks, block = torch.zeros_like(cache[:2]), cache.shape[2]
    slots = torch.cat([torch.arange(block, 2 * block), torch.arange(block)]).to(cache.device)
    keys, values = (plane.contiguous().to(cache.device) for plane in kv[:, 0])
    try:
        host.write_kv(layer, keys, values, blocks, slots)
    except Exception as error:
        raise UnsupportedEngine(f"an attention layer cannot write to its KV cache: {error}") from error
    return blocks.flip(0).cpu()


def _known(shape: ChunkShape, block: int, in_blocks: bool) -> list[str]:
    names = [tiles.layout(kind, block, blocks=in_blocks) for kind in tiles.KINDS]
    return [*([] if in_blocks else ["fused"]), *(name for name in names if tiles.fits(shape, name))]


def _packed(kv: torch.Tensor, shape: ChunkShape, name: str) -> torch.Tensor:
    out = torch.empty(shape.size_bytes, dtype=torch.uint8)
    tiles.pack(kv, out, shape, name)
    return out
