"""Registry: which cartridges there are and where, in one SQLite file. Tools write it; serving only reads it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from . import artifact
from .errors import CartridgeExists, CartridgeNotFound, RegistryError
from .manifest import Manifest, check_id

_MIGRATIONS = (
    (
        """
        CREATE TABLE cartridges (
            id TEXT NOT NULL,
            version INTEGER NOT NULL,
            digest TEXT NOT NULL,
            kind TEXT NOT NULL,
            positions INTEGER NOT NULL,
            bytes INTEGER NOT NULL,
            location TEXT NOT NULL,
            registered TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now')),
            PRIMARY KEY (id, version)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX cartridges_digest ON cartridges (digest)",
        """
        CREATE TABLE labels (
            label TEXT PRIMARY KEY,
            id TEXT NOT NULL,
            version INTEGER NOT NULL,
            FOREIGN KEY (id, version) REFERENCES cartridges (id, version)
        ) WITHOUT ROWID
        """,
    ),
)
"""Schema changes in order, each a run of statements; `PRAGMA user_version` counts those applied."""


class Location(NamedTuple):
    """One registered version of a cartridge."""

    id: str
    version: int
    digest: str
    kind: str
    positions: int
    bytes: int
    """Payload size."""
    root: Path
    """Directory of the artefact."""
    registered: str
    """ISO 8601, UTC."""

    @property
    def name(self) -> str:
        """`id@version`."""
        return f"{self.id}@{self.version}"


_COLUMNS = ", ".join("location" if field == "root" else field for field in Location._fields)


class Registry:
    """The registry file at `path`.

    Calls are short and blocking, each on a connection of its own, so any thread may call. With `read_only` no call
    changes the file, and a missing file is an empty registry.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._read_only = read_only
        if not read_only:
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise RegistryError(f"registry {path}: {error.strerror}") from error
            with self._connect() as db:
                self._migrate(db)
            # A write-ahead log lets servers read while a tool writes. The change of mode needs the file for itself for
            # a moment; where it cannot have it, somebody else is making the same change.
            with suppress(RegistryError), self._connect() as db:
                db.execute("PRAGMA journal_mode = WAL")

    def register(self, root: Path) -> Manifest:
        """Add the artefact at `root` under the id and version of its manifest, and return that.

        The same artefact again is no change. Raises `CartridgeExists` if other content has this id and version,
        or a label this name, `ManifestError` or `ArtifactError` if the artefact is not sound.
        """
        root = root.resolve()
        manifest = artifact.load_manifest(root)
        artifact.load_token_ids(manifest, root)
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")  # nobody else may take the version between the look and the write
            row = db.execute(
                "SELECT digest FROM cartridges WHERE id = ? AND version = ?", (manifest.id, manifest.version)
            ).fetchone()
            if row and row[0] != manifest.digest:
                raise CartridgeExists(
                    f"{manifest.name} is registered with other content (digest {row[0][:16]}...); "
                    "versions never change. Build the cartridge again to get a new version"
                )
            if db.execute("SELECT 1 FROM labels WHERE label = ?", (manifest.id,)).fetchone():
                raise CartridgeExists(f"{manifest.id} is a label already and cannot be the id of a cartridge too")
            db.execute(
                "INSERT INTO cartridges (id, version, digest, kind, positions, bytes, location) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET location = excluded.location",
                (
                    manifest.id, manifest.version, manifest.digest, manifest.kind, manifest.positions,
                    manifest.payload_bytes, str(root),
                ),
            )  # fmt: skip
        return manifest

    def label(self, label: str, name: str) -> Location:
        """Point `label` at the cartridge `name` stands for now, in one step, and return that cartridge.

        Raises `CartridgeNotFound` for an unknown name, `CartridgeExists` if `label` is a cartridge's id.
        """
        check_id(label)
        target = self.find(name)
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")
            if db.execute("SELECT 1 FROM cartridges WHERE id = ?", (label,)).fetchone():
                raise CartridgeExists(f"{label} is the id of a cartridge and cannot be a label too")
            db.execute(
                "INSERT INTO labels VALUES (?, ?, ?) "
                "ON CONFLICT DO UPDATE SET id = excluded.id, version = excluded.version",
                (label, target.id, target.version),
            )
        return target

    def find(self, name: str) -> Location:
        """Return the cartridge that `name` stands for: `id` (its newest version), `id@version` or a label.

        Raises `CartridgeNotFound`.
        """
        cartridge_id, _, version = name.partition("@")
        select = f"SELECT {_COLUMNS} FROM cartridges "
        with self._connect() as db:
            if version.isdecimal() and len(version) < 19:  # larger ones are no SQLite integers
                where, values = "WHERE id = ? AND version = ?", (cartridge_id, int(version))
            else:
                where, values = "WHERE id = ? ORDER BY version DESC LIMIT 1", (name,)
            row = db.execute(select + where, values).fetchone()
            if row is None:
                row = db.execute(select + "JOIN labels USING (id, version) WHERE label = ?", (name,)).fetchone()
        if row is None:
            raise CartridgeNotFound(
                f"no cartridge, version or label is called {name!r}; `lmcache-cartridge list` shows them"
            )
        return _location(row)

    def all(self) -> list[Location]:
        """Return every version of every cartridge, by id and version."""
        with self._connect() as db:
            rows = db.execute(f"SELECT {_COLUMNS} FROM cartridges ORDER BY id, version").fetchall()
        return [_location(row) for row in rows]

    def labels(self) -> dict[str, str]:
        """Return every label with the `id@version` it points at."""
        with self._connect() as db:
            rows = db.execute("SELECT label, id, version FROM labels ORDER BY label").fetchall()
        return {label: f"{cartridge_id}@{version}" for label, cartridge_id, version in rows}

    def next_version(self, cartridge_id: str) -> int:
        """Return the version that a new build of `cartridge_id` gets."""
        with self._connect() as db:
            row = db.execute("SELECT max(version) FROM cartridges WHERE id = ?", (cartridge_id,)).fetchone()
        return (row[0] or 0) + 1

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Open a connection, commit on success; SQLite's errors become `RegistryError` here and only here."""
        db = None
        try:
            if self._read_only and not self.path.exists():
                db = sqlite3.connect(":memory:")
                self._migrate(db)
            else:
                mode = "ro" if self._read_only else "rwc"
                if self._read_only and not os.access(self.path.parent, os.W_OK):
                    mode += "&immutable=1"  # a write-ahead log cannot be read where its -shm cannot be made
                db = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode={mode}", uri=True, timeout=10)
                self._check_schema(db)
            with db:
                yield db
        except (sqlite3.Error, UnicodeEncodeError) as error:
            raise RegistryError(f"registry {self.path}: {error}") from error
        finally:
            if db is not None:
                db.close()

    def _check_schema(self, db: sqlite3.Connection) -> None:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(_MIGRATIONS):
            raise RegistryError(
                f"registry {self.path} has schema {version}, this release knows {len(_MIGRATIONS)}; "
                "upgrade lmcache-cartridge"
            )
        if self._read_only and version < len(_MIGRATIONS):
            raise RegistryError(
                f"registry {self.path} has the older schema {version}; "
                "run `lmcache-cartridge list` once as the user that writes it"
            )

    def _migrate(self, db: sqlite3.Connection) -> None:
        """Bring the schema up to date, once even if several processes start at the same time."""
        if db.execute("PRAGMA user_version").fetchone()[0] == len(_MIGRATIONS):
            return
        db.execute("BEGIN IMMEDIATE")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        for number, statements in enumerate(_MIGRATIONS[version:], start=version + 1):
            for statement in statements:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {number}")


def _location(row: tuple) -> Location:
    return Location(*row[:6], Path(row[6]), row[7])
