"""Entries: one record for each digest that a catalog knows, its names, and the totals of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from ..errors import CartridgeError
from .rows import Row


class Entry(msgspec.Struct, gc=False):
    """What is known of one digest. Without garbage collection: there may be 100,000, and none refers to another."""

    row: Row | None = None
    """None where it cannot be served."""
    names: tuple[str, ...] = ()
    """`id@version` of every registered version that has this digest. To be changed by `Entries` alone."""
    error: CartridgeError | None = None
    """Why it is not served. To be changed by `Entries` alone."""


class Entries:
    """Entries by digest. An entry without a name is retired: it is dropped after a while.

    A new name does not bring a retired entry back; that is done once its artefact was read and found sound. Whoever
    calls holds a lock, except for `row` and `get`.
    """

    def __init__(self, grace_s: float, clock: Callable[[], float]) -> None:
        self._grace_s, self._clock = grace_s, clock
        self._entries: dict[str, Entry] = {}
        self._digests: dict[str, str] = {}
        """By name: the index of the entries' names."""
        self._retired: dict[str, float] = {}
        """When an entry is dropped."""
        self._unfit_names = 0
        """Names of entries with an error."""

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._digests)

    def get(self, digest: str) -> Entry | None:
        """Return an entry, None if there is none."""
        return self._entries.get(digest)

    def row(self, digest: str) -> Row | None:
        """Return the row of a cartridge that can be served, None for any other."""
        entry = self._entries.get(digest)
        return None if entry is None else entry.row

    def rows(self) -> dict[str, Row]:
        """Return the rows of those that can be served and are not retired, by digest."""
        return {d: entry.row for d, entry in self._entries.items() if entry.row and d not in self._retired}

    def all_names(self) -> Iterator[str]:
        """Return every name, as it was registered first."""
        return iter(self._digests)

    def names(self, quarantined: Mapping[str, str]) -> list[str]:
        """Return every name whose cartridge is served, sorted."""
        return sorted(n for n, d in self._digests.items() if d not in quarantined and not self._entries[d].error)

    def refused(self, quarantined: Mapping[str, str]) -> dict[str, str]:
        """Return for every other name why its cartridge is not served."""
        reasons = {digest: str(entry.error) for digest, entry in self._entries.items() if entry.error}
        reasons.update(quarantined)
        return {name: why for d, why in reasons.items() if d in self._entries for name in self._entries[d].names}

    def counts(self, quarantined: Mapping[str, str]) -> tuple[int, int]:
        """Return the lengths of `names` and `refused`; the cost grows with `quarantined` alone."""
        entries = [entry for digest in quarantined if (entry := self.get(digest)) and not entry.error]
        refused = self._unfit_names + sum(len(entry.names) for entry in entries)
        return len(self._digests) - refused, refused

    def add(self, digest: str, name: str | None) -> Entry:
        """Return the entry of a digest, made where there was none, with one more name unless that is None.

        No other digest may have the name. One without any name is retired from now on.
        """
        entry = self._entries.setdefault(digest, Entry())
        if name is not None and self._digests.get(name) != digest:
            self._unfit_names += bool(entry.error)
            entry.names, self._digests[name] = (*entry.names, name), digest
        elif not entry.names:
            self._retired.setdefault(digest, self._clock() + self._grace_s)
        return entry

    def digest_of(self, name: str) -> str | None:
        """Return the digest that a name stands for, None for an unknown one."""
        return self._digests.get(name)

    def remove(self, name: str) -> str | None:
        """Take a name away; return its digest if that is retired by it, else None."""
        digest = self._digests.pop(name, None)
        if digest is None:
            return None
        entry = self._entries[digest]
        entry.names = tuple(other for other in entry.names if other != name)
        self._unfit_names -= bool(entry.error)
        if entry.names:
            return None
        self._retired[digest] = self._clock() + self._grace_s
        return digest

    def serve(self, row: Row) -> None:
        """Have a cartridge served that has an entry, and was found sound."""
        entry = self._entries[row.digest]
        self._set_error(entry, None)
        entry.row = row
        if entry.names:
            self._retired.pop(row.digest, None)
        else:
            self._retired[row.digest] = self._clock() + self._grace_s

    def refuse(self, digest: str, error: CartridgeError) -> None:
        """Note why a cartridge is not served that has an entry, unless it is served from where it was found sound."""
        entry = self._entries[digest]
        if entry.row is None or digest in self._retired:
            self._set_error(entry, error)

    def is_retired(self, digest: str) -> bool:
        """Whether an entry will be dropped."""
        return digest in self._retired

    def keep(self, digest: str) -> None:
        """Let a retired entry stay for another while; no change for any other."""
        if digest in self._retired:
            self._retired[digest] = self._clock() + self._grace_s

    def drop_expired(self) -> list[str]:
        """Drop the entries whose time is over and return their digests; of one with a new name the error stays."""
        now = self._clock()
        expired = [digest for digest, until in self._retired.items() if until <= now]
        for digest in expired:
            del self._retired[digest]
            self._entries[digest].row = None
            if not self._entries[digest].names:
                del self._entries[digest]
        return expired

    def _set_error(self, entry: Entry, error: CartridgeError | None) -> None:
        self._unfit_names += len(entry.names) * (bool(error) - bool(entry.error))
        entry.error = error
