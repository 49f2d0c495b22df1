"""ReadQueue: artefacts that are still to be read, or again since they could not be; at once or in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import NamedTuple

from .registry import RegistryEntry
from .workers import Workers

logger = logging.getLogger(__name__)

_RETRY_S = 5.0
"""How long after a failure an artefact is read again."""
_REST = 9
"""Retries pause for this many times as long as the last ones took: they use a tenth of one thread at most."""
_AT_ONCE_S = 2.0
"""How long a caller waits; the background reads the rest."""
_CLOSE_S = 1.0


class _Queued(NamedTuple):
    request: RegistryEntry
    due_at: float = float("-inf")
    complaint: str = ""
    """Empty where it was not tried yet."""


class ReadQueue:
    """Requests by the name that a cartridge is registered under. Safe from any thread."""

    def __init__(self, read: Callable[[RegistryEntry, bool], None], clock: Callable[[], float]) -> None:
        """`read` reads one, over the network only if it is told True, and calls `take` when it is done with it."""
        self._read, self._clock = read, clock
        self._queued: dict[str, _Queued] = {}
        self._lock = threading.Lock()
        self._rest_until = float("-inf")
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

    def take(self, request: RegistryEntry) -> str | None:
        """Take one out; return the complaint it was put back with last, empty without any.

        None where it is not there: the cartridge was removed or replaced while it was read.
        """
        with self._lock:
            queued = self._queued.get(request.name)
            if queued is None or queued.request != request:
                return None
            del self._queued[request.name]
            return queued.complaint

    def put_back(self, request: RegistryEntry, complaint: str) -> None:
        """Have one read again after a while."""
        with self._lock:
            self._queued[request.name] = _Queued(request, self._clock() + _RETRY_S, complaint)

    def read_some(self, requests: Iterable[RegistryEntry]) -> None:
        """Read what lies here, and wait for it, for some seconds at most."""
        if wait([self._begin(one, False) for one in requests], _AT_ONCE_S).not_done:
            logger.info("%d cartridges are still to be read; that goes on in the background", len(self))

    def read_on(self) -> None:
        """Have all that is due read in the background."""
        self._workers.relieve()
        with self._lock:
            now = self._clock()
            rested = now >= self._rest_until
            due = [q.request for q in self._queued.values() if q.due_at <= now and (rested or not q.complaint)]
        for one in due:
            self._begin(one, True)

    def later(self, work: Callable[[], None]) -> None:
        """Have something else done in the background."""

        def run() -> None:
            try:
                work()
            except Exception:
                logger.exception("something was not done in the background")

        self._workers.submit(run, run)

    def close(self) -> None:
        """Stop reading. Waits for what is being read, but not for what hangs."""
        self._workers.close(_CLOSE_S)

    def _begin(self, request: RegistryEntry, network: bool) -> Future[None]:
        return self._workers.submit((request, network), lambda: self._try(request, network), {request.location})

    def _try(self, request: RegistryEntry, network: bool) -> None:
        started, queued = time.monotonic(), self._queued.get(request.name)
        if queued is None or queued.request != request:
            return  # it was read by now, or removed
        try:
            self._read(request, network)
        except Exception as error:  # whatever it is, the others must be read
            logger.exception("cartridge %s was not read", request.name)
            if self.take(request) is not None:
                self.put_back(request, str(error) or type(error).__name__)
        with self._lock:
            if (queued := self._queued.get(request.name)) is not None and queued.complaint:
                now = self._clock()
                self._rest_until = max(self._rest_until, now) + _REST * (time.monotonic() - started)
