"""Quarantine: cartridges that must not be served, with the reason; one small file each, seen by every process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..artifact import files
from ..artifact.location import is_remote
from ..errors import CartridgeError

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 10.0
"""How often S3 is asked whether a quarantined cartridge has other bytes now."""


class BadCopy(NamedTuple):
    """The payload on S3 that had wrong bytes."""

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

    def put(self, digest: str, reason: str, copy: BadCopy | None = None) -> bool:
        """Quarantine a cartridge, for what `copy` holds on S3 if given; return whether others will see it. Never raises."""
        text = "\n".join((reason, *(copy or ("", ""))))
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.replace(self._path(digest), [text.encode("utf-8", "backslashreplace")], 0o600)
        except OSError:
            return False
        return True

    def reason(self, digest: str) -> str | None:
        """Return why a cartridge is quarantined, None if it is not."""
        return self._read(digest)[0]

    def copy(self, digest: str) -> BadCopy | None:
        """Return what on S3 caused a quarantine, None if nothing did."""
        _, location, revision = self._read(digest)
        return BadCopy(location, revision) if is_remote(location) else None

    def digests(self) -> set[str]:
        """Return the digests of every quarantined cartridge."""
        try:
            return {path.stem for path in self._directory.glob("[!.]*.txt")}
        except OSError:
            return set()

    def lift(self, digest: str) -> None:
        """Let a cartridge be served again; no change if it may already."""
        self._path(digest).unlink(missing_ok=True)

    def _read(self, digest: str) -> tuple[str | None, str, str]:
        """Return the reason, None without one, and from the last two lines the copy's location and revision, or ""."""
        try:
            text = self._path(digest).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None, "", ""
        reason, location, revision = (*text.rsplit("\n", 2), "", "")[:3]  # by hand, a reason alone will do
        return reason, location, revision

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}.txt"


class _Case(NamedTuple):
    """Why one cartridge is quarantined."""

    reason: str
    is_noted: bool
    """Whether that lies in the directory, so that it is lifted when it is removed there."""
    copy: BadCopy | None


class ProcessQuarantine:
    """The quarantine as one serving process follows it. Safe from any thread."""

    def __init__(self, quarantine: Quarantine, revision: Callable[[str], str], clock: Callable[[], float]) -> None:
        """`revision` returns a text that changes with the payload at an `s3://` location; it may block and raise."""
        self.reasons: Mapping[str, str] = {}
        """By digest; such cartridges are not served. Replaced and never changed, so that it can be read at any time."""
        self._quarantine, self._revision, self._clock = quarantine, revision, clock
        self._cases: dict[str, _Case] = {}
        self._distrusted: dict[str, str] = {}
        self._asked_at = float("-inf")
        self._lock = threading.Lock()

    def put(self, digest: str, reason: str, location: str | None) -> bool:
        """Quarantine a cartridge here and for those who see the same directory; whether it was not already.

        `location` is that of a payload on S3: the cartridge is served again once there are other bytes. Blocks to ask
        which ones they were.
        """
        copy = None
        if location is not None:  # before anybody is told: whoever puts it right from now on is heard
            copy = BadCopy(location, "")
            with suppress(CartridgeError):
                copy = BadCopy(location, self._revision(location))
        with self._lock:
            if digest in self._cases:
                return False
            self._cases[digest] = _Case(reason, self._quarantine.put(digest, reason, copy), copy)
            self._publish()
            return True

    def distrust(self, digest: str, reason: str) -> None:
        """Serve a cartridge no more in this process alone: its bytes are sound, and others may serve it."""
        with self._lock:
            self._distrusted.setdefault(digest, reason)
            self._publish()

    def look_up(self, digests: Iterable[str]) -> None:
        """Take in what the directory says of cartridges that come to be served."""
        with self._lock:
            for digest in digests:
                if digest not in self._cases and (reason := self._quarantine.reason(digest)) is not None:
                    self._cases[digest] = _Case(f"quarantined: {reason}", True, None)
                    self._publish()

    def follow(self, knows: Callable[[str], bool]) -> bool:
        """Take in what others put into the directory, of cartridges that the caller `knows`, or lifted from it.

        Return whether it is time for `ask_again`.
        """
        noted = self._quarantine.digests()
        with self._lock:
            for digest in [d for d, case in self._cases.items() if case.is_noted and d not in noted]:
                del self._cases[digest]
                self._publish()
                logger.info("the quarantine of %s was lifted", digest)
        self.look_up(filter(knows, noted))
        now = self._clock()
        if not (noted or self._cases) or now - self._asked_at < _LOOK_AGAIN_S:
            return False
        self._asked_at = now
        return True

    def ask_again(self) -> None:
        """Lift the quarantines of those that have other bytes on S3 than the ones that were wrong. Asks S3."""
        for digest in self._quarantine.digests() | self.reasons.keys():
            copy = self._copy(digest)
            with suppress(CartridgeError):
                if copy is not None and self._revision(copy.location) != copy.revision:
                    self.forgive(digest)

    def forgive(self, digest: str) -> None:
        """Lift a quarantine that a copy on S3 caused; what is there now is checked when it is loaded. Else no change."""
        if self._copy(digest) is None:
            return
        with suppress(OSError):
            self._quarantine.lift(digest)
        with self._lock:
            lifted = self._cases.pop(digest, None)
            self._publish()
        if lifted is not None:
            logger.info("the quarantine of %s is lifted: it is fetched from S3 again", digest)

    def _copy(self, digest: str) -> BadCopy | None:
        case = self._cases.get(digest)
        return case.copy if case is not None and case.copy is not None else self._quarantine.copy(digest)

    def _publish(self) -> None:
        self.reasons = self._distrusted | {digest: case.reason for digest, case in self._cases.items()}
