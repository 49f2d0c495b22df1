"""Quarantine: copies of cartridges that must not be served, with the reason; one small file each, seen by every process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from ..artifact import files
from ..artifact.location import is_remote

logger = logging.getLogger(__name__)

Copy = tuple[str, str]
"""A copy of a cartridge: its digest, and where it lies."""


class Quarantine:
    """Notes on copies of cartridges, each with the reason, under one directory that serving may write.

    A quarantine outlives the process; `lmcache-cartridge verify` lifts it when the artefact is sound again.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, digest: str, reason: str, location: str) -> bool:
        """Quarantine the copy at `location`; return whether others will see it. Never raises."""
        text = f"{reason}\n{location}\n"
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.replace(self._file(digest, location), [text.encode("utf-8", "backslashreplace")], 0o600)
        except OSError:
            return False
        return True

    def notes(self) -> dict[Copy, str]:
        """Return why each copy is quarantined that is."""
        return {(path.stem.partition("-")[0], location): reason for path, location, reason in self._read("[!.]")}

    def reason(self, digest: str, location: str | None = None) -> str | None:
        """Return why the copy at `location`, or any of a digest, is quarantined; None if it is not."""
        return next((reason for _, where, reason in self._read(digest) if location in (None, where)), None)

    def lift(self, digest: str, location: str | None = None) -> None:
        """Let the copy at `location`, or all of a digest, be served again; no change if they may already."""
        for path, where, _ in self._read(digest):
            if location in (None, where):
                path.unlink(missing_ok=True)

    def drop(self, digest: str, location: str) -> None:
        """Take back what `put` noted, if it is there; what others forbid stays forbidden. Raises `OSError`."""
        self._file(digest, location).unlink(missing_ok=True)

    def _file(self, digest: str, location: str) -> Path:
        return self._directory / f"{digest}-{blake3(location.encode()).hexdigest(8)}.txt"

    def _read(self, begin: str) -> Iterator[tuple[Path, str, str]]:
        """Yield file, location and reason of the notes whose names begin so."""
        with suppress(OSError):
            for path in sorted(self._directory.glob(f"{begin}*.txt")):
                with suppress(OSError):
                    reason, _, where = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").rpartition("\n")
                    yield path, where, reason


class ProcessQuarantine:
    """The quarantine as one serving process follows it. Safe from any thread."""

    def __init__(self, quarantine: Quarantine) -> None:
        self.notes: Mapping[Copy, str] = {}
        """Replaced and never changed, so that it can be read at any time."""
        self._quarantine = quarantine
        self._written: set[Copy] = set()
        """Which of them the directory had: no others are lifted when they are not there."""
        self._lock = threading.Lock()

    def put(self, digest: str, reason: str, location: str) -> bool:
        """Quarantine a copy here and for those who see the same directory; whether it was not already."""
        with self._lock:
            if (copy := (digest, location)) in self.notes:
                return False
            self.notes = {**self.notes, copy: reason}
        if self._quarantine.put(digest, reason, location):  # without the lock: that disk may hang
            with self._lock:
                self._written.add(copy)
        return True

    def follow(self) -> set[str]:
        """Take in what others put into the directory, or lifted from it; return the digests that it was about."""
        before, now = set(self._written), self._quarantine.notes()
        lifted = before - now.keys()
        for digest, location in lifted:
            logger.info("the quarantine of %s at %s was lifted", digest, location)
        with self._lock:
            self.notes = {copy: reason for copy, reason in self.notes.items() if copy not in lifted} | now
            self._written = self._written - lifted | now.keys()
        return {digest for digest, _ in before ^ now.keys()}

    def forgive(self, digest: str) -> None:
        """Lift the quarantines that copies on S3 caused; what is there now is checked when it is loaded. Else no change."""
        with self._lock:
            forgiven = [copy for copy in self.notes if copy[0] == digest and is_remote(copy[1])]
            self.notes = {copy: reason for copy, reason in self.notes.items() if copy not in forgiven}
        for copy in forgiven:
            with suppress(OSError):
                self._quarantine.drop(*copy)
