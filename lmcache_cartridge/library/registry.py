"""Registry: which cartridges there are and where, in one SQLite file. Tools write it; serving only reads it."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from ..artifact.location import is_remote
from ..artifact.manifest import Id, Kind, Manifest, check_id
from ..errors import ArtifactError, CartridgeExists, CartridgeNotFound, RegistryError

T = TypeVar("T")

_VERSION = 5
"""Of the schema, in `PRAGMA user_version`."""
_SCHEMA = (
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
        promoted INTEGER NOT NULL DEFAULT 1, -- an id alone means its newest version that is promoted
        PRIMARY KEY (id, version)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX cartridges_digest ON cartridges (digest)",
    """
    CREATE TABLE labels (
        label TEXT PRIMARY KEY,
        id TEXT NOT NULL,
        version INTEGER NOT NULL,
        warm INTEGER NOT NULL DEFAULT 0,
        FOREIGN KEY (id, version) REFERENCES cartridges (id, version)
    ) WITHOUT ROWID
    """,
    f"PRAGMA user_version = {_VERSION}",
)
_MOST_CANDIDATES = 8
"""Versions of an id that are tried, the newest first, until one can be served."""


Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class RegistryEntry(NamedTuple):
    """One registered version of a cartridge."""

    id: Id
    version: Annotated[int, msgspec.Meta(ge=1, lt=1 << 60)]
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    kind: Kind
    positions: Number
    bytes: Number
    """Payload size."""
    registered: str
    """ISO 8601, UTC."""
    promoted: bool = True
    """Whether its id may mean it."""
    location: str = ""
    """Where the artefact lies: a directory, or `s3://bucket/key`."""

    @property
    def name(self) -> str:
        """`id@version`."""
        return f"{self.id}@{self.version}"

    @property
    def rank(self) -> str:
        """What sorts those that were registered later behind the others."""
        return f"{self.registered} {self.name}"

    def local_root(self) -> Path:
        """Return the directory of the artefact. Raises `ArtifactError` for one that lies on S3."""
        if is_remote(self.location):
            raise ArtifactError(
                f"cartridge {self.name} lies on S3; `lmcache-cartridge pull {self.location}` brings it here first"
            )
        return Path(self.location)


def entry_of(manifest: Manifest, location: str, *, registered: str = "", promoted: bool = True) -> RegistryEntry:
    """Return what a registry says of the artefact of a manifest that lies at `location`."""
    about = manifest.id, manifest.version, manifest.digest, manifest.kind, manifest.positions, manifest.payload_bytes
    return RegistryEntry(*about, registered, promoted, location)


_decode = msgspec.msgpack.Decoder(list[RegistryEntry], strict=False).decode
COLUMNS = ", ".join(RegistryEntry._fields)
_RESTORE = "restore a copy of the file, or move it away and register the cartridges again"
_REPAIR = "Run `lmcache-cartridge list` once as the user that writes it"


class Registry:
    """The registry file at `path`.

    Calls are short and blocking, each on a connection of its own, so any thread may call. With `read_only` no call
    changes the file or makes others beside it, and a missing file is an empty registry. Readers and one writer do not
    wait for each other, but for the milliseconds of a commit.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Make the file where it is missing, unless `read_only`. Raises `RegistryError`."""
        self.path = path
        self._read_only = read_only
        if not read_only:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RegistryError(f"registry {path}: {error.strerror}") from error
            with self._connect() as db:
                self._create(db)

    def register(
        self,
        root: Path,
        location: str | None = None,
        *,
        promote: bool = True,
        label: str | None = None,
        version: int | None = None,
    ) -> Manifest:
        """Add the artefact at `root` under the id and version of its manifest, and return that, with `version` for its own.

        With `location` the payload lies there, and `root` holds a copy of its manifest and token ids only. Without
        `promote` a new version is had by its `id@version` alone, until `promote()`; the id means what it meant. `label` is pointed at
        it in the same step. The same artefact again is no change, or a change of its location. Raises `CartridgeExists` if other content has this id
        and version, or a label this name, `ManifestError` or `ArtifactError` if the artefact is not sound.
        """
        from ..artifact import reading  # here, since `list` would wait for numpy

        root = root.resolve()
        manifest = reading.load_manifest(root, payload=location is None)
        reading.load_token_ids(manifest, root)
        manifest = msgspec.structs.replace(manifest, version=version or manifest.version)
        entry = entry_of(manifest, location or str(root), promoted=promote)
        if label is not None:
            check_id(label)

        def change(db: sqlite3.Connection) -> Manifest:
            _add(db, entry)
            if label is not None:
                _point(db, label, entry, warm=False)
            return manifest

        return self._change(change)

    def promote(self, name: str) -> RegistryEntry:
        """Let the id of the version that `name` stands for mean that version, older or newer, and return it.

        Raises `CartridgeNotFound`.
        """

        def change(db: sqlite3.Connection) -> RegistryEntry:
            target = _candidates(db, name)[0]
            newer = "UPDATE cartridges SET promoted = version = ? WHERE id = ? AND version >= ?"
            db.execute(newer, (target.version, *target[:2]))
            return target

        return self._change(change)

    def remove(self, name: str, *, labels: bool = False) -> RegistryEntry:
        """Take one version of a cartridge out, its `labels` with it if so, and return what it was. Its files stay.

        Raises `CartridgeNotFound`, and `RegistryError` while other labels point at it.
        """

        def change(db: sqlite3.Connection) -> RegistryEntry:
            target = _candidates(db, name)[0]
            if labels:
                db.execute("DELETE FROM labels WHERE id = ? AND version = ?", target[:2])
            (left,) = db.execute(
                "SELECT group_concat(label, ', ') FROM labels WHERE id = ? AND version = ?", target[:2]
            ).fetchone()
            if left:
                raise RegistryError(f"{target.name} has the label {left}; point it elsewhere first")
            db.execute("DELETE FROM cartridges WHERE id = ? AND version = ?", target[:2])
            return target

        return self._change(change)

    def unlabel(self, label: str) -> None:
        """Remove a label. Raises `CartridgeNotFound` if there is none of this name."""

        def change(db: sqlite3.Connection) -> None:
            if not db.execute("DELETE FROM labels WHERE label = ?", (label,)).rowcount:
                raise CartridgeNotFound(f"there is no label {label!r}")

        self._change(change)

    def label(self, label: str, name: str, *, warm: bool = False, instead: str | None = None) -> RegistryEntry:
        """Point `label` at the cartridge `name` stands for now, in one step, and return that cartridge.

        Its other labels that begin with `instead` are removed. What a `warm` label points at is brought into memory when a server starts, or sees it move. Raises `CartridgeNotFound` for an unknown name, `CartridgeExists` if `label` is a cartridge's id.
        """
        check_id(label)

        def change(db: sqlite3.Connection) -> RegistryEntry:
            target = _candidates(db, name)[0]
            db.execute(
                "DELETE FROM labels WHERE id = ? AND version = ? AND label GLOB ? || '*'", (*target[:2], instead)
            )
            _point(db, label, target, warm=warm)
            return target

        return self._change(change)

    def find(self, name: str) -> RegistryEntry:
        """Return the cartridge that `name` stands for: `id` (its newest promoted version), `id@version` or a label.

        Raises `CartridgeNotFound`.
        """
        return self.candidates(name)[0]

    def candidates(self, name: str) -> list[RegistryEntry]:
        """Return what `name` may stand for: what `find` returns, and for an id its older promoted versions, newest first.

        Raises `CartridgeNotFound`.
        """
        with self._connect() as db:
            return _candidates(db, name, _MOST_CANDIDATES)

    def current(self, ids: Iterable[str]) -> set[str]:
        """Return the `id@version` that each of some ids means without a version."""
        statement = """SELECT id || '@' || max(version) FROM cartridges
            WHERE promoted AND id IN (SELECT value FROM json_each(?)) GROUP BY id"""
        return {row[0] for row in self._run(statement, json.dumps(list(ids)))}

    def all(self) -> list[RegistryEntry]:
        """Return every version of every cartridge, by id and version."""
        return self._select("ORDER BY id, version")

    def page(self, limit: int, after: str) -> list[RegistryEntry]:
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

    def look(self, known: object = None) -> tuple[object, list[RegistryEntry]] | None:
        """Return which state of the file this is, and every version in it; None where that still is `known`.

        Raises `RegistryError` where the file is gone that was known: that is no way to remove everything.
        """
        revision: object = ()
        try:
            status = self.path.stat()
            with self.path.open("rb") as file:
                # SQLite counts changes in bytes 24 to 27. Asked first: what is changed meanwhile is read again next time.
                revision = status.st_ino, status.st_mtime_ns, file.read(28)[24:]
        except FileNotFoundError:
            if known:
                raise RegistryError(f"registry {self.path} is gone") from None
        except OSError as error:
            raise RegistryError(f"registry {self.path}: {error.strerror}") from error
        return None if revision == known else (revision, self.all())

    def warm(self) -> list[RegistryEntry]:
        """Return the cartridges that warm labels point at."""
        return self._select("WHERE (id, version) IN (SELECT id, version FROM labels WHERE warm) ORDER BY id, version")

    def labels(self) -> dict[str, str]:
        """Return every label with the `id@version` it points at."""
        return dict(self._run("SELECT label, id || '@' || version FROM labels ORDER BY label"))

    def next_version(self, cartridge_id: str, directory: Path | None = None) -> int:
        """Return the version that a new build of `cartridge_id` gets.

        It is newer than any that lies in `directory`, `<id>/<version>`, too: what was removed from the registry and left
        there, or never registered since its maker was killed, keeps its version.
        """
        (row,) = self._run("SELECT coalesce(max(version), 0) FROM cartridges WHERE id = ?", cartridge_id)
        there = () if directory is None else (directory / cartridge_id).glob("[1-9]*")
        return max([row[0], *(int(path.name) for path in there if _parts(f"@{path.name}")[1])]) + 1

    def _change(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Have a function change the tables, all that it does or nothing, and return its result."""
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")  # nobody else may change anything between its look and its write
            result = change(db)
        with suppress(OSError):
            os.utime(self.path)  # what was changed to the same is looked at again too
        return result

    def _run(self, statement: str, *values: object) -> list[tuple]:
        with self._connect() as db:
            return db.execute(statement, values).fetchall()

    def _select(self, rest: str, *values: object) -> list[RegistryEntry]:
        with self._connect() as db:
            return _entries(db, rest, *values)

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Open a connection, commit on success; SQLite's errors become `RegistryError` here and only here."""
        db = None
        try:
            if self._read_only and not self.path.exists():
                db = sqlite3.connect(":memory:")
                self._create(db)
                db.commit()
            else:
                # A rollback journal and no write-ahead log: to read one, SQLite has to write files beside it.
                mode = "ro" if self._read_only else "rwc"
                db = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode={mode}", uri=True, timeout=10)
                self._check_schema(db)
                db.execute("PRAGMA foreign_keys = ON")
            with db:
                yield db
        except (sqlite3.Error, UnicodeError, msgspec.ValidationError) as error:
            todo = ""
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_ROLLBACK:
                todo = f"; a tool was killed while it wrote. {_REPAIR}"
            elif type(error) in (sqlite3.DatabaseError, msgspec.ValidationError) or "decode" in str(error):
                todo = f"; {_RESTORE}"
            raise RegistryError(f"registry {self.path}: {error}{todo}") from error
        finally:
            if db is not None:
                db.close()

    def _check_schema(self, db: sqlite3.Connection) -> None:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _VERSION):
            todo = "upgrade lmcache-cartridge" if version > _VERSION else _RESTORE
            raise RegistryError(f"registry {self.path} has schema {version}, this release knows {_VERSION}; {todo}")
        if version == 0 and self._read_only:
            raise RegistryError(f"registry {self.path} is empty. {_REPAIR}")

    def _create(self, db: sqlite3.Connection) -> None:
        """Make the tables, once even if several processes start at the same time."""
        if db.execute("PRAGMA user_version").fetchone()[0] == 0:
            db.execute("BEGIN IMMEDIATE")
            if db.execute("PRAGMA user_version").fetchone()[0] == 0:
                for statement in _SCHEMA:
                    db.execute(statement)


def _parts(name: str) -> tuple[str, int | None]:
    """Return the id and the version of `id@version`, None where it has none that SQLite could hold."""
    cartridge_id, _, version = name.partition("@")
    return cartridge_id, int(version) if version.isdecimal() and len(version) < 19 else None


def _entries(db: sqlite3.Connection, rest: str, *values: object) -> list[RegistryEntry]:
    rows = db.execute(f"SELECT {COLUMNS} FROM cartridges {rest}", values).fetchall()
    return _decode(msgspec.msgpack.encode(rows))


def _candidates(db: sqlite3.Connection, name: str, limit: int = 1) -> list[RegistryEntry]:
    cartridge_id, version = _parts(name)
    if version is not None:
        rows = _entries(db, "WHERE id = ? AND version = ?", cartridge_id, version)
    else:
        rows = _entries(db, "WHERE id = ? AND promoted ORDER BY version DESC LIMIT ?", name, limit)
    rows = rows or _entries(db, "JOIN labels USING (id, version) WHERE label = ?", name)
    if not rows:
        rest = db.execute("SELECT max(version) FROM cartridges WHERE id = ?", (name,)).fetchone()[0]
        raise CartridgeNotFound(
            f"no version of {name!r} is promoted; `lmcache-cartridge label {name} {name}@{rest}` does"
            if rest
            else f"no cartridge, version or label is called {name!r}; `lmcache-cartridge list` shows them"
        )
    return rows


def check_same(name: str, there: str, digest: str) -> None:
    """Raise `CartridgeExists` unless the digest that a version has is that of its content."""
    if there != digest:
        raise CartridgeExists(
            f"{name} is registered with other content (digest {there[:16]}...); versions never change. "
            "Build the cartridge again to get a new version"
        )


def _add(db: sqlite3.Connection, new: RegistryEntry) -> None:
    for (there,) in db.execute("SELECT digest FROM cartridges WHERE id = ? AND version = ?", new[:2]).fetchall():
        check_same(new.name, there, new.digest)
    if db.execute("SELECT 1 FROM labels WHERE label = ?", (new.id,)).fetchone():
        raise CartridgeExists(f"{new.id} is a label already and cannot be the id of a cartridge too")
    db.execute(
        "INSERT INTO cartridges (id, version, digest, kind, positions, bytes, promoted, location) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET location = excluded.location",
        (*new[:6], *new[7:]),
    )


def _point(db: sqlite3.Connection, label: str, target: RegistryEntry, *, warm: bool) -> None:
    if db.execute("SELECT 1 FROM cartridges WHERE id = ?", (label,)).fetchone():
        raise CartridgeExists(f"{label} is the id of a cartridge and cannot be a label too")
    db.execute("INSERT OR REPLACE INTO labels VALUES (?, ?, ?, ?)", (label, *target[:2], warm))
