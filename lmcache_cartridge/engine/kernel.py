"""Kernel: chunks of all layers to and from the engine's blocks by one call of LMCache's kernel, once it is seen to be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import UnsupportedEngine
from ..memory.layout import ChunkShape, fused_view
from . import host, host_inprocess
from .probe import Written, some_kv


class TransferKernel:
    """Moves chunks of layout `fused` by LMCache's `multi_layer_kv_transfer`: CUDA's, ROCm's, for tensors on the CPU torch's.

    LMCache's connectors give it other buffers, and so corrupt caches that have K beside V (LMCache#4463). Here a chunk is
    `[1, L, T, H * 2 * D]`, rows as these caches have them. Admitted by `proven`, never by a layout's name.
    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        """Take the engine's caches, `[blocks, H, block, 2 * D]` each in the order of the model.

        Raises `UnsupportedEngine` where they do not lie alike in memory, or in no way that the kernel can be told.
        """
        cache = caches[0]
        blocks, heads, block, double = cache.shape
        step, *inside = cache.stride()
        self._call, layouts, self._directions = host_inprocess.transfer_kernel()
        is_tight = step == cache[0].numel()
        if len({(each.shape, each.stride(), each.dtype, each.device) for each in caches}) > 1:
            raise UnsupportedEngine("the layers' blocks do not lie alike in memory")
        if inside[1:] == [heads * double, 1] and (inside[0] == double or heads == 1):
            # One vector a token, as of latent attention, is what torch's version knows. CUDA's counts it in 32 bits, which a
            # layer of 16 GiB exceeds, and the other in 64.
            layout = layouts.NL_X_NB_BS_HS if is_tight and cache.device.type == "cpu" else layouts.NL_X_NB_BS_NH_CS
        elif inside == [block * double, double, 1]:
            layout = layouts.NL_X_NB_NH_BS_CS
        else:
            raise UnsupportedEngine(f"blocks with strides {list(cache.stride())} are unknown to LMCache's kernel")
        self._row, self._dtype, self.device = (1, len(caches), -1, heads * double), cache.dtype, cache.device
        self._pointers = torch.tensor([each.data_ptr() for each in caches], device=cache.device)
        self._slots, self._layout = blocks * block, layout
        self._sizes = {
            "block_size": block, "head_size": double // 2, "block_stride_elems": 0 if is_tight else step,
        }  # fmt: skip

    def load(self, raw: torch.Tensor, slots: torch.Tensor, skip: int = 0) -> None:
        """Write the chunk with the bytes `raw`, all but its first `skip` tokens, to `slots`, one for each token of the chunk.

        Begins on the current stream, and does not wait for it.
        """
        self._move(self._reachable(raw), slots, skip, self._directions.H2D)

    def save(self, raw: torch.Tensor, slots: torch.Tensor) -> None:
        """Fill `raw` with what is in `slots`, as `load` begins."""
        self._move(there := self._reachable(raw), slots, 0, self._directions.D2H)
        if there is not raw:
            raw.copy_(there)

    def _move(self, raw: torch.Tensor, slots: torch.Tensor, skip: int, direction: Any) -> None:
        self._call(
            raw.view(self._dtype).view(self._row), self._pointers, slots, self.device, self._slots, direction, self._layout,
            skip_prefix_n_tokens=skip, **self._sizes,
        )  # fmt: skip

    def _reachable(self, raw: torch.Tensor) -> torch.Tensor:
        """Return bytes that the device can address itself: these, or a copy of what is in pageable memory."""
        return raw if raw.device == self.device or raw.is_pinned() else raw.to(self.device)


def proven(
    kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], rules: Mapping[str, Written]
) -> TransferKernel:
    """Return the kernel for these caches, in the order of the model, which are only looked at.

    Blocks of our own, between others, are written by every layer's op and by the kernel, and then read by it. Raises
    `UnsupportedEngine` unless every byte is the same, those beside them too. `rules` are of a quantised cache.
    """
    caches = list(kv_caches.values())
    (_, heads, block, double), device = caches[0].shape, caches[0].device
    shape = ChunkShape(heads, len(caches), 2 * block, double // 2, str(caches[0].dtype).removeprefix("torch."))
    slots, skip = torch.arange(block, 3 * block, device=device).roll(7), block // 3
    chunk = torch.empty(shape.size_bytes, dtype=torch.uint8)
    (by_op, written), (by_kernel, moved) = _scratch(caches), _scratch(caches)
    for number, (name, into) in enumerate(zip(kv_caches, written, strict=True)):
        rule = rules.get(name)
        kv = some_kv(into, rule and rule.dtype, seed=number)
        keys, values = kv[:, 0, skip:].to(device)
        host.write_kv(layers[name], keys, values, into, slots[skip:])
        fused_view(chunk, shape)[:, number] = (rule.rule(kv) if rule else kv)[:, 0]
    try:
        kernel, trial, back = TransferKernel(caches), TransferKernel(moved), torch.zeros_like(chunk, device=device)
        trial.load(chunk.to(device), slots, skip)
        trial.save(back, slots)
    except Exception as error:
        raise UnsupportedEngine(f"LMCache's kernel cannot move these blocks: {error}") from error
    fused_view(chunk, shape)[:, :, :skip] = 0  # which was not written
    if not torch.equal(by_op, by_kernel) or not torch.equal(back.cpu(), chunk):
        raise UnsupportedEngine("LMCache's kernel moves other bytes than the layers' ops")
    return kernel


def _scratch(caches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return zeros, as flat bytes, and in them four blocks for each cache, as far from each other as the engine's are.

    Layers whose blocks lie between each other's (blocks first) do so here.
    """
    step = caches[0].stride(0)
    start = min(cache.data_ptr() for cache in caches)
    offsets = [(cache.data_ptr() - start) // cache.itemsize for cache in caches]
    if max(offsets) >= step:
        offsets = [4 * step * number for number in range(len(caches))]
    memory = torch.zeros(max(offsets) + 4 * step, dtype=caches[0].dtype, device=caches[0].device)
    return memory.view(torch.uint8), [
        memory.as_strided((4, *caches[0].shape[1:]), caches[0].stride(), at) for at in offsets
    ]
