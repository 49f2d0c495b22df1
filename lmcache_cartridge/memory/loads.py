"""LoadThreads: threads that fill memory with chunks, slow sources apart from fast ones, and read each piece once."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C import set_num_threads

from ..errors import CartridgeError
from ..library.index import ChunkKey
from ..library.workers import STALLED_S, Workers, go_on
from ..sources.cores import use_all_cores

logger = logging.getLogger(__name__)

LOAD_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the buckets in which durations of loads are counted; a last bucket counts longer ones."""


_streams = threading.local()


def copy_and_wait(data: torch.Tensor, out: torch.Tensor) -> None:
    """Copy to another device; return when the bytes are there.

    Nothing may be under way that reads or writes what is filled: on CUDA this thread has a stream of its own, so that it
    waits for no computation, nor one for it.
    """
    if not out.is_cuda:
        out.copy_(data)
        return
    streams = vars(_streams)
    stream = streams.get(str(out.device)) or streams.setdefault(str(out.device), torch.cuda.Stream(out.device))
    with torch.cuda.stream(stream):
        out.copy_(data, non_blocking=True)
    stream.synchronize()


class Piece(NamedTuple):
    """What has to be read for a chunk, or for a part of it; others may be made of it too."""

    at: ChunkKey
    where: Any = None
    """Where it belongs; None: it is all of the chunk, as it is read."""


class ChunkSource:
    """Where a tier's chunks come from. As it stands each is read by itself; called by the loading threads."""

    def plan(self, digest: str) -> Callable[[int], Sequence[Piece]]:
        """Return what tells the pieces of each chunk of a cartridge or chain. May block; raises `CartridgeError`."""
        return lambda chunk: [Piece(ChunkKey(digest, chunk))]

    def read(self, at: ChunkKey, out: torch.Tensor | None) -> torch.Tensor:
        """Return the verified bytes of a piece, flat uint8: `out`, filled, where there is one. Blocks; raises `CartridgeError`."""
        raise NotImplementedError

    def put(self, piece: Piece, data: torch.Tensor, out: torch.Tensor) -> None:
        """Fill the part of `out`, made by `room`, that a piece is."""
        out.copy_(data)

    def room(self, slot: torch.Tensor) -> torch.Tensor:
        """Return the memory to put a chunk's pieces into; quick."""
        return slot

    def finish(self, room: torch.Tensor, slot: torch.Tensor) -> None:
        """Fill a chunk's slot once all its pieces are in `room`."""


Loaded = Callable[[Sequence[ChunkKey], Sequence[CartridgeError | None]], None]
"""Is told which chunks were loaded together, and for each None or why it could not be."""


class _Chunk:
    """A chunk that is being loaded."""

    __slots__ = ("error", "key", "left", "pieces", "room", "seconds", "slot")

    def __init__(self, key: ChunkKey, slot: torch.Tensor, room: torch.Tensor) -> None:
        self.key, self.slot, self.room = key, slot, room
        self.pieces: Sequence[Piece] = ()
        self.left, self.seconds = 0, 0.0
        self.error: CartridgeError | None = None

    def attempt(self, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call, unless something went wrong before, and note what goes wrong."""
        try:
            if self.error is None:
                call(*arguments)
        except Exception as caught:
            self.error = _as_error(self.key, caught)


class LoadThreads:
    """Loads each chunk once, soon after it was asked for, and tells how that ended.

    Each piece is read once for all chunks that wait for it, and those that come to want it meanwhile.
    """

    def __init__(
        self,
        source: ChunkSource,
        loaded: Loaded,
        lock: threading.RLock,
        *,
        threads: int = 4,
        slow_threads: int = 0,
        is_slow: Callable[[str], bool] = lambda digest: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """No thread begins with a chunk while a caller holds `lock`, so chunks submitted meanwhile are loaded together.

        Digests that are `is_slow` to load have `slow_threads` of their own, so that they keep no others waiting. `loaded` is
        called by the loading thread.
        """
        self._source, self._loaded, self._is_slow = source, loaded, is_slow
        self._chunks: dict[ChunkKey, _Chunk] = {}
        self._unplanned: dict[str, list[_Chunk]] = {}
        self._wanted: dict[ChunkKey, list[tuple[_Chunk, Piece]]] = {}
        """Who waits for each piece until it was read."""
        self._waiting: set[ChunkKey] = set()
        """Those of them that no thread has begun with."""
        self._jobs: set[ChunkKey] = set()
        """Pieces that a thread will look at, those too that were taken back."""
        self._seconds, self._counts = 0.0, [0] * (len(LOAD_SECONDS) + 1)
        self._lock = lock
        limits = {"cartridge-load": threads, "cartridge-fetch": slow_threads}
        self._workers = [
            Workers(name, limit, begin=_begin_thread, stalled_s=STALLED_S, clock=clock)
            for name, limit in limits.items()
            if limit
        ]

    def submit(self, key: ChunkKey, slot: torch.Tensor) -> None:
        """Have a chunk loaded into `slot`, which is the loading threads' until `loaded` is called. Does not wait."""
        with self._lock:
            chunk = self._chunks[key] = _Chunk(key, slot, self._source.room(slot))
            if key.digest not in self._unplanned:
                self._unplanned[key.digest] = []
                self._begin(key.digest, partial(self._plan, key.digest))
            self._unplanned[key.digest].append(chunk)

    def waiting(self) -> list[ChunkKey]:
        """Return the chunks that no thread has begun with, the last submitted first."""
        with self._lock:
            return [
                key
                for key, chunk in reversed(self._chunks.items())
                if chunk.left == len(chunk.pieces) and self._waiting.issuperset(piece.at for piece in chunk.pieces)
            ]

    def take_back(self, key: ChunkKey) -> None:
        """Forget one of `waiting`; `loaded` is not called. `lock` has been held since."""
        chunk = self._chunks.pop(key)
        if chunk in (unplanned := self._unplanned.get(key.digest, [])):
            unplanned.remove(chunk)
        for piece in chunk.pieces:
            wanted = self._wanted[piece.at]
            wanted.remove((chunk, piece))
            if not wanted:
                del self._wanted[piece.at]
                self._waiting.remove(piece.at)

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
        """Wait for what threads have begun, but not for what is stalled, and fail the rest; submit nothing afterwards."""
        for workers in self._workers:
            workers.close(STALLED_S)
        self._end(list(self._chunks.values()), CartridgeError("this engine stops"))

    def _begin(self, digest: str, job: Callable[[], None]) -> None:
        self._workers[-self._is_slow(digest)].submit(object(), lambda: go_on(job), (digest,))

    def _plan(self, digest: str) -> None:
        with self._lock:
            chunks = self._unplanned.pop(digest)
        try:
            pieces_of = self._source.plan(digest)
            planned = [(chunk, pieces_of(chunk.key.chunk)) for chunk in chunks]
        except Exception as caught:
            self._end(chunks, _as_error(ChunkKey(digest, 0), caught))
            return
        with self._lock:
            for chunk, pieces in planned:
                if self._chunks.get(chunk.key) is chunk:
                    chunk.pieces, chunk.left = pieces, len(pieces)
                    for piece in pieces:
                        self._want(chunk, piece)

    def _want(self, chunk: _Chunk, piece: Piece) -> None:
        at = piece.at
        if at not in self._wanted:
            self._wanted[at] = []
            self._waiting.add(at)
            if at not in self._jobs:
                self._jobs.add(at)
                self._begin(at.digest, partial(self._read, at))
        self._wanted[at].append((chunk, piece))

    def _read(self, at: ChunkKey) -> None:
        started, data, error = time.perf_counter(), None, None
        with self._lock:
            self._jobs.remove(at)
            if at not in self._waiting:
                return  # it was taken back
            self._waiting.remove(at)
            rooms = [chunk.room for chunk, piece in self._wanted[at] if piece.where is None]
        try:
            data = self._source.read(at, next(iter(rooms), None))
        except Exception as caught:  # a bug must not leave waiters hanging or a slot lost
            error = _as_error(at, caught)
        with self._lock:
            wanted = self._wanted.pop(at)  # with those who came to want it meanwhile
        for chunk, piece in wanted:
            chunk.error = chunk.error or error
            if data is not chunk.room:
                chunk.attempt(self._source.put, piece, data, chunk.room)
        took_s, done = time.perf_counter() - started, []
        with self._lock:
            self._seconds += took_s
            for chunk, _ in wanted:
                chunk.seconds += took_s
                chunk.left -= 1
                if not chunk.left:
                    done.append(chunk)
        for chunk in done:
            chunk.attempt(self._source.finish, chunk.room, chunk.slot)
        self._end(done)

    def _end(self, chunks: Sequence[_Chunk], error: CartridgeError | None = None) -> None:
        """Tell of chunks that are loaded, or could not be; not of those that were taken back or told of."""
        with self._lock:
            chunks = [chunk for chunk in chunks if self._chunks.get(chunk.key) is chunk]
            for chunk in chunks:
                del self._chunks[chunk.key]
                self._counts[bisect_left(LOAD_SECONDS, chunk.seconds)] += 1
                chunk.error = chunk.error or error
                if chunk.error is not None:
                    logger.warning("chunk %d of %s was not loaded: %s", *reversed(chunk.key), chunk.error)
            self._loaded([chunk.key for chunk in chunks], [chunk.error for chunk in chunks])


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
