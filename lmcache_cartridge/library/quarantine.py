"""Quarantine: copies of cartridges that must not be served, with the reason; one small file each, seen by every process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from ..artifact import files
from ..artifact.location import is_remote

logger = logging.getLogger(__name__)


class Note(NamedTuple):
    """Why one copy of a cartridge is quarantined."""

    reason: str
    location: str
    """Where that copy lies."""


class Quarantine:
    """Notes by content digest and place, under one directory that serving may write.

    A quarantine outlives the process; `lmcache-cartridge verify` lifts it when the artefact is sound again.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, digest: str, reason: str, location: str) -> bool:
        """Quarantine the copy at `location`; return whether others will see it. Never raises."""
        text = f"{reason}\n{location}\n"
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self._directory / f"{name_of(digest, location)}.txt"
            files.replace(path, [text.encode("utf-8", "backslashreplace")], 0o600)
        except OSError:
            return False
        return True

    def notes(self, digest: str = "", location: str | None = None) -> dict[str, Note]:
        """Return the notes about the copy at `location`, or any of a digest, or all that there are, by their names.

        A name begins with the digest.
        """
        found = {}
        with suppress(OSError):
            for path in sorted(self._directory.glob(f"{digest or '[!.]'}*.txt")):
                with suppress(OSError):
                    reason, _, where = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").rpartition("\n")
                    if location in (None, where):
                        found[path.stem] = Note(reason, where)
        return found

    def reason(self, digest: str, location: str | None = None) -> str | None:
        """Return why the copy at `location`, or any of a digest, is quarantined; None if it is not."""
        return next((note.reason for note in self.notes(digest, location).values()), None)

    def lift(self, digest: str, location: str | None = None) -> None:
        """Let the copy at `location`, or all of a digest, be served again; no change if they may already."""
        for name in self.notes(digest, location):
            self.drop(name)

    def drop(self, name: str) -> None:
        """Take one note away, if it is there; what others forbid stays forbidden. Raises `OSError`."""
        (self._directory / f"{name}.txt").unlink(missing_ok=True)


def name_of(digest: str, location: str) -> str:
    """Return what a note is called."""
    return f"{digest}-{blake3(location.encode()).hexdigest(8)}"


class ProcessQuarantine:
    """The quarantine as one serving process follows it. Safe from any thread."""

    def __init__(self, quarantine: Quarantine, location_of: Callable[[str], str | None]) -> None:
        """`location_of` returns where the copy lies that a digest is served from."""
        self.reasons: Mapping[str, str] = {}
        """By digest; such cartridges are not served. Replaced and never changed, so that it can be read at any time."""
        self._quarantine, self._location_of = quarantine, location_of
        self._notes: dict[str, Note] = {}
        self._written: set[str] = set()
        """Which of them the directory had: no others are lifted when they are not there."""
        self._lock = threading.RLock()

    def put(self, digest: str, reason: str, location: str) -> bool:
        """Quarantine a copy here and for those who see the same directory; whether it was not already."""
        with self._lock:
            if self.holds(digest, location):
                return False
            name = name_of(digest, location)
            self._notes[name] = Note(reason, location)
        is_written = self._quarantine.put(digest, reason, location)  # without the lock: that disk may hang
        with self._lock:
            if is_written:
                self._written.add(name)
            self.publish()
        return True

    def holds(self, digest: str, location: str) -> bool:
        """Whether the copy at `location` is quarantined."""
        with self._lock:
            return name_of(digest, location) in self._notes

    def follow(self) -> set[str]:
        """Take in what others put into the directory, or lifted from it; return the digests that it was about."""
        before, written = set(self._written), self._quarantine.notes()
        with self._lock:
            for name in before - written.keys():
                self._notes.pop(name, None)
                self._written.discard(name)
                logger.info("the quarantine of %s was lifted", name)
            self._notes |= written
            self._written |= written.keys()
            self.publish()
        return {name.partition("-")[0] for name in before ^ written.keys()}

    def forgive(self, digest: str) -> None:
        """Lift the quarantines that copies on S3 caused; what is there now is checked when it is loaded. Else no change."""
        with self._lock:
            names = [n for n, note in self._notes.items() if n.startswith(digest) and is_remote(note.location)]
            for name in names:
                del self._notes[name]
            self.publish()
        for name in names:
            with suppress(OSError):
                self._quarantine.drop(name)

    def publish(self) -> None:
        """Let `reasons` be of the copies that are served now."""
        with self._lock:
            self.reasons = {
                digest: f"quarantined: {note.reason}"
                for name, note in self._notes.items()
                if note.location == self._location_of(digest := name.partition("-")[0])
            }
