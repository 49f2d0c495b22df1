"""Claim: what a request, a pin or a preload has on a cartridge or chain, and how far that is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..errors import CartridgeError, ModelMismatch
from .hold import Hold, HoldState

_GIVE_UP_S = 600.0
"""How long a fetch in the background is tried for."""


class Readiness(NamedTuple):
    """How far a cartridge or chain is on its way into memory."""

    resident: int
    """Chunks that are resident."""
    admitted: int
    """Chunks that are resident or being loaded; the others wait for memory."""
    chunks: int
    refused: str | None = None
    """Why it will never be, None if it may."""
    mismatch: bool = False
    """Whether it was made for another model, so that even its token ids mean nothing here."""
    problem: str | None = None
    """Why loading it failed last; it is tried again."""
    digest: str | None = None
    """Of a cartridge that is refused by itself, not for its place in a chain."""
    eta_s: float | None = None
    """Seconds until it is resident at the pace so far, None before the first chunk."""
    opening: bool = False
    """Whether its manifest is still being read; it has no chunks until then."""

    @classmethod
    def never(cls, error: CartridgeError) -> Readiness:
        """Return that of what will never be, for this reason."""
        return cls(0, 0, 0, str(error), isinstance(error, ModelMismatch), digest=error.digest)

    @property
    def ready(self) -> bool:
        """Whether all of it is resident."""
        return self.refused is None and not self.opening and self.resident == self.chunks


_OPENING = Readiness(0, 0, 0, opening=True)
_FAILED = Readiness(0, 0, 0, "it could not be read; the log of its engine says why")


class Claim:
    """Somebody's claim on a cartridge or chain: what is loaded of it stays in memory until `close()`."""

    def __init__(
        self,
        tag: str,
        opening: Iterator[Hold | Readiness | None],
        refusal: Callable[[], Readiness | None],
        clock: Callable[[], float],
        closed: Callable[[Claim], None],
    ) -> None:
        """`opening` yields None while there is something to read, then the hold, or why there never will be one.

        `refusal` tells why what is held will never be, None if it may; `closed` is called once. Starts opening.
        """
        self.tag, self.started_at, self.closed = tag, clock(), False
        self._opening, self._refusal, self._clock, self._on_close = opening, refusal, clock, closed
        self._held: Hold | Readiness | None = None
        self._before: int | None = None
        self._lock = threading.Lock()
        self._open()

    def poll(self) -> Readiness:
        """Start loading what is missing, as far as memory allows, and return how far it is; does not wait."""
        held = self._open()
        if held is None:
            return _OPENING
        if isinstance(held, Readiness):
            return held
        if refused := self._refusal():
            return refused
        state = held.poll()
        if self._before is None:
            self._before = state.resident
        return Readiness(state.resident, state.admitted, state.chunks, problem=state.problem, eta_s=self._eta_s(state))

    def is_done(self) -> bool:
        """Whether there is no use in polling on: it is all there, never will be, or is as far as memory allows."""
        state = self.poll()
        stuck = state.problem is None and 0 < state.admitted == state.resident
        return state.ready or state.refused is not None or stuck or self._clock() > self.started_at + _GIVE_UP_S

    def close(self) -> None:
        """Let it go. Closing twice is no change."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            if isinstance(self._held, Hold):
                self._held.close()
        self._on_close(self)

    def _open(self) -> Hold | Readiness | None:
        with self._lock:
            if self._held is None and not self.closed:
                self._held = next(self._opening, _FAILED)
            return self._held

    def _eta_s(self, state: HoldState) -> float | None:
        if state.ready:
            return 0.0
        loaded = state.resident - self._before
        elapsed_s = self._clock() - self.started_at
        return elapsed_s / loaded * (state.chunks - state.resident) if loaded > 0 else None
