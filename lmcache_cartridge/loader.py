"""ChunkLoader: brings one engine chunk from its source into memory, verified and in the layout asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from . import artifact, tiles
from .chunk_check import ChunkCheck
from .disk import DiskTier, PieceKey
from .errors import ArtifactError, CartridgeError, CorruptChunk, ManifestError, OverBudget, SourceError
from .layout import VIEWS, ChunkShape, heads_view
from .manifest import Manifest
from .rope import shift_keys
from .sources import Sources

MAX_SCRATCH_BYTES = 1 << 30
"""Largest stored chunk that engine chunks of another size are cut from; each loading thread may hold one."""


class Cartridge(NamedTuple):
    """A manifest and where its artefact lies."""

    manifest: Manifest
    root: Path
    """Directory of the manifest and token ids."""
    location: str
    """Where the payload lies: the same directory, or `s3://bucket/key`."""


class SourceStats(NamedTuple):
    """Counters of reads from the sources themselves."""

    reads: int
    failed: int
    read_bytes: int
    read_seconds: float
    """With the checks, which are made on the way."""
    corrupt: int
    """Copies, in the disk tier or just fetched, that were not what their manifest says."""


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
        self,
        sources: Sources,
        shape: ChunkShape,
        heads: range,
        layout: str,
        disk: DiskTier | None = None,
        *,
        keep_local: bool = False,
    ) -> None:
        """`heads` are the KV heads of this rank, `layout` a key of `layout.VIEWS` or one of `tiles`.

        `disk` keeps copies of what comes from remote sources, with `keep_local` of what comes from directories too.
        """
        self.shape, self._keep_local = shape, keep_local
        self._sources, self._heads, self._disk = sources, heads, disk
        self._tiles = layout if tiles.is_tiled(layout) else None
        self._layout = "heads" if self._tiles else layout
        self._lock = threading.Lock()
        self._stats = SourceStats(0, 0, 0, 0.0, 0)
        self._finite: dict[str, int] = {}
        """A bit for each stored chunk of a cartridge whose bytes, of the manifest's checksums, have no NaN."""

    def stats(self) -> SourceStats:
        """Return the counters; no side effects."""
        return self._stats

    def load(self, segments: Sequence[Segment], chunk: int, out: torch.Tensor) -> None:
        """Fill `out`, flat uint8 of `shape.size_bytes`, with engine chunk `chunk` of some cartridges in a row.

        Blocks; safe from any thread. Raises a subclass of `ArtifactError` when the bytes are wrong and of `SourceError`
        when they cannot be had, its `digest` naming the cartridge at fault; `out` is then undefined.
        """
        packed, out = out, torch.empty_like(out) if self._tiles else out
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
        if self._tiles:
            tiles.pack(heads_view(out, self.shape), packed, self.shape, self._tiles)

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
            if piece.size_bytes > MAX_SCRATCH_BYTES:
                raise OverBudget(
                    f"cartridge {manifest.name}: chunk {stored} is stored as {piece.size_bytes} bytes for this rank, more "
                    f"than the {MAX_SCRATCH_BYTES} that are set apart to cut others from; build it in smaller chunks"
                )
            scratch = torch.empty(piece.size_bytes, dtype=torch.uint8)
            self._read(cartridge, stored, memoryview(scratch.numpy()))
            low, high = max(first_needed, first), min(last_needed, first + piece.tokens)
            keys, values = heads_view(scratch, piece)[:, :, low - first : high - first]
            place = slice(low + offset - start, high + offset - start)
            target[0, :, place] = shift_keys(keys, manifest.fingerprint.rope, offset) if offset else keys
            target[1, :, place] = values

    def _read(self, cartridge: Cartridge, stored: int, out: memoryview) -> None:
        """Fill `out` with this rank's heads of a stored chunk and verify them, from the disk tier if it can."""
        manifest, _, location = cartridge
        path = f"{location}/{manifest.payload.file}"
        key = PieceKey(manifest.digest, stored, self._heads.start, self._heads.stop)
        disk = self._disk if self._keep_local or self._sources.is_remote(location) else None
        if disk is not None:
            check = self._check(manifest, stored)
            if disk.read_into(key, out, check.update):
                try:
                    self._finish(check, manifest, stored, out, str(disk.root))
                    return
                except ArtifactError:
                    disk.discard(key)
        try:
            self._fetch(cartridge, stored, out, path)
        except CorruptChunk:
            # Once more: it may have been damaged on its way, or be in the middle of being written.
            try:
                self._fetch(cartridge, stored, out, path)
            except CorruptChunk:
                self._diagnose(cartridge, stored)
                raise
        if disk is not None:
            disk.write(key, out)

    def _fetch(self, cartridge: Cartridge, stored: int, out: memoryview, path: str) -> None:
        """Fill `out` from the source itself and verify it."""
        manifest, _, location = cartridge
        where = artifact.chunk_range(manifest, stored, self._heads)
        check = self._check(manifest, stored)
        started, failed = time.perf_counter(), True
        try:
            self._sources.read_into(location, manifest.payload.file, where, out, check.update)
            failed = False
        except (SourceError, ArtifactError) as error:
            raise type(error)(f"cartridge {manifest.name}: chunk {stored}: {error}") from error
        finally:
            took_s = time.perf_counter() - started
            with self._lock:
                now = self._stats
                self._stats = now._replace(
                    reads=now.reads + 1,
                    failed=now.failed + failed,
                    read_bytes=now.read_bytes + (0 if failed else len(out)),
                    read_seconds=now.read_seconds + took_s,
                )
        self._finish(check, manifest, stored, out, path)

    def _check(self, manifest: Manifest, stored: int) -> ChunkCheck:
        known = self._finite.get(manifest.digest, 0) >> stored & 1
        return ChunkCheck(manifest, stored, self._heads, known_finite=bool(known))

    def _finish(self, check: ChunkCheck, manifest: Manifest, stored: int, data: memoryview, where: str) -> None:
        try:
            check.finish(data, where)
        except CorruptChunk:
            with self._lock:
                self._stats = self._stats._replace(corrupt=self._stats.corrupt + 1)
            raise
        with self._lock:
            self._finite[manifest.digest] = self._finite.get(manifest.digest, 0) | 1 << stored

    def _diagnose(self, cartridge: Cartridge, stored: int) -> None:
        """Raise what is wrong with an artefact on local disk whose bytes have wrong checksums, if it is more than that."""
        manifest, _, location = cartridge
        if self._sources.is_remote(location):
            return
        root = Path(location)
        try:
            artifact.check_local_header(artifact.load_manifest(root, manifest.digest), root)
        except ManifestError:
            return
        except ArtifactError as error:
            where = root / manifest.payload.file
            raise type(error)(f"cartridge {manifest.name}: chunk {stored} of {where}: {error}") from error
