"""Contexts: cartridges that clients had servers make, of whom each is, and until when; in a file beside the registry.

Whoever made one alone can name it: for all others there is none of that name. All API servers of one home share the file. What
a published library has of them is taken in from there: a label of each says what the registry does not.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from ..artifact.chat import MAX_MESSAGES
from ..engine.trust import CONTEXT, private_places
from ..errors import RegistryError
from ..library.registry import Registry, RegistryEntry
from ..settings import Settings
from .http import current

STATE = "ctx."
"""What such a label begins with."""
PUBLISHED = f"/cartridges/{CONTEXT}"
"""In the location of each in a published library: none can be named by it."""
_TAKE_IN = """INSERT INTO contexts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, NULL, NULL) ON CONFLICT (id) DO UPDATE SET
tenant = excluded.tenant, key = excluded.key, expires_at = excluded.expires_at, bytes = excluded.bytes, done = excluded.done,
digest = excluded.digest, error = NULL"""
_LET_GO = "DELETE FROM contexts WHERE digest != '' AND id NOT IN (SELECT value FROM json_each(?))"


class Patched(BaseModel):
    """What of a context is to be another."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ttl: float | None = None
    """Seconds from now."""
    labels: list[str] | None = Field(default=None, max_length=16)


class Posted(Patched):
    """A text to be kept: one of `document`, `messages` and `token_ids`."""

    ttl: float = 3600.0
    id: str | None = None
    document: str | None = None
    messages: list[dict[str, str]] | None = Field(default=None, max_length=MAX_MESSAGES)
    """The first ones of a chat: role and content."""
    chat_template_kwargs: dict[str, Any] = {}
    token_ids: list[int] | None = None
    model: str | None = None
    """The name of a LoRA adapter that is to compute it, or the base model's, if any."""
    cache_salt: str | None = None


class Context(NamedTuple):
    """One context: a row of the table."""

    id: str
    tenant: str
    key: str
    """Digest of the tenant and of what it is made of."""
    created_at: float
    expires_at: float
    """When it is removed. While it is made that is soon, and put off again and again."""
    tokens: int
    bytes: int
    done: int = 0
    """Tokens whose KV is written."""
    digest: str = ""
    """Empty while it is made."""
    uses: int = 0
    last_used_at: float | None = None
    error: str | None = None
    """Why it was not made."""

    @property
    def label(self) -> str:
        """What says in a published library whose it is, and until when."""
        return f"{STATE}{self.tenant}.{self.key}.{self.expires_at:.3f}"

    @property
    def is_own(self) -> bool:
        """Whether the current request's tenant may know of it."""
        return self.tenant in current().tenants

    @property
    def shown(self) -> dict[str, Any]:
        """What a client hears of it; once it is made its `state` is for the engine to say."""
        about = {name: value for name, value in self._asdict().items() if name not in ("tenant", "key")}
        state = "failed" if self.error else "making"
        return {"object": "cartridge", "version": 1, "state": state} | about


class Contexts:
    """The table. Where the file is missing there are none. Safe to use in threads; blocks for the disk."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        """`registry` is that of the `settings`, maybe a published library's copy."""
        self._path, self._private = settings.registry_path.with_suffix(".contexts"), private_places(settings)
        self._library = registry if settings.library else None
        self._known: object = None
        """Which state of the library was taken in."""
        self.used: Counter[str] = Counter()
        """How often each was used lately, by id."""

    def create(self) -> None:
        """Make the file where it is missing."""
        self._path.touch(0o600)
        with self._open() as db:
            db.execute(f"CREATE TABLE IF NOT EXISTS contexts ({', '.join(Context._fields)}, PRIMARY KEY (id))")
            db.execute("CREATE UNIQUE INDEX IF NOT EXISTS making ON contexts (key) WHERE digest = ''")

    def of(self, ids: list[str]) -> dict[str, Context]:
        """Return those of some ids, by id."""
        found = self.run("SELECT * FROM contexts WHERE id IN (SELECT value FROM json_each(?))", json.dumps(ids))
        return {row[0]: Context(*row) for row in found}

    def own(self, ids: list[str]) -> dict[str, Context]:
        """Return what of those the current request's tenant may know of."""
        return {name: found for name, found in self.of(ids).items() if found.is_own}

    def seen(self, rows: list[RegistryEntry]) -> list[RegistryEntry]:
        """Return what of registered cartridges the current request's tenant may know of, and no context that is still tried.

        A context is version 1 of its id: later ones are the owner's, who registered them since.
        """
        found = self.of([row.id for row in rows])
        return [
            row
            for row in rows
            if (
                found[row.id].is_own and found[row.id].digest
                if row.id in found and row.version == 1
                else not row.location.startswith(self._private)
            )
        ]

    def run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run one SQL statement and return the rows that it selects. Raises `RegistryError`."""
        with suppress(RegistryError):  # what was known is served on, and of what is new nobody hears
            self._take_in()
        if not self._path.exists():
            return []
        with self._open() as db:
            return db.execute(statement, values).fetchall()

    def _take_in(self) -> None:
        """Have the table hold what a published library says of contexts, where that is another."""
        if (library := self._library) is None or library.look(self._known) is None:
            return
        self.create()
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")  # of several processes the last one has the newest
            known, rows = library.look() or (None, [])
            about = {name: label.split(".", 3) for label, name in library.labels().items() if label.startswith(STATE)}
            there = [row for row in rows if row.id.startswith(CONTEXT) and row.name in about]
            for row in there:
                _, tenant, key, until = about[row.name]
                made = datetime.fromisoformat(row.registered).timestamp()
                size = row.positions, row.bytes, row.positions
                db.execute(_TAKE_IN, (row.id, tenant, key, made, float(until), *size, row.digest))
            db.execute(_LET_GO, (json.dumps([row.id for row in there]),))
        self._known = known

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, timeout=10)) as db, db:
                yield db
        except (sqlite3.Error, UnicodeError) as error:
            raise RegistryError(f"{self._path}: {error}") from error
