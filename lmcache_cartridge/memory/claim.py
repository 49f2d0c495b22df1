"""Claim: somebody's claim on a cartridge or chain, for a request, a pin or a preload."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from .readiness import Readiness
from .tier import Hold

_GIVE_UP_S = 600.0
"""How long a fetch in the background is tried for."""
_OPENING = Readiness(0, 0, 0, opening=True)
_FAILED = Readiness(0, 0, 0, "it could not be read; the log of its engine says why")


class Claim:
    """What a claim loads stays in memory until `close()`. One that is dropped without it is closed soon after."""

    def __init__(
        self,
        tag: str,
        opening: Iterator[Hold | Readiness | None],
        refusal: Callable[[], Readiness | None],
        clock: Callable[[], float],
    ) -> None:
        """Start opening: `opening` yields None while there is something to read, and in the end the hold, or why there
        will be none. `refusal` tells why a hold has become useless, None while it has not.
        """
        self.tag, self.started_at, self.closed = tag, clock(), False
        self._opening, self._refusal, self._clock = opening, refusal, clock
        self._opened: Hold | Readiness | None = None
        self._resident_before: int | None = None
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
        state = opened.poll()
        if self._resident_before is None:
            self._resident_before = state.resident
        return state._replace(eta_s=self._eta_s(state, self._resident_before))

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
            if isinstance(self._opened, Hold):
                self._opened.close()

    def _open(self) -> Hold | Readiness | None:
        with self._lock:
            if self._opened is None and not self.closed:
                self._opened = next(self._opening, _FAILED)
            return self._opened

    def _eta_s(self, state: Readiness, resident_before: int) -> float | None:
        if state.ready:
            return 0.0
        loaded = state.resident - resident_before
        elapsed_s = self._clock() - self.started_at
        return elapsed_s / loaded * (state.chunks - state.resident) if loaded > 0 else None
