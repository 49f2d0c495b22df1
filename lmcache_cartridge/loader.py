"""ChunkLoader: brings one engine chunk from its source into memory, verified and in the layout asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from . import artifact
from .disk import DiskTier, PieceKey
from .errors import CartridgeError, CorruptChunk
from .layout import VIEWS, ChunkShape, heads_view
from .manifest import Manifest
from .rope import shift_keys
from .sources import ByteSource


class Cartridge(NamedTuple):
    """A manifest and where its artefact lies."""

    manifest: Manifest
    root: Path


class Segment(NamedTuple):
    """A cartridge at its place in a prompt."""

    cartridge: Cartridge
    offset: int
    """Position of its first token; its keys are rotated there."""


class ChunkLoader:
    """Loads chunks of `shape.tokens` positions and the heads of one rank.

    Where the engine's chunk is a stored chunk of a cartridge at the head of the prompt, in the stored layout, the
    bytes go from the source into the caller's buffer and nowhere else. Other chunk sizes and layouts and the later
    cartridges of a chain are gathered through one scratch buffer.
    """

    def __init__(
        self, source: ByteSource, shape: ChunkShape, heads: range, layout: str, disk: DiskTier | None = None
    ) -> None:
        """`heads` are the KV heads of this rank, `layout` a key of `layout.VIEWS`."""
        self.shape = shape
        self._source, self._heads, self._layout, self._disk = source, heads, layout, disk

    def load(self, segments: Sequence[Segment], chunk: int, out: torch.Tensor) -> None:
        """Fill `out`, flat uint8 of `shape.size_bytes`, with engine chunk `chunk` of some cartridges in a row.

        Blocks; safe from any thread. Raises `CorruptChunk` when bytes have the wrong checksum, `TruncatedPayload` or
        `SourceError` when they cannot be had, its `digest` naming the cartridge at fault; `out` is then undefined.
        """
        start, end = chunk * self.shape.tokens, (chunk + 1) * self.shape.tokens
        within = [s for s in segments if s.offset < end and start < s.offset + s.cartridge.manifest.positions]
        for segment in within:
            try:
                if self._is_stored_so(segment, start, end):
                    self._read(segment.cartridge, chunk, memoryview(out.numpy()))
                else:
                    self._gather(segment, start, end, out)
            except CartridgeError as error:
                error.digest = segment.cartridge.manifest.digest
                raise

    def _is_stored_so(self, segment: Segment, start: int, end: int) -> bool:
        manifest = segment.cartridge.manifest
        return (
            segment.offset == 0
            and end <= manifest.positions
            and manifest.payload.chunk_tokens == self.shape.tokens
            and self._layout == "heads"
        )

    def _gather(self, segment: Segment, start: int, end: int, out: torch.Tensor) -> None:
        """Fill the part of `out`, positions `start` to `end` of the prompt, that the segment covers."""
        cartridge, offset = segment
        manifest = cartridge.manifest
        target = VIEWS[self._layout](out, self.shape)
        stored_tokens = manifest.payload.chunk_tokens
        first_needed, last_needed = max(start - offset, 0), min(end - offset, manifest.positions)
        for stored in range(first_needed // stored_tokens, -(-last_needed // stored_tokens)):
            first = stored * stored_tokens
            piece = self.shape._replace(tokens=manifest.chunk_length(stored))
            scratch = torch.empty(piece.size_bytes, dtype=torch.uint8)
            self._read(cartridge, stored, memoryview(scratch.numpy()))
            low, high = max(first_needed, first), min(last_needed, first + piece.tokens)
            keys, values = heads_view(scratch, piece)[:, :, low - first : high - first]
            place = slice(low + offset - start, high + offset - start)
            target[0, :, place] = shift_keys(keys, manifest.fingerprint.rope, offset) if offset else keys
            target[1, :, place] = values

    def _read(self, cartridge: Cartridge, stored: int, out: memoryview) -> None:
        """Fill `out` with this rank's heads of a stored chunk and verify them, from the disk tier if it can."""
        manifest, root = cartridge
        path = str(root / manifest.payload.file)
        key = PieceKey(manifest.digest, stored, self._heads.start, self._heads.stop)
        if self._disk is not None and self._disk.read_into(key, out):
            try:
                artifact.verify_chunk(manifest, stored, self._heads, out, path)
                return
            except CorruptChunk:
                self._disk.discard(key)
        where = artifact.chunk_range(manifest, stored, self._heads)
        self._source.read_into(str(root), manifest.payload.file, where, out)
        artifact.verify_chunk(manifest, stored, self._heads, out, path)
        if self._disk is not None:
            self._disk.write(key, out)
