"""ReadQueue: artefacts that are still to be read, or again since they could not be; at once or in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

logger = logging.getLogger(__name__)

_RETRY_S = 5.0
"""How long after a failure an artefact is read again."""
_REST = 9
"""Retries pause for this many times as long as the last round took: they use a tenth of one thread at most."""
_AT_ONCE_S = 2.0
"""How long a caller reads itself; the background reads the rest."""
_PROGRESS_S = 10.0
"""How often it is logged how far a round is."""


class ReadRequest(NamedTuple):
    """A registered cartridge that has to be read."""

    name: str
    digest: str
    location: str


class _Queued(NamedTuple):
    request: ReadRequest
    due_at: float = float("-inf")
    complaint: str = ""
    """Empty where it was not tried yet."""


class ReadQueue:
    """Requests by the name that a cartridge is registered under. Safe from any thread."""

    def __init__(self, read: Callable[[ReadRequest, bool], None], clock: Callable[[], float]) -> None:
        """`read` reads one, over the network only if it is told True, and calls `take` when it is done with it."""
        self._read, self._clock = read, clock
        self._queued: dict[str, _Queued] = {}
        self._lock = threading.Lock()
        self._rest_until = float("-inf")
        self._round: Future[None] | None = None
        self._closing = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cartridge-manifest")

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._queued))

    def add(self, requests: Iterable[ReadRequest]) -> None:
        """Queue some; a later one of a name takes the place of an earlier one."""
        with self._lock:
            self._queued.update((one.name, _Queued(one)) for one in requests)

    def drop(self, name: str) -> None:
        """Take the request of a name out; no change if there is none."""
        if name in self._queued:
            with self._lock:
                self._queued.pop(name, None)

    def take(self, request: ReadRequest) -> str | None:
        """Take one out; return the complaint it was put back with last, empty without any.

        None where it is not there: the cartridge was removed or replaced while it was read.
        """
        with self._lock:
            queued = self._queued.get(request.name)
            if queued is None or queued.request != request:
                return None
            del self._queued[request.name]
            return queued.complaint

    def put_back(self, request: ReadRequest, complaint: str) -> None:
        """Have one read again after a while."""
        with self._lock:
            self._queued[request.name] = _Queued(request, self._clock() + _RETRY_S, complaint)

    def read_some(self, requests: Iterable[ReadRequest]) -> None:
        """Read what lies here, for some seconds at most."""
        until = time.monotonic() + _AT_ONCE_S
        for one in requests:
            if time.monotonic() > until:
                logger.info("%d cartridges are still to be read; that goes on in the background", len(self))
                return
            self._try(one, False)

    def read_on(self) -> None:
        """Start a round in the background of all that is due, unless one is under way or nothing is due."""
        with self._lock:
            if self._closing or (self._round is not None and not self._round.done()):
                return
            now = self._clock()
            rested = now >= self._rest_until
            due = [q.request for q in self._queued.values() if q.due_at <= now and (rested or not q.complaint)]
            if due:
                self._round = self._pool.submit(self._read_all, due)

    def later(self, work: Callable[[], None]) -> None:
        """Have something else done in the background, after the round that is under way."""
        with self._lock:
            if not self._closing:
                self._pool.submit(work)

    def close(self) -> None:
        """Stop reading. Blocks for the artefact that is being read."""
        with self._lock:
            self._closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read_all(self, due: list[ReadRequest]) -> None:
        started = told = time.monotonic()
        for count, one in enumerate(due):
            if self._closing:
                return
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                logger.info("%d of %d cartridges are read", count, len(due))
            self._try(one, True)
        if told > started:
            logger.info("%d cartridges are read", len(due))
        self._rest_until = self._clock() + _REST * (time.monotonic() - started)

    def _try(self, request: ReadRequest, network: bool) -> None:
        try:
            self._read(request, network)
        except Exception as error:  # whatever it is, the others must be read
            logger.exception("cartridge %s was not read", request.name)
            if self.take(request) is not None:
                self.put_back(request, str(error) or type(error).__name__)
