"""Entries: one record for each digest that a catalog knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from ..errors import CartridgeError
from .rows import Row


class Entry(msgspec.Struct, gc=False):
    """What is known of one digest. Without garbage collection: there may be 100,000, and none refers to another."""

    row: Row | None = None
    """None where it cannot be served."""
    names: tuple[str, ...] = ()
    """`id@version` of every registered version that has this digest."""
    until_s: float = math.inf
    """When it is dropped. One without a name is retired, and so is one whose new name was not found sound yet."""


class Entries:
    """Entries by digest. Whoever changes something holds a lock."""

    def __init__(self, grace_s: float, clock: Callable[[], float]) -> None:
        """What is retired stays for `grace_s`."""
        self._grace_s, self._clock = grace_s, clock
        self._entries: dict[str, Entry] = {}
        self.digests: dict[str, str] = {}
        """By name, as registered first."""
        self.errors: dict[str, CartridgeError] = {}
        """By digest: why it is not served."""

    def row(self, digest: str) -> Row | None:
        """Return the row of a cartridge that can be served, None for any other."""
        entry = self._entries.get(digest)
        return None if entry is None else entry.row

    def names_of(self, digest: str) -> tuple[str, ...]:
        """Return the names of a digest; none for an unknown one."""
        entry = self._entries.get(digest)
        return () if entry is None else entry.names

    def rows(self) -> list[Row]:
        """Return the rows of those that can be served and are not retired."""
        return [entry.row for entry in self._entries.values() if entry.row and entry.until_s == math.inf]

    def refused(self, quarantined: Mapping[str, str]) -> dict[str, str]:
        """Return for every name that is not served why; the cost grows with them alone."""
        reasons = {digest: str(error) for digest, error in self.errors.items()} | dict(quarantined)
        return {name: why for digest, why in reasons.items() for name in self.names_of(digest)}

    def add(self, digest: str, name: str | None) -> Entry:
        """Return the entry of a digest, made where there was none, with one more name unless that is None.

        No other digest may have the name.
        """
        entry = self._entries.setdefault(digest, Entry())
        if name is not None and self.digests.get(name) != digest:
            entry.names, self.digests[name] = (*entry.names, name), digest
        elif not entry.names:
            entry.until_s = min(entry.until_s, self._clock() + self._grace_s)
        return entry

    def remove(self, name: str) -> str | None:
        """Take a name away; return its digest if that is retired by it, else None."""
        if (digest := self.digests.pop(name, None)) is None:
            return None
        entry = self._entries[digest]
        entry.names = tuple(other for other in entry.names if other != name)
        if entry.names:
            return None
        entry.until_s = self._clock() + self._grace_s
        return digest

    def serve(self, row: Row) -> None:
        """Have a cartridge served that has an entry, and was found sound."""
        entry = self._entries[row.digest]
        self.errors.pop(row.digest, None)
        entry.row = row
        entry.until_s = math.inf if entry.names else self._clock() + self._grace_s

    def refuse(self, digest: str, error: CartridgeError) -> None:
        """Note why a cartridge is not served that has an entry, unless it is served from where it was found sound."""
        if self._entries[digest].row is None or self.is_retired(digest):
            self.errors[digest] = error

    def is_retired(self, digest: str) -> bool:
        """Whether an entry will be dropped."""
        return digest in self._entries and self._entries[digest].until_s < math.inf

    def keep(self, digest: str) -> None:
        """Let a retired entry stay for another while; no change for any other."""
        if self.is_retired(digest):
            self._entries[digest].until_s = self._clock() + self._grace_s

    def drop_expired(self) -> list[str]:
        """Drop the entries whose time is over and return their digests; of one with a new name the error stays."""
        now = self._clock()
        expired = [digest for digest, entry in self._entries.items() if entry.until_s <= now]
        for digest in expired:
            if (entry := self._entries[digest]).names:
                entry.row, entry.until_s = None, math.inf
            else:
                del self._entries[digest]
                self.errors.pop(digest, None)
        return expired
