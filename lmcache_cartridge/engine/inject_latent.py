"""LatentConnector: brings latent vectors of multi-head latent attention into vLLM's blocks and reads them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryObj

from ..artifact.fingerprint import Fingerprint
from ..errors import UnsupportedEngine
from ..memory.layout import HELD, ChunkShape
from . import host
from .inject import EngineWriteConnector


class LatentConnector(EngineWriteConnector):
    """Copies rows: a token's latent vector and its rotary key are one row of a block, seen when it is bound."""

    def __init__(self) -> None:
        super().__init__()
        self._caches: list[torch.Tensor] = []
        self._chunk: ChunkShape | None = None

    def bind(
        self, kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], shape: ChunkShape, *,
        saves: bool = False, first_layer: int = 0, computed: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Write to `kv_caches` from now on, `[blocks, 1, block, size]` or without the 1, and read from them.

        Raises `UnsupportedEngine` for caches of other layers, sizes or dtypes, and where a layer is not seen to write a
        row for each token: latent vector, then rotary key.
        """
        names = sorted(kv_caches, key=host.layer_index)
        own = range(first_layer, first_layer + shape.layers)
        if [host.layer_index(name) for name in names] != list(own):
            raise UnsupportedEngine(f"the engine's KV caches {names} are not those of layers {own[0]} to {own[-1]}")
        self._caches = [_rows(name, kv_caches[name], shape) for name in names]
        for name, cache in zip(names, self._caches, strict=True):
            _check_rows(name, cache, layers.get(name))
        self._chunk, self.device = shape, str(self._caches[0].device)

    def batched_to_gpu(self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any) -> None:
        """Write chunk i to the slots of tokens `starts[i]` to `ends[i]`, less what vLLM has cached itself."""
        slots, cached = kwargs["slot_mapping"], kwargs.get("vllm_cached_tokens", 0)
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            rows, skip = self._rows_of(chunk, end - start), min(max(cached - start, 0), end - start)
            where = slots[start + skip : end]
            for cache, layer in zip(self._caches, rows[:, skip:], strict=True):
                cache[where // cache.shape[1], where % cache.shape[1]] = layer.to(cache.device)
        if slots.is_cuda:
            torch.cuda.current_stream(slots.device).synchronize()

    def batched_from_gpu(self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any) -> None:
        """Fill chunk i with what the engine has in the slots of tokens `starts[i]` to `ends[i]`, for LMCache to save."""
        slots = kwargs["slot_mapping"]
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            where = slots[start:end]
            for cache, layer in zip(self._caches, self._rows_of(chunk, end - start), strict=True):
                layer.copy_(cache[where // cache.shape[1], where % cache.shape[1]])

    def canonical(self, chunk: MemoryObj) -> torch.Tensor:
        """Return the KV `[1, L, T, 1, D]` of a chunk; a new tensor on the CPU."""
        return self._rows_of(chunk, self._given().tokens)[None, :, :, None].clone()

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of `num_tokens` tokens, LMCache's KV_MLA_FMT."""
        shape = self._given()
        return torch.Size([1, shape.layers, num_tokens, shape.head_size])

    def _given(self) -> ChunkShape:
        if self._chunk is None:
            raise UnsupportedEngine("the injector is not bound to an engine yet")
        return self._chunk

    def _rows_of(self, chunk: MemoryObj, tokens: int) -> torch.Tensor:
        """View a chunk as `[L, T, D]`."""
        shape, raw = self._given(), chunk.raw_data[: chunk.get_size()]
        if raw.numel() != shape.size_bytes or tokens != shape.tokens:
            raise UnsupportedEngine(
                f"a chunk of another shape: {raw.numel()} bytes for {tokens} tokens, not {shape.size_bytes} for {shape.tokens}"
            )
        return raw.view(HELD[shape.dtype]).view(shape.layers, shape.tokens, shape.head_size)


def check_latents(kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], shape: Fingerprint) -> None:
    """Raise `UnsupportedEngine` unless every layer is seen to write a row for each token: latent vector, then rotary key."""
    row = ChunkShape(1, 1, 1, shape.head_size, shape.dtype, 1)
    for name, cache in kv_caches.items():
        _check_rows(name, _rows(name, cache, row), layers.get(name))


def _rows(name: str, cache: torch.Tensor, shape: ChunkShape) -> torch.Tensor:
    """Return a cache as `[blocks, block, size]`; no copy."""
    rows = cache[:, 0] if cache.dim() == 4 and cache.shape[1] == 1 else cache
    if rows.dim() != 3 or rows.shape[2] != shape.head_size or str(rows.dtype).removeprefix("torch.") != shape.dtype:
        raise UnsupportedEngine(
            f"the KV cache of layer {name} is {cache.dtype} {list(cache.shape)}, not {shape.dtype} rows of {shape.head_size}; "
            "remove --kv-cache-dtype"
        )
    return rows


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
