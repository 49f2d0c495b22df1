"""EngineWriteConnector: brings chunks into vLLM's own blocks and reads them back, by LMCache's kernel or as copies of blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from lmcache.v1.memory_management import MemoryObj

from ..errors import UnsupportedEngine
from ..memory import tiles
from ..memory.layout import ChunkShape
from ..memory.quantise import Quantiser, quantiser
from . import host
from .kernel import TransferKernel, proven
from .probe import Written, places, written_layout, written_rules
from .whole import write_layers

logger = logging.getLogger(__name__)

_Interface: Any = host.module("lmcache.v1.gpu_connector.gpu_connectors").GPUConnectorInterface
_WORD = torch.complex128
"""What blocks and rows are copied as: the widest element there is, 16 bytes."""


class _Piece(NamedTuple):
    """What is to be written or read of one chunk: all of it but its first `skip` tokens; `slots` are those of all."""

    raw: torch.Tensor
    skip: int
    slots: torch.Tensor


class EngineWriteConnector(_Interface):
    """Writes resident chunks into the engine's blocks, and reads what LMCache saves back in the same layout.

    One of three ways, which `bind` settles by what the layers' own ops are seen to write: LMCache's kernel where K lies beside
    V (`kernel`; on GPUs), copies of whole blocks where they are packed in a way that is known (`tiles`; on CPU), else each
    layer's op, `impl.do_kv_cache_update`, which is right for any layout and for partial blocks, and cannot read.
    """

    _shape: ChunkShape
    """Of the chunks. Settled by `bind`."""

    def __init__(self) -> None:
        self.layout = "heads"
        """The layout that chunks must have: a key of `layout.VIEWS`, `fused` for LMCache's kernel, or one of `tiles`. Settled by
        `bind`.
        """
        self.quantiser: Quantiser | None = None
        """How the engine writes its numbers where its caches are quantised. Settled by `bind`."""
        self.device = "cpu"
        """Where the engine's blocks are: `cpu`, `cuda:0`. Settled by `bind`."""
        self.layers: list[tuple[torch.nn.Module, torch.Tensor]] = []
        """Each with its cache, in the order of the model. Settled by `bind`."""
        self._kernel: TransferKernel | None = None

    def bind(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        layers: Mapping[str, Any],
        shape: ChunkShape,
        *,
        saves: bool = False,
        first_layer: int = 0,
        computed: torch.dtype | None = None,
    ) -> None:
        """Write to `kv_caches` from now on: one tensor a layer, by the name of its attention layer in `layers`.

        `shape` is that of the chunks that will come, from the model's layer `first_layer` on; with `saves` they are read
        too. `computed` is the dtype of the model's KV where `shape` is of a quantised cache's bytes. Raises `UnsupportedEngine` when a layer cannot be written to, or read.
        """
        names = sorted(kv_caches, key=host.layer_index)
        own = range(first_layer, first_layer + shape.layers)
        if [host.layer_index(name) for name in names] != list(own):
            raise UnsupportedEngine(f"the engine's KV caches {names} are not those of layers {own[0]} to {own[-1]}")
        for name in names:
            if str(kv_caches[name].dtype).removeprefix("torch.") != shape.dtype:
                raise UnsupportedEngine(
                    f"the KV cache of layer {name} is {kv_caches[name].dtype}, not {shape.dtype} as LMCache has it; remove "
                    "--kv-cache-dtype"
                )
            # vLLM's ops check no shapes: heads or elements too many would land in the next block.
            if kv_caches[name].shape[1::2] != (shape.heads, 2 * shape.head_size):
                raise UnsupportedEngine(
                    f"the KV cache of layer {name} is {list(kv_caches[name].shape)}, not [blocks, {shape.heads} heads, "
                    f"block, 2 * {shape.head_size}]; layers that differ in KV heads or head size are not supported"
                )
        rules: dict[str, Written] = {}
        if shape.dtype == "uint8" and computed is not None:
            rules = written_rules(kv_caches, layers, computed)
            self.quantiser = quantiser([rules[name].rule for name in names])
        self.layout, self._kernel = "heads", None
        self.layers = [(layers[name], kv_caches[name]) for name in names]
        self.device = str(kv_caches[names[0]].device)
        try:
            self.layout = self._faster({name: kv_caches[name] for name in names}, layers, shape, rules)
        except UnsupportedEngine as error:
            if saves:
                raise UnsupportedEngine(
                    f"LMCache cannot save what this engine computes, since nothing reads it back: {error}. Serve with --no-save "
                    '("kv_role": "kv_consumer"), or with a --block-size that divides the chunk size'
                ) from error
            for name in () if rules else names:
                places(name, kv_caches[name], layers[name])
            logger.warning("chunks will be written by vLLM's op: %s", error)
        self._shape, self._computed = shape, computed or torch.bfloat16

    def _faster(
        self,
        caches: dict[str, torch.Tensor],
        layers: Mapping[str, Any],
        shape: ChunkShape,
        rules: Mapping[str, Written],
    ) -> str:
        """Return the layout of chunks that are moved without the layers' ops. Raises `UnsupportedEngine` where none can be."""
        if written_layout(caches, layers, rules=rules) == "fused":
            self._kernel = proven(caches, layers, rules)
            return "fused"
        layout = written_layout(caches, layers, in_blocks=True, rules=rules)
        if not tiles.fits(shape, layout):
            raise UnsupportedEngine(f"chunks of {shape.tokens} tokens are not made of whole blocks")
        return layout

    @torch.inference_mode()
    def batched_to_gpu(self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any) -> None:
        """Write chunk i to the slots of tokens `starts[i]` to `ends[i]`, less what vLLM has cached itself.

        Returns when the bytes are in the engine's blocks, so that the chunks' memory may be reused.
        """
        slots, cached = kwargs["slot_mapping"], kwargs.get("vllm_cached_tokens", 0)
        pieces = self._pieces(memory_objs, starts, ends, slots, cached)
        blocks = self._whole_blocks(pieces)
        if blocks is not None:
            self._copy(pieces, blocks)
            return
        for piece in pieces:
            if self._kernel:
                self._kernel.load(piece.raw, piece.slots, piece.skip)
            else:
                self._write(piece)
        if slots.is_cuda:
            torch.cuda.current_stream(slots.device).synchronize()

    def _pieces(
        self, chunks: list[MemoryObj], starts: list[int], ends: list[int], slots: torch.Tensor, cached: int = 0
    ) -> list[_Piece]:
        """Return what is to be moved of each chunk, once all are seen to fit."""
        pieces, shape = [], self._shape
        for chunk, start, end in zip(chunks, starts, ends, strict=True):
            skip = min(max(cached - start, 0), end - start)
            if skip < end - start:
                pieces.append(_Piece(_bytes(chunk), skip, slots[start:end]))
        # No assertions: under `python -O` they would let a wrong chunk into a live cache.
        for raw, _, own in pieces:
            if raw.numel() != shape.size_bytes:
                raise UnsupportedEngine(f"a chunk of another shape: {raw.numel()} bytes, not {shape.size_bytes}")
            if len(own) != shape.tokens:
                raise UnsupportedEngine(f"a chunk of another length: {shape.tokens} tokens for {len(own)} slots")
        return pieces

    def _whole_blocks(self, pieces: Sequence[_Piece]) -> list[torch.Tensor] | None:
        """Return the numbers of the blocks that each piece fills; None where they cannot just be copied."""
        if not pieces or not tiles.is_tiled(self.layout):
            return None
        block = self.layers[0][1].shape[2]
        if any(piece.skip % block for piece in pieces):
            return None
        slots = torch.cat([piece.slots[piece.skip :] for piece in pieces]).view(-1, block)
        numbers = slots[:, 0] // block
        if not torch.equal(slots, numbers[:, None] * block + torch.arange(block)):
            return None
        return list(numbers.split([(len(piece.slots) - piece.skip) // block for piece in pieces]))

    def _copy(self, pieces: Sequence[_Piece], blocks: Sequence[torch.Tensor]) -> None:
        """Copy the blocks of some chunks, a layer of as many chunks as possible by one call, which uses all threads."""
        shape = self._shape
        words = shape.size_bytes // _WORD.itemsize
        in_chunk = shape.tokens // self.layers[0][1].shape[2]
        block_words = words // shape.layers // in_chunk
        for run in _runs(pieces, blocks):
            piece, numbers = run[0][0], torch.stack([each for _, each in run])
            chunks = piece.raw.view(_WORD)
            distance = (run[1][0].raw.data_ptr() - piece.raw.data_ptr()) // _WORD.itemsize if len(run) > 1 else words
            first = chunks.storage_offset() + (in_chunk - numbers.shape[1]) * block_words
            for layer, (_, kv_cache) in enumerate(self.layers):
                source = chunks.as_strided(
                    (*numbers.shape, block_words), (distance, block_words, 1), first + layer * in_chunk * block_words
                )
                kv_cache.view(len(kv_cache), -1).view(_WORD)[numbers] = source

    def _write(self, piece: _Piece) -> None:
        """Have each layer's op write its part of a chunk."""
        kv = tiles.unpack(piece.raw.to(piece.slots.device), self._shape, self.layout)[:, :, piece.skip :]
        if self.quantiser:
            kv = self.quantiser.numbers(kv, self._computed)
        write_layers(self.layers, kv, piece.slots[piece.skip :])

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Write one chunk; see `batched_to_gpu`."""
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    @torch.inference_mode()
    def batched_from_gpu(self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any) -> None:
        """Fill chunk i with what the engine has in the slots of tokens `starts[i]` to `ends[i]`, for LMCache to save.

        Returns when the bytes are there, in the layout in which `batched_to_gpu` takes them.
        """
        slots = kwargs["slot_mapping"]
        pieces = self._pieces(memory_objs, starts, ends, slots)
        blocks = self._whole_blocks(pieces)
        if pieces and not (blocks or self._kernel):
            raise UnsupportedEngine(f"chunks in layout {self.layout} cannot be read from these slots")
        for i, piece in enumerate(pieces):
            if self._kernel:
                self._kernel.save(piece.raw, piece.slots)
            elif blocks:
                self._copy_back(piece, blocks[i])
        if slots.is_cuda:
            torch.cuda.current_stream(slots.device).synchronize()

    def _copy_back(self, piece: _Piece, numbers: torch.Tensor) -> None:
        rows = piece.raw.view(_WORD).view(len(self.layers), len(numbers), -1)
        for row, (_, kv_cache) in zip(rows, self.layers, strict=True):
            torch.index_select(kv_cache.view(len(kv_cache), -1).view(_WORD), 0, numbers, out=row)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Read one chunk; see `batched_from_gpu`."""
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    def canonical(self, chunk: MemoryObj) -> torch.Tensor:
        """Return the KV `[2, L, T, H, D]` of a chunk in this layout; a new tensor on the CPU."""
        return tiles.unpack(_bytes(chunk), self._shape, self.layout).clone()

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of `num_tokens` tokens, KV_2LTD with one K and one V plane per head."""
        shape = self._shape
        return torch.Size([2 * shape.heads, shape.layers, num_tokens, shape.head_size])


def _bytes(chunk: MemoryObj) -> torch.Tensor:
    """Return a chunk's bytes, without those that LMCache's allocator rounds up to."""
    return chunk.raw_data[: chunk.get_size()]


def _runs(pieces: Sequence[_Piece], blocks: Sequence[torch.Tensor]) -> Iterator[list[tuple[_Piece, torch.Tensor]]]:
    """Yield the pieces with their blocks in groups that one view shows: of one memory, at equal distances."""

    def place(one: tuple[_Piece, torch.Tensor]) -> tuple[int, int, int]:
        raw = one[0].raw
        return raw.untyped_storage().data_ptr(), one[0].skip, raw.data_ptr()

    for _, group in groupby(sorted(zip(pieces, blocks, strict=True), key=place), key=lambda one: place(one)[:2]):
        run: list[tuple[_Piece, torch.Tensor]] = []
        for one in group:
            at = [each.raw.data_ptr() for each, _ in (*run[-2:], one)]
            if len(at) == 3 and at[2] - at[1] != at[1] - at[0]:
                yield run
                run = []
            run.append(one)
        yield run
