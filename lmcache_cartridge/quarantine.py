"""Quarantine: cartridges that must not be served, with the reason; one small file each, seen by every process."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path


class Quarantine:
    """Reasons by content digest, under one directory that serving may write.

    A quarantine outlives the process; `lmcache-cartridge verify` lifts it when the artefact is sound again.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, digest: str, reason: str) -> None:
        """Quarantine a cartridge. Never raises: where the file cannot be written other processes find out themselves."""
        partial = self._directory / f".{digest}.{uuid.uuid4().hex}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(reason)
            partial.rename(self._path(digest))
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
        self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}.txt"
