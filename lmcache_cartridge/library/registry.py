"""Registry: which cartridges there are and where, in one SQLite file. Tools write it; serving only reads it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..artifact.manifest import Manifest, check_id
from ..errors import CartridgeExists, CartridgeNotFound, RegistryError

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
    (
        "ALTER TABLE labels ADD COLUMN warm INTEGER NOT NULL DEFAULT 0",
        # What servers read to follow changes; a row for each, so that they need not compare everything.
        "CREATE TABLE changes (sequence INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, version INTEGER NOT NULL)",
        "INSERT INTO changes (id, version) SELECT id, version FROM cartridges",
        *(
            f"CREATE TRIGGER cartridges_{event.lower()} AFTER {event} ON cartridges BEGIN "
            f"INSERT INTO changes (id, version) VALUES ({row}.id, {row}.version); END"
            for event, row in (("INSERT", "new"), ("UPDATE", "new"), ("DELETE", "old"))
        ),
    ),
    # Sequences with gaps that nobody can guess: a backup put back and changed as often is told from what it replaced.
    tuple(
        statement
        for event, row in (("INSERT", "new"), ("UPDATE", "new"), ("DELETE", "old"))
        for statement in (
            f"DROP TRIGGER cartridges_{event.lower()}",
            f"CREATE TRIGGER cartridges_{event.lower()} AFTER {event} ON cartridges BEGIN "
            "INSERT INTO changes (sequence, id, version) SELECT coalesce(max(sequence), 0) + 1 + abs(random() % 4294967296), "
            f"{row}.id, {row}.version FROM changes; END",
        )
    ),
    # An id alone means its newest version that is promoted.
    ("ALTER TABLE cartridges ADD COLUMN promoted INTEGER NOT NULL DEFAULT 1",),
)
"""Schema changes in order, each a run of statements; `PRAGMA user_version` counts those applied."""


_MOST_CANDIDATES = 8
"""Versions of an id that are tried, the newest first, until one can be served."""


class RegistryEntry(NamedTuple):
    """One registered version of a cartridge."""

    id: str
    version: int
    digest: str
    kind: str
    positions: int
    bytes: int
    """Payload size."""
    location: str
    """Where the artefact lies: a directory, or `s3://bucket/key`."""
    registered: str
    """ISO 8601, UTC."""

    @property
    def name(self) -> str:
        """`id@version`."""
        return f"{self.id}@{self.version}"


_COLUMNS = ", ".join(RegistryEntry._fields)
_CANNOT_MAKE_FILES = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
_RESTORE = "restore a copy of the file, or move it away and register the cartridges again"
_TYPES = (str, int, str, str, int, int, str, str)


class Changes(NamedTuple):
    """What a registry came to hold, or ceased to, after some moment."""

    sequence: int
    """The moment of the last of them; pass it to learn of later ones."""
    present: list[RegistryEntry]
    """New or moved versions; every version if `whole`."""
    gone: list[str]
    """`id@version` of those removed; empty if `whole`."""
    whole: bool
    """Whether this is all there is, since there is nothing to compare with."""


class Registry:
    """The registry file at `path`.

    Calls are short and blocking, each on a connection of its own, so any thread may call. With `read_only` no call
    changes the file, and a missing file is an empty registry; the first connection stays open, since without one SQLite
    would have to make files beside it for each call, which a full disk forbids.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._read_only = read_only
        self._kept: tuple[sqlite3.Connection, tuple[int, int]] | None = None
        if not read_only:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RegistryError(f"registry {path}: {error.strerror}") from error
            with self._connect() as db:
                self._migrate(db)
            # A write-ahead log lets servers read while a tool writes. The change of mode needs the file for itself for
            # a moment; where it cannot have it, somebody else is making the same change.
            with suppress(RegistryError), self._connect() as db:
                db.execute("PRAGMA journal_mode = WAL")

    def register(self, root: Path, location: str | None = None, *, promote: bool = True) -> Manifest:
        """Add the artefact at `root` under the id and version of its manifest, and return that.

        With `location` the payload lies there, and `root` holds a copy of its manifest and token ids only. Without
        `promote` a new version is had by its `id@version` alone, until `promote()`; the id means what it meant. The same
        artefact again is no change, or a change of its location. Raises `CartridgeExists` if other content has this id
        and version, or a label this name, `ManifestError` or `ArtifactError` if the artefact is not sound.
        """
        from ..artifact import reading  # here, since `list` would wait for numpy

        root = root.resolve()
        manifest = reading.load_manifest(root, payload=location is None)
        reading.load_token_ids(manifest, root)
        if location is None:
            reading.check_local_header(manifest, root)
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
                "INSERT INTO cartridges (id, version, digest, kind, positions, bytes, location, promoted) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET location = excluded.location",
                (
                    manifest.id, manifest.version, manifest.digest, manifest.kind, manifest.positions,
                    manifest.payload_bytes, location or str(root), promote,
                ),
            )  # fmt: skip
        return manifest

    def promote(self, name: str) -> RegistryEntry:
        """Let the id of the version that `name` stands for mean that version, older or newer, and return it.

        Raises `CartridgeNotFound`.
        """
        target = self.find(name)
        with self._connect() as db:
            mine = (target.id, target.version)
            db.execute("UPDATE cartridges SET promoted = 0 WHERE id = ? AND version > ? AND promoted", mine)
            if not db.execute("UPDATE cartridges SET promoted = 1 WHERE id = ? AND version = ?", mine).rowcount:
                raise CartridgeNotFound(f"{target.name} was removed at this moment")
        return target

    def remove(self, name: str) -> RegistryEntry:
        """Take one version of a cartridge out, and return what it was. Its files stay.

        Raises `CartridgeNotFound`, and `RegistryError` while labels point at it.
        """
        target = self.find(name)
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")
            mine = (target.id, target.version)
            rows = db.execute("SELECT label FROM labels WHERE id = ? AND version = ? ORDER BY label", mine)
            if labels := [label for (label,) in rows]:
                raise RegistryError(f"{target.name} has the label {', '.join(labels)}; point it elsewhere first")
            db.execute("DELETE FROM cartridges WHERE id = ? AND version = ?", mine)
        return target

    def unlabel(self, label: str) -> None:
        """Remove a label. Raises `CartridgeNotFound` if there is none of this name."""
        with self._connect() as db:
            if not db.execute("DELETE FROM labels WHERE label = ?", (label,)).rowcount:
                raise CartridgeNotFound(f"there is no label {label!r}")

    def label(self, label: str, name: str, *, warm: bool = False) -> RegistryEntry:
        """Point `label` at the cartridge `name` stands for now, in one step, and return that cartridge.

        What a `warm` label points at is brought into memory when a server starts, or sees it move. Raises `CartridgeNotFound` for an unknown name, `CartridgeExists` if `label` is a cartridge's id.
        """
        check_id(label)
        target = self.find(name)
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")
            if db.execute("SELECT 1 FROM cartridges WHERE id = ?", (label,)).fetchone():
                raise CartridgeExists(f"{label} is the id of a cartridge and cannot be a label too")
            mine = (target.id, target.version)
            if not db.execute("SELECT 1 FROM cartridges WHERE id = ? AND version = ?", mine).fetchone():
                raise CartridgeNotFound(f"{target.name} was removed at this moment")
            db.execute(
                "INSERT INTO labels VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET id = excluded.id, version = excluded.version, warm = excluded.warm",
                (label, target.id, target.version, warm),
            )
        return target

    def find(self, name: str) -> RegistryEntry:
        """Return the cartridge that `name` stands for: `id` (its newest promoted version), `id@version` or a label.

        Raises `CartridgeNotFound`.
        """
        return self.candidates(name, limit=1)[0]

    def candidates(self, name: str, *, limit: int = _MOST_CANDIDATES) -> list[RegistryEntry]:
        """Return what `name` may stand for: what `find` returns, and for an id its older promoted versions, newest first.

        Raises `CartridgeNotFound`.
        """
        cartridge_id, version = _parts(name)
        select = f"SELECT {_COLUMNS} FROM cartridges "
        with self._connect() as db:
            if version is not None:
                where, values = "WHERE id = ? AND version = ?", (cartridge_id, version)
            else:
                where, values = "WHERE id = ? AND promoted ORDER BY version DESC LIMIT ?", (name, limit)
            rows = db.execute(select + where, values).fetchall()
            if not rows:
                rows = db.execute(select + "JOIN labels USING (id, version) WHERE label = ?", (name,)).fetchall()
            rest = db.execute("SELECT max(version) FROM cartridges WHERE id = ?", (name,)).fetchone()[0]
        if not rows and rest is not None:
            raise CartridgeNotFound(
                f"no version of {name!r} is promoted; `lmcache-cartridge promote {name}@{rest}` does"
            )
        if not rows:
            raise CartridgeNotFound(
                f"no cartridge, version or label is called {name!r}; `lmcache-cartridge list` shows them"
            )
        return list(map(_entry, rows))

    def current(self, ids: Iterable[str]) -> set[str]:
        """Return the `id@version` that each of some ids means without a version."""
        with self._connect() as db:
            rows = db.execute(
                "SELECT id, max(version) FROM cartridges WHERE promoted AND id IN (SELECT value FROM json_each(?)) GROUP BY id",
                (json.dumps(sorted(set(ids))),),
            ).fetchall()
        return {f"{cartridge_id}@{version}" for cartridge_id, version in rows}

    def all(self) -> list[RegistryEntry]:
        """Return every version of every cartridge, by id and version."""
        return self._select("ORDER BY id, version")

    def page(self, limit: int, after: str = "") -> list[RegistryEntry]:
        """Return up to `limit` versions, by id and version, those that come after the `id@version` `after`."""
        cartridge_id, version = _parts(after)
        return self._select(
            "WHERE (id, version) > (?, ?) ORDER BY id, version LIMIT ?", cartridge_id, version or 0, limit
        )

    def having(self, digests: Iterable[str]) -> list[RegistryEntry]:
        """Return the versions that have one of `digests`, by id and version."""
        return self._select(
            "WHERE digest IN (SELECT value FROM json_each(?)) ORDER BY id, version", json.dumps(sorted(digests))
        )

    def changes(self, since: int = 0) -> Changes:
        """Return what changed after `since`, an earlier answer's sequence; everything there is for 0.

        Everything too where the file is another than the one that answered earlier, such as a backup put back. Raises
        `RegistryError` where there is none any more: nobody means to remove everything by that.
        """
        if since and not self.path.exists():
            raise RegistryError(f"registry {self.path} is gone")
        with self._connect() as db:
            db.execute("BEGIN")  # one state of the file for all of it
            last = db.execute("SELECT coalesce(max(sequence), 0) FROM changes").fetchone()[0]
            known = db.execute("SELECT 1 FROM changes WHERE sequence = ?", (since,)).fetchone()
            if since == 0 or known is None:
                rows = db.execute(f"SELECT {_COLUMNS} FROM cartridges ORDER BY id, version").fetchall()
                return Changes(last, [_entry(row) for row in rows], [], whole=True)
            if last == since:
                return Changes(last, [], [], whole=False)
            rows = db.execute(
                f"SELECT c.id, c.version, {', '.join(f'r.{column}' for column in RegistryEntry._fields)} FROM "
                "(SELECT DISTINCT id, version FROM changes WHERE sequence > ?) AS c "
                "LEFT JOIN cartridges AS r USING (id, version)",
                (since,),
            ).fetchall()
        present = [_entry(row[2:]) for row in rows if row[2] is not None]
        return Changes(last, present, [f"{row[0]}@{row[1]}" for row in rows if row[2] is None], whole=False)

    def warm(self) -> list[RegistryEntry]:
        """Return the cartridges that warm labels point at."""
        with self._connect() as db:
            rows = db.execute(
                f"SELECT DISTINCT {_COLUMNS} FROM cartridges JOIN labels USING (id, version) WHERE warm ORDER BY id"
            ).fetchall()
        return [_entry(row) for row in rows]

    def largest_bytes(self) -> int:
        """Return the size of the largest payload, 0 without any."""
        with self._connect() as db:
            return db.execute("SELECT coalesce(max(bytes), 0) FROM cartridges").fetchone()[0]

    def labels(self) -> dict[str, str]:
        """Return every label with the `id@version` it points at."""
        with self._connect() as db:
            rows = db.execute("SELECT label, id, version FROM labels ORDER BY label").fetchall()
        return {label: f"{cartridge_id}@{version}" for label, cartridge_id, version in rows}

    def next_version(self, cartridge_id: str, directory: Path | None = None) -> int:
        """Return the version that a new build of `cartridge_id` gets.

        It is newer than any that lies in `directory`, `<id>/<version>`, too: what was removed from the registry and left
        there, or never registered since its maker was killed, keeps its version.
        """
        with self._connect() as db:
            row = db.execute("SELECT max(version) FROM cartridges WHERE id = ?", (cartridge_id,)).fetchone()
        there = () if directory is None else (directory / cartridge_id).glob("[1-9]*")
        return max([row[0] or 0, *(int(path.name) for path in there if _parts(f"@{path.name}")[1])]) + 1

    def _select(self, rest: str, *values: object) -> list[RegistryEntry]:
        with self._connect() as db:
            return [_entry(row) for row in db.execute(f"SELECT {_COLUMNS} FROM cartridges {rest}", values)]

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Open a connection, commit on success; SQLite's errors become `RegistryError` here and only here."""
        db = unchanged = None
        is_file = not self._read_only or self.path.exists()
        try:
            if not is_file:
                db = sqlite3.connect(":memory:")
                self._migrate(db)
                db.commit()
            else:
                try:
                    db = self._open("ro" if self._read_only else "rwc")
                    self._check_schema(db)
                except sqlite3.OperationalError as error:
                    if not self._read_only or error.sqlite_errorcode & 0xFF not in _CANNOT_MAKE_FILES:
                        raise
                    # No log is there, and none can be made to read: the file as it lies, if nobody writes meanwhile.
                    unchanged = self._state()
                    db = self._open("ro&immutable=1")
                    self._check_schema(db)
            with db:
                yield db
            if unchanged is not None and unchanged != self._state():
                raise RegistryError(f"registry {self.path} changed while it was read; read it again")
            if not self._read_only:
                # Into the file itself, so that a copy of that is whole, as far as readers allow at this moment.
                with suppress(sqlite3.Error):
                    db.execute("PRAGMA busy_timeout = 200")
                    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            elif is_file and unchanged is None and self._keep(db):
                db = None
        except (sqlite3.Error, UnicodeError) as error:
            damaged = type(error) is sqlite3.DatabaseError or "decode" in str(error)
            todo = f"; {_RESTORE}" if damaged else ""
            raise RegistryError(f"registry {self.path}: {error}{todo}") from error
        finally:
            if db is not None:
                db.close()

    def _open(self, mode: str) -> sqlite3.Connection:
        uri = f"{self.path.resolve().as_uri()}?mode={mode}"
        return sqlite3.connect(uri, uri=True, timeout=10, check_same_thread=False)

    def _keep(self, db: sqlite3.Connection) -> bool:
        """Keep a connection open unless one to the same file is; whether it was kept."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        file = (found.st_dev, found.st_ino)
        if self._kept is not None and self._kept[1] == file:
            return False
        self._kept = (db, file)
        return True

    def _state(self) -> tuple[int, ...]:
        """Return what changes when a tool writes to a file whose write-ahead log cannot be read here.

        Raises `RegistryError` where that holds something: the file alone is out of date then.
        """
        log = self.path.with_name(f"{self.path.name}-wal")
        if log.exists() and log.stat().st_size:
            raise RegistryError(
                f"registry {self.path} has changes in {log.name}, which cannot be read where {self.path.parent} may not be "
                "written; run `lmcache-cartridge list` once as the user that writes it"
            )
        found = self.path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

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


def _parts(name: str) -> tuple[str, int | None]:
    """Return the id and the version of `id@version`, None where it has none that SQLite could hold."""
    cartridge_id, _, version = name.partition("@")
    return cartridge_id, int(version) if version.isdecimal() and len(version) < 19 else None


def _entry(row: tuple) -> RegistryEntry:
    if tuple(map(type, row)) != _TYPES:
        raise RegistryError(f"the registry's row of {str(row[0])[:80]!r} is damaged; {_RESTORE}")
    return RegistryEntry(*row)
