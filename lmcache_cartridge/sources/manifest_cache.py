"""ManifestCache: local copies of what is small of artefacts on S3, their manifests and token ids; payloads stay where they are."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from ..artifact import files, reading
from ..artifact.manifest import MAX_MANIFEST_BYTES, Manifest, decode
from ..errors import ArtifactError, CartridgeError, SourceDenied, SourceError, SourceNotFound
from .sources import Sources

logger = logging.getLogger(__name__)

_WARN_EVERY_S = 60.0
_STALE_S = 3600.0
"""Age at which an unfinished directory was left behind by a process that is gone."""


_UNUSED_S = 30 * 86400.0
"""How long a copy is kept that nobody asks for."""
_MAX_ENTRIES = 10_000
"""Locations that are remembered without a look at the disk; requests may name any."""


class _Entry:
    """What is known of one location; its lock is held while S3 is asked."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.revision: str | None = None
        self.copy: str | None = None
        """Name of the directory that holds the copy."""
        self.checked_s = float("-inf")


class ManifestCache:
    """Copies under `directory`, which processes may share.

    A copy is named by the blake3 of its manifest file, appears whole by rename and never changes, so that who reads one
    is not disturbed when the artefact is replaced.
    """

    def __init__(self, directory: Path, sources: Sources, max_age_s: float = 10.0) -> None:
        """A location is asked for a newer manifest at most every `max_age_s`. Touches no file before the first call."""
        self._directory, self._sources, self._max_age_s = directory, sources, max_age_s
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._warned_s = float("-inf")
        self._prepared = False

    def known(self, location: str) -> Path | None:
        """Return the copy that is here, however old, or None. Does not ask S3 and waits for nobody who does."""
        entry = self._entry(location)
        if entry.lock.acquire(blocking=False):
            try:
                if entry.copy is None:
                    self._recall(location, entry)
            finally:
                entry.lock.release()
        return self._sound(entry)

    def is_fresh(self, location: str, *, max_age_s: float | None = None) -> bool:
        """Whether `fetch` without `force` would answer from the copy without asking S3."""
        entry = self._entry(location)
        return (entry.lock.locked() or self._is_fresh(entry, max_age_s)) and self.known(location) is not None

    def fetch(self, location: str, *, force: bool = False, max_age_s: float | None = None) -> Path:
        """Return a local directory with the manifest and token ids of the artefact at an `s3://` location.

        Blocks while S3 is asked; one thread asks for a newer manifest, others get the copy there is. `max_age_s` stands
        in for the cache's own where the copy is known not to be the one that is wanted. With `force` S3 is asked at once. Where it cannot be reached the copy stands in, unless `force`. Raises `SourceError`,
        `ManifestError` or `ArtifactError`, `TruncatedPayload` if the payload has another size than the manifest says.
        """
        self._prepare()
        entry = self._entry(location)
        known = self._sound(entry)
        if known and not force and entry.lock.locked():
            return known  # somebody else is asking S3, which may take long
        with entry.lock:
            if entry.copy is None:
                self._recall(location, entry)
            known = self._sound(entry)
            if known and not force and self._is_fresh(entry, max_age_s):
                return known
            try:
                found = self._revalidate(location, entry, known, force)
            except (SourceNotFound, SourceDenied):
                raise
            except SourceError as error:
                if known is None or force:
                    raise
                self._warn(location, error)
                found = known
            entry.checked_s = time.monotonic()
            return found

    def payload_revision(self, location: str) -> str:
        """Return what changes whenever the payload at an `s3://` location does. Asks S3. Raises `SourceError`."""
        return self._sources.revision(location, reading.PAYLOAD)

    def prune(self, keep: Container[str]) -> None:
        """Remove the copies of locations that nobody asked for in a month, except those to `keep`. Never raises."""
        named, now = set(), time.time()
        for note in self._directory.glob("locations/*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                known = json.loads(note.read_bytes())
                if known["location"] in keep or now - note.stat().st_mtime < _UNUSED_S:
                    named.add(known["copy"])
                else:
                    note.unlink()
        for copy in self._directory.glob("[!.]*/"):
            with suppress(OSError):
                if copy.name not in {"locations"} | named and now - copy.stat().st_mtime > _UNUSED_S:
                    shutil.rmtree(copy)

    def _entry(self, location: str) -> _Entry:
        with self._lock:
            entry = self._entries.setdefault(location, _Entry())
            self._entries.move_to_end(location)
            if len(self._entries) > _MAX_ENTRIES:
                self._entries.popitem(last=False)
            return entry

    def _is_fresh(self, entry: _Entry, max_age_s: float | None) -> bool:
        return time.monotonic() - entry.checked_s < (self._max_age_s if max_age_s is None else max_age_s)

    def _prepare(self) -> None:
        """Make the directory where it lacks, and clear away what processes that are gone left half-made in it."""
        if self._prepared:
            return
        try:
            for part in (self._directory, self._directory / "locations"):
                part.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SourceError(f"{self._directory}: {error.strerror}") from error
        for partial in self._directory.glob(".*.partial"):
            with suppress(OSError):
                if time.time() - partial.stat().st_mtime > _STALE_S:
                    shutil.rmtree(partial)
        self._prepared = True

    def _revalidate(self, location: str, entry: _Entry, known: Path | None, force: bool) -> Path:
        """Return the copy of what is at the location now."""
        small = self._sources.read(
            location, reading.MANIFEST, MAX_MANIFEST_BYTES, known=entry.revision if known else None
        )
        if small is None:
            if force:
                self._check_payload(location, reading.load_manifest(known, payload=False))
            with suppress(OSError):
                os.utime(self._remembered(location))  # it is used, see `prune`
            return known
        name = blake3(small.data).hexdigest()
        manifest = decode(small.data, f"{location}/{reading.MANIFEST}")
        self._check_payload(location, manifest)
        copy = self._directory / name
        if not _is_whole(copy, manifest, small.data):
            self._make(location, manifest, small.data, copy)
        entry.revision, entry.copy = small.revision, name
        self._remember(location, entry)
        return copy

    def _check_payload(self, location: str, manifest: Manifest) -> None:
        if manifest.payload is None:
            return
        file = manifest.payload.file
        reading.check_size(manifest, self._sources.size(location, file), f"{location}/{file}", "Push it again")

    def _make(self, location: str, manifest: Manifest, data: bytes, copy: Path) -> None:
        partial = self._directory / f".{copy.name}.{uuid.uuid4().hex}.partial"
        try:
            partial.mkdir(mode=0o700)
            files.write(partial / reading.MANIFEST, [data], 0o600)
            for file, limit_bytes in reading.id_files(manifest).items():
                files.write(partial / file, [self._sources.read(location, file, limit_bytes).data], 0o600)
            reading.load_token_ids(manifest, partial)
            reading.load_document_ids(manifest, partial)
            if not _is_whole(copy, manifest, data):  # unless another process was first
                shutil.rmtree(copy, ignore_errors=True)
                partial.rename(copy)
        except CartridgeError:
            raise
        except OSError as error:
            raise ArtifactError(f"{copy}: {error.strerror}; the copy of {location} cannot be kept") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _sound(self, entry: _Entry) -> Path | None:
        """Return the copy if it still is there."""
        copy = self._directory / entry.copy if entry.copy else None
        return copy if copy and (copy / reading.MANIFEST).is_file() else None

    def _remembered(self, location: str) -> Path:
        return self._directory / "locations" / f"{blake3(location.encode()).hexdigest(16)}.json"

    def _recall(self, location: str, entry: _Entry) -> None:
        """Take up what an earlier process knew; anything wrong with it is as if there were nothing."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(self._remembered(location).read_bytes())
            name, revision = known["copy"], known["revision"]
            manifest = (self._directory / name / reading.MANIFEST).read_bytes()
            if known["location"] == location and isinstance(revision, str) and blake3(manifest).hexdigest() == name:
                entry.copy, entry.revision = name, revision

    def _remember(self, location: str, entry: _Entry) -> None:
        """Note it for a later process; where that cannot be it asks S3 again."""
        path = self._remembered(location)
        partial = path.with_suffix(f".{uuid.uuid4().hex}")
        known = {"location": location, "revision": entry.revision, "copy": entry.copy}
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            files.write(partial, [json.dumps(known).encode()], 0o600)
            partial.rename(path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _warn(self, location: str, error: SourceError) -> None:
        with self._lock:
            if time.monotonic() - self._warned_s < _WARN_EVERY_S:
                return
            self._warned_s = time.monotonic()
        logger.warning("%s cannot be checked for a newer manifest, the copy there is stands in: %s", location, error)


def _is_whole(copy: Path, manifest: Manifest, data: bytes) -> bool:
    """Return whether a copy is there and undamaged: whoever cleans the directory may take any of it."""
    try:
        reading.load_token_ids(manifest, copy)
        reading.load_document_ids(manifest, copy)
        return (copy / reading.MANIFEST).read_bytes() == data
    except (OSError, ArtifactError):
        return False
