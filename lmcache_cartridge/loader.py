"""ChunkLoader: brings one engine chunk from its source into memory, verified and in the layout asked for."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from . import artifact
from .disk import DiskTier, PieceKey
from .errors import CorruptChunk
from .layout import VIEWS, ChunkShape, heads_view
from .manifest import Manifest
from .sources import ByteSource


class Cartridge(NamedTuple):
    """A manifest and where its artefact lies."""

    manifest: Manifest
    root: Path


class ChunkLoader:
    """Loads chunks of `shape.tokens` positions and the heads of one rank.

    Where the engine's chunk is the stored chunk and its layout the stored one, the bytes go from the source into
    the caller's buffer and nowhere else; other chunk sizes and layouts are gathered through one scratch buffer.
    """

    def __init__(
        self, source: ByteSource, shape: ChunkShape, heads: range, layout: str, disk: DiskTier | None = None
    ) -> None:
        """`heads` are the KV heads of this rank, `layout` a key of `layout.VIEWS`."""
        self.shape = shape
        self._source, self._heads, self._layout, self._disk = source, heads, layout, disk

    def load(self, cartridge: Cartridge, chunk: int, out: torch.Tensor) -> None:
        """Fill `out`, flat uint8 of `shape.size_bytes`, with engine chunk `chunk`. Blocks; safe from any thread.

        Raises `CorruptChunk` when bytes have the wrong checksum, `TruncatedPayload` or `SourceError` when they
        cannot be had; `out` is then undefined.
        """
        stored_tokens = cartridge.manifest.payload.chunk_tokens
        start, end = chunk * self.shape.tokens, (chunk + 1) * self.shape.tokens
        if stored_tokens == self.shape.tokens and self._layout == "heads":
            self._read(cartridge, chunk, memoryview(out.numpy()))
            return
        target = VIEWS[self._layout](out, self.shape)
        for stored in range(start // stored_tokens, -(-end // stored_tokens)):
            first = stored * stored_tokens
            length = cartridge.manifest.chunk_length(stored)
            piece = self.shape._replace(tokens=length)
            scratch = torch.empty(piece.size_bytes, dtype=torch.uint8)
            self._read(cartridge, stored, memoryview(scratch.numpy()))
            low, high = max(start, first), min(end, first + length)
            target[:, :, low - start : high - start] = heads_view(scratch, piece)[:, :, low - first : high - first]

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
        self._source.read_into(root, manifest.payload.file, where, out)
        artifact.verify_chunk(manifest, stored, self._heads, out, path)
        if self._disk is not None:
            self._disk.write(key, out)
