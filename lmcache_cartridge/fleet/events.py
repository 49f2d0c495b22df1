"""Events: the KV events of one engine, followed from vLLM's ZMQ sockets without a gap, or said to have one.

vLLM 0.32 publishes `[topic, number, payload]` and numbers its batches from 0 in each process. Past batches are asked of a
ROUTER socket, from a number on, and end with number -1. What was published before its buffer begins is gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
from time import monotonic

import msgspec
import zmq
import zmq.asyncio

from .index import Index, MalformedEvent, Source, read_event

logger = logging.getLogger("lmcache_cartridge.fleet")

_END = (-1).to_bytes(8, "big", signed=True)
_RETRY_S = 1.0


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


_batch = msgspec.msgpack.Decoder(_Batch)


class Counts(msgspec.Struct):
    """What is counted of one server's events."""

    lost: int = 0
    """Times that batches were gone for good, so that what the server holds is known in part only."""
    malformed: int = 0
    """Batches and events that could not be read."""


class Follower:
    """Follows one engine into an index. One event loop."""

    def __init__(
        self, index: Index, source: Source, events: str, replay: str, *, name: str, timeout_s: float,
        verify_s: float, counts: Counts | None = None,
    ) -> None:  # fmt: skip
        """`events` and `replay` are ZMQ endpoints to connect to."""
        self.counts = counts or Counts()
        self.known = False
        """Whether what was published before is in the index, as far as it can be had."""
        self.index, self._source, self._name = index, source, name
        self._events, self._replay = events, replay
        self._timeout_ms, self._verify_s = int(timeout_s * 1000), verify_s
        self._last, self._told_s = -1, 0.0
        """The number of the last batch, and when it was published. By these another process in the server's place is told:
        it has none of this number, or of another time."""

    async def follow(self) -> None:
        """Follow until cancelled; what was told is forgotten then."""
        with _socket(zmq.SUB, self._events) as socket:
            looked_s = -math.inf
            try:
                while True:
                    due_s = looked_s + (self._verify_s if self.known else min(self._verify_s, _RETRY_S)) - monotonic()
                    if due_s <= 0:  # what came last may be lost, or the process another, whatever else comes
                        await self._catch_up()
                        looked_s = monotonic()
                    elif await socket.poll(int(due_s * 1000) + 1):
                        await self._take(await socket.recv_multipart())
                        await asyncio.sleep(0)  # others' turn, where many are waiting
            finally:
                self._forget()

    async def _take(self, frames: list[bytes]) -> None:
        """Take in a batch as it was published."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self.counts.malformed += 1
            return
        number, batch = int.from_bytes(frames[1], "big"), self._read(frames[2])
        if number == self._last + 1:
            self._apply(number, batch)
        elif (number > self._last or batch.ts > self._told_s) and not await self._catch_up():
            self._forget()

    async def _catch_up(self) -> bool:
        """Take in what was published and did not come, from the server's buffer; False if nobody answers.

        Where the last batch is not there as it came, what was told before is forgotten, and all that there is taken in.
        """
        while True:
            batches, is_end = await self._ask()
            if not (batches or is_end):
                return False
            if self._last >= 0 and [(n, self._read(one).ts) for n, one in batches[:1]] != [(self._last, self._told_s)]:
                logger.warning("%s: it was restarted, or keeps too few batches; what it told is forgotten", self._name)
                self._forget()
                continue
            before = self._last
            if batches and before < 0 < batches[0][0]:
                self._lose(batches[0][0])
            for number, payload in batches:
                if number > self._last + 1:
                    is_end = False  # vLLM's ROUTER drops what exceeds 1,000 messages of a burst
                    break
                if number == self._last + 1:
                    self._apply(number, self._read(payload))
                    await asyncio.sleep(0)
            if is_end or self._last == before:
                if not self.known:
                    logger.info("%s: %d batches replayed", self._name, self._last + 1)
                self.known = True
                return True

    async def _ask(self) -> tuple[list[tuple[int, bytes]], bool]:
        """Return the batches from the last one on, and whether they are at an end; nothing if nobody answers."""
        found: list[tuple[int, bytes]] = []
        with _socket(zmq.DEALER, self._replay) as socket:
            await socket.send_multipart([b"", max(self._last, 0).to_bytes(8, "big")])
            while await socket.poll(self._timeout_ms):
                frames = await socket.recv_multipart()
                if len(frames) != 4 or len(frames[2]) != 8:
                    self.counts.malformed += 1
                    return [], False
                if frames[2] == _END:
                    return found, True
                found.append((int.from_bytes(frames[2], "big"), frames[3]))
        return found, False

    def _lose(self, number: int) -> None:
        """Begin with a batch whose predecessors cannot be had."""
        self._last = number - 1
        self.counts.lost += 1
        logger.warning(
            "%s: the batches before %d are gone; which blocks it holds is known in part until it clears them. A "
            "larger `buffer_steps` in its --kv-events-config keeps more", self._name, number,
            )  # fmt: skip

    def _forget(self) -> None:
        self.index.clear(self._source)
        self._last, self.known = -1, False

    def _read(self, payload: bytes) -> _Batch:
        try:
            return _batch.decode(payload)
        except (msgspec.DecodeError, ValueError):
            self.counts.malformed += 1
            return _Batch(0.0, [])

    def _apply(self, number: int, batch: _Batch) -> None:
        self._last, self._told_s = number, batch.ts
        for packed in batch.events:
            try:
                self.index.apply(self._source, read_event(packed))
            except MalformedEvent as error:
                self.counts.malformed += 1
                logger.warning("%s: batch %d: %s", self._name, number, error)


def _socket(kind: int, endpoint: str) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    return socket
