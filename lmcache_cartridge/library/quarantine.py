"""Quarantine: cartridges that must not be served, with the reason; one small file each, seen by every process."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class BadCopy(NamedTuple):
    """What on S3 had the wrong bytes."""

    location: str
    revision: str
    """Of the payload; empty where it is not known."""


class Quarantine:
    """Reasons by content digest, under one directory that serving may write.

    A quarantine outlives the process; `lmcache-cartridge verify` lifts it when the artefact is sound again. One that a
    copy on S3 caused is lifted by servers too, once there is another.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, digest: str, reason: str) -> None:
        """Quarantine a cartridge. Never raises: where the file cannot be written other processes find out themselves."""
        self._write(self._path(digest), reason)

    def put_copy(self, digest: str, copy: BadCopy) -> None:
        """Note what caused a quarantine. Never raises."""
        self._write(self._path(digest, ".copy"), f"{copy.location}\n{copy.revision}")

    def copy(self, digest: str) -> BadCopy | None:
        """Return what on S3 caused a quarantine, None if nothing did."""
        try:
            location, _, revision = self._path(digest, ".copy").read_text(encoding="utf-8").partition("\n")
        except (OSError, ValueError):
            return None
        return BadCopy(location, revision)

    def _write(self, path: Path, text: str) -> None:
        partial = self._directory / f".{path.name}.{uuid.uuid4().hex}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            partial.rename(path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def reason(self, digest: str) -> str | None:
        """Return why a cartridge is quarantined, None if it is not."""
        try:
            return self._path(digest).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def digests(self) -> set[str]:
        """Return the digests of every quarantined cartridge."""
        try:
            return {path.stem for path in self._directory.glob("[!.]*.txt")}
        except OSError:
            return set()

    def lift(self, digest: str) -> None:
        """Let a cartridge be served again; no change if it may already."""
        self._path(digest, ".copy").unlink(missing_ok=True)
        self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: str, suffix: str = ".txt") -> Path:
        return self._directory / f"{digest}{suffix}"
