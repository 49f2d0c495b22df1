"""LoadThreads: threads that fill memory with chunks, slow sources apart from fast ones, neighbouring chunks together."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch._C import set_num_threads

from ..errors import CartridgeError
from ..library.index import ChunkKey
from ..library.workers import STALLED_S, Workers
from ..sources.cores import use_all_cores

logger = logging.getLogger(__name__)

LOAD_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the buckets in which durations of loads are counted; a last bucket counts longer ones."""


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

        def workers(name: str, limit: int) -> Workers:
            return Workers(name, limit, begin=_begin_thread, stalled_s=STALLED_S, clock=clock)

        fast = workers("cartridge-load", threads)
        self._workers = fast, workers("cartridge-fetch", slow_threads) if slow_threads else fast

    def submit(self, key: ChunkKey, slot: torch.Tensor) -> None:
        """Have a chunk loaded into `slot`, which is the loading thread's until `loaded` is called. Does not wait."""
        with self._lock:
            self._waiting[key] = slot
        # Each under a key of its own: one that was loaded may be wanted again before its thread is done.
        future = self._workers[self._is_slow(key)].submit(object(), lambda: self._run(key), (key.digest,))
        future.add_done_callback(lambda ended: self._drop(key) if ended.cancelled() else None)

    def durations(self) -> tuple[float, tuple[int, ...]]:
        """Return the seconds spent in loads, failed ones too, and the chunks by duration, as `LOAD_SECONDS` divides."""
        with self._lock:
            return self._seconds, tuple(self._counts)

    def relieve(self) -> None:
        """Put other threads in the place of those that are stalled, for all cartridges but theirs. Does not wait.

        To be called every now and then.
        """
        for workers in self._workers:
            workers.relieve()

    def close(self) -> None:
        """Fail what no thread has begun, and wait for the rest, but not for what is stalled; submit nothing afterwards."""
        for workers in self._workers:
            workers.close(STALLED_S)

    def _drop(self, key: ChunkKey) -> None:
        with self._lock:
            if self._waiting.pop(key, None) is not None:
                self._loaded([key], [CartridgeError("this engine stops")])

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


def _begin_thread() -> None:
    """Have this thread use one core at a time, whichever is free.

    A parallel operation of torch in it would start a team of OpenMP threads of its own. With more of those than cores OpenMP's
    barriers stop spinning, in the engine's team too: on a CPU engine each of its operations then takes longer, for good
    (decode steps of the shipped model 9 ms instead of 3). `torch._C.set_num_threads`, though it is private: vLLM's CPU worker
    replaces `torch.set_num_threads` by a function that does nothing.
    """
    set_num_threads(1)
    use_all_cores()
