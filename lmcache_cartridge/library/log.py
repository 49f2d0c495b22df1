"""Log: the format of a published library, a log of numbered files under one prefix that never change.

    log/000000000000.json        says what this is; the same in every library
    log/000000000001.json        a record: one or several changes that took place together, and the hash of the one before
    snapshot/000000000064.json.gz    everything there was after record 64
    library.json                 which snapshot to begin with; the one file that is replaced
    cartridges/ID/VERSION/DIGEST16/  an artefact, as `push` stores it; there for everybody before its record is

The next record is written only where there is none of its number, so that all publishers agree on the order, and one of
two that publish the same version is told. A follower asks for the next number until there is none.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec
from blake3 import blake3

from ..artifact.manifest import Kind, check_id
from ..errors import CartridgeError, RegistryError
from .changes import Added, Change, Labelled, Unlabelled
from .registry import RegistryEntry

T = TypeVar("T")

FORMAT = 1
GENESIS = b'{"format":1,"library":"lmcache-cartridge"}'
"""Record 0."""
POINTER = "library.json"
MAX_BYTES = 16 << 20
"""Of a record."""
MAX_SNAPSHOT_BYTES = 1 << 30
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one file of the log says."""

    format: int
    previous: str
    """`mark` of the record before."""
    nonce: str
    """Of whoever wrote it: no two records are alike."""
    at: str
    """ISO 8601, UTC."""
    changes: tuple[Change, ...]


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """One version of a snapshot."""

    added: Added
    registered: str


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything there was after record `position`, whose hash is `mark`."""

    format: int
    position: int
    mark: str
    cartridges: tuple[Kept, ...]
    labels: tuple[Labelled, ...]


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which snapshot to begin with, 0 for none."""

    format: int
    snapshot: int


_record, _pointer = msgspec.json.Decoder(Record), msgspec.json.Decoder(Pointer)
_snapshot = msgspec.json.Decoder(Snapshot)


class Row(NamedTuple):
    """A registered version as the registry holds it."""

    entry: RegistryEntry
    promoted: bool


def record_file(number: int) -> str:
    """Return the name of a record's file."""
    return f"log/{number:012d}.json"


def snapshot_file(number: int) -> str:
    """Return the name of a snapshot's file."""
    return f"snapshot/{number:012d}.json.gz"


def place(cartridge_id: str, version: int, digest: str) -> str:
    """Return where an artefact lies in a library. Other content lies elsewhere, so nobody overwrites what another pushed."""
    return f"cartridges/{cartridge_id}/{version}/{digest[:16]}"


def mark(data: bytes) -> str:
    """Return the hash by which a record names the one before."""
    return blake3(data).hexdigest()


def encode(record: Record) -> bytes:
    """Return the bytes of a record."""
    return msgspec.json.encode(record)


def decode(data: bytes, name: str) -> Record:
    """Return the record in a file called `name`. Raises `RegistryError` unless it is one, or where it is of a newer format."""
    record = _decode(data, _record.decode, name)
    for change in record.changes:
        _check(change, name)
    return record


def encode_pointer(snapshot: int) -> bytes:
    """Return the bytes of the file that names a snapshot."""
    return msgspec.json.encode(Pointer(FORMAT, snapshot))


def decode_pointer(data: bytes, name: str) -> int:
    """Return the number of the snapshot to begin with, 0 for none. Raises `RegistryError`."""
    return _decode(data, _pointer.decode, name).snapshot


def encode_snapshot(position: int, mark: str, rows: Sequence[Row], labels: Sequence[Labelled]) -> bytes:
    """Return the bytes of a snapshot; the locations of `rows` are relative to the library."""
    cartridges = tuple(
        Kept(Added(e.id, e.version, e.digest, e.kind, e.positions, e.bytes, e.location, promoted), e.registered)
        for e, promoted in rows
    )
    data = msgspec.json.encode(Snapshot(FORMAT, position, mark, cartridges, tuple(labels)))
    return gzip.compress(data, 6, mtime=0)


def decode_snapshot(data: bytes, name: str) -> Snapshot:
    """Return the snapshot in a file called `name`. Raises `RegistryError`."""
    try:
        inflate = zlib.decompressobj(wbits=31)
        plain = inflate.decompress(data, MAX_SNAPSHOT_BYTES)
        if not inflate.eof:
            raise zlib.error("it has no end")
    except zlib.error as error:
        raise RegistryError(f"{name} is damaged ({error})") from None
    snapshot = _decode(plain, _snapshot.decode, name)
    for kept in snapshot.cartridges:
        _check(kept.added, name)
    for label in snapshot.labels:
        _check(label, name)
    return snapshot


def _decode(data: bytes, decode: Callable[[bytes], T], name: str) -> T:
    try:
        plain: Any = msgspec.json.decode(data)
        written = plain.get("format") if isinstance(plain, dict) else None
        if isinstance(written, int) and written > FORMAT:
            raise RegistryError(f"{name} has format {written}, this release knows {FORMAT}; upgrade lmcache-cartridge")
        if written != FORMAT:
            raise RegistryError(f"{name} is no part of a library: it has no format")
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RegistryError(f"{name} is damaged or was written by something else ({error})") from None


def _check(change: Change, name: str) -> None:
    """Raise `RegistryError` unless a change is one that a publisher may have written."""
    try:
        if isinstance(change, Labelled | Unlabelled):
            check_id(change.label)
        if not isinstance(change, Unlabelled):
            check_id(change.id)
            if not 1 <= change.version < 1 << 60:
                raise RegistryError(f"{change.version} is no version")
        if isinstance(change, Added):
            sound = _DIGEST.fullmatch(change.digest) and change.kind in get_args(Kind)
            sound = sound and min(change.positions, change.bytes) >= 0 and max(change.positions, change.bytes) < 1 << 60
            if not sound or change.location != place(change.id, change.version, change.digest):
                raise RegistryError(f"what it says of {change.id}@{change.version} cannot be")
    except CartridgeError as error:
        raise RegistryError(f"{name} is damaged or was written by something else ({error})") from None
