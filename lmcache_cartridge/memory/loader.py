"""ChunkLoader: makes chunks of the engine's size, in its layout, out of stored ones, each read once and verified."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..artifact import reading
from ..artifact.cartridge import Cartridge, Segment
from ..artifact.check import ChunkCheck
from ..artifact.location import is_remote
from ..artifact.manifest import Manifest
from ..errors import ArtifactError, CartridgeError, CorruptChunk, OverBudget, SourceError
from ..library.catalog import Catalog
from ..library.index import ChunkKey
from ..library.workers import Workers
from ..sources.disk_cache import CopyKey, DiskCache
from ..sources.sources import Sources
from . import codec, tiles
from .layout import ChunkShape, heads_view
from .loads import ChunkSource, Piece
from .quantise import Quantiser
from .rope import shift
from .slab import slab

MAX_SCRATCH_BYTES = 1 << 30
"""Largest stored chunk that engine chunks of another size are cut from; each loading thread may hold one."""

_MAX_UNWRITTEN_BYTES = 256 << 20
"""Bytes of copies that may wait to be written: of what comes faster than the disk takes it, no copy is kept."""
_CLOSE_S = 1.0


class SourceStats(NamedTuple):
    """Counters of reads from the sources themselves."""

    reads: int
    failed: int
    read_bytes: int
    read_seconds: float
    """With the checks, which are made on the way."""
    corrupt: int
    """Copies, in the disk tier or just fetched, that were not what their manifest says."""


class ChunkLoader:
    """Loads chunks of `shape.tokens` positions and the heads of one rank, out of the stored chunks that they overlap.

    Where the engine's chunk is a stored chunk of a cartridge at the head of the prompt, in the stored layout, the
    source reads into the caller's buffer. Other layouts are packed from a scratch buffer for each chunk, int8 is decoded from one;
    for other chunk sizes, the later cartridges of a chain and the stages of a pipeline stored chunks are copied from one.
    """

    def __init__(
        self,
        sources: Sources,
        shape: ChunkShape,
        heads: range,
        layout: str,
        disk: DiskCache | None = None,
        *,
        keep_local: bool = False,
        layers: range | None = None,
        quantiser: Quantiser | None = None,
    ) -> None:
        """`shape` is that of chunks in the model's dtype, `heads` are the KV heads of this rank, `layers` the layers of its
        stage, all by default, `layout` is a key of `layout.VIEWS` or one of `tiles`, `quantiser` for an engine with such a cache.

        `disk` keeps copies of what comes from remote sources, with `keep_local` of what comes from directories too.
        """
        self.shape, self._keep_local = shape, keep_local
        self._sources, self._heads, self._disk = sources, heads, disk
        self._layers = layers or range(shape.layers)
        self._quantiser = quantiser
        # One latent vector a token is the same bytes in both layouts.
        self._packed = layout if quantiser or (layout != "heads" and shape.planes == 2) else None
        self._lock = threading.Lock()
        self._writer = Workers("cartridge-copy", 1, stalled_s=math.inf)
        self._counts: Any = Counter()
        """`SourceStats`, and how many bytes are `unwritten`: on their way to the disk tier."""

    def stats(self) -> SourceStats:
        """Return the counters; no side effects."""
        return SourceStats(*(self._counts[name] for name in SourceStats._fields))

    def pieces(self, segments: Sequence[Segment], chunk: int) -> list[Piece]:
        """Return the stored chunks that an engine chunk of some cartridges in a row overlaps. Raises `CartridgeError`.

        `Piece.where` is the segment that one is of, and the first position of the engine chunk in its prompt.
        """
        found, tokens = [], self.shape.tokens
        start, end = chunk * tokens, (chunk + 1) * tokens
        for segment in segments:
            manifest, offset = segment.cartridge.manifest, segment.offset
            first, last = max(start - offset, 0), min(end - offset, manifest.positions)
            stored_tokens = manifest.stored.chunk_tokens
            is_as_served = (
                offset == 0
                and stored_tokens == last - first == tokens
                and len(self._layers) == manifest.fingerprint.layers
            )
            if first < last:
                for stored in range(first // stored_tokens, -(-last // stored_tokens)):
                    where = None if is_as_served else (segment, start)
                    found.append(Piece(ChunkKey(manifest.digest, stored), where))
        return found

    def read(self, cartridge: Cartridge, stored: int, out: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's heads of a stored chunk, flat uint8, verified and in the model's dtype: `out`, where there is one.

        Raises a subclass of `ArtifactError` when the bytes are wrong and of `SourceError` when they cannot be had, its
        `digest` naming the cartridge; the buffer is then undefined. Blocks; safe from any thread.
        """
        manifest = cartridge.manifest
        try:
            data = self._scratch(manifest, stored) if out is None else out
            if manifest.stored.encoding == "plain":
                self._read(cartridge, stored, data.numpy().data)
            else:
                packed = slab(len(self._heads) * manifest.head_bytes(stored)).numpy().data
                self._read(cartridge, stored, packed)
                codec.decode(packed, data, manifest.fingerprint, manifest.chunk_length(stored))
        except CartridgeError as error:
            error.digest = manifest.digest
            raise
        return data

    def put(self, piece: Piece, data: torch.Tensor, out: torch.Tensor) -> None:
        """Fill the part of an engine chunk in the heads layout, flat uint8, that a stored chunk is."""
        ((manifest, _, _), offset), start = piece.where
        first = piece.at.chunk * manifest.stored.chunk_tokens
        shape = self._piece(manifest, piece.at.chunk)
        low = max(start - offset, first)
        high = min(start + self.shape.tokens - offset, first + shape.tokens)
        place = slice(low + offset - start, high + offset - start)
        kv = heads_view(data, shape)[:, :, low - first : high - first]
        if offset:
            kv = shift(kv, manifest.fingerprint, offset)  # of all layers: it knows them by number
        heads_view(out, self.shape)[:, :, place] = kv[:, self._layers.start : self._layers.stop]

    def room(self, slot: torch.Tensor) -> torch.Tensor:
        """Return the memory in which an engine chunk is put together: its slot, where that has the heads layout."""
        return slab(self.shape.size_bytes) if self._packed else slot

    def finish(self, room: torch.Tensor, slot: torch.Tensor) -> None:
        """Fill a slot with a chunk in the engine's layout, and its numbers, once all of it is in `room`."""
        if self._packed is None:
            return
        shape = self.shape
        if self._quantiser:
            shape, plain = shape._replace(dtype="uint8"), room
            room = torch.empty(shape.size_bytes, dtype=torch.uint8)
            self._quantiser.quantise(plain, room, self.shape)
        tiles.pack(heads_view(room, shape), slot, shape, self._packed)

    def _piece(self, manifest: Manifest, stored: int) -> ChunkShape:
        return self.shape._replace(tokens=manifest.chunk_length(stored), layers=manifest.fingerprint.layers)

    def _scratch(self, manifest: Manifest, stored: int) -> torch.Tensor:
        size_bytes = self._piece(manifest, stored).size_bytes
        if size_bytes > MAX_SCRATCH_BYTES:
            raise OverBudget(
                f"cartridge {manifest.name}: chunk {stored} is stored as {size_bytes} bytes for this rank, more "
                f"than the {MAX_SCRATCH_BYTES} that are set apart to cut others from; build it in smaller chunks"
            )
        return slab(size_bytes)

    def _read(self, cartridge: Cartridge, stored: int, out: memoryview) -> None:
        """Fill `out` with this rank's heads of a stored chunk and verify them, from the disk tier if it can."""
        if self._read_copy(cartridge, stored, out):
            return
        try:
            self._fetch(cartridge, stored, out)
        except CorruptChunk:
            # Once more: it may have been damaged on its way, or be in the middle of being written.
            self._fetch(cartridge, stored, out)

    def _read_copy(self, cartridge: Cartridge, stored: int, out: memoryview) -> bool:
        """Fill `out` from the disk tier and verify it; False if it has no copy, or a bad one, which is discarded."""
        disk = self._disk_for(cartridge)
        if disk is None:
            return False
        check, key = ChunkCheck(cartridge.manifest, stored, self._heads), self._copy_key(cartridge, stored)
        if not disk.read_into(key, out, check.update):
            return False
        try:
            self._finish(check, out, str(disk.root))
        except ArtifactError:
            disk.discard(key)
            return False
        return True

    def _fetch(self, cartridge: Cartridge, stored: int, out: memoryview) -> None:
        """Fill `out` from the source itself, verify it, and keep a copy in the disk tier."""
        manifest, _, location = cartridge
        file, where = manifest.stored.file, reading.chunk_range(manifest, stored, self._heads)
        check, started, done = ChunkCheck(manifest, stored, self._heads), time.perf_counter(), 0
        try:
            self._sources.read_into(location, file, where, out, check.update)
            done = len(out)
        except (SourceError, ArtifactError) as error:
            raise type(error)(f"cartridge {manifest.name}: chunk {stored}: {error}") from error
        finally:
            self._count(reads=1, failed=int(not done), read_bytes=done, read_seconds=time.perf_counter() - started)
        self._finish(check, out, f"{location}/{file}")
        if disk := self._disk_for(cartridge):
            self._keep(disk, self._copy_key(cartridge, stored), out)

    def _keep(self, disk: DiskCache, key: CopyKey, data: memoryview) -> None:
        """Have a copy written to the disk tier in the background, so that no load waits for that disk, nor for its lock."""
        with self._lock:
            if self._counts["unwritten"] >= _MAX_UNWRITTEN_BYTES:
                return
            self._counts["unwritten"] += len(data)
        copy = np.array(data)
        writing = self._writer.submit(object(), lambda: disk.write(key, copy.data))
        writing.add_done_callback(lambda _: self._count(unwritten=-len(data)))

    def _count(self, **counts: float) -> None:
        with self._lock:
            self._counts.update(counts)

    def close(self) -> None:
        """Write no more copies; waits a moment for the one under way."""
        self._writer.close(_CLOSE_S)

    def _disk_for(self, cartridge: Cartridge) -> DiskCache | None:
        return self._disk if self._keep_local or is_remote(cartridge.location) else None

    def _copy_key(self, cartridge: Cartridge, stored: int) -> CopyKey:
        return CopyKey(cartridge.manifest.digest, stored, self._heads.start, self._heads.stop)

    def _finish(self, check: ChunkCheck, data: memoryview, where: str) -> None:
        try:
            check.finish(data, where)
        except CorruptChunk:
            self._count(corrupt=1)
            raise


class CatalogSource(ChunkSource):
    """The chunks of a catalog's cartridges and chains, from wherever each cartridge lies at the moment."""

    def __init__(self, loader: ChunkLoader, catalog: Catalog) -> None:
        self._loader, self._catalog = loader, catalog
        self.room, self.put, self.finish = loader.room, loader.put, loader.finish  # type: ignore[method-assign]

    def pieces(self, key: ChunkKey) -> Sequence[Piece]:
        return self._loader.pieces(self._segments(key.digest), key.chunk)

    def read(self, at: ChunkKey, out: torch.Tensor | None) -> torch.Tensor:
        """Read a stored chunk; quarantine a copy whose bytes are wrong, and read from another place where there is one."""
        cartridge = self._segments(at.digest)[0].cartridge
        try:
            return self._loader.read(cartridge, at.chunk, out)
        except ArtifactError as error:
            moved = self._catalog.quarantine(at.digest, str(error), cartridge.location)
            if not (moved and self._catalog.segments(at.digest)):
                raise
        return self.read(at, out)

    def _segments(self, tag: str) -> list[Segment]:
        segments = self._catalog.segments(tag)
        if not segments:
            raise CartridgeError(f"a cartridge of {tag} was quarantined or removed meanwhile")
        return segments
