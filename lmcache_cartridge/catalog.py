"""Catalog: the cartridges that one engine can be served, kept up to date with the registry and the quarantine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from . import artifact
from .errors import CartridgeError, CartridgeNotFound, ChunkSizeMismatch, ModelMismatch, UnsupportedEngine
from .fingerprint import Fingerprint
from .keys import ChunkKey, Hasher, KeyIndex
from .loader import Cartridge, Segment
from .mirror import Mirror
from .quarantine import Quarantine
from .registry import Location, Registry
from .rope import check_shift
from .sources import Sources

logger = logging.getLogger(__name__)

_RETRY_S = 5.0
"""How long after a failure the manifest of a remote artefact is asked for again."""


class Catalog:
    """Cartridges by digest, and the index that finds their chunks.

    A cartridge that does not fit the engine or is not sound is left out or quarantined, with a reason; the others are
    served. What is removed from the registry is found no more, but stays for those who came before.
    """

    def __init__(
        self,
        registry: Registry,
        quarantine: Quarantine,
        mirror: Mirror,
        *,
        fingerprint: Fingerprint,
        hasher: Hasher,
        chunk_tokens: int,
        allow_trained: bool,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Knows nothing before the first `refresh`. A removed cartridge stays for `grace_s`."""
        self.index = KeyIndex(hasher, chunk_tokens)
        self._registry, self._quarantine, self._mirror = registry, quarantine, mirror
        self._fingerprint, self._allow_trained = fingerprint, allow_trained
        self._chunk_tokens, self._grace_s, self._clock = chunk_tokens, grace_s, clock
        self._cartridges: dict[str, Cartridge] = {}
        self._names: dict[str, list[str]] = {}
        self._digests: dict[str, str] = {}  # by name: the same, the other way round
        self._indexed: set[str] = set()
        self._unfit: dict[str, CartridgeError] = {}
        self.quarantined: dict[str, str] = {}
        """Reasons by digest; such cartridges are not served."""
        self._noted: set[str] = set()
        self._retired: dict[str, float] = {}
        self._removed: list[str] = []
        self._sequence = 0
        self._lock = threading.RLock()
        self._pending: dict[str, tuple[Location, float]] = {}
        self._fetching: Future | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cartridge-manifest")

    def refresh(self) -> list[str]:
        """Take in what changed in the registry and the quarantine; return the digests that were removed from it.

        Blocks for local reads only: the manifests of remote artefacts that are not here yet are fetched in the
        background. Raises `RegistryError`; everything is as it was then.
        """
        changes = self._registry.changes(self._sequence)
        with self._lock:
            self._sequence = changes.sequence
            gone = list(changes.gone)
            if changes.whole:
                present = {row.name for row in changes.present}
                gone = [name for name in self._digests if name not in present]
            for row in changes.present:
                self._take(row)
            for name in gone:
                self._remove(name)
            # Without those that another name of this look brought back.
            removed, self._removed = [d for d in dict.fromkeys(self._removed) if d in self._retired], []
            self._follow_quarantine()
            now = self._clock()
            for digest in [d for d, until in self._retired.items() if until <= now]:
                self._forget(digest)
        self._fetch_pending()
        return removed

    def add(self, name: str | None, digest: str, root: Path, location: str) -> None:
        """Make a cartridge findable, or note why not. `name` is its `id@version`, if it is registered."""
        with self._lock:
            self._name(name, digest)
            try:
                manifest = artifact.load_manifest(root, digest, payload=location == str(root))
                self._check_fits(manifest.fingerprint, manifest.kind)
                if digest not in self.quarantined and (reason := self._quarantine.reason(digest)):
                    self.quarantined[digest] = f"quarantined: {reason}"
                    self._noted.add(digest)
                # A document that is not registered answers those who name it, not every prompt that begins like it.
                if digest not in self._indexed and manifest.kind != "tokens" and (name or manifest.kind == "trained"):
                    self.index.add(manifest, artifact.load_token_ids(manifest, root).tolist())
                    self._indexed.add(digest)
            except CartridgeError as error:
                if digest not in self._cartridges or digest in self._retired:  # else it lies elsewhere, sound
                    self._unfit[digest] = error
                logger.warning("cartridge %s is not served: %s", name or digest, error)
                return
            self._unfit.pop(digest, None)
            self._retired.pop(digest, None)
            self._cartridges[digest] = Cartridge(manifest, root, location)

    def keep(self, tag: str) -> None:
        """Let the cartridges of a tag that were removed stay for another `grace_s`: somebody uses them."""
        with self._lock:
            for digest in self._retired.keys() & set(tag.split(".")):
                self._retired[digest] = self._clock() + self._grace_s

    def knows(self, digest: str) -> bool:
        """Whether a cartridge can be served, were it not for a quarantine."""
        return digest in self._cartridges

    def quarantine(self, digest: str, reason: str) -> None:
        """Serve a cartridge no more, in this process and in those that see the same quarantine."""
        with self._lock:
            if digest in self.quarantined:
                return
            self.quarantined[digest] = reason
            self._quarantine.put(digest, reason)
            if self._quarantine.reason(digest) is not None:
                self._noted.add(digest)
            cartridge = self._cartridges.get(digest)
        logger.error("cartridge %s is quarantined: %s", cartridge.manifest.name if cartridge else digest, reason)

    def refusal(self, tag: str) -> CartridgeError | None:
        """Return why a cartridge or chain will not be served, None if it may be."""
        for digest in tag.split("."):
            if digest in self._unfit:
                return self._unfit[digest]
            if digest in self.quarantined:
                return CartridgeError(self.quarantined[digest])
        try:
            known = self.derive(tag) is not None
        except CartridgeError as error:
            return error
        return None if known else CartridgeNotFound("a cartridge of it is not there")

    def segments(self, tag: str) -> list[Segment]:
        """Return the cartridges that a tag names, each at its place; empty if one is not there or quarantined."""
        segments, offset = [], 0
        for digest in tag.split("."):
            cartridge = self._cartridges.get(digest)
            if cartridge is None or digest in self.quarantined:
                return []
            segments.append(Segment(cartridge, offset))
            offset += cartridge.manifest.positions
        return segments

    def derive(self, tag: str | None) -> int | None:
        """Make the chunks of a tag findable and return how many of them must be had together or not at all.

        None for a tag of which a cartridge is not there or quarantined: the others must not answer in its place.
        Raises `ChunkSizeMismatch` or `UnsupportedModel` for cartridges that cannot stand in that order.
        """
        if tag is None:
            return 0
        segments = self.segments(tag)
        if not segments:
            return None
        end = trained_end = 0
        for segment in segments:
            end = segment.offset + segment.cartridge.manifest.positions
            if segment.cartridge.manifest.kind == "trained":
                trained_end = end
        chunk = self._chunk_tokens
        whole = end // chunk
        needed = -(-trained_end // chunk)
        if needed > whole:
            raise ChunkSizeMismatch(
                f"the chain has {end} positions, of which the last {end % chunk} end in a trained cartridge and do not "
                f"fill a chunk of {chunk}; put a document of at least {chunk - end % chunk} tokens behind it"
            )
        if not self.index.has(tag):
            first = segments[0].cartridge.manifest
            for segment in segments[1:]:
                check_shift(segment.cartridge.manifest.fingerprint.rope)
            ids = [i for s in segments for i in artifact.load_token_ids(*s.cartridge[:2]).tolist()]
            own = first.positions // chunk
            keys = [ChunkKey(first.digest if i < own else tag, i) for i in range(whole)]
            with self._lock:
                self.index.add_chain(tag, ids, keys)
        return needed

    def names(self) -> list[str]:
        """Return `id@version` of every registered cartridge that is served now."""
        with self._lock:
            served = [d for d in self._cartridges if d not in self.quarantined and d not in self._unfit]
            return [name for digest in served for name in self._names[digest]]

    def refused(self) -> dict[str, str]:
        """Return the reason for every registered cartridge that is not served, by `id@version`."""
        with self._lock:
            reasons = {digest: str(error) for digest, error in self._unfit.items()} | self.quarantined
            return {name: why for digest, why in reasons.items() for name in self._names.get(digest, ())}

    def close(self) -> None:
        """Stop fetching manifests."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _take(self, row: Location) -> None:
        """Add one row of the registry, or put it on the list of those whose manifest has to be fetched first."""
        self._pending.pop(row.name, None)
        if not Sources.is_remote(row.location):
            self.add(row.name, row.digest, Path(row.location), row.location)
        elif (root := self._mirror.known(row.location)) and _digest(root) == row.digest:
            self.add(row.name, row.digest, root, row.location)
        else:
            self._pending[row.name] = (row, 0.0)

    def _fetch_pending(self) -> None:
        with self._lock:
            busy = self._fetching is not None and not self._fetching.done()
            due = [row for row, at in self._pending.values() if at <= self._clock()]
            if due and not busy:
                self._fetching = self._pool.submit(self._fetch, due)

    def _fetch(self, rows: list[Location]) -> None:
        for row in rows:
            try:
                root = self._mirror.fetch(row.location)
                artifact.load_manifest(root, row.digest, payload=False)
            except CartridgeError as error:
                logger.warning("the manifest of %s was not fetched: %s", row.name, error)
                with self._lock:
                    if self._is_pending(row):
                        self._name(row.name, row.digest)
                        if row.digest not in self._cartridges:
                            self._unfit[row.digest] = error
                        self._pending[row.name] = (row, self._clock() + _RETRY_S)
                continue
            with self._lock:
                if self._is_pending(row):
                    del self._pending[row.name]
                    self.add(row.name, row.digest, root, row.location)

    def _is_pending(self, row: Location) -> bool:
        """Whether a manifest is still wanted: its row may have been removed or replaced while it was fetched."""
        return row.name in self._pending and self._pending[row.name][0] == row

    def _name(self, name: str | None, digest: str) -> None:
        names = self._names.setdefault(digest, [])
        if name is not None and name not in names:
            self._remove(name)  # removed and registered again with other content, between two looks
            names.append(name)
            self._digests[name] = digest

    def _remove(self, name: str) -> None:
        """Take a name away, and retire its digest if that was the last one. The lock is held."""
        self._pending.pop(name, None)
        digest = self._digests.pop(name, None)
        if digest is None:
            return
        self._names[digest].remove(name)
        if self._names[digest]:
            return
        self.index.hide(digest)
        self._indexed.discard(digest)
        self._retired[digest] = self._clock() + self._grace_s
        self._removed.append(digest)

    def _forget(self, digest: str) -> None:
        del self._retired[digest]
        self._cartridges.pop(digest, None)
        if not self._names[digest]:  # else it was registered again where it is not sound
            del self._names[digest]
            self._unfit.pop(digest, None)
        self.index.forget(digest)

    def _follow_quarantine(self) -> None:
        """Take in what other processes, or a person, put into the quarantine or lifted from it."""
        noted = self._quarantine.digests()
        for digest in self._noted - noted:
            self.quarantined.pop(digest, None)
            logger.info("the quarantine of %s was lifted", digest)
        for digest in noted - self.quarantined.keys():
            if digest in self._cartridges:
                self.quarantined[digest] = f"quarantined: {self._quarantine.reason(digest)}"
        self._noted = noted

    def _check_fits(self, fingerprint: Fingerprint, kind: str) -> None:
        if differences := fingerprint.differences(self._fingerprint):
            raise ModelMismatch(f"made for another model than the one served: {'; '.join(differences)}")
        if kind == "trained" and not self._allow_trained:
            raise UnsupportedEngine(
                "a trained cartridge needs kv_load_failure_policy: fail, since nothing can compute it; this engine "
                "recomputes what it cannot load"
            )


def _digest(root: Path) -> str | None:
    try:
        return artifact.load_manifest(root, payload=False).digest
    except CartridgeError:
        return None
