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
    """Notes on copies of cartridges, each with the reason, under one directory that serving may write. Safe from any thread.

    A quarantine outlives the process; `lmcache-cartridge verify` lifts it when the artefact is sound again.
    """

    def __init__(self, directory: Path) -> None:
        """Looks at nothing yet."""
        self.notes: Mapping[Copy, str] = {}
        """Why each copy is quarantined, as of the last `follow`, and what was put here. Replaced and never changed, so that it can
        be read at any time."""
        self._directory = directory
        self._written: set[Copy] = set()
        """Which of them the directory had: no others are lifted when they are not there."""
        self._lock = threading.Lock()

    def put(self, digest: str, reason: str, location: str) -> bool:
        """Quarantine the copy at `location` here and for those who see the same directory; whether it was not already."""
        with self._lock:
            if (copy := (digest, location)) in self.notes:
                return False
            self.notes = {**self.notes, copy: reason}
        file = self._directory / f"{digest}-{blake3(location.encode()).hexdigest(8)}.txt"
        with suppress(OSError):  # it holds in this process then
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.replace(file, [f"{reason}\n{location}\n".encode("utf-8", "backslashreplace")], 0o600)
            with self._lock:  # not before: that disk may hang
                self._written.add(copy)
        return True

    def follow(self) -> set[str]:
        """Take in what others put into the directory, or lifted from it; return the digests that it was about."""
        before = set(self._written)
        now = {(path.stem.partition("-")[0], location): reason for path, location, reason in self._read("[!.]")}
        lifted = before - now.keys()
        for digest, location in lifted:
            logger.info("the quarantine of %s at %s was lifted", digest, location)
        with self._lock:
            self.notes = {copy: reason for copy, reason in self.notes.items() if copy not in lifted} | now
            self._written = self._written - lifted | now.keys()
        return {digest for digest, _ in before ^ now.keys()}

    def reason(self, digest: str, location: str | None = None) -> str | None:
        """Return why the copy at `location`, or any of a digest, is quarantined in the directory now; None if it is not."""
        return next((reason for _, where, reason in self._read(digest) if location in (None, where)), None)

    def lift(self, digest: str, location: str | None = None) -> None:
        """Let the copy at `location`, or all of a digest, be served again; no change if they may already."""
        with self._lock:
            kept = {copy for copy in self.notes if copy[0] != digest or location not in (None, copy[1])}
            self.notes = {copy: self.notes[copy] for copy in kept}
        for path, where, _ in self._read(digest):
            if location in (None, where):
                path.unlink(missing_ok=True)

    def forgive(self, digest: str) -> None:
        """Lift the quarantines that copies on S3 caused; what is there now is checked when it is loaded. Else no change."""
        for there, location in self.notes:
            if there == digest and is_remote(location):
                with suppress(OSError):
                    self.lift(digest, location)

    def _read(self, begin: str) -> Iterator[tuple[Path, str, str]]:
        """Yield file, location and reason of the notes whose names begin so."""
        with suppress(OSError):
            for path in sorted(self._directory.glob(f"{begin}*.txt")):
                with suppress(OSError):
                    reason, _, where = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").rpartition("\n")
                    yield path, where, reason
