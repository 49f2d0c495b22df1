"""CartridgeStore: answers an engine's chunk hashes with prepared chunks. What every serving adapter is built on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import artifact
from .disk import DiskTier
from .errors import ArtifactError, CartridgeError, ModelMismatch
from .fingerprint import Fingerprint
from .keys import ChunkKey, Hasher, KeyIndex
from .layout import ChunkShape, rank_heads
from .loader import Cartridge, ChunkLoader
from .quarantine import Quarantine
from .registry import Location, Registry
from .residency import Loan, Residency, ResidencyStats
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
        self._whole_chunks: dict[str, int] = {}
        self._quarantine = Quarantine(settings.quarantine_dir)
        self._unfit: dict[str, str] = {}
        self._quarantined: dict[str, str] = {}
        self._lock = threading.Lock()
        slab = Slab(self.shape.size_bytes, settings.cpu_bytes, pin_memory=engine.pin_memory)
        self._residency = Residency(
            slab, self._load, threads=settings.load_threads, lease_s=settings.lease_s, on_failure=self._load_failed
        )
        for location in Registry(settings.registry_path, read_only=True).all():
            self._add(location)

    def lookup(self, hashes: Sequence[int], tag: str | None = None) -> int:
        """Lease the leading chunks of a prompt and return how many of its hashes they answer.

        Waits up to `lookup_timeout_s` for chunks to be loaded. A trained cartridge answers with all its chunks or
        none. Every chunk counted is resident, verified, and stays for the lease.
        """
        keys = self._index.leading(hashes, tag, self._quarantined)
        if not keys:
            return 0
        if tag is not None and len(keys) < self._whole_chunks[keys[0].digest]:
            return 0
        return self._residency.acquire(keys, self._settings.lookup_timeout_s, whole=tag is not None)

    def resident(self, hashes: Sequence[int], tag: str | None = None) -> int:
        """Return how many leading hashes could be lent now; leases and loads nothing."""
        return self._residency.resident(self._index.leading(hashes, tag, self._quarantined))

    def lend(self, chunk_hash: int, tag: str | None = None) -> Loan | None:
        """Return the resident bytes of one chunk, the caller's to close, or None if it cannot be had.

        A chunk that is not resident any more is loaded again, waiting up to `lookup_timeout_s`.
        """
        # A quarantined cartridge's resident chunks were verified, and a lookup may have promised them already.
        for key in self._index.candidates(chunk_hash, tag):
            if loan := self._residency.lend(key):
                return loan
        keys = self._index.leading((chunk_hash,), tag, self._quarantined)
        if not keys or not self._residency.acquire(keys, self._settings.lookup_timeout_s):
            return None
        loan = self._residency.lend(keys[0])
        self._residency.release(keys[0])
        return loan

    def release(self, chunk_hash: int, tag: str | None = None) -> bool:
        """End one lease of a chunk; False if it has none."""
        return any(self._residency.release(key) for key in self._index.candidates(chunk_hash, tag))

    def names(self) -> list[str]:
        """Return `id@version` of every cartridge that is served now."""
        return [c.manifest.name for digest, c in self._cartridges.items() if digest not in self._quarantined]

    def refused(self) -> dict[str, str]:
        """Return the reason for every registered cartridge that is not served, by `id@version`."""
        quarantined = dict(self._quarantined)
        return self._unfit | {self._cartridges[digest].manifest.name: why for digest, why in quarantined.items()}

    def stats(self) -> ResidencyStats:
        """Return the cpu tier's counters."""
        return self._residency.stats()

    def check(self) -> None:
        """Assert the invariants of the tiers."""
        self._residency.check()

    def close(self) -> None:
        """Stop loading. Loans stay valid."""
        self._residency.close()

    def _add(self, location: Location) -> None:
        try:
            manifest = artifact.load_manifest(location.root)
            if manifest.digest != location.digest:
                raise CartridgeError(
                    f"{location.root} was replaced after it was registered; register it again as a new version"
                )
            self._check_fits(manifest.fingerprint, manifest.kind)
            if reason := self._quarantine.reason(manifest.digest):
                raise CartridgeError(f"quarantined: {reason}")
            whole = self._index.add(manifest, artifact.load_token_ids(manifest, location.root).tolist())
        except CartridgeError as error:
            self._unfit[location.name] = str(error)
            logger.warning("cartridge %s is not served: %s", location.name, error)
            return
        self._cartridges[manifest.digest] = Cartridge(manifest, location.root)
        self._whole_chunks[manifest.digest] = whole

    def _check_fits(self, fingerprint: Fingerprint, kind: str) -> None:
        if differences := fingerprint.differences(self.engine.fingerprint):
            raise ModelMismatch(f"made for another model than the one served: {'; '.join(differences)}")
        if kind == "trained" and not self.engine.allow_trained:
            raise ModelMismatch(
                "a trained cartridge needs kv_load_failure_policy: fail, since nothing can compute it; this engine "
                "recomputes what it cannot load"
            )

    def _load(self, key: ChunkKey, out: torch.Tensor) -> None:
        self._loader.load(self._cartridges[key.digest], key.chunk, out)

    def _load_failed(self, key: ChunkKey, error: CartridgeError) -> None:
        """Quarantine a cartridge whose bytes are wrong. One that could not be read is only a miss, for this time."""
        name = self._cartridges[key.digest].manifest.name
        if not isinstance(error, ArtifactError):
            logger.warning("cartridge %s: chunk %d was not loaded: %s", name, key.chunk, error)
            return
        with self._lock:
            if key.digest in self._quarantined:
                return
            self._quarantined[key.digest] = str(error)
        logger.error("cartridge %s is quarantined: %s", name, error)
        self._quarantine.put(key.digest, str(error))
