"""Warm: what comes into memory before anybody asks: what warm labels point at, and what this server of a fleet owns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from ..library.placement import owner
from ..library.registry import Registry
from ..settings import Settings
from .background import Background

logger = logging.getLogger(__name__)

_AT_ONCE = 4
"""Owned cartridges that are brought in at the same time: what is being loaded cannot be evicted for a request."""


class Warm:
    """Follows a registry and preloads; each cartridge once, each time it comes to be one of those. Safe from any thread."""

    def __init__(
        self, registry: Registry, settings: Settings, background: Background, chunks_of: Callable[[str], int | None],
        slots: int,
    ) -> None:  # fmt: skip
        """`chunks_of` returns how many chunks a digest that is served has, else None; memory has room for `slots`."""
        self._registry, self._settings, self._background = registry, settings, background
        self._chunks_of, self._slots = chunks_of, slots
        self._sequence: int | None = None
        self._owned: list[str] = []
        self._begun: dict[str, int] = {}
        self._pending: list[str] = []
        self._told: object = None
        self._lock = threading.RLock()

    def follow(self) -> None:
        """Take in what changed; what warm labels point at is begun at once. Raises `RegistryError`."""
        with self._lock:
            labelled = {row.digest for row in self._registry.warm()}
            if self._settings.warm_owned is not None and (sequence := self._registry.sequence()) != self._sequence:
                self._owned, self._sequence = self._find_owned(), sequence
            owned = [digest for digest in self._owned if digest not in labelled]
            wanted = {*labelled, *owned}
            self._begun = {digest: chunks for digest, chunks in self._begun.items() if digest in wanted}
            for digest in labelled - self._begun.keys():
                if (chunks := self._chunks_of(digest)) is not None:
                    self._begin(digest, chunks)
            self._pending = self._within_memory(owned)
            self.go_on()

    def go_on(self) -> None:
        """Begin as many of the owned ones as may be brought in at once."""
        with self._lock:
            while self._pending and self._background.preloading() < _AT_ONCE:
                digest = self._pending.pop(0)
                if (chunks := self._chunks_of(digest)) is not None:
                    self._begin(digest, chunks)

    def _begin(self, digest: str, chunks: int) -> None:
        self._begun[digest] = chunks
        self._background.preload(digest, {})

    def _find_owned(self) -> list[str]:
        """Return the digests that this server owns, those registered last first."""
        settings = self._settings
        servers, me = settings.fleet_servers, settings.warm_owned
        newest = self._registry.newest(-1)
        return [row.digest for row in newest if owner(row.id, servers, settings.fleet_router) == me]

    def _within_memory(self, owned: list[str]) -> list[str]:
        """Return those of `owned` that are not begun and find room beside all that are, in order."""
        sizes: Mapping[str, int | None] = {digest: self._chunks_of(digest) for digest in owned}
        used, found = sum(self._begun.values()), []
        for digest in owned:
            chunks = sizes[digest]
            if digest not in self._begun and chunks and used + chunks <= self._slots:
                used += chunks
                found.append(digest)
        known = [chunks for chunks in sizes.values() if chunks]
        if sum(known) > self._slots and self._told != (told := (len(known), sum(known))):
            self._told = told
            fits = len(found) + len(self._begun.keys() & sizes.keys())
            logger.warning(
                "%d of the %d cartridges that this server owns fit in cpu_bytes, the newest: it has room for %d chunks, "
                "and they have %d", fits, len(known), self._slots, sum(known),
            )  # fmt: skip
        return found
