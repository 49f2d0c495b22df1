"""Contexts: cartridges that clients had this server make, of whom each is, and until when; in a file beside the registry.

Whoever made one alone can name it: for all others there is none of that name. All API servers of one home share the file.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from ..artifact.chat import MAX_MESSAGES
from ..errors import RegistryError
from ..library.registry import RegistryEntry
from .http import current


class Patched(BaseModel):
    """What of a context is to be another."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ttl: float | None = None
    """Seconds from now."""
    labels: list[str] | None = Field(None, max_length=16)


class Posted(Patched):
    """A text to be kept: one of `document`, `messages` and `token_ids`."""

    ttl: float | None = 3600.0
    id: str | None = None
    document: str | None = None
    messages: list[dict[str, str]] | None = Field(default=None, max_length=MAX_MESSAGES)
    """The first ones of a chat: role and content."""
    chat_template_kwargs: dict[str, Any] = {}
    token_ids: list[int] | None = None
    cache_salt: str | None = None


class Context(NamedTuple):
    """One context: a row of the table."""

    id: str
    tenant: str
    key: str
    """Digest of the tenant, the tokens and the chat that they begin."""
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
    def is_own(self) -> bool:
        """Whether the current request's tenant may know of it."""
        return self.tenant in current().tenants

    @property
    def shown(self) -> dict[str, Any]:
        """What a client hears of it."""
        about = {name: value for name, value in self._asdict().items() if name not in ("tenant", "key")}
        state = "failed" if self.error else "ready" if self.digest else "making"
        return {"object": "cartridge", "version": 1, "state": state} | about


class Contexts:
    """The table. Where the file is missing there are none. Safe to use in threads; blocks for the disk."""

    def __init__(self, path: Path) -> None:
        """Touches no file."""
        self._path = path
        self.used: Counter[str] = Counter()
        """How often each was used lately, by id."""

    def create(self) -> None:
        """Make the file where it is missing."""
        self._path.touch(0o600)
        self.run(f"CREATE TABLE IF NOT EXISTS contexts ({', '.join(Context._fields)}, PRIMARY KEY (id), UNIQUE (key))")

    def of(self, ids: list[str]) -> dict[str, Context]:
        """Return those of some ids, by id."""
        found = self.run("SELECT * FROM contexts WHERE id IN (SELECT value FROM json_each(?))", json.dumps(ids))
        return {row[0]: Context(*row) for row in found}

    def own(self, ids: list[str]) -> dict[str, Context]:
        """Return what of those the current request's tenant may know of."""
        return {name: found for name, found in self.of(ids).items() if found.is_own}

    def seen(self, rows: list[RegistryEntry]) -> list[RegistryEntry]:
        """Return what of registered cartridges the current request's tenant may know of."""
        found = self.of([row.id for row in rows])
        return [row for row in rows if row.id not in found or found[row.id].is_own]

    def run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run one SQL statement and return the rows that it selects. Raises `RegistryError`."""
        if not self._path.exists():
            return []
        try:
            with closing(sqlite3.connect(self._path, timeout=10)) as db, db:
                return db.execute(statement, values).fetchall()
        except (sqlite3.Error, UnicodeError) as error:
            raise RegistryError(f"{self._path}: {error}") from error
