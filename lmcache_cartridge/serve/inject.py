"""EngineWriteConnector: injects chunks through vLLM's own cache-write op instead of LMCache's kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryObj

from ..errors import UnsupportedEngine
from ..layout import ChunkShape, heads_view

_GATHER_BYTES = 1 << 20
"""How much of one layer is written by one call: enough to make the call worth its cost, little enough to stay cached."""


class _Piece(NamedTuple):
    """What is to be written of one chunk: all of it but its first `skip` tokens, to `slots`."""

    raw: torch.Tensor
    skip: int
    slots: torch.Tensor


class EngineWriteConnector(GPUConnectorInterface):
    """Writes resident chunks (heads layout) into the engine's blocks with `impl.do_kv_cache_update`.

    Every vLLM attention backend implements that op for its own block layout, so this one path is right on CPU
    (whose blocks are packed for the instruction set), on CUDA and on ROCm, for any layout and for partial blocks.
    LMCache 0.5.6 has no connector for CPU and writes wrong KV into vLLM >= 0.26's fused layout (LMCache#4463).
    """

    def __init__(self) -> None:
        self._layers: list[tuple[torch.nn.Module, torch.Tensor]] = []
        self._shape: ChunkShape | None = None
        self._gathered = 1

    def bind(self, kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], shape: ChunkShape) -> None:
        """Write to `kv_caches` from now on: one tensor a layer, by the name of its attention layer in `layers`.

        `shape` is that of the chunks that will come. Raises `UnsupportedEngine` when a layer cannot be written to.
        """
        from vllm.model_executor.models.utils import extract_layer_index

        names = sorted(kv_caches, key=extract_layer_index)
        if [extract_layer_index(name) for name in names] != list(range(shape.layers)):
            raise UnsupportedEngine(f"the engine's KV caches {names} are not those of layers 0 to {shape.layers - 1}")
        for name in names:
            impl = getattr(layers.get(name), "impl", None)
            if not hasattr(impl, "do_kv_cache_update"):
                raise UnsupportedEngine(f"the attention backend of layer {name} has no op to write its KV cache")
            if str(kv_caches[name].dtype).removeprefix("torch.") != shape.dtype:
                raise UnsupportedEngine(
                    f"the KV cache of layer {name} is {kv_caches[name].dtype}, the model's KV {shape.dtype}. "
                    "Quantised KV caches are not supported: remove --kv-cache-dtype"
                )
            # vLLM's ops check no shapes: heads or elements too many would land in the next block.
            if kv_caches[name].shape[1::2] != (shape.heads, 2 * shape.head_size):
                raise UnsupportedEngine(
                    f"the KV cache of layer {name} is {list(kv_caches[name].shape)}, not [blocks, {shape.heads} heads, "
                    f"block, 2 * {shape.head_size}]; layers that differ in KV heads or head size are not supported"
                )
        self._layers = [(layers[name], kv_caches[name]) for name in names]
        self._shape = shape
        self._gathered = max(1, _GATHER_BYTES * shape.layers // shape.size_bytes)

    def batched_to_gpu(self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any) -> None:
        """Write chunk i to the slots of tokens `starts[i]` to `ends[i]`, less what vLLM has cached itself.

        Returns when the bytes are in the engine's blocks, so that the chunks' memory may be reused.
        """
        slots, cached = kwargs["slot_mapping"], kwargs.get("vllm_cached_tokens", 0)
        pieces = []
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            skip = min(max(cached - start, 0), end - start)
            if skip < end - start:
                pieces.append(_Piece(chunk.raw_data, skip, slots[start + skip : end]))
        for first in range(0, len(pieces), self._gathered):
            self._write(pieces[first : first + self._gathered])
        if slots.is_cuda:
            torch.cuda.current_stream(slots.device).synchronize()

    def _layers_of(self, piece: _Piece) -> tuple[torch.Tensor, ...]:
        """Return K and V of each layer, `[2, H, T, D]`, on the engine's device."""
        assert self._shape is not None and piece.raw.numel() == self._shape.size_bytes, "a chunk of another shape"
        assert len(piece.slots) == self._shape.tokens - piece.skip, "a chunk of another length"
        kv = heads_view(piece.raw.to(piece.slots.device, non_blocking=True), self._shape)[:, :, piece.skip :]
        return kv.transpose(2, 3).unbind(1)

    def _write(self, pieces: Sequence[_Piece]) -> None:
        """Write some chunks together: to gather a layer of several costs less than a call of the op for each."""
        slots = torch.cat([piece.slots for piece in pieces])
        layers = list(map(self._layers_of, pieces))
        for layer, (module, kv_cache) in enumerate(self._layers):
            planes = [each[layer] for each in layers]
            keys, values = (torch.cat(planes, dim=2) if len(planes) > 1 else planes[0]).transpose(1, 2)
            if slots.device.type != "cpu":
                # The CUDA ops take a token stride only; the CPU op takes a head stride too and needs no copy.
                keys, values = keys.contiguous(), values.contiguous()
            module.impl.do_kv_cache_update(module, keys, values, kv_cache, slots)

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Write one chunk; see `batched_to_gpu`."""
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Raise: reading blocks back is not supported, and `check_vllm` refuses to start where it would be needed."""
        raise UnsupportedEngine("saving KV is switched off beside cartridges; use kv_role kv_consumer")

    def batched_from_gpu(self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any) -> None:
        """Raise; see `from_gpu`."""
        self.from_gpu(memory_objs, 0, 0)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of `num_tokens` tokens, KV_2LTD with one K and one V plane per head."""
        assert self._shape is not None, "not bound to an engine yet"
        shape = self._shape
        return torch.Size([2 * shape.heads, shape.layers, num_tokens, shape.head_size])
