"""LoadThreads: threads that fill memory with chunks, slow sources apart from fast ones, and read each piece once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch._C import set_num_threads

from ..errors import CartridgeError
from ..library.index import ChunkKey
from ..library.workers import STALLED_S, Workers, go_on
from ..sources.cores import use_all_cores
from .holds import Entry

logger = logging.getLogger(__name__)

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

    def pieces(self, key: ChunkKey) -> Sequence[Piece]:
        """Return what a chunk is made of. May block; raises `CartridgeError`."""
        return [Piece(key)]

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


class LoadThreads:
    """Loads each chunk once, soon after it was asked for, and tells how that ended.

    Each piece is read once for all chunks that wait for it, and those that come to want it meanwhile.
    """

    def __init__(
        self,
        source: ChunkSource,
        loaded: Callable[[Sequence[Entry]], None],
        lock: threading.RLock,
        *,
        threads: int = 4,
        slow_threads: int = 0,
        is_slow: Callable[[str], bool] = lambda digest: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`loaded` is called by the loading thread, under `lock`, with chunks that are loaded, or have an `error`.

        Digests that are `is_slow` to load have `slow_threads` of their own, so that they keep no others waiting.
        """
        self._source, self._loaded, self._is_slow = source, loaded, is_slow
        self._loading: dict[ChunkKey, Entry] = {}
        self._reads: dict[ChunkKey, list[tuple[Entry, Piece]]] = {}
        """The pieces that are to be read, and the chunks that wait for each."""
        self._begun: set[ChunkKey] = set()
        self.seconds = 0.0
        """Spent in loads, failed ones too. To be read under `lock`."""
        self._lock = lock
        limits = {"cartridge-load": threads, "cartridge-fetch": slow_threads}
        self._workers = [
            Workers(name, limit, begin=_begin_thread, stalled_s=STALLED_S, clock=clock)
            for name, limit in limits.items()
            if limit
        ]

    def submit(self, entries: Sequence[Entry]) -> None:
        """Have chunks loaded into their slots, which are the loading threads' until `loaded` is called. Does not wait.

        `lock` is held.
        """
        for entry in entries:
            entry.room = self._source.room(entry.bytes)
            self._loading[entry.key] = entry
        for digest, group in groupby(entries, lambda entry: entry.key.digest):
            self._begin(digest, partial(self._plan, list(group)))

    def loading(self) -> list[Entry]:
        """Return the chunks that are being loaded, the last submitted first."""
        with self._lock:
            return list(reversed(self._loading.values()))

    def take_back(self, entry: Entry) -> None:
        """Forget a chunk that no thread has begun to read for; `loaded` is not called. `lock` has been held since."""
        del self._loading[entry.key]
        entry.room = entry.bytes

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
        self._end(self.loading(), CartridgeError("this engine stops"))

    def _begin(self, digest: str, job: Callable[[], None]) -> None:
        self._workers[-self._is_slow(digest)].submit(object(), lambda: go_on(job), (digest,))

    def _plan(self, entries: Sequence[Entry]) -> None:
        planned = []
        for entry in entries:
            try:
                planned.append((entry, self._source.pieces(entry.key)))
            except Exception as caught:
                self._end([entry], _as_error(entry.key, caught))
        with self._lock:  # for all, so that what several are made of is not read before all want it
            for entry, pieces in planned:
                if self._is_loading(entry):  # else it was taken back
                    entry.left = len(pieces)
                    for piece in pieces:
                        self._want(entry, piece)

    def _is_loading(self, entry: Entry) -> bool:
        return self._loading.get(entry.key) is entry

    def _want(self, entry: Entry, piece: Piece) -> None:
        if piece.at not in self._reads:
            self._reads[piece.at] = []
            self._begin(piece.at.digest, partial(self._read, piece.at))
        self._reads[piece.at].append((entry, piece))
        entry.is_begun |= piece.at in self._begun

    def _read(self, at: ChunkKey) -> None:
        started, data, error = time.perf_counter(), None, None
        with self._lock:
            wanted = self._reads[at] = [each for each in self._reads[at] if self._is_loading(each[0])]
            if not wanted:  # all were taken back
                del self._reads[at]
                return
            self._begun.add(at)
            for entry, _ in wanted:
                entry.is_begun = True
            rooms = [entry.room for entry, piece in wanted if piece.where is None]
        try:
            data = self._source.read(at, next(iter(rooms), None))
        except Exception as caught:  # a bug must not leave waiters hanging or a slot lost
            error = _as_error(at, caught)
        with self._lock:
            del self._reads[at]  # with those who came to want it meanwhile
            self._begun.discard(at)
        for entry, piece in wanted:
            entry.error = entry.error or error
            if data is not entry.room:
                _attempt(entry, self._source.put, piece, data, entry.room)
        done = []
        with self._lock:
            self.seconds += time.perf_counter() - started
            for entry, _ in wanted:
                entry.left -= 1
                if not entry.left:
                    done.append(entry)
        for entry in done:
            _attempt(entry, self._source.finish, entry.room, entry.bytes)
        self._end(done)

    def _end(self, entries: Sequence[Entry], error: CartridgeError | None = None) -> None:
        """Tell of chunks that are loaded, or could not be; not of those that were taken back or told of."""
        with self._lock:
            entries = list(filter(self._is_loading, entries))
            for entry in entries:
                del self._loading[entry.key]
                entry.room = entry.bytes
                entry.error = entry.error or error
                if entry.error is not None:
                    logger.warning("chunk %d of %s was not loaded: %s", *reversed(entry.key), entry.error)
            self._loaded(entries)


def _attempt(entry: Entry, call: Callable[..., None], *arguments: Any) -> None:
    """Make a call for a chunk, unless something went wrong with it before, and note what goes wrong."""
    try:
        if entry.error is None:
            call(*arguments)
    except Exception as caught:
        entry.error = _as_error(entry.key, caught)


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
