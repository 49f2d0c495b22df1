"""Workers: daemon threads for what may block for ever, such as a file on a mount that hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

STALLED_S = 5.0
"""A job that takes longer is stalled: another thread takes the place of its own, which cannot be ended."""
_MOST_STALLED = 64
"""Threads that may be stalled before no others take their place."""
_noted: Counter[str] = Counter()
"""Errors that ended no thread, by the thread's name."""


def noted() -> int:
    """Return how many errors were noted in this process."""
    return _noted.total()


def go_on(run: Callable[[], object]) -> None:
    """Run a part of what a thread in the background does. What it raises is logged and counted, and ends nothing."""
    try:
        run()
    except Exception as error:
        note(error)


def note(error: Exception) -> None:
    """Count an error that ends nothing, and log it the thread's first, second, fourth, eighth time and so on."""
    name = threading.current_thread().name
    _noted[name] += 1
    if _noted[name].bit_count() == 1:
        logger.warning("%s goes on: %s", name, error, exc_info=True)


class _Job(NamedTuple):
    key: Hashable
    groups: frozenset[str]
    run: Callable[[], Any]
    future: Future[Any]


class Workers:
    """At most `limit` threads that are not stalled, each of which runs one job after the other. Safe from any thread.

    No job begins that has a group in common with a stalled one, such as the place that both read; with `one_a_group` with
    any that runs. Other jobs pass it.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        *,
        one_a_group: bool = False,
        begin: Callable[[], None] = lambda: None,
        stalled_s: float = STALLED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins no thread yet; each calls `begin` first."""
        self._name, self._limit, self._one_a_group, self._begin = name, limit, one_a_group, begin
        self._stalled_s, self._clock = stalled_s, clock
        self._waiting: OrderedDict[Hashable, _Job] = OrderedDict()
        """Ordered, since to find the first of a plain dict takes a look at all that were before it."""
        self._running: dict[threading.Thread, tuple[_Job, float]] = {}
        """What each thread is at, and since when."""
        self._stalled: set[threading.Thread] = set()
        self._alive = self._idle = 0
        """Threads that are not stalled; those of them that wait for a job."""
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, key: Hashable, run: Callable[[], Any], groups: Collection[str] = ()) -> Future[Any]:
        """Return the future of the job `key`, the one that waits or runs where there is one. Does not block.

        It is cancelled where the workers are closed before it began. To take a job back that no thread has begun, cancel its
        future; that is so for all who wait for it.
        """
        with self._changed:
            self.relieve()
            for job in (self._waiting.get(key), *(job for job, _ in self._running.values())):
                if job is not None and job.key == key and not job.future.cancelled():
                    return job.future
            job = _Job(key, frozenset(groups), run, Future())
            if self._closed:
                _drop(job)
                return job.future
            self._waiting[key] = job
            self._wake()
        return job.future

    def relieve(self) -> None:
        """Put threads in the place of stalled ones, as each `submit` does. To be called every now and then."""
        with self._changed:
            late = self._clock() - self._stalled_s
            for thread, (job, since) in self._running.items():
                if since < late and thread not in self._stalled and len(self._stalled) < _MOST_STALLED:
                    self._stalled.add(thread)
                    logger.warning("%s: %s takes too long; others go on without it", self._name, [*job.groups])
                    self._alive -= 1
                    self._wake()

    def close(self, wait_s: float) -> None:
        """Take back what waits, and wait for what runs, for `wait_s` at most. Calling again is no change."""
        with self._changed:
            self._closed = True
            dropped = list(self._waiting.values())
            self._waiting.clear()
            self._changed.notify_all()
        for job in dropped:
            _drop(job)
        with self._changed:
            self._changed.wait_for(lambda: not self._alive, wait_s)

    def _wake(self) -> None:
        if len(self._waiting) > self._idle and self._alive < self._limit:
            self._alive += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._changed.notify_all()

    def _next(self) -> _Job | None:
        busy = (job for thread, (job, _) in self._running.items() if self._one_a_group or thread in self._stalled)
        taken = frozenset().union(*(job.groups for job in busy))
        for key, job in self._waiting.items():
            if not taken & job.groups:
                del self._waiting[key]
                return job
        return None

    def _work(self) -> None:
        go_on(self._begin)
        me = threading.current_thread()
        while True:
            with self._changed:
                job = None  # else an idle thread keeps what the job holds alive
                while (job := self._next()) is None:
                    if self._closed:
                        self._alive -= 1
                        self._changed.notify_all()
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                if not job.future.set_running_or_notify_cancel():
                    continue
                self._running[me] = job, self._clock()
            try:
                result, error = job.run(), None
            except BaseException as caught:
                result, error = None, caught
            with self._changed:
                del self._running[me]
                replaced = me in self._stalled
                self._stalled.discard(me)
                self._changed.notify_all()  # what waited for its groups may go on
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)
            result = error = None
            if replaced:
                return


def _drop(job: _Job) -> None:
    """Cancel a job that no thread will take, and wake whoever waits for it."""
    if job.future.cancel():
        job.future.set_running_or_notify_cancel()
