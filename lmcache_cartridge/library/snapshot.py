"""Snapshot: what reading many artefacts gave, in one file, so that the next start need not read them all again."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from ..artifact.manifest import Kind

logger = logging.getLogger(__name__)

_FORMAT = 1
_HEAD = b"cartridges\0\0"
_STALE_S = 30 * 86400.0
"""Age at which what nobody read any more is removed."""


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a catalog must know of a cartridge that nobody asks for."""

    digest: str
    location: str
    root: str | None
    """Directory of its manifest and token ids; None where that is the location."""
    kind: Kind
    positions: int
    hashes: bytes
    """Of its whole chunks, as `KeyIndex.hash` returns them."""
    refusal: tuple[str, str] | None = None
    """Name of the error and its message, where the cartridge is sound but nothing for this engine."""

    @property
    def directory(self) -> Path:
        """Where its manifest and token ids are."""
        return Path(self.root or self.location)


class Snapshot:
    """One file under `directory`, named by a digest of everything that decides what its rows hold.

    A cache, which processes may share: whoever writes it last is read next. A file that is damaged, or of another format, is
    as none at all. What its rows say was so once; whoever uses one has to look.
    """

    def __init__(self, directory: Path, facts: Any) -> None:
        """`facts` are all that the rows depend on beside the artefacts. Touches no file."""
        self._key = blake3(msgspec.json.encode((_FORMAT, facts))).digest()
        self.path = directory / f"{self._key.hex()[:32]}.rows"

    def load(self) -> list[Row]:
        """Return the rows, none where there is no sound file. Blocks for the read."""
        try:
            data = memoryview(self.path.read_bytes())
        except OSError:
            return []
        head = len(_HEAD) + len(self._key)
        if bytes(data[:head]) != _HEAD + self._key or blake3(data[head + 32 :]).digest() != data[head : head + 32]:
            logger.warning("%s is damaged; the artefacts are read again", self.path)
            return []
        with suppress(OSError):
            os.utime(self.path)
        try:
            return msgspec.msgpack.decode(data[head + 32 :], type=list[Row])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("%s is not understood (%s); the artefacts are read again", self.path, error)
            return []

    def save(self, rows: Iterable[Row]) -> None:
        """Replace the file, whole or not at all. Blocks for the write; where it fails the next start reads them all."""
        data = msgspec.msgpack.encode(list(rows))
        partial = self.path.with_suffix(f".{uuid.uuid4().hex}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_HEAD + self._key + blake3(data).digest())
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(self.path)
            self._clear_away()
        except OSError as error:
            logger.warning("%s is not written (%s); the next start reads all artefacts", self.path, error.strerror)
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the file: it was found to be wrong."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _clear_away(self) -> None:
        """Remove what engines left that are gone, and what was left half-written."""
        for path in self.path.parent.glob("*.*"):
            with suppress(OSError):
                age_s = time.time() - path.stat().st_mtime
                if age_s > (_STALE_S if path.suffix == ".rows" else 3600.0):
                    path.unlink()
