"""Catalog: the cartridges that one engine can be served, kept up to date with the registry and the quarantine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from .. import errors
from ..artifact import reading
from ..artifact.cartridge import Cartridge, Place, Segment
from ..artifact.location import is_remote
from ..artifact.lru import Lru
from ..artifact.model import Fingerprint, check_shift
from ..errors import ArtifactError, CartridgeError, CartridgeNotFound
from .entries import Entries, Entry
from .index import ChunkKey, Hasher, KeyIndex
from .manifest_cache import ManifestCache
from .quarantine import ProcessQuarantine, Quarantine
from .read_queue import ReadQueue
from .registry import Registry, RegistryEntry
from .rows import PERMANENT, Recalled, Row, RowReader
from .workers import Workers

logger = logging.getLogger(__name__)

_KEPT_FROM = 1000
"""Cartridges from which on what was read of them is kept: fewer are read anew at every start, in less than a second."""
_KEPT_PARTS = 100
"""Kept again once one in so many was read since."""
_MAX_MANIFESTS = 256
"""Manifests that are kept; of a large model each is some 100 KiB."""


class Needed(NamedTuple):
    """What of a cartridge or chain must be had together or not at all: up to the end of its last trained cartridge."""

    chunks: int
    """Whole chunks."""
    tail: int
    """Positions behind the last whole chunk."""


class Catalog:
    """Cartridges by digest, and the index that finds their chunks.

    A cartridge that does not fit the engine or is not sound is left out or quarantined, with a reason; the others are
    served. One that is removed from the registry leads no new prompt, but stays for a while for requests that have it.
    Of a cartridge that nobody asks for only a `Row` is known; its manifest is read, and the row compared with it, when
    the first of its chunks is loaded. One that is found to be wrong then is refused as if it had been found at the start.
    """

    def __init__(
        self,
        registry: Registry,
        quarantine: Quarantine,
        copies: ManifestCache,
        *,
        fingerprint: Fingerprint,
        hasher: Hasher,
        chunk_tokens: int,
        allow_trained: bool,
        grace_s: float,
        cache_dir: Path,
        accept_weights: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Knows nothing before the first `refresh`. What is removed, or was never registered, stays for `grace_s`.

        Under `cache_dir` is kept what the next start need not read.
        """
        self.index = KeyIndex(hasher, chunk_tokens)
        self._registry, self._copies = registry, copies
        self._chunk_tokens = chunk_tokens
        self._entries = Entries(grace_s, clock)
        self._quarantine = ProcessQuarantine(quarantine, self._location_of)
        self.forgive = self._quarantine.forgive
        self._manifests: Lru[str, Cartridge] = Lru(_MAX_MANIFESTS)
        self._manifest_reads = Workers("cartridge-manifest", 4)
        """A digest's manifest is read once, however many want it, and they alone wait for it."""
        self._removed: list[str] = []
        self._sequence, self._pruned, self._unkept = 0, False, 0
        self._lock, self._refreshing = threading.RLock(), threading.Lock()
        self._queue = ReadQueue(self._read_queued, clock)
        self._reader = RowReader(
            self.index, copies, fingerprint, directory=cache_dir, registry=registry.path, allow_trained=allow_trained,
            accept_weights=accept_weights,
        )  # fmt: skip

    # What changes.

    def refresh(self) -> list[str]:
        """Take in what changed in the registry and the quarantine; return the digests that were removed from it.

        Blocks for local reads only, and for some seconds at most: the background reads the rest, and the manifests of
        remote artefacts that have no copy here. Raises `RegistryError`; nothing is changed then.
        """
        with self._refreshing:
            return self._refresh()

    def _refresh(self) -> list[str]:
        changes = self._registry.changes(self._sequence)
        present, gone = changes.present, changes.gone
        recalled = self._recall(len(present)) if changes.whole else Recalled()
        with self._lock:
            self._sequence = changes.sequence
            if changes.whole:
                names = {one.name for one in present}
                gone = [name for name in (*self._entries.digests, *self._queue) if name not in names]
                rows = {row.digest: row for row in recalled.rows}
                present = [one for one in present if not self._adopt(one, rows.get(one.digest), recalled)]
            # What is served from the place of a name that goes is read from that of another.
            present += self._registry.having(filter(None, map(self._entries.digests.get, gone)))
            self._queue.add(present)
        if not self._pruned:
            self._pruned = True
            remote = {one.location for one in changes.present if is_remote(one.location)}
            self._queue.later(lambda: self._copies.prune(remote))
        self._queue.read_on([one for one in present if not is_remote(one.location) or self._copies.known(one.location)])
        with self._lock:
            for name in gone:
                self._remove(name)
            # Without those that another name of this look brought back.
            removed, self._removed = [d for d in dict.fromkeys(self._removed) if self._entries.is_retired(d)], []
            self._quarantine.follow(self.knows)
            for digest in self._entries.drop_expired():
                self._manifests.pop(digest)
                self.index.forget(digest)
        if self._unkept * _KEPT_PARTS >= len(self._entries.digests):
            self._queue.later(self._keep)
        return removed

    def add(self, digest: str, place: Place) -> None:
        """Read a cartridge that is not registered and make it findable by its tag, or note why not. Blocks to read."""
        try:
            row, cartridge = self._reader.read(digest, place)
        except CartridgeError as error:
            self._refuse(None, digest, error)
        else:
            with self._lock:
                self._put(None, row, cartridge)

    def keep(self, tag: str) -> None:
        """Let the cartridges of a tag that are not registered stay for another `grace_s`: somebody uses them."""
        with self._lock:
            for digest in tag.split("."):
                self._entries.keep(digest)

    def quarantine(self, digest: str, reason: str, location: str) -> bool:
        """Serve a cartridge no more from this place, in this process and in those that see the same quarantine.

        Returns whether it is served from another place from now on, where a sound copy is registered. Blocks to read it.
        """
        if self._quarantine.put(digest, reason, location):
            logger.error("cartridge %s at %s is quarantined: %s", self.names_of(digest) or digest, location, reason)
        for one in self._registry.having([digest]):
            if self._location_of(digest) == location and not self._quarantine.holds(digest, one.location):
                self._queue.add([one])
                self._read_queued(one)
        return self._location_of(digest) != location

    def _location_of(self, digest: str) -> str | None:
        row = self._entries.row(digest)
        return None if row is None else row.location

    def close(self) -> None:
        """Stop reading. Blocks for the artefact that is being read, and to keep what was read of others."""
        self._queue.close()
        self._keep()

    # What there is.

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Reasons by digest; such cartridges are not served."""
        return self._quarantine.reasons

    def knows(self, digest: str) -> bool:
        """Whether a cartridge can be served, were it not for a quarantine."""
        return self._entries.row(digest) is not None

    def is_at_hand(self, tag: str) -> bool:
        """Whether `require` answers without reading anything."""
        digests = tag.split(".")
        return len(digests) == 1 or self.index.has(tag) or not all(map(self.knows, digests))

    def locations(self, tag: str) -> set[str]:
        """Return where those cartridges of a tag lie that are known."""
        return {location for digest in tag.split(".") if (location := self._location_of(digest))}

    def is_remote(self, tag: str) -> bool:
        """Whether a cartridge of a tag has to be fetched over the network."""
        return any(map(is_remote, self.locations(tag)))

    def names(self) -> list[str]:
        """Return `id@version` of every registered cartridge that is served now."""
        with self._lock:
            return sorted(self._entries.digests.keys() - self.refused().keys())

    def names_of(self, digest: str) -> tuple[str, ...]:
        """Return every `id@version` that has a digest; none for one that is not registered."""
        return self._entries.names_of(digest)

    def chunks_of(self, digest: str) -> int | None:
        """Return how many chunks a cartridge that can be served has; None for any other."""
        row = self._entries.row(digest)
        return None if row is None else self.index.chunks_in(row.positions, row.kind)

    def refused(self) -> dict[str, str]:
        """Return the reason for every registered cartridge that is not served, by `id@version`."""
        with self._lock:
            return self._entries.refused(self.quarantined)

    def counts(self) -> tuple[int, int]:
        """Return the lengths of `names` and `refused`; its cost grows with the latter alone."""
        with self._lock:
            refused = len(self.refused())
            return len(self._entries.digests) - refused, refused

    def refusal(self, tag: str) -> CartridgeError | None:
        """Return why a cartridge or chain will not be served, None if it may be."""
        try:
            self.require(tag)
        except CartridgeError as error:
            return error
        return None

    def require(self, tag: str) -> Needed:
        """`derive`, but raise why a cartridge or chain will not be served."""
        for digest in tag.split("."):
            error = self._entries.errors.get(digest)
            if error is None and (reason := self.quarantined.get(digest)) is not None:
                error = CartridgeError(reason)
            if error is not None:
                error.digest = digest
                raise error.with_traceback(None)  # which would grow each time
        needed = self.derive(tag)
        if needed is None:
            raise CartridgeNotFound("a cartridge of it is not there")
        return needed

    def segments(self, tag: str) -> list[Segment]:
        """Return the cartridges that a tag names, each at its place; empty if one is not there or quarantined.

        Blocks for local reads where a manifest is not at hand; one that is not what was registered is refused from now on.
        """
        segments, offset = [], 0
        for digest in tag.split("."):
            cartridge = None if digest in self.quarantined else self._cartridge(digest)
            if cartridge is None:
                return []
            segments.append(Segment(cartridge, offset))
            offset += cartridge.manifest.positions
        return segments

    def derive(self, tag: str | None) -> Needed | None:
        """Make the chunks of a tag findable and return what of it must be had together or not at all.

        None for a tag of which a cartridge is not there or quarantined: the others must not answer in its place.
        Raises `UnsupportedModel` for cartridges that cannot stand in that order. Blocks for local reads, and to hash it, where
        a chain is new; others pass meanwhile.
        """
        if tag is None:
            return Needed(0, 0)
        rows = []
        for digest in tag.split("."):
            row = self._entries.row(digest)
            if row is None or digest in self.quarantined:
                return None
            rows.append(row)
        end = trained_end = 0
        for row in rows:
            end += row.positions
            if row.kind == "trained":
                trained_end = end
        chunk = self._chunk_tokens
        whole = end // chunk
        needed = Needed(min(-(-trained_end // chunk), whole), max(trained_end - whole * chunk, 0))
        if len(rows) > 1 and not self.index.has(tag):
            segments = self.segments(tag)
            if not segments:
                return None
            for segment in segments[1:]:
                check_shift(segment.cartridge.manifest.fingerprint.rope)
            ids = [i for s in segments for i in reading.load_token_ids(*s.cartridge[:2]).tolist()]
            own = rows[0].positions // chunk
            keys = [ChunkKey(rows[0].digest if i < own else tag, i) for i in range(whole + bool(needed.tail))]
            self.index.add_chain(tag, ids, keys)
        return needed

    # Reading.

    def _read_queued(self, request: RegistryEntry) -> None:
        try:
            row, cartridge = self._reader.find(request.digest, request.location)
        except CartridgeError as error:
            self._give_up(request, error)
        else:
            with self._lock:
                if self._queue.take(request):
                    self._put(request.name, row, cartridge, request.rank)
                    self._unkept += 1

    def _put(self, name: str | None, row: Row, cartridge: Cartridge, rank: str = "") -> None:
        """Have a cartridge served that was read, unless it lies elsewhere too and this copy is quarantined."""
        entry = self._name(name, row.digest)
        if not self._quarantine.holds(row.digest, row.location) or entry.row is None:
            self._manifests.put(row.digest, cartridge)
            self._serve(entry, row, rank)
            self._quarantine.look_up(())

    def _serve(self, entry: Entry, row: Row, rank: str) -> None:
        self._entries.serve(row)
        if row.kind != "tokens":
            # A document that is not registered answers those who name it, not every prompt that begins like it.
            self.index.add(row.digest, row.hashes, open_to_all=row.is_open and bool(entry.names), rank=rank)

    def _give_up(self, request: RegistryEntry, error: CartridgeError) -> None:
        with self._lock:
            if not self._queue.holds(request):
                return
            if isinstance(error, PERMANENT):
                is_new = self._queue.take(request)
                self._unkept += 1
            else:
                is_new = self._queue.put_back(request, str(error))
            self._refuse(request.name, request.digest, error, quiet=not is_new)

    def _refuse(self, name: str | None, digest: str, error: CartridgeError, *, quiet: bool = False) -> None:
        """Note why a cartridge is not served, unless it lies elsewhere, sound."""
        error.__cause__ = error.__context__ = None  # they hold what was read
        with self._lock:
            self._name(name, digest)
            self._entries.refuse(digest, error.with_traceback(None))
        if not quiet:
            logger.warning("cartridge %s is not served: %s", name or digest, error)

    def _cartridge(self, digest: str) -> Cartridge | None:
        """Return a cartridge with its manifest, None if it is not there or not what it was."""
        if (found := self._manifests.get(digest)) or not self.knows(digest):
            return found
        return self._manifest_reads.submit(digest, lambda: self._read_again(digest)).result()

    def _read_again(self, digest: str) -> Cartridge | None:
        row = self._entries.row(digest)
        if (found := self._manifests.get(digest)) or row is None:
            return found
        try:
            fresh, cartridge = self._reader.read(digest, row.place)
            if fresh != row:  # served at once it could still answer a lookup that went by the wrong row
                self._reader.forget()
                raise ArtifactError(f"{cartridge.manifest.name} is not what was kept of it; read again soon")
        except CartridgeError as error:
            self._disown(row, error)
            return None
        with self._lock:
            return self._manifests.put(digest, cartridge) if self._entries.row(digest) == row else None

    def _disown(self, row: Row, error: CartridgeError) -> None:
        """Stop serving a cartridge whose artefact is not what its row says, and read it again soon.

        Its chunks in memory were verified, and stay findable for the requests that were promised them.
        """
        with self._lock:
            if self._entries.row(row.digest) != row:
                return
            names = self.names_of(row.digest)
            self._entries.add(row.digest, None).row = None
            self.index.hide(row.digest)
            self._refuse(next(iter(names), None), row.digest, error)
            for one in self._registry.having([row.digest]):
                self._queue.put_back(one, str(error))

    # What an earlier start read.

    def _recall(self, count: int) -> Recalled:
        """Return what can be said of artefacts without reading them."""
        with self._lock:
            if rows := self._entries.rows():
                return Recalled(tuple(rows))
        return self._reader.recall() if count >= _KEPT_FROM else Recalled()

    def _adopt(self, one: RegistryEntry, row: Row | None, recalled: Recalled) -> bool:
        """Take in what is known of a registered cartridge; False where nothing is. The lock is held."""
        if one.digest in recalled.refusals:
            kind, message = recalled.refusals[one.digest]
            self._name(one.name, one.digest)
            self._entries.refuse(one.digest, getattr(errors, kind)(message))
            return True
        if row is None or self._entries.is_retired(one.digest) or not self._reader.is_likely(row, one):
            return False
        self._queue.drop(one.name)
        self._serve(self._name(one.name, row.digest), row, one.rank)
        return True

    def _keep(self) -> None:
        """Keep what was read for the next start, where it is much."""
        with self._lock:
            rows, refused = self._entries.rows(), dict(self._entries.errors)
            unkept, self._unkept = self._unkept, 0
        if unkept and len(rows) + len(refused) >= _KEPT_FROM:
            self._reader.keep(rows, refused)

    # Names. The lock is held.

    def _name(self, name: str | None, digest: str) -> Entry:
        """Return the entry of a digest, which has a name from now on; None is none."""
        if name is not None and self._entries.digests.get(name, digest) != digest:
            self._remove(name)  # removed and registered again with other content, between two looks
        return self._entries.add(digest, name)

    def _remove(self, name: str) -> None:
        """Take a name away; without any its cartridge leads no new prompt, and is forgotten after a while."""
        self._queue.drop(name)
        if (digest := self._entries.remove(name)) is not None:
            self.index.hide(digest)
            self._removed.append(digest)
