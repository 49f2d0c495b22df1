"""CartridgeStore: answers an engine's chunk hashes with prepared chunks. What every serving adapter is built on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from . import artifact
from .disk import DiskTier
from .errors import ArtifactError, CartridgeError, ChunkSizeMismatch, ModelMismatch, UnsupportedEngine
from .fingerprint import Fingerprint
from .keys import ChunkKey, Hasher, KeyIndex
from .layout import ChunkShape, rank_heads
from .loader import Cartridge, ChunkLoader, Segment
from .quarantine import Quarantine
from .registry import Registry
from .residency import Loan, Residency, ResidencyStats
from .rope import check_shift
from .settings import Settings
from .slab import Slab
from .sources import LocalSource

logger = logging.getLogger(__name__)


class Engine(NamedTuple):
    """What the store must know of the engine it serves."""

    fingerprint: Fingerprint
    chunk_tokens: int
    rank: int
    """Tensor-parallel rank of this process."""
    world: int
    """Tensor-parallel ranks."""
    layout: str
    """How the engine's injector reads chunks: a key of `layout.VIEWS`."""
    hasher: Hasher
    pin_memory: bool
    allow_trained: bool
    """False where the engine computes what it could not load, which would answer from identity tokens."""


class Readiness(NamedTuple):
    """How far a cartridge or chain is on its way into memory."""

    resident: int
    """Leading chunks that are resident."""
    chunks: int
    refused: str | None
    """Why it will never be, None if it may."""
    mismatch: bool = False
    """Whether it was made for another model, so that even its token ids mean nothing here."""


class CartridgeStore:
    """The registered cartridges that fit one engine and rank, and the memory they are served from.

    Safe from any thread. A cartridge that does not fit or is not sound is left out or quarantined, with a reason;
    the others are served.
    """

    def __init__(self, settings: Settings, engine: Engine) -> None:
        """Read the registry and make its cartridges findable. Blocks for that; loads no payload.

        Raises `OverBudget` or `RegistryError`. A cartridge that cannot be served is reported by `refused`.
        """
        self.engine, self._settings = engine, settings
        shape, heads = engine.fingerprint, rank_heads(engine.fingerprint.kv_heads, engine.rank, engine.world)
        self.shape = ChunkShape(len(heads), shape.layers, engine.chunk_tokens, shape.head_size, shape.dtype)
        disk = DiskTier(settings.cache_dir, settings.disk_bytes) if settings.disk_bytes else None
        self._loader = ChunkLoader(LocalSource(), self.shape, heads, engine.layout, disk)
        self._disk = disk
        self._index = KeyIndex(engine.hasher, engine.chunk_tokens)
        self._cartridges: dict[str, Cartridge] = {}
        self._names: dict[str, list[str]] = {}
        self._quarantine = Quarantine(settings.quarantine_dir)
        self._unfit: dict[str, CartridgeError] = {}
        self._quarantined: dict[str, str] = {}
        self._lock = threading.Lock()
        slab = Slab(self.shape.size_bytes, settings.cpu_bytes, pin_memory=engine.pin_memory)
        self._residency = Residency(
            slab, self._load, threads=settings.load_threads, lease_s=settings.lease_s, on_failure=self._load_failed
        )
        for location in Registry(settings.registry_path, read_only=True).all():
            self._add(location.name, location.digest, location.root)

    def lookup(self, hashes: Sequence[int], tag: str | None = None) -> int:
        """Lease the leading chunks of a prompt and return how many of its hashes they answer.

        `tag` names a cartridge or chain by its digests, joined by dots; without one only prefill cartridges answer,
        each for its own tokens. Waits up to `lookup_timeout_s` for chunks to be loaded. Where a trained cartridge is
        part of it, all its chunks answer or none. Every chunk counted is resident, verified, and stays for the lease.
        """
        needed = self._derive(tag)
        keys = self._index.leading(hashes, tag, self._quarantined)
        if needed is None or not keys or len(keys) < needed:
            return 0
        return self._residency.acquire(keys, self._settings.lookup_timeout_s, whole=needed > 0)

    def resident(self, hashes: Sequence[int], tag: str | None = None) -> int:
        """Return how many leading hashes could be lent now; leases and loads nothing."""
        if self._derive(tag) is None:
            return 0
        return self._residency.resident(self._index.leading(hashes, tag, self._quarantined))

    def lend(self, chunk_hash: int, tag: str | None = None) -> Loan | None:
        """Return the resident bytes of one chunk, the caller's to close, or None if it cannot be had.

        A chunk that is not resident any more is loaded again, waiting up to `lookup_timeout_s`.
        """
        servable = self._derive(tag) is not None
        # A quarantined cartridge's resident chunks were verified, and a lookup may have promised them already.
        for key in self._index.candidates(chunk_hash, tag):
            if loan := self._residency.lend(key):
                return loan
        keys = self._index.leading((chunk_hash,), tag, self._quarantined)
        if not servable or not keys or not self._residency.acquire(keys, self._settings.lookup_timeout_s):
            return None
        loan = self._residency.lend(keys[0])
        self._residency.release(keys[0])
        return loan

    def release(self, chunk_hash: int, tag: str | None = None) -> bool:
        """End one lease of a chunk; False if it has none."""
        self._derive(tag)
        return any(self._residency.release(key) for key in self._index.candidates(chunk_hash, tag))

    def prepare(self, tag: str, roots: Mapping[str, Path]) -> Readiness:
        """Start bringing a cartridge or chain into memory and return how far it is; does not wait.

        `roots` tells by digest where artefacts lie that were not registered when this store was opened. Leases
        nothing: a lookup soon after finds the chunks, one much later may find them evicted and loads them again.
        """
        for digest, root in roots.items():
            if digest not in self._cartridges:
                self._add(None, digest, root)
        for digest in tag.split("."):
            if digest in self._unfit:
                error = self._unfit[digest]
                return Readiness(0, 0, str(error), mismatch=isinstance(error, ModelMismatch))
            if digest in self._quarantined:
                return Readiness(0, 0, self._quarantined[digest])
        try:
            self._derive(tag)
        except CartridgeError as error:
            return Readiness(0, 0, str(error))
        keys = self._index.chunks(tag)
        if len(keys) * self.shape.size_bytes > self._residency.stats().budget_bytes:
            return Readiness(0, len(keys), f"{len(keys)} chunks of {self.shape.size_bytes} bytes exceed cpu_bytes")
        leased = self._residency.acquire(keys, 0.0)
        for key in keys[:leased]:
            self._residency.release(key)
        return Readiness(leased, len(keys), None)

    def resident_chunks(self) -> dict[str, int]:
        """Return how many chunks of each cartridge or chain are resident, by digests."""
        return self._residency.resident_by_digest()

    def pin(self, digest: str) -> int:
        """Keep a cartridge's resident chunks in memory until `unpin`; return how many there are."""
        return self._residency.pin(digest, True)

    def unpin(self, digest: str) -> int:
        """Let a cartridge's chunks be evicted again; return how many there are."""
        return self._residency.pin(digest, False)

    def evict(self, digest: str) -> int:
        """Drop a cartridge's chunks that nobody relies on, local copies too, and return how many were in memory."""
        if self._disk is not None:
            self._disk.discard_cartridge(digest)
        return self._residency.evict(digest)

    def names(self) -> list[str]:
        """Return `id@version` of every cartridge that is served now."""
        served = [digest for digest in self._cartridges if digest not in self._quarantined]
        return [name for digest in served for name in self._names[digest]]

    def refused(self) -> dict[str, str]:
        """Return the reason for every registered cartridge that is not served, by `id@version`."""
        reasons = {digest: str(error) for digest, error in self._unfit.items()} | dict(self._quarantined)
        return {name: why for digest, why in reasons.items() for name in self._names[digest]}

    def stats(self) -> ResidencyStats:
        """Return the cpu tier's counters."""
        return self._residency.stats()

    def check(self) -> None:
        """Assert the invariants of the tiers."""
        self._residency.check()

    def close(self) -> None:
        """Stop loading. Loans stay valid."""
        self._residency.close()

    def _add(self, name: str | None, digest: str, root: Path) -> None:
        """Make the cartridge at `root` findable, or note why not. `name` is its `id@version`, if it is registered."""
        self._names.setdefault(digest, []).extend([name] if name else [])
        try:
            manifest = artifact.load_manifest(root, digest)
            self._check_fits(manifest.fingerprint, manifest.kind)
            if reason := self._quarantine.reason(manifest.digest):
                raise CartridgeError(f"quarantined: {reason}")
            if manifest.kind != "tokens":
                self._index.add(manifest, artifact.load_token_ids(manifest, root).tolist())
        except CartridgeError as error:
            if digest not in self._cartridges:  # the same content may lie elsewhere, sound
                self._unfit[digest] = error
            logger.warning("cartridge %s is not served: %s", name or digest, error)
            return
        self._unfit.pop(digest, None)
        self._cartridges[manifest.digest] = Cartridge(manifest, root)

    def _segments(self, tag: str) -> list[Segment]:
        """Return the cartridges that a tag names, each at its place; empty if one is not there or quarantined."""
        segments, offset = [], 0
        for digest in tag.split("."):
            cartridge = self._cartridges.get(digest)
            if cartridge is None or digest in self._quarantined:
                return []
            segments.append(Segment(cartridge, offset))
            offset += cartridge.manifest.positions
        return segments

    def _derive(self, tag: str | None) -> int | None:
        """Make the chunks of a tag findable and return how many of them must be had together or not at all.

        None for a tag of which a cartridge is not there or quarantined: the others must not answer in its place.
        Raises `ChunkSizeMismatch` or `UnsupportedModel` for cartridges that cannot stand in that order.
        """
        if tag is None:
            return 0
        segments = self._segments(tag)
        if not segments:
            return None
        end = trained_end = 0
        for segment in segments:
            end = segment.offset + segment.cartridge.manifest.positions
            if segment.cartridge.manifest.kind == "trained":
                trained_end = end
        chunk = self.engine.chunk_tokens
        whole = end // chunk
        needed = -(-trained_end // chunk)
        if needed > whole:
            raise ChunkSizeMismatch(
                f"the chain has {end} positions, of which the last {end % chunk} end in a trained cartridge and do not "
                f"fill a chunk of {chunk}; put a document of at least {chunk - end % chunk} tokens behind it"
            )
        if not self._index.has(tag):
            first = segments[0].cartridge.manifest
            for segment in segments[1:]:
                check_shift(segment.cartridge.manifest.fingerprint.rope)
            ids = [i for s in segments for i in artifact.load_token_ids(*s.cartridge).tolist()]
            own = first.positions // chunk
            keys = [ChunkKey(first.digest if i < own else tag, i) for i in range(whole)]
            with self._lock:
                self._index.add_chain(tag, ids, keys)
        return needed

    def _check_fits(self, fingerprint: Fingerprint, kind: str) -> None:
        if differences := fingerprint.differences(self.engine.fingerprint):
            raise ModelMismatch(f"made for another model than the one served: {'; '.join(differences)}")
        if kind == "trained" and not self.engine.allow_trained:
            raise UnsupportedEngine(
                "a trained cartridge needs kv_load_failure_policy: fail, since nothing can compute it; this engine "
                "recomputes what it cannot load"
            )

    def _load(self, key: ChunkKey, out: torch.Tensor) -> None:
        segments = self._segments(key.digest)
        if not segments:
            raise CartridgeError(f"a cartridge of {key.digest} was quarantined meanwhile")
        self._loader.load(segments, key.chunk, out)

    def _load_failed(self, key: ChunkKey, error: CartridgeError) -> None:
        """Quarantine a cartridge whose bytes are wrong. One that could not be read is only a miss, for this time."""
        digest = error.digest
        if digest is None or not isinstance(error, ArtifactError):
            logger.warning("chunk %d of %s was not loaded: %s", key.chunk, key.digest, error)
            return
        with self._lock:
            if digest in self._quarantined:
                return
            self._quarantined[digest] = str(error)
        logger.error("cartridge %s is quarantined: %s", self._cartridges[digest].manifest.name, error)
        self._quarantine.put(digest, str(error))
