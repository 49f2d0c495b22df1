"""Catalog: the cartridges that one engine can be served, kept up to date with the registry and the quarantine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ..artifact import reading
from ..artifact.cartridge import Cartridge, Segment
from ..artifact.fingerprint import Fingerprint, check_shift
from ..artifact.location import is_remote
from ..errors import (
    ArtifactError,
    CartridgeError,
    CartridgeNotFound,
    ChunkSizeMismatch,
    ModelMismatch,
    UnsupportedEngine,
)
from .backlog import Backlog, Wanted
from .index import ChunkKey, Hasher, KeyIndex
from .quarantine import BadCopy, Quarantine
from .reader import Reader
from .registry import Location, Registry
from .snapshot import Row, Snapshot

logger = logging.getLogger(__name__)

_SNAPSHOT_FROM = 1000
"""Cartridges from which on a snapshot is kept: fewer are read anew at every start, in less than a second."""
_SNAPSHOT_SHARE = 100
"""A snapshot is written once this part of it is new: one in 100."""
_SNAPSHOT_EVERY_S = 60.0
"""How often it is written while much is read."""
_LOOK_AGAIN_S = 10.0
"""How often it is looked whether what is quarantined has other bytes on S3 now."""
_FOR_OTHERS = {error.__name__: error for error in (ModelMismatch, ChunkSizeMismatch, UnsupportedEngine)}
"""What does not change however often an artefact is read."""


class ManifestCopies(Protocol):
    """Local copies of what is small of artefacts on S3: their manifests and token ids."""

    def known(self, location: str) -> Path | None:
        """Return the directory of the copy that is here, however old, or None. Does not ask S3."""

    def fetch(self, location: str) -> Path:
        """Return the directory of a copy, made or renewed. Blocks while S3 is asked. Raises `CartridgeError`."""

    def payload_revision(self, location: str) -> str:
        """Return a text that changes whenever the payload does. Asks S3. Raises `SourceError`."""

    def prune(self, keep: Container[str]) -> None:
        """Remove the copies that nobody used for long, except those of the locations to `keep`. Never raises."""


class Catalog:
    """Cartridges by digest, and the index that finds their chunks.

    A cartridge that does not fit the engine or is not sound is left out or quarantined, with a reason; the others are
    served. What is removed from the registry is found no more, but stays for those who came before. Of a cartridge
    that nobody asks for only a `Row` is known; its manifest is read, and the row compared with it, when the first of its
    chunks is loaded. What is found to be wrong then is refused as if it had been found at the start.
    """

    def __init__(
        self,
        registry: Registry,
        quarantine: Quarantine,
        copies: ManifestCopies,
        *,
        fingerprint: Fingerprint,
        hasher: Hasher,
        chunk_tokens: int,
        allow_trained: bool,
        grace_s: float,
        snapshots: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Knows nothing before the first `refresh`. What is removed, or was never registered, stays for `grace_s`.

        `snapshots` is a directory that may be written, for what the next start need not read again.
        """
        self.index = KeyIndex(hasher, chunk_tokens)
        self._registry, self._quarantine, self._manifests = registry, quarantine, copies
        self._chunk_tokens, self._grace_s, self._clock = chunk_tokens, grace_s, clock
        self._rows: dict[str, Row] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._digests: dict[str, str] = {}  # by name: the same, the other way round
        self._unfit: dict[str, CartridgeError] = {}
        self._for_others: dict[str, Row] = {}
        """Of the unfit, those that always will be."""
        self.quarantined: dict[str, str] = {}
        """Reasons by digest; such cartridges are not served."""
        self._noted: set[str] = set()
        self._copies: dict[str, BadCopy] = {}
        """What on S3 caused a quarantine, by digest."""
        self._looked_again = float("-inf")
        self._retired: dict[str, float] = {}
        self._removed: list[str] = []
        self._sequence, self._looked, self._pruned = 0, False, False
        self._lock, self._refreshing = threading.RLock(), threading.Lock()
        self._reader = Reader(self.index, fingerprint, allow_trained=allow_trained)
        self._backlog = Backlog(self._read_wanted, self._save, clock)
        probe = list(map(hex, self.index.probe))
        facts = (probe, chunk_tokens, fingerprint, allow_trained, str(registry.path.absolute()))
        self._snapshot = Snapshot(snapshots, facts)
        self._unsaved, self._saved_at = 0, float("-inf")

    def refresh(self) -> list[str]:
        """Take in what changed in the registry and the quarantine; return the digests that were removed from it.

        Blocks for local reads only, and for some seconds at most: what else there is to read, and the manifests of
        remote artefacts that are not here yet, is read in the background. Raises `RegistryError`; everything is as it was
        then.
        """
        with self._refreshing:
            return self._refresh()

    def _refresh(self) -> list[str]:
        changes = self._registry.changes(self._sequence)
        present = changes.present
        known = self._known(present) if changes.whole else {}
        with self._lock:
            self._sequence = changes.sequence
            gone = changes.gone
            if changes.whole:
                names = {row.name for row in present}
                gone = [name for name in (*self._digests, *self._backlog) if name not in names]
                present = self._adopt(present, known)
            wanted = [Wanted(row.name, row.digest, row.location) for row in present]
            self._backlog.add(wanted)
        if not self._pruned:
            self._pruned = True
            remote = {row.location for row in changes.present if is_remote(row.location)}
            self._backlog.later(lambda: self._manifests.prune(remote))
        del known, changes, present
        self._backlog.read_some(wanted)
        with self._lock:
            for name in gone:
                self._remove(name)
            # Without those that another name of this look brought back.
            removed, self._removed = [d for d in dict.fromkeys(self._removed) if d in self._retired], []
            self._follow_quarantine()
            now = self._clock()
            for digest in [d for d, until in self._retired.items() if until <= now]:
                self._forget(digest)
        self._backlog.read_on(needed=self._is_snapshot_due())
        return removed

    def add(self, name: str | None, digest: str, root: Path, location: str) -> None:
        """Make a cartridge findable, or note why not. `name` is its `id@version`, if it is registered."""
        try:
            row, cartridge = self._reader.read(digest, root, location)
        except CartridgeError as error:
            self._refuse(name, digest, error)
        else:
            self._put(name, row, cartridge)

    def keep(self, tag: str) -> None:
        """Let the cartridges of a tag that are not registered stay for another `grace_s`: somebody uses them."""
        with self._lock:
            for digest in self._retired.keys() & set(tag.split(".")):
                self._retired[digest] = self._clock() + self._grace_s

    def knows(self, digest: str) -> bool:
        """Whether a cartridge can be served, were it not for a quarantine."""
        return digest in self._rows

    def is_at_hand(self, tag: str) -> bool:
        """Whether `require` answers without reading anything."""
        digests = tag.split(".")
        return len(digests) == 1 or self.index.has(tag) or not all(map(self.knows, digests))

    def locations(self, tag: str) -> set[str]:
        """Return where those cartridges of a tag lie that are known."""
        return {row.location for digest in tag.split(".") if (row := self._rows.get(digest)) is not None}

    def quarantine(self, digest: str, reason: str) -> None:
        """Serve a cartridge no more, in this process and in those that see the same quarantine.

        Where its bytes came from S3 it is served again once there are others. Blocks to ask S3 which ones they were.
        """
        row = self._rows.get(digest)
        copy = None
        if row is not None and is_remote(row.location):
            revision = ""
            with suppress(CartridgeError):
                revision = self._manifests.payload_revision(row.location)
            copy = BadCopy(row.location, revision)
        with self._lock:
            if digest in self.quarantined:
                return
            if copy is not None:  # before anybody is told: whoever puts it right from now on is heard
                self._copies[digest] = copy
                self._quarantine.put_copy(digest, copy)
            self.quarantined[digest] = reason
            self._quarantine.put(digest, reason)
            if self._quarantine.reason(digest) is not None:
                self._noted.add(digest)
            name = ", ".join(self._names.get(digest, ())) or digest
        logger.error("cartridge %s is quarantined: %s", name, reason)

    def forgive(self, digest: str) -> None:
        """Lift a quarantine that a copy on S3 caused; what is there now is checked when it is loaded. Else no change."""
        if digest in self._copies or self._quarantine.copy(digest) is not None:
            with suppress(OSError):
                self._quarantine.lift(digest)
            with self._lock:
                self._copies.pop(digest, None)
                self._noted.discard(digest)
                lifted = self.quarantined.pop(digest, None)
            if lifted is not None:
                logger.info("the quarantine of %s is lifted: it is fetched from S3 again", digest)

    def distrust(self, digest: str, reason: str) -> None:
        """Serve a cartridge no more in this process alone: its bytes are sound, and others may serve it."""
        with self._lock:
            self.quarantined.setdefault(digest, reason)

    def refusal(self, tag: str) -> CartridgeError | None:
        """Return why a cartridge or chain will not be served, None if it may be."""
        try:
            self.require(tag)
        except CartridgeError as error:
            return error
        return None

    def require(self, tag: str) -> int:
        """`derive`, but raise why a cartridge or chain will not be served."""
        for digest in tag.split("."):
            error = self._unfit.get(digest)
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

    def is_remote(self, tag: str) -> bool:
        """Whether a cartridge of a tag has to be fetched over the network."""
        rows = map(self._rows.get, tag.split("."))
        return any(row is not None and is_remote(row.location) for row in rows)

    def derive(self, tag: str | None) -> int | None:
        """Make the chunks of a tag findable and return how many of them must be had together or not at all.

        None for a tag of which a cartridge is not there or quarantined: the others must not answer in its place.
        Raises `ChunkSizeMismatch` or `UnsupportedModel` for cartridges that cannot stand in that order. Blocks for local
        reads, and to hash it, where a chain is new; others pass meanwhile.
        """
        if tag is None:
            return 0
        rows = self._rows_of(tag)
        if not rows:
            return None
        end = trained_end = 0
        for row in rows:
            end += row.positions
            if row.kind == "trained":
                trained_end = end
        chunk = self._chunk_tokens
        whole = end // chunk
        needed = -(-trained_end // chunk)
        if needed > whole:
            raise ChunkSizeMismatch(
                f"the chain has {end} positions, of which the last {end % chunk} end in a trained cartridge and do not "
                f"fill a chunk of {chunk}; put a document of at least {chunk - end % chunk} tokens behind it"
            )
        if len(rows) > 1 and not self.index.has(tag):
            segments = self.segments(tag)
            if not segments:
                return None
            for segment in segments[1:]:
                check_shift(segment.cartridge.manifest.fingerprint.rope)
            ids = [i for s in segments for i in reading.load_token_ids(*s.cartridge[:2]).tolist()]
            own = rows[0].positions // chunk
            keys = [ChunkKey(rows[0].digest if i < own else tag, i) for i in range(whole)]
            self.index.add_chain(tag, ids, keys)
        return needed

    def names(self) -> list[str]:
        """Return `id@version` of every registered cartridge that is served now."""
        with self._lock:
            unfit, quarantined = self._unfit, self.quarantined
            return [name for name, digest in self._digests.items() if digest not in unfit and digest not in quarantined]

    def refused(self) -> dict[str, str]:
        """Return the reason for every registered cartridge that is not served, by `id@version`."""
        with self._lock:
            reasons = {digest: str(error) for digest, error in self._unfit.items()} | self.quarantined
            return {name: why for digest, why in reasons.items() for name in self._names.get(digest, ())}

    def counts(self) -> tuple[int, int]:
        """Return the lengths of `names` and `refused`, at the cost of the latter."""
        with self._lock:
            refused = sum(len(self._names.get(digest, ())) for digest in self._unfit.keys() | self.quarantined.keys())
            return len(self._digests) - refused, refused

    def close(self) -> None:
        """Stop reading."""
        self._backlog.close()

    # What is known without reading.

    def _known(self, present: list[Location]) -> dict[str, Row]:
        """Return what can be said of artefacts without reading them, by digest."""
        with self._lock:
            known = {digest: row for digest, row in self._rows.items() if digest not in self._retired}
        if self._looked or len(present) < _SNAPSHOT_FROM:
            return known
        known = {row.digest: row for row in self._snapshot.load()}
        logger.info("the snapshot %s has %d of %d cartridges", self._snapshot.path, len(known), len(present))
        return known

    def _adopt(self, present: list[Location], known: dict[str, Row]) -> list[Location]:
        """Take in what is known and return the others, in order. The lock is held."""
        others, documents = [], {}
        self._looked = self._looked or bool(present)
        for place in present:
            row = known.get(place.digest)
            if row is None or place.digest in self._retired or not self._is_likely(row, place):
                others.append(place)
                continue
            self._backlog.drop(place.name)
            self._name(place.name, row.digest)
            if row.refusal is not None:
                kind, message = row.refusal
                self._unfit[row.digest] = _FOR_OTHERS[kind](message)
                self._for_others[row.digest] = row
            elif row.digest not in self._rows:
                self._rows[row.digest] = row
                if row.kind == "prefill":
                    documents[row.digest] = row.hashes
                elif row.kind == "trained":
                    self.index.add(row.digest, row.hashes, open_to_all=False)
        if documents:
            self.index.add_all(documents)
        return others

    def _is_likely(self, row: Row, place: Location) -> bool:
        if row.location != place.location:
            return False
        if row.refusal is not None:
            return row.refusal[0] in _FOR_OTHERS
        if (row.kind, row.positions) != (place.kind, place.positions):
            return False
        return len(row.hashes) == (0 if row.kind == "tokens" else self.index.hash_bytes(row.positions))

    def _rows_of(self, tag: str) -> list[Row]:
        """Return the rows of a tag; empty if a cartridge is not there or quarantined."""
        rows = []
        for digest in tag.split("."):
            row = self._rows.get(digest)
            if row is None or digest in self.quarantined:
                return []
            rows.append(row)
        return rows

    # Reading.

    def _put(self, name: str | None, row: Row, cartridge: Cartridge) -> None:
        digest = row.digest
        with self._lock:
            if name is not None:
                self._name(name, digest)
            if digest in self._names:
                self._retired.pop(digest, None)
            else:
                self._retired[digest] = self._clock() + self._grace_s
            self._unfit.pop(digest, None)
            self._rows[digest] = row
            self._reader.keep(cartridge)
            self._unsaved += 1
            if row.kind != "tokens":
                # A document that is not registered answers those who name it, not every prompt that begins like it.
                self.index.add(digest, row.hashes, open_to_all=row.kind == "prefill" and digest in self._names)
            if digest not in self.quarantined and (reason := self._quarantine.reason(digest)):
                self.quarantined[digest] = f"quarantined: {reason}"
                self._noted.add(digest)

    def _refuse(self, name: str | None, digest: str, error: CartridgeError, *, quiet: bool = False) -> None:
        """Note why a cartridge is not served, unless it lies elsewhere, sound."""
        error.__cause__ = error.__context__ = None  # they hold what was read
        with self._lock:
            if name is not None:
                self._name(name, digest)
            elif digest not in self._names:
                self._retired.setdefault(digest, self._clock() + self._grace_s)
            if digest not in self._rows or digest in self._retired:
                self._unfit[digest] = error.with_traceback(None)
        if not quiet:
            logger.warning("cartridge %s is not served: %s", name or digest, error)

    def _cartridge(self, digest: str) -> Cartridge | None:
        """Return a cartridge with its manifest, None if it is not there or not what it was."""
        if (found := self._reader.at_hand(digest)) or digest not in self._rows:
            return found
        with self._reader.alone(digest):
            row = self._rows.get(digest)
            if (found := self._reader.at_hand(digest)) or row is None:
                return found
            try:
                fresh, cartridge = self._reader.read(digest, row.directory, row.location)
                if fresh != row:
                    # Served at once it could still answer a lookup that went by the wrong row.
                    self._snapshot.discard()
                    raise ArtifactError(
                        f"{cartridge.manifest.name} is not what {self._snapshot.path} said; read again soon"
                    )
            except CartridgeError as error:
                self._disown(row, error)
                return None
            with self._lock:
                if self._rows.get(digest) != row:
                    return None
                self._reader.keep(cartridge)
                return cartridge

    def _disown(self, row: Row, error: CartridgeError) -> None:
        """Serve no more what was known and is not so any longer; who was promised its chunks may still come for them."""
        with self._lock:
            if self._rows.get(row.digest) != row:
                return
            del self._rows[row.digest]
            self.index.hide(row.digest)
            names = self._names.get(row.digest, ())
            self._refuse(next(iter(names), None), row.digest, error)
            for name in names:
                self._backlog.put_back(Wanted(name, row.digest, row.location), str(error))

    def _read_wanted(self, wanted: Wanted, network: bool) -> None:
        """Read one of the backlog. Without the network what may have to be fetched is left for later."""
        remote = is_remote(wanted.location)
        try:
            if not remote:
                root = Path(wanted.location)
            elif network:
                root = self._manifests.fetch(wanted.location)
            else:
                root = self._manifests.known(wanted.location)
            if root is None:
                return
            row, cartridge = self._reader.read(wanted.digest, root, wanted.location)
        except CartridgeError as error:
            if network or not remote:
                self._give_up(wanted, error)
            return
        with self._lock:
            still_wanted, _ = self._backlog.take(wanted)
            if still_wanted:
                self._put(wanted.name, row, cartridge)

    def _give_up(self, wanted: Wanted, error: CartridgeError) -> None:
        with self._lock:
            still_wanted, complaint = self._backlog.take(wanted)
            if not still_wanted:
                return
            self._refuse(wanted.name, wanted.digest, error, quiet=str(error) == complaint)
            if type(error).__name__ not in _FOR_OTHERS:
                self._backlog.put_back(wanted, str(error))
            elif wanted.digest in self._unfit:
                refusal = (type(error).__name__, str(error))
                self._for_others[wanted.digest] = Row(wanted.digest, wanted.location, None, "prefill", 0, b"", refusal)
                self._unsaved += 1

    # The snapshot.

    def _is_snapshot_due(self) -> bool:
        count = len(self._rows) + len(self._for_others)
        return count >= _SNAPSHOT_FROM and self._unsaved * _SNAPSHOT_SHARE >= max(count, 1)

    def _save(self, done: bool) -> None:
        """Keep what is known for the next start, if that is due."""
        with self._lock:
            if not self._is_snapshot_due() or not (done or time.monotonic() - self._saved_at >= _SNAPSHOT_EVERY_S):
                return
            known = (*self._rows.values(), *self._for_others.values())
            rows = [row for row in known if row.digest in self._names]
            self._unsaved, self._saved_at = 0, time.monotonic()
        self._snapshot.save(rows)

    # What is registered.

    def _name(self, name: str, digest: str) -> None:
        if self._digests.get(name) != digest:
            self._remove(name)  # removed and registered again with other content, between two looks
            self._names[digest] = (*self._names.get(digest, ()), name)
            self._digests[name] = digest

    def _remove(self, name: str) -> None:
        """Take a name away, and retire its digest if that was the last one. The lock is held."""
        self._backlog.drop(name)
        digest = self._digests.pop(name, None)
        if digest is None:
            return
        self._names[digest] = tuple(other for other in self._names[digest] if other != name)
        if self._names[digest]:
            return
        del self._names[digest]
        self.index.hide(digest)
        self._retired[digest] = self._clock() + self._grace_s
        self._removed.append(digest)

    def _forget(self, digest: str) -> None:
        del self._retired[digest]
        self._rows.pop(digest, None)
        self._reader.forget(digest)
        if digest not in self._names:  # else it was registered again where it is not sound
            self._unfit.pop(digest, None)
            self._for_others.pop(digest, None)
        self.index.forget(digest)

    def _follow_quarantine(self) -> None:
        """Take in what other processes, or a person, put into the quarantine or lifted from it."""
        noted = self._quarantine.digests()
        for digest in self._noted - noted:
            self.quarantined.pop(digest, None)
            logger.info("the quarantine of %s was lifted", digest)
        for digest in noted - self.quarantined.keys():
            if digest in self._rows:
                self.quarantined[digest] = f"quarantined: {self._quarantine.reason(digest)}"
        self._noted = noted
        now = self._clock()
        if (noted or self._copies) and now - self._looked_again >= _LOOK_AGAIN_S:
            self._looked_again = now
            self._backlog.later(self._look_again)

    def _look_again(self) -> None:
        """Lift the quarantines of those that have other bytes on S3 than those that were wrong. Blocks to ask S3."""
        for digest in list(self._noted | self._copies.keys()):
            copy = self._copies.get(digest) or self._quarantine.copy(digest)
            with suppress(CartridgeError):
                if copy is not None and self._manifests.payload_revision(copy.location) != copy.revision:
                    self.forgive(digest)
