"""LoadThreads: threads that fill memory with chunks, slow sources apart from fast ones, neighbouring chunks together."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch._C import set_num_threads

from ..errors import CartridgeError
from ..library.index import ChunkKey
from ..sources.cores import use_all_cores

logger = logging.getLogger(__name__)

LOAD_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the buckets in which durations of loads are counted; a last bucket counts longer ones."""
STALLED_S = 5.0
"""A load that takes longer is counted as stalled, as a file on a mount that hangs is."""
_MOST_STALLED = 64
"""Threads that may be stalled before no others take their place: they cannot be ended."""


class LoadRun(NamedTuple):
    """How the chunks of one cartridge or chain are loaded."""

    limit: int
    """Most neighbouring chunks that one call should be given."""
    load: Callable[[int, Sequence[torch.Tensor]], Sequence[CartridgeError | None]]
    """Fills buffers, flat uint8, with the verified bytes of a chunk and of those after it; returns for each None, or why it
    could not be loaded."""


Plan = Callable[[ChunkKey], LoadRun]
"""Tells how a chunk is loaded. Called by the loading thread; raises `CartridgeError` where the chunk cannot be had."""

Loaded = Callable[[Sequence[ChunkKey], Sequence[CartridgeError | None]], None]
"""Is told which chunks were loaded together, and for each None or why it could not be."""


_streams = threading.local()


def copy_and_wait(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the first of each pair to the second, on one other device; return when the bytes are there.

    Nothing may be under way that reads or writes what is filled: on CUDA this thread has a stream of its own, so that it
    waits for no computation, nor one for it.
    """
    if not pairs or not pairs[0][1].is_cuda:
        for data, out in pairs:
            out.copy_(data)
        return
    device, streams = pairs[0][1].device, vars(_streams)
    stream = streams.get(str(device)) or streams.setdefault(str(device), torch.cuda.Stream(device))
    with torch.cuda.stream(stream):
        for data, out in pairs:
            out.copy_(data, non_blocking=True)
    stream.synchronize()


class LoadThreads:
    """Loads each chunk once, soon after it was asked for, and tells how that ended."""

    def __init__(
        self,
        plan: Plan,
        loaded: Loaded,
        lock: threading.RLock,
        *,
        threads: int = 4,
        slow_threads: int = 0,
        is_slow: Callable[[ChunkKey], bool] = lambda key: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """No thread begins with a chunk while a caller holds `lock`, so chunks submitted meanwhile are loaded together.

        Chunks that are `is_slow` to load have `slow_threads` of their own, so that they keep no others waiting. A
        thread takes waiting neighbours of its chunk along, up to the limit of its plan. `loaded` is called by the loading
        thread.
        """
        self._plan, self._loaded, self._is_slow = plan, loaded, is_slow
        self._waiting: dict[ChunkKey, torch.Tensor] = {}
        self._seconds, self._counts = 0.0, [0] * (len(LOAD_SECONDS) + 1)
        self._lock = lock
        self._pool = _Pool(self._run, threads, "cartridge-load", clock)
        self._slow_pool = _Pool(self._run, slow_threads, "cartridge-fetch", clock) if slow_threads else self._pool

    def submit(self, key: ChunkKey, slot: torch.Tensor) -> None:
        """Have a chunk loaded into `slot`, which is the loading thread's until `loaded` is called. Does not wait."""
        with self._lock:
            self._waiting[key] = slot
        (self._slow_pool if self._is_slow(key) else self._pool).submit(key)

    def durations(self) -> tuple[float, tuple[int, ...]]:
        """Return the seconds spent in loads, failed ones too, and the chunks by duration, as `LOAD_SECONDS` divides."""
        with self._lock:
            return self._seconds, tuple(self._counts)

    def relieve(self) -> None:
        """Put other threads in the place of those that are stalled, for all cartridges but theirs. Does not wait.

        To be called every now and then.
        """
        for pool in (self._pool, self._slow_pool):
            pool.relieve()

    def close(self) -> None:
        """Wait for everything that was submitted, but not for what is stalled; nothing may be submitted afterwards."""
        for pool in (self._pool, self._slow_pool):
            pool.close()

    def _run(self, key: ChunkKey) -> None:
        if key not in self._waiting:
            return  # the thread of a neighbour has it
        started, run = time.perf_counter(), None
        errors: list[CartridgeError | None] = []
        try:
            run = self._plan(key)
        except Exception as caught:
            errors = [_as_error(key, caught)]
        taken = self._take(key, 1 if run is None else run.limit)
        if not taken:
            return
        keys = list(taken)
        if run is not None:
            try:
                errors = list(run.load(keys[0].chunk, list(taken.values())))
            except Exception as caught:  # a bug must not leave waiters hanging or a slot lost
                errors = [_as_error(keys[0], caught)] * len(keys)
        for failed, error in zip(keys, errors, strict=True):
            if error is not None:
                logger.warning("chunk %d of %s was not loaded: %s", failed.chunk, failed.digest, error)
        took_s = time.perf_counter() - started
        with self._lock:
            self._seconds += took_s
            self._counts[bisect_left(LOAD_SECONDS, took_s / len(keys))] += len(keys)
            self._loaded(keys, errors)

    def _take(self, key: ChunkKey, limit: int) -> dict[ChunkKey, torch.Tensor]:
        """Return the slots that this thread is to fill, by chunk, in order: of `key` and of `limit` chunks at most.

        Neighbours before it are among them, so that they stay together whichever thread comes first. Empty if another
        thread has `key`.
        """
        with self._lock:
            taken: dict[ChunkKey, torch.Tensor] = {}
            if key not in self._waiting:
                return taken
            first = key
            while key.chunk - first.chunk < limit - 1 and _neighbour(first, -1) in self._waiting:
                first = _neighbour(first, -1)
            while len(taken) < limit and first in self._waiting:
                taken[first] = self._waiting.pop(first)
                first = _neighbour(first, 1)
            return taken


def _neighbour(key: ChunkKey, step: int) -> ChunkKey:
    return key._replace(chunk=key.chunk + step)


def _as_error(key: ChunkKey, caught: Exception) -> CartridgeError:
    if isinstance(caught, CartridgeError):
        return caught
    return CartridgeError(f"loading chunk {key.chunk} of {key.digest}: {type(caught).__name__}: {caught}")


class _Pool:
    """Threads that load, each of which uses one core at a time, whichever is free.

    A parallel operation of torch in any of them would start a team of OpenMP threads of its own. With more of those than
    cores OpenMP's barriers stop spinning, in the engine's team too: on a CPU engine each of its operations then takes
    longer, for good (decode steps of the shipped model 9 ms instead of 3). `torch._C.set_num_threads`, though it is
    private: vLLM's CPU worker replaces `torch.set_num_threads` by a function that does nothing.

    A thread that hangs in a read cannot be ended. Once it is stalled another takes its place, and no further thread
    begins with a chunk of that cartridge or chain before the read has ended.
    """

    def __init__(self, run: Callable[[ChunkKey], None], threads: int, name: str, clock: Callable[[], float]) -> None:
        self._run, self._threads, self._name, self._clock = run, threads, name, clock
        self._jobs: deque[ChunkKey] = deque()
        self._running: dict[threading.Thread, tuple[str, float]] = {}
        """What each thread that loads is at, and since when."""
        self._stalled: dict[threading.Thread, str] = {}
        self._alive = self._idle = 0
        """Threads that are not stalled; those of them that wait for something to do."""
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, key: ChunkKey) -> None:
        """Have `run(key)` called by a thread."""
        with self._changed:
            self._jobs.append(key)
            self._wake()

    def relieve(self) -> None:
        """Count as stalled what has been running for too long, and have its place taken."""
        with self._changed:
            late = self._clock() - STALLED_S
            for thread, (digest, started) in self._running.items():
                if started < late and thread not in self._stalled and len(self._stalled) < _MOST_STALLED:
                    self._stalled[thread] = digest
                    self._alive -= 1
                    logger.warning("loading %s has taken more than %g s; others go on without it", digest, STALLED_S)
                    self._wake()

    def close(self) -> None:
        """Wait until every thread that is not stalled has ended. Calling again is no change."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while self._alive:
            self.relieve()
            with self._changed:
                self._changed.wait_for(lambda: not self._alive, 0.1)

    def _wake(self) -> None:
        """Have a thread look for something to do. The lock is held."""
        if len(self._jobs) > self._idle and self._alive < self._threads:
            self._alive += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._changed.notify_all()

    def _next_job(self) -> ChunkKey | None:
        stalled = set(self._stalled.values())
        for place, key in enumerate(self._jobs):
            if key.digest not in stalled:
                del self._jobs[place]
                return key
        return None

    def _work(self) -> None:
        set_num_threads(1)
        use_all_cores()
        me = threading.current_thread()
        while True:
            with self._changed:
                while (key := self._next_job()) is None:
                    if self._closed:
                        self._alive -= 1
                        self._changed.notify_all()
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                self._running[me] = key.digest, self._clock()
            try:
                self._run(key)
            except Exception:
                logger.exception("loading %s failed", key)
            with self._changed:
                del self._running[me]
                if self._stalled.pop(me, None) is not None:
                    self._changed.notify_all()  # what waited for it may go on; another thread has this one's place
                    return
