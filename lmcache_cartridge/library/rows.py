"""Rows: a summary of each artefact that was read, kept in SQLite so that the next start need not read them all."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from blake3 import blake3

from ..artifact import reading
from ..artifact.cartridge import Cartridge, Place
from ..artifact.location import is_remote
from ..artifact.manifest import Kind
from ..artifact.model import Fingerprint
from ..errors import ModelMismatch, UnsupportedEngine
from .index import KeyIndex
from .manifest_cache import ManifestCache
from .registry import RegistryEntry

logger = logging.getLogger(__name__)

T = TypeVar("T")

PERMANENT = {error.__name__: error for error in (ModelMismatch, UnsupportedEngine)}
"""Errors of sound cartridges that one engine can never serve; to read them again is no use."""
_FORMAT = 4
_UNUSED_S = 30 * 86400.0
"""Age at which the file of an engine that starts no more is removed."""
_WAIT_S = 10.0
"""How long another process may hold the file; its transactions take milliseconds."""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""SQLite's codes for a file that is no database, or has other tables than ours."""


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a catalog must know of a cartridge that nobody asks for."""

    digest: str
    location: str
    root: str | None
    """Directory of its manifest and token ids; None where that is the location."""
    kind: Kind
    positions: int
    hashes: bytes
    """Of its chunks, as `KeyIndex.hash` returns them."""
    refusal: tuple[str, str] | None = None
    """Name of the error and its message, where the cartridge is sound but nothing for this engine."""
    adapted: bool = False
    """Whether it was made with a LoRA adapter."""

    @property
    def is_open(self) -> bool:
        """Whether every prompt with its tokens may have it: what the base model computes of them."""
        return self.kind == "prefill" and not self.adapted

    @property
    def place(self) -> Place:
        """Where its artefact lies."""
        return Place(Path(self.root or self.location), self.location)


_decode = msgspec.msgpack.Decoder(Row).decode


class RowReader:
    """Reads artefacts for one engine. Keeps nothing; safe from any thread."""

    def __init__(
        self,
        index: KeyIndex,
        copies: ManifestCache,
        fingerprint: Fingerprint,
        *,
        allow_trained: bool,
        accept_weights: bool = False,
    ) -> None:
        self._index, self._copies = index, copies
        self._allow_trained = allow_trained
        self._check = lambda manifest: manifest.fingerprint.check_fits(fingerprint, accept_weights=accept_weights)
        self.facts = (list(map(hex, index.probe)), index.chunk_tokens, fingerprint, allow_trained, accept_weights)
        """All that rows depend on beside the artefacts."""

    def place(self, location: str, *, network: bool) -> Place | None:
        """Return where a registered artefact can be read; None for one on S3 without a copy here.

        With `network` a copy is made or renewed, which blocks and raises `CartridgeError`.
        """
        if not is_remote(location):
            return Place(Path(location), location)
        root = self._copies.fetch(location, check=self._check) if network else self._copies.known(location)
        return None if root is None else Place(root, location)

    def read(self, digest: str, place: Place) -> tuple[Row, Cartridge]:
        """Read an artefact and hash its document. Blocks for local reads.

        Raises `CartridgeError` where it cannot be served: one of `PERMANENT`, or another where it is not sound.
        """
        root, location = place
        manifest = reading.load_manifest(root, digest, payload=location == str(root))
        self._check(manifest)
        if manifest.kind == "trained" and not self._allow_trained:
            raise UnsupportedEngine(
                "a trained cartridge needs kv_load_failure_policy: fail, since nothing can compute it; this engine "
                "recomputes what it cannot load"
            )
        hashes = self._index.hash(manifest, reading.load_token_ids(manifest, root).tolist())
        beside = None if location == str(root) else str(root)
        adapted = manifest.fingerprint.lora is not None
        row = Row(digest, location, beside, manifest.kind, manifest.positions, hashes, adapted=adapted)
        return row, Cartridge(manifest, root, location)

    def is_likely(self, row: Row, entry: RegistryEntry) -> bool:
        """Whether a row may be what `read` would return for a registered cartridge. Reads nothing."""
        if row.location != entry.location:
            return False
        if row.refusal is not None:
            return row.refusal[0] in PERMANENT
        if (row.kind, row.positions) != (entry.kind, entry.positions):
            return False
        return len(row.hashes) == self._index.hash_bytes(row.positions, row.kind)


class RowCache:
    """Rows by digest, in the SQLite file at `path`.

    Any number of processes may share it, and be killed at any time. A row was right when it was written; compare it
    with the artefact before use. No call raises: a file that is damaged is removed, one that cannot be read is empty,
    and where nothing can be written the next start reads the artefacts. Of that the first is logged.
    """

    def __init__(self, path: Path) -> None:
        """Touches no file. Others in its directory that were not used for a month are removed with the first write."""
        self.path = path
        self._complained = False

    @classmethod
    def of(cls, directory: Path, facts: Any) -> RowCache:
        """Return the cache of all rows that depend on the same `facts`, beside the artefacts; msgspec can encode them."""
        return cls(directory / f"{blake3(msgspec.json.encode((_FORMAT, facts))).hexdigest(16)}.sqlite")

    def load(self) -> list[Row]:
        """Return every row. Blocks for the read."""
        with suppress(OSError):
            os.utime(self.path)
        return self._run(lambda db: [_decode(row) for (row,) in db.execute("SELECT CAST(row AS BLOB) FROM rows")]) or []

    def add(self, rows: Iterable[Row]) -> None:
        """Keep some more rows, each in place of any other of its digest, all of them or none. Blocks for the write."""
        encode = msgspec.msgpack.Encoder().encode
        values = [(row.digest, encode(row)) for row in rows]
        self._run(lambda db: db.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", values))
        self._remove_unused()

    def clear(self) -> None:
        """Drop all rows: one was found to be wrong."""
        self._run(lambda db: db.execute("DELETE FROM rows"))

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Do something in one transaction; None where that failed."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with closing(sqlite3.connect(self.path, timeout=_WAIT_S)) as db, db:
                db.execute("CREATE TABLE IF NOT EXISTS rows (digest TEXT PRIMARY KEY, row BLOB NOT NULL)")
                return work(db)
        except (sqlite3.Error, OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            damaged = not isinstance(error, OSError | sqlite3.Error)
            if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
                damaged = True
            if damaged:
                for path in (self.path, self.path.with_name(f"{self.path.name}-journal")):
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
            if not self._complained:
                self._complained = True
                what = "is damaged and was removed" if damaged else "cannot be used"
                logger.warning("%s %s (%s); artefacts are read instead, at the next start too", self.path, what, error)
            return None

    def _remove_unused(self) -> None:
        for path in self.path.parent.glob("*.*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _UNUSED_S:
                    path.unlink()
