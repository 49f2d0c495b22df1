"""Hold: somebody's claim on chunks of one tier, which keeps them in memory from when they are admitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..library.index import ChunkKey

if TYPE_CHECKING:
    from .tier import Entry, Residency

_FIRST_RETRY_S, _LAST_RETRY_S = 0.25, 5.0


class HoldState(NamedTuple):
    """How far a hold is."""

    resident: int
    """Chunks of it that are resident."""
    admitted: int
    """Chunks of it that have memory: resident or being loaded."""
    chunks: int
    problem: str | None
    """Why the last load of one of them failed; it is tried again."""

    @property
    def ready(self) -> bool:
        """Whether every chunk is resident."""
        return self.resident == self.chunks


class Hold:
    """Keeps chunks in memory, each from when it is admitted until `close()`.

    Nothing is admitted before the first `poll()`. With `whole` all of them are admitted or none, else as many of the
    leading ones as idle memory allows.
    """

    def __init__(self, residency: Residency, keys: Sequence[ChunkKey], whole: bool) -> None:
        self.keys, self.whole = tuple(keys), whole
        self._residency = residency
        self._entries: dict[ChunkKey, Entry] = {}
        self._counted = self._closed = False
        self._problem: str | None = None
        self._retry_s, self._retry_at = 0.0, 0.0

    def poll(self) -> HoldState:
        """Admit what is missing, as far as memory allows, and return how far everything is; does not wait.

        What could not be loaded is tried again after a pause that grows from poll to poll. After `close` it tells what
        was, and changes nothing.
        """
        with self._residency._lock:
            if not self._closed:
                self._admit()
            resident = sum(entry.state == "resident" for entry in self._entries.values())
            return HoldState(resident, len(self._entries), len(self.keys), self._problem)

    def close(self) -> None:
        """Let the chunks go; those being loaded are loaded to their end. Closing twice is no change."""
        with self._residency._lock:
            if not self._closed:
                self._closed = True
                for entry in self._entries.values():
                    self._residency._hold(entry, -1)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _admit(self) -> None:
        """Hold what is there of the chunks, and start loading what is missing of them. The lock is held."""
        residency, held = self._residency, self._entries
        now = residency._clock()
        failed = [key for key, entry in held.items() if entry.state == "gone"]
        for key in failed:
            self._problem = str(held.pop(key).error)
        if failed:
            self._retry_s = min(2 * self._retry_s or _FIRST_RETRY_S, _LAST_RETRY_S)
            self._retry_at = now + self._retry_s
        if len(held) == len(self.keys):
            if self._problem is not None and all(entry.state == "resident" for entry in held.values()):
                self._problem, self._retry_s = None, 0.0
            return
        if residency._closed or now < self._retry_at or (self.whole and not residency._fits(self.keys)):
            return
        for key in self.keys:
            entry = residency._entries.get(key)
            if not self._counted:
                residency._count(entry)
            if entry is not None and key not in held:
                residency._hold(entry, 1)
                held[key] = entry
        self._counted = True
        for key in self.keys:
            if key not in held:
                if not residency._has_room():
                    break
                entry = held[key] = residency._start(key)
                residency._hold(entry, 1)
        residency._touch([key for key in self.keys if key in held])
