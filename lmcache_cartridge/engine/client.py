"""Client: how the API server, or an offline program, calls every worker's store at once; see `control`."""

from __future__ import annotations

import asyncio
import itertools
import queue
import socket
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import msgspec

from ..errors import CartridgeError, UnsupportedEngine
from . import frames

TIMEOUT_S = 30.0
"""How long a call may take."""
_STILL_S = 10.0
"""How often a worker is told which claims there still are."""


class ControlClient:
    """Calls every worker's store. Safe from any thread; no call waits for another.

    A call that is not answered in time fails by itself. Where a worker ends, every call under way does, and every claim.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """`paths` are those of the workers' control sockets, by rank. Connects at the first call."""
        self._paths = list(paths)
        self._connections: list[socket.socket] = []
        self._calls: dict[int, _Call] = {}
        self._claimed: set[str] = set()
        """Names of the claims that somebody has."""
        self._numbers = itertools.count(1)
        self._closed = False
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[tuple[int, _Call | None, bytes] | None] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="cartridge-calls", daemon=True).start()

    def begin(self, method: str, *arguments: Any) -> Future[list[Any]]:
        """Call all workers and return the future of each rank's result. Does not block.

        Its error is a `CartridgeError`: a worker's own, or that one does not answer.
        """
        number, call = next(self._numbers), _Call(method, len(self._paths))
        data = frames.encode([number, method, *arguments])
        call.future.add_done_callback(lambda _: self._calls.pop(number, None))
        self._outbox.put((number, call, data))
        return call.future

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Return each rank's result. Blocks, `TIMEOUT_S` at most; raises `CartridgeError` as `begin` says."""
        return _result(self.begin(method, *arguments), method)

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Do `call` without blocking a thread."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await asyncio.wrap_future(self.begin(method, *arguments))
        except TimeoutError:
            raise UnsupportedEngine(f"a worker does not answer {method}: timed out") from None

    def claim(self, tag: str, places: Mapping[str, tuple[str, str]]) -> RemoteClaim:
        """Return a claim on a cartridge or chain in every worker, the caller's to poll and release."""
        return RemoteClaim(self, tag, places)

    def close(self) -> None:
        """Disconnect, which ends every claim. Nothing may be called any more."""
        with self._lock:
            self._closed = True
        self._outbox.put(None)
        self._drop("closed")

    def _release(self, name: str) -> None:
        """Have a claim released soon. Does not block, and may be called where nothing may: in a finalizer."""
        self._claimed.discard(name)
        self._outbox.put((0, None, frames.encode([0, "release", name])))

    def _send_all(self) -> None:
        """Send what is called, in order; and from time to time, which claims there still are."""
        next_at = time.monotonic() + _STILL_S
        while True:
            try:
                sent = self._outbox.get(timeout=max(next_at - time.monotonic(), 0.0))
            except queue.Empty:
                sent = 0, None, b""
            if sent is None:
                return
            if sent[2]:
                self._send(*sent)
            if time.monotonic() >= next_at:
                self._send(0, None, frames.encode([0, "still", list(self._claimed.copy())]))
                next_at = time.monotonic() + _STILL_S

    def _send(self, number: int, call: _Call | None, data: bytes) -> None:
        try:
            with self._lock:
                if call is not None:
                    self._connect()
                    self._calls[number] = call
                connections = list(self._connections)
            if call is not None and call.future.done():  # whoever called does not wait for it any more
                self._calls.pop(number, None)
                return
            for connection in connections:
                connection.sendall(data)
        except OSError as error:
            self._drop(error)
            if call is not None:
                call.fail(f"a worker does not answer {call.method}: {error}")

    def _connect(self) -> None:
        """Connect to those workers that there is no connection to. The lock is held. Raises `OSError`."""
        if self._closed:
            raise OSError("closed")
        for rank, path in list(enumerate(self._paths))[len(self._connections) :]:
            connection = frames.connect(path)
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(TIMEOUT_S), 0))
            self._connections.append(connection)
            receiver = threading.Thread(
                target=self._receive_all, args=(rank, connection), name="cartridge-answers", daemon=True
            )
            receiver.start()

    def _receive_all(self, rank: int, connection: socket.socket) -> None:
        """Hand out one worker's answers until it goes."""
        problem: OSError | ValueError | None = None
        try:
            while (frame := frames.receive(connection)) is not None:
                number, error, result = msgspec.msgpack.decode(frame)
                if call := self._calls.get(number):
                    call.answer(rank, error, result)
        except (OSError, ValueError) as error:
            problem = error
        self._drop(problem, connection)

    def _drop(self, problem: Any, connection: socket.socket | None = None) -> None:
        """Disconnect from all workers, unless that was done since `connection` broke, and fail the calls under way."""
        with self._lock:
            if connection is not None and connection not in self._connections:
                return
            connections, self._connections = self._connections, []
            calls, self._calls = self._calls, {}
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
            connection.close()
        for call in calls.values():
            ended = f"a worker ended while it was asked for {call.method}"
            call.fail(ended if problem is None else f"a worker does not answer {call.method}: {problem}")


def _result(future: Future, method: str) -> Any:
    """Wait for a call's result, `TIMEOUT_S` at most, and give it up then."""
    try:
        return future.result(TIMEOUT_S)
    except TimeoutError:
        raise UnsupportedEngine(f"a worker does not answer {method}: timed out") from None
    finally:
        future.cancel()


class _Call:
    """One call under way, until all ranks have answered."""

    def __init__(self, method: str, ranks: int) -> None:
        self.method = method
        self.future: Future[list[Any]] = Future()
        self._results: dict[int, Any] = {}
        self._error: str | None = None
        self._ranks, self._lock = ranks, threading.Lock()

    def answer(self, rank: int, error: str | None, result: Any) -> None:
        with self._lock:
            self._results[rank] = result
            self._error = self._error or error
            if len(self._results) < self._ranks:
                return
        with suppress(InvalidStateError):  # whoever called does not wait for it any more
            if self._error is not None:
                self.future.set_exception(CartridgeError(self._error))
            else:
                self.future.set_result([self._results[rank] for rank in range(self._ranks)])

    def fail(self, message: str) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(UnsupportedEngine(message))


class RemoteClaim:
    """A claim in every worker, until `release()`, at the latest until nobody refers to it any more.

    Made by `ControlClient.claim`. After `release` nothing claims it again, however its calls overtake each other: a poll that
    was under way then is followed by another release, and a worker remembers which names were released.
    """

    def __init__(self, workers: ControlClient, tag: str, places: Mapping[str, tuple[str, str]]) -> None:
        self._workers, self._name = workers, uuid.uuid4().hex
        self._what = tag, places
        self._end = weakref.finalize(self, workers._release, self._name)  # runs once, whoever calls it
        self._end.atexit = False
        workers._claimed.add(self._name)

    def poll(self) -> list[dict[str, Any]]:
        """Return how far each worker is with it; see `CartridgeStore.claim`. Blocks as `ControlClient.call` does."""
        return _result(self.begin(), "claim")

    def begin(self) -> Future[list[dict[str, Any]]]:
        """Return the future of what `poll` returns. Does not block."""
        future = self._workers.begin("claim", self._name, *self._what)
        if not self._end.alive:
            self._workers._release(self._name)
        return future

    def release(self) -> None:
        """Let the memory go. Does not wait; releasing twice is no change."""
        self._end()
