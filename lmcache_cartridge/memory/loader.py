"""ChunkLoader: reads chunks of the engine's size from their source, verified and in the layout asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from ..artifact import reading
from ..artifact.cartridge import Cartridge, Segment
from ..artifact.check import ChunkCheck
from ..artifact.location import is_remote
from ..artifact.manifest import Manifest, Payload
from ..errors import ArtifactError, CartridgeError, CorruptChunk, ManifestError, OverBudget, SourceError
from ..sources.disk_cache import CopyKey, DiskCache
from ..sources.sources import Sources
from . import codec, tiles
from .layout import ChunkShape, heads_view
from .quantise import Quantiser
from .rope import shift_keys
from .slab import slab

MAX_SCRATCH_BYTES = 1 << 30
"""Largest stored chunk that engine chunks of another size are cut from; each loading thread may hold one."""

_MAX_FINITE = 10_000
"""Cartridges of which it is remembered that they have no NaN; of others it is looked for again."""


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
    """Loads chunks of `shape.tokens` positions and the heads of one rank.

    Where the engine's chunk is a stored chunk of a cartridge at the head of the prompt, in the stored layout, the
    source reads into the caller's buffer. Other layouts are packed from a scratch buffer for each chunk; other chunk sizes,
    the later cartridges of a chain and the stages of a pipeline are gathered through one, int8 through one of its own size.
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
        self._stats = SourceStats(0, 0, 0, 0.0, 0)
        self._finite: dict[str, int] = {}
        """A bit for each stored chunk of a cartridge whose bytes, of the manifest's checksums, have no NaN; of the last
        `_MAX_FINITE` cartridges."""

    def stats(self) -> SourceStats:
        """Return the counters; no side effects."""
        return self._stats

    def run_of(self, segments: Sequence[Segment]) -> int:
        """Return the most chunks that one `load_run` should be given: the number nearest to one request of the source."""
        if len(segments) != 1 or not self._is_stored_as_served(segments[0], 0, self.shape.tokens):
            return 1
        manifest, _, location = segments[0].cartridge
        if _payload(manifest).encoding != "plain" or len(self._heads) < manifest.fingerprint.kv_heads:
            return 1  # it does not come as it is served; other ranks' heads lie between the parts of two chunks
        size_bytes = self.shape.size_bytes
        return max(1, (self._sources.request_bytes(location) + size_bytes // 2) // size_bytes)

    def load_run(
        self, segments: Sequence[Segment], chunk: int, outs: Sequence[torch.Tensor]
    ) -> list[CartridgeError | None]:
        """Fill `outs`, flat uint8 of a chunk's size, with engine chunk `chunk` of some cartridges in a row and those after it.

        Returns for each None, or why it could not be had: a subclass of `ArtifactError` when the bytes are wrong and of
        `SourceError` when they cannot be had, its `digest` naming the cartridge at fault; the buffer is then undefined.
        `run_of` tells how many are worth it. Those that the disk cache has not are read from the source by one request.
        Where that brings wrong bytes each is loaded by itself, so one bad chunk fails alone. Blocks; safe from any thread.
        """
        # The one place where chunks get the engine's layout, however they were read.
        read = [slab(self.shape.size_bytes) for _ in outs] if self._packed else outs
        errors = self._read_run(segments, chunk, read)
        if self._packed:
            for error, data, out in zip(errors, read, outs, strict=True):
                if error is None:
                    self._pack(data, out, self._packed)
        return errors

    def _pack(self, data: torch.Tensor, out: torch.Tensor, layout: str) -> None:
        """Fill `out` with a chunk in the engine's layout, and its numbers; `data` is it as it was read, rotations made."""
        shape = self.shape
        if self._quantiser:
            shape, plain = shape._replace(dtype="uint8"), data
            data = torch.empty(shape.size_bytes, dtype=torch.uint8)
            self._quantiser.quantise(plain, data, shape)
        tiles.pack(heads_view(data, shape), out, shape, layout)

    def _read_run(
        self, segments: Sequence[Segment], chunk: int, outs: Sequence[torch.Tensor]
    ) -> list[CartridgeError | None]:
        """Fill `outs` with chunks in a row in the heads layout; return for each None, or why it could not be had."""
        cartridge = segments[0].cartridge
        if (
            len(outs) == 1 or (chunk + len(outs)) * self.shape.tokens > cartridge.manifest.positions
        ):  # the last is not whole
            return [self._attempt(segments, chunk + i, out) for i, out in enumerate(outs)]
        buffers = [out.numpy().data for out in outs]
        done = [self._read_copy(cartridge, chunk + i, buffer) for i, buffer in enumerate(buffers)]
        if not any(done):
            try:
                done = self._fetch_run(cartridge, chunk, buffers)
            except SourceError as error:
                error.digest = cartridge.manifest.digest
                return [error] * len(outs)
        return [
            None if loaded else self._attempt(segments, chunk + i, out)
            for i, (loaded, out) in enumerate(zip(done, outs, strict=True))
        ]

    def _attempt(self, segments: Sequence[Segment], chunk: int, out: torch.Tensor) -> CartridgeError | None:
        """Fill `out` with one chunk in the heads layout; return None, or why it could not be had."""
        start, end = chunk * self.shape.tokens, (chunk + 1) * self.shape.tokens
        within = [s for s in segments if s.offset < end and start < s.offset + s.cartridge.manifest.positions]
        for segment in within:
            try:
                if self._is_stored_as_served(segment, start, end):
                    self._read_plain(segment.cartridge, chunk, out)
                else:
                    self._gather(segment, start, end, out)
            except CartridgeError as error:
                error.digest = segment.cartridge.manifest.digest
                return error
        return None

    def _is_stored_as_served(self, segment: Segment, start: int, end: int) -> bool:
        """Whether an engine chunk's positions are one stored chunk in the layout that is read, at unmoved positions."""
        manifest = segment.cartridge.manifest
        return (
            segment.offset == 0
            and end <= manifest.positions
            and _payload(manifest).chunk_tokens == self.shape.tokens
            and len(self._layers) == manifest.fingerprint.layers
        )

    def _gather(self, segment: Segment, start: int, end: int, out: torch.Tensor) -> None:
        """Fill the part of `out`, positions `start` to `end` of the prompt, that the segment covers."""
        cartridge, offset = segment
        manifest = cartridge.manifest
        target = heads_view(out, self.shape)
        stored_tokens, own = _payload(manifest).chunk_tokens, slice(self._layers.start, self._layers.stop)
        first_needed, last_needed = max(start - offset, 0), min(end - offset, manifest.positions)
        for stored in range(first_needed // stored_tokens, -(-last_needed // stored_tokens)):
            first = stored * stored_tokens
            piece = self.shape._replace(tokens=manifest.chunk_length(stored), layers=manifest.fingerprint.layers)
            if piece.size_bytes > MAX_SCRATCH_BYTES:
                raise OverBudget(
                    f"cartridge {manifest.name}: chunk {stored} is stored as {piece.size_bytes} bytes for this rank, more "
                    f"than the {MAX_SCRATCH_BYTES} that are set apart to cut others from; build it in smaller chunks"
                )
            scratch = slab(piece.size_bytes)
            self._read_plain(cartridge, stored, scratch)
            low, high = max(first_needed, first), min(last_needed, first + piece.tokens)
            planes = heads_view(scratch, piece)[:, :, low - first : high - first]
            place = slice(low + offset - start, high + offset - start)
            for plane, kv in enumerate(planes):
                if plane == 0 and offset:
                    # All layers: it knows them by number.
                    kv = shift_keys(kv, manifest.fingerprint, offset)
                target[plane, :, place] = kv[own]

    def _read_plain(self, cartridge: Cartridge, stored: int, out: torch.Tensor) -> None:
        """Fill `out`, flat uint8, with this rank's heads of a stored chunk, verified and in the model's dtype."""
        manifest = cartridge.manifest
        if _payload(manifest).encoding == "plain":
            self._read(cartridge, stored, out.numpy().data)
            return
        packed = slab(len(self._heads) * manifest.head_bytes(stored)).numpy().data
        self._read(cartridge, stored, packed)
        codec.decode(packed, out, manifest.fingerprint, manifest.chunk_length(stored))

    def _read(self, cartridge: Cartridge, stored: int, out: memoryview) -> None:
        """Fill `out` with this rank's heads of a stored chunk and verify them, from the disk tier if it can."""
        if self._read_copy(cartridge, stored, out):
            return
        try:
            self._fetch(cartridge, stored, out)
        except CorruptChunk:
            # Once more: it may have been damaged on its way, or be in the middle of being written.
            try:
                self._fetch(cartridge, stored, out)
            except CorruptChunk:
                self._diagnose(cartridge, stored)
                raise

    def _read_copy(self, cartridge: Cartridge, stored: int, out: memoryview) -> bool:
        """Fill `out` from the disk tier and verify it; False if it has no copy, or a bad one, which is discarded."""
        disk = self._disk_for(cartridge)
        if disk is None:
            return False
        check = self._check(cartridge.manifest, stored)
        if not disk.read_into(self._copy_key(cartridge, stored), out, check.update):
            return False
        try:
            self._finish(check, cartridge.manifest, stored, out, str(disk.root))
        except ArtifactError:
            disk.discard(self._copy_key(cartridge, stored))
            return False
        return True

    def _fetch(self, cartridge: Cartridge, stored: int, out: memoryview) -> None:
        """Fill `out` from the source itself, verify it, and keep a copy in the disk tier."""
        manifest, _, location = cartridge
        where = reading.chunk_range(manifest, stored, self._heads)
        check = self._check(manifest, stored)
        with self._counted(cartridge, f"chunk {stored}", len(out)):
            self._sources.read_into(location, _payload(manifest).file, where, out, check.update)
        self._keep(check, cartridge, stored, out)

    def _fetch_run(self, cartridge: Cartridge, first: int, outs: Sequence[memoryview]) -> list[bool]:
        """Do `_fetch` for chunks in a row by one request and return which of them are as they should be."""
        manifest, _, location = cartridge
        start, size_bytes = reading.chunk_range(manifest, first, self._heads).start, sum(map(len, outs))
        try:
            with self._counted(cartridge, f"chunks {first} to {first + len(outs) - 1}", size_bytes):
                self._sources.read_each(location, _payload(manifest).file, start, outs)
        except ArtifactError:  # it ends early, and the first of them may be there
            return [False] * len(outs)
        return [self._is_sound(cartridge, first + i, out) for i, out in enumerate(outs)]

    def _is_sound(self, cartridge: Cartridge, stored: int, data: memoryview) -> bool:
        check = self._check(cartridge.manifest, stored)
        check.update(data)
        try:
            self._keep(check, cartridge, stored, data)
        except ArtifactError:
            return False
        return True

    @contextmanager
    def _counted(self, cartridge: Cartridge, what: str, size_bytes: int) -> Iterator[None]:
        """Count a read of a source, and say in its errors what was read."""
        started, failed = time.perf_counter(), True
        try:
            yield
            failed = False
        except (SourceError, ArtifactError) as error:
            raise type(error)(f"cartridge {cartridge.manifest.name}: {what}: {error}") from error
        finally:
            took_s = time.perf_counter() - started
            with self._lock:
                now = self._stats
                self._stats = now._replace(
                    reads=now.reads + 1,
                    failed=now.failed + failed,
                    read_bytes=now.read_bytes + (0 if failed else size_bytes),
                    read_seconds=now.read_seconds + took_s,
                )

    def _keep(self, check: ChunkCheck, cartridge: Cartridge, stored: int, data: memoryview) -> None:
        """Raise unless what was fetched is as it should be; then keep a copy where copies are kept."""
        manifest, _, location = cartridge
        self._finish(check, manifest, stored, data, f"{location}/{_payload(manifest).file}")
        if disk := self._disk_for(cartridge):
            disk.write(self._copy_key(cartridge, stored), data)

    def _disk_for(self, cartridge: Cartridge) -> DiskCache | None:
        return self._disk if self._keep_local or is_remote(cartridge.location) else None

    def _copy_key(self, cartridge: Cartridge, stored: int) -> CopyKey:
        return CopyKey(cartridge.manifest.digest, stored, self._heads.start, self._heads.stop)

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
            while len(self._finite) > _MAX_FINITE:
                del self._finite[next(iter(self._finite))]

    def _diagnose(self, cartridge: Cartridge, stored: int) -> None:
        """Raise what is wrong with an artefact on local disk whose bytes have wrong checksums, if it is more than that."""
        manifest, _, location = cartridge
        if is_remote(location):
            return
        root = Path(location)
        try:
            reading.check_local_header(reading.load_manifest(root, manifest.digest), root)
        except ManifestError:
            return
        except ArtifactError as error:
            where = root / _payload(manifest).file
            raise type(error)(f"cartridge {manifest.name}: chunk {stored} of {where}: {error}") from error


def _payload(manifest: Manifest) -> Payload:
    if manifest.payload is None:
        raise ArtifactError(f"cartridge {manifest.name} has token ids alone, and no chunks")
    return manifest.payload
