"""Reader: reads artefacts for one engine, and keeps the manifests of those in use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from ..artifact import reading
from ..artifact.cartridge import Cartridge
from ..artifact.fingerprint import Fingerprint
from ..errors import ModelMismatch, UnsupportedEngine
from .index import KeyIndex
from .snapshot import Row

_MAX_MANIFESTS = 256
"""Manifests that are kept; of a large model each is some 100 KiB."""


class Reader:
    """Artefacts by digest. Safe from any thread."""

    def __init__(self, index: KeyIndex, fingerprint: Fingerprint, *, allow_trained: bool) -> None:
        self._index, self._fingerprint, self._allow_trained = index, fingerprint, allow_trained
        self._kept: OrderedDict[str, Cartridge] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = tuple(threading.Lock() for _ in range(16))

    def read(self, digest: str, root: Path, location: str) -> tuple[Row, Cartridge]:
        """Read an artefact and hash its document; keeps nothing. Blocks for local reads.

        Raises `CartridgeError` where nothing can be served of it: `ModelMismatch`, `UnsupportedEngine` and
        `ChunkSizeMismatch` for this engine, others where it is not sound.
        """
        manifest = reading.load_manifest(root, digest, payload=location == str(root))
        self._check_fits(manifest.fingerprint, manifest.kind)
        hashes = b""
        if manifest.kind != "tokens":
            hashes = self._index.hash(manifest, reading.load_token_ids(manifest, root).tolist())
        beside = None if location == str(root) else str(root)
        row = Row(digest, location, beside, manifest.kind, manifest.positions, hashes)
        return row, Cartridge(manifest, root, location)

    def at_hand(self, digest: str) -> Cartridge | None:
        """Return a cartridge whose manifest is kept; None, and nothing is read, for any other."""
        with self._lock:
            if found := self._kept.get(digest):
                self._kept.move_to_end(digest)
            return found

    def alone(self, digest: str) -> threading.Lock:
        """Return the lock under which a digest's artefact is read once, however many want it; some share one."""
        return self._reading[hash(digest) % len(self._reading)]

    def keep(self, cartridge: Cartridge) -> None:
        """Have it at hand, in place of the one that was least recently asked for where there are many."""
        with self._lock:
            self._kept[cartridge.manifest.digest] = cartridge
            while len(self._kept) > _MAX_MANIFESTS:
                self._kept.popitem(last=False)

    def forget(self, digest: str) -> None:
        """Have it at hand no more; no change if it is not."""
        with self._lock:
            self._kept.pop(digest, None)

    def _check_fits(self, fingerprint: Fingerprint, kind: str) -> None:
        if differences := fingerprint.differences(self._fingerprint):
            raise ModelMismatch(f"made for another model than the one served: {'; '.join(differences)}")
        if kind == "trained" and not self._allow_trained:
            raise UnsupportedEngine(
                "a trained cartridge needs kv_load_failure_policy: fail, since nothing can compute it; this engine "
                "recomputes what it cannot load"
            )
