"""Claim: somebody's claim on a cartridge or chain. Background: claims of no request, for preloads, pins and warm labels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

from ..artifact.cartridge import Place
from ..errors import CartridgeError, OverBudget
from .holds import Readiness, Reservation

_GIVE_UP_S = 600.0
"""How long a fetch in the background is tried for."""
_OPENING = Readiness(0, 0, 0, opening=True)
_FAILED = Readiness(0, 0, 0, "it could not be read; the log of its engine says why")


class Claim:
    """What a claim loads stays in memory until `close()`. One that is dropped without it is closed soon after."""

    def __init__(
        self,
        tag: str,
        opening: Iterator[Reservation | Readiness | None],
        refusal: Callable[[], Readiness | None],
        clock: Callable[[], float],
    ) -> None:
        """Start opening: `opening` yields None while there is something to read, and in the end the hold, or why there
        will be none. `refusal` tells why a hold has become useless, None while it has not.
        """
        self.tag, self.started_at, self.closed = tag, clock(), False
        self._opening, self._refusal, self._clock = opening, refusal, clock
        self._opened: Reservation | Readiness | None = None
        self._lock = threading.Lock()
        self._open()

    def poll(self) -> Readiness:
        """Start loading what is missing, as far as memory allows, and return how far it is. Does not wait."""
        opened = self._open()
        if opened is None:
            return _OPENING
        if isinstance(opened, Readiness):
            return opened
        if refused := self._refusal():
            return refused
        return opened.poll()

    def is_done(self) -> bool:
        """Whether polling it again would change nothing: everything is resident or memory is full, or it is refused, or
        was tried for too long.
        """
        state = self.poll()
        is_full = state.problem is None and 0 < state.admitted == state.resident
        return state.ready or state.refused is not None or is_full or self._clock() > self.started_at + _GIVE_UP_S

    def close(self) -> None:
        """Let its chunks be evicted. Closing twice is no change."""
        with self._lock:
            self.closed = True
            if isinstance(self._opened, Reservation):
                self._opened.close()

    def _open(self) -> Reservation | Readiness | None:
        with self._lock:
            if self._opened is None and not self.closed:
                self._opened = next(self._opening, _FAILED)
            return self._opened


class Background:
    """Holds claims that somebody has to poll: `poll` does it for all. Safe from any thread."""

    def __init__(self, claim: Callable[[str, Mapping[str, Place]], Claim]) -> None:
        """`claim` makes a claim on a tag; see `CartridgeStore.claim`."""
        self._claim = claim
        self._claims: dict[str, Claim] = {}
        self._pinned: set[str] = set()
        """Those of them that last until `unpin`."""
        self._warmed: set[str] = set()
        self._lock = threading.RLock()

    def warm(self, digests: set[str]) -> None:
        """Preload these cartridges, each once as long as it is among them."""
        with self._lock:
            new, self._warmed = digests - self._warmed, digests
            for digest in new:
                self.preload(digest, {})

    def preload(self, tag: str, places: Mapping[str, Place]) -> Readiness:
        """Start bringing a cartridge or chain into memory; return how far it is. Does not wait."""
        with self._lock:
            state = self._held(tag, places).poll()
            self._end_if_done(tag)
        return state

    def pin(self, digest: str) -> int:
        """Keep a cartridge in memory until `unpin`, loading what is missing; return how many chunks it has.

        Raises `CartridgeError` for one that cannot be served, and `OverBudget` where memory has no room for all of its
        chunks; nothing is pinned then. Pinning again is no change.
        """
        with self._lock:
            state = self._held(digest, {}).poll()
            if digest in self._pinned or (state.refused is None and state.admitted == state.chunks):
                self._pinned.add(digest)
                return state.chunks
            self.cancel(digest)
        if state.refused is not None:
            raise CartridgeError(f"{digest} cannot be pinned: {state.refused}")
        raise OverBudget(f"only {state.admitted} of {state.chunks} chunks can be pinned: others hold the memory")

    def unpin(self, digest: str) -> int:
        """Let a cartridge's chunks be evicted again; return how many were pinned."""
        with self._lock:
            if digest not in self._pinned:
                return 0
            self._pinned.discard(digest)
            chunks = self._claims[digest].poll().chunks
            self.cancel(digest)
        return chunks

    def cancel(self, tag: str) -> None:
        """End a preload, if there is one."""
        with self._lock:
            if tag in self._claims and tag not in self._pinned:
                self._claims.pop(tag).close()

    def poll(self) -> None:
        """Try again what failed to load, and end the preloads that are done. Does not wait."""
        with self._lock:
            for tag in list(self._claims):
                self._end_if_done(tag)

    def pinned(self) -> list[str]:
        """Return the digests that are pinned."""
        with self._lock:
            return list(self._pinned)

    def claims(self) -> set[Claim]:
        """Return every claim held here."""
        with self._lock:
            return set(self._claims.values())

    def _held(self, tag: str, places: Mapping[str, Place]) -> Claim:
        if tag not in self._claims:
            self._claims[tag] = self._claim(tag, places)
        return self._claims[tag]

    def _end_if_done(self, tag: str) -> None:
        if self._claims[tag].is_done():
            self.cancel(tag)
