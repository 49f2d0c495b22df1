"""ReadQueue: artefacts that are still to be read, or again since they could not be, in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import NamedTuple

from .registry import RegistryEntry
from .workers import Workers, go_on, note

logger = logging.getLogger(__name__)

_RETRY_S, _LONGEST_RETRY_S = 5.0, 80.0
"""How long after its first failure an artefact is read again; after each more twice as long, up to the longest."""
_AT_ONCE_S = 2.0
"""How long a caller waits; the background reads the rest."""
_CLOSE_S = 1.0


class _Queued(NamedTuple):
    request: RegistryEntry
    due_at: float = float("-inf")
    complaint: str = ""
    """Empty where it was not tried yet."""
    wait_s: float = _RETRY_S
    """From the next failure to the try after it."""


class ReadQueue:
    """Requests by the name that a cartridge is registered under. Safe from any thread."""

    def __init__(self, read: Callable[[RegistryEntry], None], clock: Callable[[], float]) -> None:
        """`read` reads one, and calls `take` or `put_back` when it is done with it."""
        self._read, self._clock = read, clock
        self._queued: dict[str, _Queued] = {}
        self._lock = threading.Lock()
        self._workers = Workers("cartridge-manifest", 2, one_a_group=True)

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._queued))

    def add(self, requests: Iterable[RegistryEntry]) -> None:
        """Queue some; a later one of a name takes the place of an earlier one."""
        with self._lock:
            self._queued.update((one.name, _Queued(one)) for one in requests)

    def drop(self, name: str) -> None:
        """Take the request of a name out; no change if there is none."""
        with self._lock:
            self._queued.pop(name, None)

    def take(self, request: RegistryEntry) -> bool:
        """Take one out; False where it is not there: the cartridge was removed or replaced while it was read."""
        with self._lock:
            if not self._holds(request):
                return False
            del self._queued[request.name]
            return True

    def put_back(self, request: RegistryEntry, complaint: str) -> bool:
        """Have one read again after a while; whether it has another complaint than before."""
        with self._lock:
            known = self._queued.get(request.name) or _Queued(request)
            longer_s = min(2 * known.wait_s, _LONGEST_RETRY_S)
            self._queued[request.name] = _Queued(request, self._clock() + known.wait_s, complaint, longer_s)
            return complaint != known.complaint

    def holds(self, request: RegistryEntry) -> bool:
        """Whether one is still to be read."""
        with self._lock:
            return self._holds(request)

    def _holds(self, request: RegistryEntry) -> bool:
        return (queued := self._queued.get(request.name)) is not None and queued.request == request

    def read_on(self, at_once: Iterable[RegistryEntry] = ()) -> None:
        """Have all that is due read in the background, and wait some seconds at most for what is to be read `at_once`."""
        self._workers.relieve()
        waited = [self._begin(one) for one in at_once]
        with self._lock:
            now = self._clock()
            due = [queued.request for queued in self._queued.values() if queued.due_at <= now]
        for one in due:
            self._begin(one)
        if wait(waited, _AT_ONCE_S).not_done:
            logger.info("%d cartridges are still to be read; that goes on in the background", len(self))

    def later(self, work: Callable[[], None]) -> None:
        """Have something else done in the background."""
        self._workers.submit(object(), lambda: go_on(work))

    def close(self) -> None:
        """Stop reading. Waits for what is being read, but not for what hangs."""
        self._workers.close(_CLOSE_S)

    def _begin(self, request: RegistryEntry) -> Future[None]:
        return self._workers.submit(request, lambda: self._try(request), {request.location})

    def _try(self, request: RegistryEntry) -> None:
        if not self.holds(request):
            return  # it was read by now, or removed
        try:
            self._read(request)
        except Exception as error:  # whatever it is, the others must be read
            note(error)
            if self.holds(request):
                self.put_back(request, str(error) or type(error).__name__)
