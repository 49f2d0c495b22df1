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
from ..artifact.location import SCHEME, is_remote

logger = logging.getLogger(__name__)


class Note(NamedTuple):
    """Why one copy of a cartridge is quarantined."""

    reason: str
    location: str
    """Where that copy lies; empty where the note is about all of them."""


class Quarantine:
    """Notes by content digest and place, under one directory that serving may write.

    A quarantine outlives the process; `lmcache-cartridge verify` lifts it when the artefact is sound again.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, digest: str, reason: str, location: str = "") -> bool:
        """Quarantine the copy at `location`, or all that there are; return whether others will see it. Never raises."""
        text = f"{reason}\n{location}\n"
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self._directory / f"{name_of(digest, location)}.txt"
            files.replace(path, [text.encode("utf-8", "backslashreplace")], 0o600)
        except OSError:
            return False
        return True

    def reason(self, digest: str, location: str | None = None) -> str | None:
        """Return why the copy at `location`, or any of a digest, is quarantined; None if it is not."""
        notes = map(self.read, sorted(self.about(digest, location)))
        return next((note.reason for note in notes if note is not None), None)

    def about(self, digest: str, location: str | None = None) -> set[str]:
        """Return the names that notes about the copy at `location` have, or all of a digest that there are."""
        return _names(digest, location) if location else {name for name in self.names() if name.startswith(digest)}

    def names(self) -> set[str]:
        """Return the name of every note; it begins with the digest."""
        try:
            return {path.stem for path in self._directory.glob("[!.]*.txt")}
        except OSError:
            return set()

    def read(self, name: str) -> Note | None:
        """Return a note, None if there is none."""
        try:
            text = (self._directory / f"{name}.txt").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        reason, location, *_ = *text.rsplit("\n", 2), "", ""
        return Note(reason, location) if location.startswith(("/", SCHEME)) else Note(text.strip(), "")  # by hand

    def lift(self, digest: str, location: str | None = None) -> None:
        """Let the copy at `location`, or all of a digest, be served again; no change if they may already."""
        for name in self.about(digest, location):
            (self._directory / f"{name}.txt").unlink(missing_ok=True)


def name_of(digest: str, location: str) -> str:
    """Return what a note is called."""
    return f"{digest}-{blake3(location.encode()).hexdigest(8)}" if location else digest


def _names(digest: str, location: str) -> set[str]:
    return {digest, name_of(digest, location)}


class ProcessQuarantine:
    """The quarantine as one serving process follows it. Safe from any thread."""

    def __init__(self, quarantine: Quarantine, location_of: Callable[[str], str | None]) -> None:
        """`location_of` returns where the copy lies that a digest is served from."""
        self.reasons: Mapping[str, str] = {}
        """By digest; such cartridges are not served. Replaced and never changed, so that it can be read at any time."""
        self._quarantine, self._location_of = quarantine, location_of
        self._notes: dict[str, Note] = {}
        self._unwritten: set[str] = set()
        """Names of notes that the directory did not take, so that they are not lifted when they are not there."""
        self._lock = threading.Lock()

    def put(self, digest: str, reason: str, location: str) -> bool:
        """Quarantine a copy here and for those who see the same directory; whether it was not already."""
        with self._lock:
            name = name_of(digest, location)
            if name in self._notes or digest in self._notes:
                return False
            self._notes[name] = Note(reason, location)
            if not self._quarantine.put(digest, reason, location):
                self._unwritten.add(name)
        self.publish()
        return True

    def holds(self, digest: str, location: str) -> bool:
        """Whether the copy at `location` is quarantined."""
        return not _names(digest, location).isdisjoint(self._notes)

    def follow(self) -> None:
        """Take in what others put into the directory, or lifted from it."""
        noted = self._quarantine.names()
        with self._lock:
            for name in self._notes.keys() - noted - self._unwritten:
                del self._notes[name]
                logger.info("the quarantine of %s was lifted", name)
            for name in noted - self._notes.keys():
                if (note := self._quarantine.read(name)) is not None:
                    self._notes[name] = note._replace(reason=f"quarantined: {note.reason}")
        self.publish()

    def forgive(self, digest: str) -> None:
        """Lift the quarantines that copies on S3 caused; what is there now is checked when it is loaded. Else no change."""
        with self._lock:
            for name, note in list(self._notes.items()):
                if name.startswith(digest) and is_remote(note.location):
                    with suppress(OSError):
                        self._quarantine.lift(digest, note.location)
                    del self._notes[name]
        self.publish()

    def publish(self) -> None:
        """Let `reasons` be of the copies that are served now."""
        with self._lock:
            found = ((name.partition("-")[0], note) for name, note in self._notes.items())
            self.reasons = {d: note.reason for d, note in found if note.location in ("", self._location_of(d))}
