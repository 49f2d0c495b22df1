"""Changes: what can happen to a registry, each as a plain value, and what it does to the tables."""

from __future__ import annotations

import sqlite3

import msgspec

from ..errors import CartridgeExists, CartridgeNotFound, RegistryError


class Added(msgspec.Struct, tag_field="change", tag="publish", frozen=True, forbid_unknown_fields=True):
    """A version is there; the same one again is no change, or a change of its location."""

    id: str
    version: int
    digest: str
    kind: str
    positions: int
    bytes: int
    location: str
    promote: bool = True
    """Whether its id means it, where it is the newest."""


class Promoted(msgspec.Struct, tag_field="change", tag="promote", frozen=True, forbid_unknown_fields=True):
    """An id means this version, older or newer."""

    id: str
    version: int


class Labelled(msgspec.Struct, tag_field="change", tag="label", frozen=True, forbid_unknown_fields=True):
    """A label points at this version."""

    label: str
    id: str
    version: int
    warm: bool = False


class Unlabelled(msgspec.Struct, tag_field="change", tag="unlabel", frozen=True, forbid_unknown_fields=True):
    """A label is gone."""

    label: str


class Removed(msgspec.Struct, tag_field="change", tag="remove", frozen=True, forbid_unknown_fields=True):
    """A version is gone. Its files stay."""

    id: str
    version: int


Change = Added | Promoted | Labelled | Unlabelled | Removed


def apply(db: sqlite3.Connection, change: Change, at: str | None = None) -> None:
    """Do one change; `at` is when, by default now, in ISO 8601 and UTC. The caller has begun the transaction.

    Raises `CartridgeExists`, `CartridgeNotFound` or `RegistryError` where it cannot be done; the tables are as they were.
    """
    match change:
        case Added():
            _add(db, change, at)
        case Promoted():
            mine = (change.id, change.version)
            _check_there(db, *mine)
            db.execute("UPDATE cartridges SET promoted = 0 WHERE id = ? AND version > ? AND promoted", mine)
            db.execute("UPDATE cartridges SET promoted = 1 WHERE id = ? AND version = ?", mine)
        case Labelled():
            if db.execute("SELECT 1 FROM cartridges WHERE id = ?", (change.label,)).fetchone():
                raise CartridgeExists(f"{change.label} is the id of a cartridge and cannot be a label too")
            _check_there(db, change.id, change.version)
            db.execute(
                "INSERT INTO labels VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET id = excluded.id, version = excluded.version, warm = excluded.warm",
                (change.label, change.id, change.version, change.warm),
            )
        case Unlabelled():
            if not db.execute("DELETE FROM labels WHERE label = ?", (change.label,)).rowcount:
                raise CartridgeNotFound(f"there is no label {change.label!r}")
        case Removed():
            mine = (change.id, change.version)
            rows = db.execute("SELECT label FROM labels WHERE id = ? AND version = ? ORDER BY label", mine)
            if labels := [label for (label,) in rows]:
                raise RegistryError(
                    f"{change.id}@{change.version} has the label {', '.join(labels)}; point it elsewhere first"
                )
            db.execute("DELETE FROM cartridges WHERE id = ? AND version = ?", mine)


def check_same(name: str, there: str, digest: str) -> None:
    """Raise `CartridgeExists` unless the digest that a version has is that of its content."""
    if there != digest:
        raise CartridgeExists(
            f"{name} is registered with other content (digest {there[:16]}...); versions never change. "
            "Build the cartridge again to get a new version"
        )


def _add(db: sqlite3.Connection, new: Added, at: str | None) -> None:
    row = db.execute(
        "SELECT digest, location FROM cartridges WHERE id = ? AND version = ?", (new.id, new.version)
    ).fetchone()
    if row:
        check_same(f"{new.id}@{new.version}", row[0], new.digest)
    if at is not None and row == (new.digest, new.location):
        return  # of a library that is read again; a person who registers it again has it looked at again
    if db.execute("SELECT 1 FROM labels WHERE label = ?", (new.id,)).fetchone():
        raise CartridgeExists(f"{new.id} is a label already and cannot be the id of a cartridge too")
    db.execute(
        "INSERT INTO cartridges (id, version, digest, kind, positions, bytes, location, promoted, registered) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, coalesce(?, strftime('%Y-%m-%dT%H:%M:%SZ', 'now'))) "
        "ON CONFLICT DO UPDATE SET location = excluded.location",
        (new.id, new.version, new.digest, new.kind, new.positions, new.bytes, new.location, new.promote, at),
    )


def _check_there(db: sqlite3.Connection, cartridge_id: str, version: int) -> None:
    mine = (cartridge_id, version)
    if not db.execute("SELECT 1 FROM cartridges WHERE id = ? AND version = ?", mine).fetchone():
        raise CartridgeNotFound(f"{cartridge_id}@{version} was removed at this moment")
