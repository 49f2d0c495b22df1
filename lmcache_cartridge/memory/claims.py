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
        self._preloads: dict[str, Claim] = {}
        self._pins: dict[str, Claim] = {}
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
            claim = self._preloads.get(tag)
            if claim is None:
                claim = self._preloads[tag] = self._claim(tag, places)
            state = claim.poll()
            self._end_if_done(tag, claim)
        return state

    def pin(self, digest: str) -> int:
        """Keep a cartridge in memory until `unpin`, loading what is missing; return how many chunks it has.

        Raises `CartridgeError` for one that cannot be served, and `OverBudget` where memory has no room for all of its
        chunks; nothing is pinned then. Pinning again is no change.
        """
        with self._lock:
            if digest in self._pins:
                return self._pins[digest].poll().chunks
            claim = self._claim(digest, {})
            state = claim.poll()
            if state.refused is None and state.admitted == state.chunks:
                self._pins[digest] = claim
                return state.chunks
            claim.close()
        if state.refused is not None:
            raise CartridgeError(f"{digest} cannot be pinned: {state.refused}")
        raise OverBudget(f"only {state.admitted} of {state.chunks} chunks can be pinned: others hold the memory")

    def unpin(self, digest: str) -> int:
        """Let a cartridge's chunks be evicted again; return how many were pinned."""
        with self._lock:
            claim = self._pins.pop(digest, None)
        if claim is None:
            return 0
        chunks = claim.poll().chunks
        claim.close()
        return chunks

    def cancel(self, tag: str) -> None:
        """End a preload, if there is one."""
        with self._lock:
            if claim := self._preloads.pop(tag, None):
                claim.close()

    def poll(self) -> None:
        """Try again what failed to load, and end the preloads that are done. Does not wait."""
        with self._lock:
            for tag, claim in list(self._preloads.items()):
                self._end_if_done(tag, claim)
            for claim in self._pins.values():
                claim.poll()

    def pinned(self) -> list[str]:
        """Return the digests that are pinned."""
        with self._lock:
            return list(self._pins)

    def claims(self) -> set[Claim]:
        """Return every claim held here."""
        with self._lock:
            return {*self._preloads.values(), *self._pins.values()}

    def _end_if_done(self, tag: str, claim: Claim) -> None:
        if claim.is_done():
            claim.close()
            del self._preloads[tag]
