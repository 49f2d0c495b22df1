"""Background: claims of no request, for preloads, pins and warm labels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from ..artifact.cartridge import Place
from ..errors import CartridgeError, OverBudget
from .claim import Claim
from .readiness import Readiness


class Background:
    """Holds claims that somebody has to poll: `poll` does it for all. Safe from any thread."""

    def __init__(self, claim: Callable[[str, Mapping[str, Place]], Claim]) -> None:
        """`claim` makes a claim on a tag; see `CartridgeStore.claim`."""
        self._claim = claim
        self._preloads: dict[str, Claim] = {}
        self._pins: dict[str, Claim] = {}
        self._lock = threading.RLock()

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
