"""Entries: which cartridges one engine can be served, kept up to date with the registry and the quarantine."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import msgspec

from ..artifact.cartridge import Cartridge, Place
from ..artifact.location import is_remote
from ..artifact.lru import Lru
from ..artifact.model import Fingerprint
from ..errors import ArtifactError, CartridgeError
from .index import Hasher, KeyIndex
from .manifest_cache import ManifestCache
from .quarantine import Quarantine
from .registry import Registry, RegistryEntry
from .rows import PERMANENT, Row, RowReader
from .workers import Workers, go_on, note

logger = logging.getLogger(__name__)

_KEPT_FROM = 1000
"""Cartridges from which on what was read of them is kept: fewer are read anew at every start, in less than a second."""
_KEPT_PARTS = 100
"""Kept again once one in so many was read since."""
_MAX_MANIFESTS = 256
"""Manifests that are kept; of a large model each is some 100 KiB."""
_RETRY_S = 20.0
"""How long after a failure an artefact is read again."""
_AT_ONCE_S = 2.0
"""How long a look waits for what is new; the background reads the rest."""
_CLOSE_S = 1.0


class Entry(msgspec.Struct, gc=False):
    """What is known of one digest. Without garbage collection: there may be 100,000, and none refers to another."""

    row: Row | None = None
    """None where it cannot be served."""
    registered: tuple[RegistryEntry, ...] = ()
    """Every version that has this digest, as of the last look."""
    error: CartridgeError | None = None
    """Why it is not served."""
    until_s: float = math.inf
    """When it is dropped. One that is not registered is retired, and so is one that is again, and was not found sound yet."""

    @property
    def is_retired(self) -> bool:
        """Whether it will be dropped."""
        return self.until_s < math.inf


class Entries:
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
        accept_weights: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Knows nothing before the first `refresh`. What is removed, or was never registered, stays for `grace_s`.

        Under `cache_dir` is kept what the next start need not read.
        """
        self.index = KeyIndex(hasher, chunk_tokens)
        self._registry, self._copies = registry, copies
        self._chunk_tokens, self._grace_s, self._clock = chunk_tokens, grace_s, clock
        self._entries: dict[str, Entry] = {}
        self._revision: object = None
        """The registry's, at the last look."""
        self._unread: dict[RegistryEntry, float] = {}
        """When each registered version is to be read that was not yet, or could not be."""
        self._quarantine, self.forgive = quarantine, quarantine.forgive
        self._manifests: Lru[str, Cartridge] = Lru(_MAX_MANIFESTS)
        self._reads = Workers("cartridge-manifest", 2, one_a_group=True)
        self._unkept = 0
        self._lock, self._refreshing = threading.RLock(), threading.Lock()
        self._reader = RowReader(
            self.index, copies, fingerprint, directory=cache_dir, registry=registry.path, allow_trained=allow_trained,
            accept_weights=accept_weights
        )  # fmt: skip

    # What changes.

    def refresh(self) -> list[str]:
        """Take in what changed in the registry and the quarantine; return the digests that were removed from it.

        Blocks for local reads only, and for some seconds at most: the background reads the rest, and the manifests of
        remote artefacts that have no copy here. Raises `RegistryError`; nothing is changed then.
        """
        with self._refreshing:
            look = self._registry.look(self._revision)
            for digest in self._quarantine.follow() & self.quarantined:
                self._doubt(digest)
            changed = self._take_in(*look) if look else set()
            with self._lock:
                removed = [digest for digest in changed if not self._entries[digest].registered]
                for digest in removed:
                    self._entries[digest].until_s = self._clock() + self._grace_s
                self._drop_expired()
            self._read_due()
            if self._unkept * _KEPT_PARTS >= len(self._entries):
                self._begin_to_keep()
            return removed

    def _take_in(self, revision: object, rows: Sequence[RegistryEntry]) -> set[str]:
        """Compare the registry with what it was, have what is new read, and return the digests of which rows changed.

        Waits for what is new for some seconds at most.
        """
        is_first = self._revision is None
        recalled = {row.digest: row for row in self._reader.recall()} if is_first and len(rows) >= _KEPT_FROM else {}
        before = {one for entry in list(self._entries.values()) for one in entry.registered}
        changed = {one.digest for one in before.symmetric_difference(rows)}
        registered: dict[str, list[RegistryEntry]] = {digest: [] for digest in changed}
        for one in rows:
            if one.digest in changed:
                registered[one.digest].append(one)
        new: list[RegistryEntry] = []
        with self._lock:
            self._revision = revision
            self._unread = {one: -math.inf for one in self._unread if one.digest not in changed}
            for digest, having in registered.items():
                entry = self._entries.setdefault(digest, Entry())
                entry.registered = tuple(having)
                row = recalled.get(digest)
                for one in having:  # where it lies may have changed, so that it is read from another place
                    if row and (one.location, one.kind, one.positions) == (row.location, row.kind, row.positions):
                        self._serve(entry, row, one.rank)
                    else:
                        new.append(one)
            self._unread |= dict.fromkeys(new, -math.inf)
        if is_first:
            remote = {one.location for one in rows if is_remote(one.location)}
            self._reads.submit(self._copies, lambda: go_on(lambda: self._copies.prune(remote)))
        begun = [self._begin(one) for one in new if not is_remote(one.location) or self._copies.known(one.location)]
        if wait(begun, _AT_ONCE_S).not_done:
            logger.info("%d cartridges are still to be read; that goes on in the background", len(self._unread))
        return changed

    def _drop_expired(self) -> None:
        """Drop the entries whose time is over; of one that is registered again the error stays. The lock is held."""
        now = self._clock()
        for digest in [digest for digest, entry in self._entries.items() if entry.until_s <= now]:
            if (entry := self._entries[digest]).registered:
                entry.row, entry.until_s = None, math.inf
            else:
                del self._entries[digest]
            self._manifests.pop(digest)
            self.index.forget(digest)

    def add(self, digest: str, place: Place) -> None:
        """Read a cartridge that is not registered and make it findable by its tag, or note why not. Blocks to read."""
        try:
            row, cartridge = self._reader.read(digest, place)
        except CartridgeError as error:
            self._refuse(self._unregistered(digest), digest, error)
        else:
            with self._lock:
                self._put(self._unregistered(digest), row, cartridge)

    def _unregistered(self, digest: str) -> Entry:
        """Return the entry of a digest, one that stays for a while where there was none."""
        with self._lock:
            return self._entries.setdefault(digest, Entry(until_s=self._clock() + self._grace_s))

    def keep(self, tag: str) -> None:
        """Let the cartridges of a tag that are not registered stay for another `grace_s`: somebody uses them."""
        with self._lock:
            for digest in tag.split("."):
                if (entry := self._entries.get(digest)) and entry.is_retired:
                    entry.until_s = self._clock() + self._grace_s

    def quarantine(self, digest: str, reason: str, location: str) -> bool:
        """Serve a cartridge no more from this place, in this process and in those that see the same quarantine.

        Returns whether it is served from another place from now on, where a sound copy is registered. Blocks to read it.
        """
        for one in self._doubt(digest, location):  # first, so that what loads meanwhile finds a copy
            if self._location_of(digest) == location:
                self._read(one)
        if self._quarantine.put(digest, reason, location):
            names = [one.name for one in self.registered(digest)]
            logger.error("cartridge %s at %s is quarantined: %s", names or digest, location, reason)
        return self._location_of(digest) != location

    def _doubt(self, digest: str, location: str = "") -> list[RegistryEntry]:
        """Have all copies of a digest read again that are not quarantined, but that at `location`, and return them."""
        with self._lock:
            bad = {(digest, location), *self._quarantine.notes}
            others = [one for one in self.registered(digest) if (digest, one.location) not in bad]
            self._unread = dict.fromkeys(others, -math.inf) | self._unread
            return others

    def _location_of(self, digest: str) -> str | None:
        row = self._row(digest)
        return row.location if row else None

    def _row(self, digest: str) -> Row | None:
        """Return the row of a cartridge that can be served, None for any other."""
        entry = self._entries.get(digest)
        return entry.row if entry else None

    def close(self) -> None:
        """Stop reading. Blocks for what is being read, and to keep what was read, but not for what hangs."""
        wait([self._begin_to_keep()], _CLOSE_S)
        self._reads.close(_CLOSE_S)

    # What there is.

    def why_quarantined(self, digest: str) -> str | None:
        """Return why the copy must not be served that a digest would be served from; None where it may."""
        reason = self._quarantine.notes.get((digest, self._location_of(digest) or ""))
        return None if reason is None else f"quarantined: {reason}"

    @property
    def quarantined(self) -> set[str]:
        """The digests that are not served since their copies are quarantined, at a cost that grows with all notes."""
        return {digest for digest, _ in self._quarantine.notes if self.why_quarantined(digest)}

    def knows(self, digest: str) -> bool:
        """Whether a cartridge can be served, were it not for a quarantine."""
        return self._row(digest) is not None

    def serves(self, digest: str) -> bool:
        """Whether a cartridge can be served now."""
        return self.knows(digest) and not self.why_quarantined(digest)

    def is_in_place(self, digest: str) -> bool:
        """Whether a cartridge can be served from where the registry has it."""
        return self._location_of(digest) in {one.location for one in self.registered(digest)}

    def names(self) -> list[str]:
        """Return `id@version` of every registered cartridge that is served now."""
        quarantined = self.quarantined
        with self._lock:
            return sorted(
                one.name
                for digest, entry in self._entries.items()
                if entry.row and not entry.is_retired and digest not in quarantined
                for one in entry.registered
            )

    def registered(self, digest: str) -> tuple[RegistryEntry, ...]:
        """Return every registered version that has a digest."""
        entry = self._entries.get(digest)
        return entry.registered if entry else ()

    def refused(self) -> dict[str, str]:
        """Return the reason for every registered cartridge that is not served, by `id@version`."""
        quarantined = self.quarantined
        with self._lock:
            return {
                one.name: str(why)
                for digest, entry in self._entries.items()
                if (why := self.why_quarantined(digest) if digest in quarantined else entry.error)
                for one in entry.registered
            }

    # Reading.

    def _read_due(self) -> None:
        """Have all that is due read in the background."""
        self._reads.relieve()
        now = self._clock()
        with self._lock:
            due = [one for one, due_s in self._unread.items() if due_s <= now]
        for one in due:
            self._begin(one)

    def _begin(self, one: RegistryEntry) -> Future[None]:
        return self._reads.submit(one, lambda: self._read(one), {one.location})

    def _read(self, one: RegistryEntry) -> None:
        """Read a registered cartridge, if it still is to be read, and have it served or note why not."""
        if one not in self._unread:
            return
        try:
            row, cartridge = self._reader.find(one.digest, one.location)
        except Exception as error:  # whatever it is, the others must be read
            self._give_up(one, error)
        else:
            with self._lock:
                if self._unread.pop(one, None) is not None:  # else it was removed or replaced meanwhile
                    self._put(self._entries[one.digest], row, cartridge, one.rank)
                    self._unkept += 1

    def _give_up(self, one: RegistryEntry, error: Exception) -> None:
        if not isinstance(error, CartridgeError):
            note(error)
            error = CartridgeError(str(error) or type(error).__name__)
        with self._lock:
            if self._unread.pop(one, None) is not None:
                if not isinstance(error, PERMANENT):
                    self._unread[one] = self._clock() + _RETRY_S
                self._refuse(self._entries[one.digest], one.name, error)

    def _put(self, entry: Entry, row: Row, cartridge: Cartridge, rank: str = "") -> None:
        """Have a cartridge served that was read, unless it lies elsewhere too and this copy is quarantined."""
        if not entry.row or (row.digest, row.location) not in self._quarantine.notes:
            self._manifests.put(row.digest, cartridge)
            self._serve(entry, row, rank)

    def _serve(self, entry: Entry, row: Row, rank: str) -> None:
        entry.row, entry.error = row, None
        entry.until_s = math.inf if entry.registered else self._clock() + self._grace_s
        if row.kind != "tokens":
            # A document answers every prompt that begins like it: as the base model computes it, and if it is registered.
            is_open = row.kind == "prefill" and not row.adapted and bool(entry.registered)
            self.index.add(row.digest, row.hashes, open_to_all=is_open, rank=rank)

    def _refuse(self, entry: Entry, name: str, error: CartridgeError) -> None:
        """Note why a cartridge is not served, unless it lies elsewhere, sound."""
        error.__cause__ = error.__context__ = None  # they hold what was read
        with self._lock:
            if not entry.row or entry.is_retired:
                if str(entry.error) != str(error):
                    logger.warning("cartridge %s is not served: %s", name, error)
                entry.error = error.with_traceback(None)

    def _cartridge(self, digest: str) -> Cartridge | None:
        """Return a cartridge with its manifest, None if it is not there or not what it was. May block to read it."""
        row = self._row(digest)
        if (found := self._manifests.get(digest)) or row is None:
            return found
        try:
            fresh, cartridge = self._reader.read(digest, Place(Path(row.root or row.location), row.location))
            if fresh != row:  # served at once it could still answer a lookup that went by the wrong row
                self._reader.forget()
                raise ArtifactError(f"{cartridge.manifest.name} is not what was kept of it; read again soon")
        except CartridgeError as error:
            self._disown(row, error)
            return None
        with self._lock:
            return self._manifests.put(digest, cartridge) if self._row(digest) == row else None

    def _disown(self, row: Row, error: CartridgeError) -> None:
        """Stop serving a cartridge whose artefact is not what its row says, and read it again soon.

        Its chunks in memory were verified, and stay findable for the requests that were promised them.
        """
        with self._lock:
            if self._row(row.digest) != row:
                return
            entry = self._entries[row.digest]
            entry.row = None
            self._refuse(entry, next((one.name for one in entry.registered), row.digest), error)
            for one in entry.registered:
                self._unread[one] = self._clock() + _RETRY_S

    def _begin_to_keep(self) -> Future[None]:
        return self._reads.submit(self._keep, lambda: go_on(self._keep))

    def _keep(self) -> None:
        """Keep what was read for the next start, where it is much."""
        with self._lock:
            rows = [entry.row for entry in self._entries.values() if entry.row and not entry.is_retired]
            unkept, self._unkept = self._unkept, 0
        if unkept and len(rows) >= _KEPT_FROM:
            self._reader.keep(rows)
