"""Claim: what a request, a pin or a preload has on a cartridge or chain, and how far that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .errors import CartridgeError, ModelMismatch
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
    eta_s: float | None = None
    """Seconds until it is resident at the pace so far, None before the first chunk."""

    @classmethod
    def never(cls, error: CartridgeError) -> Readiness:
        """Return that of what will never be, for this reason."""
        return cls(0, 0, 0, str(error), isinstance(error, ModelMismatch))

    @property
    def ready(self) -> bool:
        """Whether all of it is resident."""
        return self.refused is None and self.resident == self.chunks


class Claim:
    """Somebody's claim on a cartridge or chain: what is loaded of it stays in memory until `close()`."""

    def __init__(
        self, tag: str, hold: Hold | None, refusal: Callable[[], Readiness | None], clock: Callable[[], float]
    ) -> None:
        """`refusal` tells why it will never be, None if it may; without a `hold` it always must."""
        self.tag, self.closed = tag, False
        self._hold, self._refusal, self._clock = hold, refusal, clock
        self._started_at, self._before = clock(), None

    def poll(self) -> Readiness:
        """Start loading what is missing, as far as memory allows, and return how far it is; does not wait."""
        if (refused := self._refusal()) or self._hold is None:
            return refused
        state = self._hold.poll()
        if self._before is None:
            self._before = state.resident
        return Readiness(state.resident, state.admitted, state.chunks, problem=state.problem, eta_s=self._eta_s(state))

    def is_done(self) -> bool:
        """Whether there is no use in polling on: it is all there, never will be, or is as far as memory allows."""
        state = self.poll()
        stuck = state.problem is None and 0 < state.admitted == state.resident
        return state.ready or state.refused is not None or stuck or self._clock() > self._started_at + _GIVE_UP_S

    def close(self) -> None:
        """Let it go. Closing twice is no change."""
        self.closed = True
        if self._hold is not None:
            self._hold.close()

    def _eta_s(self, state: HoldState) -> float | None:
        if state.ready:
            return 0.0
        loaded = state.resident - self._before
        elapsed_s = self._clock() - self._started_at
        return elapsed_s / loaded * (state.chunks - state.resident) if loaded > 0 else None
