"""Backlog: artefacts that are still to be read, or again since they could not be; now, or in the background."""

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
"""How many times as long as the last round in the background took nothing is read again after it."""
_PATIENCE_S = 2.0
"""How long is read at once; what is left is read in the background."""
_PROGRESS_S = 10.0


class Wanted(NamedTuple):
    """A registered cartridge that has to be read."""

    name: str
    digest: str
    location: str


class _Entry(NamedTuple):
    wanted: Wanted
    due_at: float | None
    """None for what nobody tried yet."""
    complaint: str | None


class Backlog:
    """Artefacts by the name they are registered under. Safe from any thread."""

    def __init__(
        self, read: Callable[[Wanted, bool], None], after: Callable[[bool], None], clock: Callable[[], float]
    ) -> None:
        """`read` reads one, over the network only if it is told True, and calls `take` when it is done with it.

        `after` is called in the background: from time to time while much is read there, and with True at its end.
        """
        self._read, self._after, self._clock = read, after, clock
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._rest_until = float("-inf")
        self._round: Future | None = None
        self._closing = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cartridge-manifest")

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def add(self, wanted: Iterable[Wanted]) -> None:
        """Have some read; of a name's, only the last one."""
        with self._lock:
            self._entries.update((one.name, _Entry(one, None, None)) for one in wanted)

    def drop(self, name: str) -> None:
        """Read it no more; no change if it is not to be read."""
        if name in self._entries:
            with self._lock:
                self._entries.pop(name, None)

    def take(self, wanted: Wanted) -> tuple[bool, str | None]:
        """Take one off; return whether it was still wanted, and the complaint it was put back with last.

        It is not where its row was removed or replaced while it was read.
        """
        with self._lock:
            entry = self._entries.get(wanted.name)
            if entry is None or entry.wanted != wanted:
                return False, None
            del self._entries[wanted.name]
            return True, entry.complaint

    def put_back(self, wanted: Wanted, complaint: str) -> None:
        """Have one read again after a while."""
        with self._lock:
            self._entries[wanted.name] = _Entry(wanted, self._clock() + _RETRY_S, complaint)

    def read_some(self, wanted: Iterable[Wanted]) -> None:
        """Read what lies here, for some seconds at most."""
        until = time.monotonic() + _PATIENCE_S
        for one in wanted:
            if time.monotonic() > until:
                logger.info("%d cartridges are still to be read; that goes on in the background", len(self))
                return
            self._try(one, False)

    def read_on(self, *, needed: bool = False) -> None:
        """Have what is due read in the background, unless something is; with `needed` even if nothing is due."""
        with self._lock:
            if self._closing or self._round is not None and not self._round.done():
                return
            now, rested = self._clock(), time.monotonic() >= self._rest_until
            due = [e.wanted for e in self._entries.values() if e.due_at is None or (e.due_at <= now and rested)]
            if due or needed:
                self._round = self._pool.submit(self._read_all, due)

    def later(self, work: Callable[[], None]) -> None:
        """Have something else done in the background, behind what is being read."""
        with self._lock:
            if not self._closing:
                self._pool.submit(work)

    def close(self) -> None:
        """Stop reading. Blocks for what is being read."""
        with self._lock:
            self._closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read_all(self, due: list[Wanted]) -> None:
        started = told = time.monotonic()
        for count, one in enumerate(due):
            if self._closing:
                return
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                logger.info("%d of %d cartridges are read", count, len(due))
                self._after(False)
            self._try(one, True)
        if told > started:
            logger.info("%d cartridges are read", len(due))
        self._rest_until = time.monotonic() + _REST * (time.monotonic() - started)
        self._after(True)

    def _try(self, wanted: Wanted, network: bool) -> None:
        try:
            self._read(wanted, network)
        except Exception as error:  # whatever it is, the others must be read
            logger.exception("cartridge %s was not read", wanted.name)
            if self.take(wanted)[0]:
                self.put_back(wanted, str(error))
