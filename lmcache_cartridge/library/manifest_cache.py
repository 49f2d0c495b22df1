"""ManifestCache: local copies of manifests and token ids of artefacts on S3; payloads stay where they are."""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from ..artifact import files, reading
from ..artifact.bytesource import ByteSource, read_whole
from ..artifact.lru import Lru
from ..artifact.manifest import MAX_MANIFEST_BYTES, Manifest, decode
from ..errors import ArtifactError, CartridgeError, SourceDenied, SourceError, SourceNotFound

logger = logging.getLogger(__name__)

_UNUSED_S = 30 * 86400.0
"""How long a copy is kept that nobody asks for."""
MAX_AGE_S = 10.0
"""How old a manifest may be at most before its location is asked for a newer one, where no other age is said."""
_MAX_ENTRIES = 10_000
"""Locations that are remembered without a look at the disk; requests may name any."""


class _Entry:
    """One location; its lock is held while S3 is asked."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.checked_s = -math.inf

    def is_younger(self, age_s: float) -> bool:
        """Whether S3 was asked within `age_s`; always so for an infinite one, never for 0."""
        return time.monotonic() - self.checked_s <= age_s


class ManifestCache:
    """Copies under `directory`, which processes may share. Safe from any thread.

    A copy is `<blake3 of the location>/<blake3 of its manifest file>/`, appears whole by rename and never changes, so a
    reader of one is not disturbed when the artefact is replaced. The one that was used last is a location's.
    """

    def __init__(self, directory: Path, source: ByteSource) -> None:
        """Touches no file before the first call."""
        self._directory, self._source = directory, source
        self._lock = threading.Lock()
        self._entries: Lru[str, _Entry] = Lru(_MAX_ENTRIES)

    def known(self, location: str, max_age_s: float = math.inf) -> Path | None:
        """Return the directory of the copy that is here, or None. Neither asks S3 nor waits for who does.

        None also for one that S3 was not asked about in the last `max_age_s`, and is not being asked about now.
        """
        entry = self._entry(location)
        is_fresh = entry.is_younger(max_age_s) or entry.lock.locked()
        return self._present(location) if is_fresh else None

    def fetch(
        self,
        location: str,
        *,
        force: bool = False,
        max_age_s: float = MAX_AGE_S,
    ) -> Path:
        """Return a local directory with the manifest and token ids of the artefact at an `s3://` location.

        Blocks while S3 is asked; one thread asks for a newer manifest, others get the copy there is. None is
        asked within `max_age_s` of the last time, but with `force`. Where S3 cannot be reached the copy is returned, unless `force`. Raises `SourceError`,
        `ManifestError` or `ArtifactError`, `TruncatedPayload` if the payload has another size than the manifest says.
        """
        if not force and (found := self.known(location, max_age_s)):
            return found
        entry = self._entry(location)
        with entry.lock:
            known = self._present(location)
            if known and not force and entry.is_younger(max_age_s):
                return known
            try:
                found = self._revalidate(location, known, force)
            except (SourceNotFound, SourceDenied):
                raise
            except SourceError as error:
                if not known or force:
                    raise
                logger.warning("%s has no newer manifest to be had; the copy of it is used: %s", location, error)
                found = known
            entry.checked_s = time.monotonic()
            return found

    def prune(self, keep: Iterable[str]) -> None:
        """Remove the copies that nobody asked for in a month, except the last ones of locations to `keep`, and what killed
        processes left half-made. Never raises.
        """
        kept = set(map(self.known, keep))
        for copy in (*self._directory.glob("*/*"), *self._directory.glob("*")):
            with suppress(OSError):
                if copy not in kept and time.time() - copy.stat().st_mtime > _UNUSED_S:
                    shutil.rmtree(copy) if copy.parent != self._directory else copy.rmdir()

    def _entry(self, location: str) -> _Entry:
        with self._lock:
            return self._entries.get(location) or self._entries.put(location, _Entry())

    def _present(self, location: str) -> Path | None:
        """Return the copy of a location that was used last, by this process or another, if it still is there."""
        with suppress(OSError):
            copies = [path.parent for path in self._of(location).glob(f"[!.]*/{reading.MANIFEST}")]
            return max(copies, key=lambda path: path.stat().st_mtime_ns, default=None)
        return None

    def _of(self, location: str) -> Path:
        return self._directory / blake3(location.encode()).hexdigest(16)

    def _revalidate(self, location: str, known: Path | None, force: bool) -> Path:
        """Return the copy of the artefact that is at the location now."""
        data = read_whole(self._source, location, reading.MANIFEST, MAX_MANIFEST_BYTES)
        manifest = decode(data, f"{location}/{reading.MANIFEST}")
        copy = self._of(location) / blake3(data).hexdigest()
        is_new = not _is_whole(copy)
        if is_new or force or copy != known:
            self._check_payload(location, manifest)
        if is_new:
            self._copy(location, manifest, data, copy)
        with suppress(OSError):
            os.utime(copy)  # it is the one that is used
        return copy

    def _check_payload(self, location: str, manifest: Manifest) -> None:
        if manifest.payload is not None:
            file = manifest.payload.file
            reading.check_size(manifest, self._source.size(location, file), f"{location}/{file}")

    def _copy(self, location: str, manifest: Manifest, data: bytes, copy: Path) -> None:
        try:
            for part in (self._directory, copy.parent):
                part.mkdir(parents=True, exist_ok=True, mode=0o700)
            with files.replacing(copy) as partial:
                partial.mkdir(mode=0o700)
                files.write(partial / reading.MANIFEST, [data], 0o600)
                for file, limit_bytes in reading.id_files(manifest).items():
                    files.write(partial / file, [read_whole(self._source, location, file, limit_bytes)], 0o600)
                reading.load_token_ids(manifest, partial)
                reading.load_document_ids(manifest, partial)
                if not _is_whole(copy):
                    shutil.rmtree(copy, ignore_errors=True)
        except CartridgeError:
            raise
        except OSError as error:
            if not _is_whole(copy):  # else another process was first, and its copy does not give way
                raise ArtifactError(f"{copy}: {error.strerror}; the copy of {location} cannot be kept") from error


def _is_whole(copy: Path) -> bool:
    """Return whether a copy is there and undamaged: whoever cleans the directory may take any of it, and its disk may fail."""
    try:
        manifest = reading.load_manifest(copy, payload=False)
        reading.load_token_ids(manifest, copy)
        reading.load_document_ids(manifest, copy)
        return blake3((copy / reading.MANIFEST).read_bytes()).hexdigest() == copy.name
    except (OSError, CartridgeError):
        return False
