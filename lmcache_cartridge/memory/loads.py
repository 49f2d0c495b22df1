"""LoadThreads: threads that fill slots with chunks, slow sources apart from fast ones, neighbouring chunks together."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from ..errors import CartridgeError
from ..library.index import ChunkKey

logger = logging.getLogger(__name__)

Load = Callable[[ChunkKey, torch.Tensor], None]
"""Fills a slot, flat uint8, with the verified bytes of a chunk; raises `CartridgeError` when it cannot."""

LoadRun = Callable[[ChunkKey, Sequence[torch.Tensor]], Sequence[CartridgeError | None]]
"""Fills slots with a chunk and those that follow it; returns for each None, or why it could not be loaded."""

Loaded = Callable[[Sequence[ChunkKey], Sequence[CartridgeError | None], float], None]
"""Hears which chunks were loaded together, for each None or why it could not be, and the seconds it took in all."""


LoadFailed = Callable[[ChunkKey, CartridgeError], None]
"""Hears of a load that raised."""


STALLED_S = 5.0
"""A load that takes longer is counted as stalled, as a file on a mount that hangs is."""
_MOST_STALLED = 64
"""Threads that may be stalled before no others take their place: they cannot be ended."""


class LoadThreads:
    """Loads each chunk once, soon after it was asked for, and tells how that ended."""

    def __init__(
        self,
        load: Load,
        loaded: Loaded,
        lock: threading.RLock,
        *,
        threads: int,
        slow_threads: int = 0,
        is_slow: Callable[[ChunkKey], bool] = lambda key: False,
        load_run: LoadRun | None = None,
        run_of: Callable[[ChunkKey], int] = lambda key: 1,
        on_failure: LoadFailed | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """No thread begins with a chunk while a caller holds `lock`, so what is submitted meanwhile is there together.

        `on_failure` hears of every load that raised before `loaded` does; both are called by the loading thread.
        Chunks that are `is_slow` to load have `slow_threads` of their own, so that they keep no others waiting. A
        chunk's thread takes neighbours of it that wait along, `run_of` it in all at most, and has `load_run` load them
        together.
        """
        self._load, self._load_run, self._loaded = load, load_run, loaded
        self._is_slow, self._run_of, self._on_failure = is_slow, run_of, on_failure
        self._waiting: dict[ChunkKey, torch.Tensor] = {}
        self._lock = lock
        self._pool = _Pool(self._run, threads, "cartridge-load", clock)
        self._slow_pool = _Pool(self._run, slow_threads, "cartridge-fetch", clock) if slow_threads else self._pool

    def submit(self, key: ChunkKey, slot: torch.Tensor) -> None:
        """Have a chunk loaded into `slot`, which is the loader's until `loaded` has heard of it. Does not wait."""
        with self._lock:
            self._waiting[key] = slot
        (self._slow_pool if self._is_slow(key) else self._pool).submit(key)

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
        taken = self._take(key)
        if not taken:
            return  # the thread of a neighbour has it
        started = time.perf_counter()
        keys, slots = list(taken), list(taken.values())
        errors = self._fill(keys[0], slots)
        for failed, error in zip(keys, errors, strict=True):
            if error is not None:
                self._tell(failed, error)
        self._loaded(keys, errors, time.perf_counter() - started)

    def _take(self, key: ChunkKey) -> dict[ChunkKey, torch.Tensor]:
        """Return the slots of a chunk and its neighbours, in order, that this thread is to load; none if another thread is.

        Those before it too, so that neighbours stay together whichever thread comes first.
        """
        try:
            limit = self._run_of(key)
        except Exception:  # loading it alone says what is wrong
            limit = 1
        with self._lock:
            taken: dict[ChunkKey, torch.Tensor] = {}
            if key not in self._waiting:
                return taken
            following = key
            while key.chunk - following.chunk < limit - 1 and _next(following, -1) in self._waiting:
                following = _next(following, -1)
            while len(taken) < limit and following in self._waiting:
                taken[following] = self._waiting.pop(following)
                following = _next(following, 1)
            return taken

    def _fill(self, key: ChunkKey, slots: Sequence[torch.Tensor]) -> Sequence[CartridgeError | None]:
        try:
            if len(slots) > 1:
                return self._load_run(key, slots)
            self._load(key, slots[0])
            return [None]
        except CartridgeError as caught:
            return [caught] * len(slots)
        except Exception as caught:  # a bug must not leave waiters hanging or a slot lost
            error = CartridgeError(f"loading chunk {key.chunk} of {key.digest}: {type(caught).__name__}: {caught}")
            return [error] * len(slots)

    def _tell(self, key: ChunkKey, error: CartridgeError) -> None:
        if self._on_failure is not None:
            try:
                self._on_failure(key, error)
            except Exception:
                logger.exception("chunk %d of %s was not loaded (%s), and nobody heard", key.chunk, key.digest, error)


def _next(key: ChunkKey, step: int) -> ChunkKey:
    return key._replace(chunk=key.chunk + step)


class _Pool:
    """Threads that load, each of which uses one core.

    A parallel operation of torch in any of them would start a team of OpenMP threads of its own. With more of those than
    cores OpenMP's barriers stop spinning, in the engine's team too: on a CPU engine each of its operations then takes
    longer, for good (decode steps of the shipped model 9 ms instead of 3). Not `torch.set_num_threads`: vLLM's CPU
    worker replaces that by one that does nothing.

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
        torch._C.set_num_threads(1)
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
