"""Events: the KV events of one engine, followed from vLLM's ZMQ sockets without a gap, or said to have one.

vLLM 0.32 publishes `[topic, number, payload]` and numbers its batches from 0 in each process. Past batches are asked of a
ROUTER socket, from a number on, and end with number -1. What was published before its buffer begins is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from hashlib import blake2b

import msgspec
import zmq
import zmq.asyncio

from .index import AllBlocksCleared, Index, MalformedEvent, Source, read_event

logger = logging.getLogger("lmcache_cartridge.fleet")

_END = (-1).to_bytes(8, "big", signed=True)
_REMEMBERED = 1024
"""Batches by which one that comes again is told from one of another process."""
_RETRY_S = 1.0
_ROUNDS = 100
"""vLLM's ROUTER drops what exceeds a thousand messages of a burst, so a long replay takes some rounds."""


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


_batch = msgspec.msgpack.Decoder(_Batch)


class Counts(msgspec.Struct):
    """What is counted of one engine's events."""

    batches: int = 0
    """Batches taken in."""
    gaps: int = 0
    """Times that a batch did not have the number after the last one's."""
    replays: int = 0
    """Times that past batches were taken from the server's buffer."""
    restarts: int = 0
    """Times that another process was found in the server's place."""
    lost: int = 0
    """Times that batches were gone for good, so that what the server holds is known in part only."""
    malformed: int = 0
    """Batches and events that could not be read."""
    orphans: int = 0
    """Events of blocks that follow on unknown ones."""


class Follower:
    """Follows one engine into an index. One event loop."""

    def __init__(
        self, index: Index, source: Source, events: str, replay: str | None, *, name: str, timeout_s: float,
        verify_s: float,
    ) -> None:  # fmt: skip
        """`events` and `replay` are ZMQ endpoints to connect to; without `replay` nothing of the past is known."""
        self.counts = Counts()
        self.known = False
        """Whether what was published before is in the index, as far as it can be had."""
        self.whole = False
        """Whether nothing of it is missing."""
        self.index, self._source, self._name = index, source, name
        self._events, self._replay = events, replay
        self._timeout_ms, self._verify_ms = int(timeout_s * 1000), int(verify_s * 1000)
        self._last = -1
        self._seen: OrderedDict[int, bytes] = OrderedDict()
        """Digests of the last batches, by number."""

    async def follow(self) -> None:
        """Follow until cancelled; what was told is forgotten then."""
        with zmq.asyncio.Context.instance().socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self._events)
            try:
                while True:
                    if not self.known:
                        await self._catch_up()
                    wait_ms = self._verify_ms if self.known else min(self._verify_ms, int(_RETRY_S * 1000))
                    if await socket.poll(wait_ms):
                        await self._take(await socket.recv_multipart())
                        await asyncio.sleep(0)  # others' turn, where many are waiting
                    elif self.known:
                        await self._catch_up()  # the last batch may be lost, or the process gone, with nothing after it
            finally:
                self._forget()

    async def _take(self, frames: list[bytes]) -> None:
        """Take in a batch as it was published."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self.counts.malformed += 1
            return
        number, payload = int.from_bytes(frames[1], "big"), frames[2]
        if number != self._last + 1 and not self._is_seen(number, payload):
            if self.known and number > self._last:
                self.counts.gaps += 1
                logger.warning("%s: batches %d to %d are missing", self._name, self._last + 1, number - 1)
            caught_up = await self._catch_up()
            if self._replay is not None and (not caught_up or number <= self._last):
                if not caught_up:
                    self._forget()
                return
            if number != self._last + 1:
                self._lose(number)
        if not self._is_seen(number, payload):
            self._apply(number, payload)

    async def _catch_up(self) -> bool:
        """Take in what was published and did not come, from the server's buffer; False if nobody answers.

        Finds another process in the server's place, and clears what the one before it told.
        """
        if self._replay is None:
            if not self.known:
                logger.warning("%s: it has no replay endpoint; what it held before now is not known", self._name)
            self.known = True
            return True
        before, first = self._last, not self.known
        for _ in range(_ROUNDS):
            done = await self._ask(self._replay)
            if done is None:
                return False
            if done:
                break
        self.counts.replays += first or self._last != before
        if first:
            logger.info("%s: %d batches replayed", self._name, self._last + 1)
        self.known = True
        return True

    async def _ask(self, endpoint: str) -> bool | None:
        """Ask for the last batch and all after it; return whether all came, None if nobody answers."""
        before, start, is_first, jumped = self._last, max(self._last, 0), True, False
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                if not await socket.poll(self._timeout_ms):
                    return False if self._last > before else None
                frames = await socket.recv_multipart()
                await asyncio.sleep(0)
                if len(frames) != 4 or len(frames[2]) != 8:
                    self.counts.malformed += 1
                    return None
                number, payload = int.from_bytes(frames[2], "big"), frames[3]
                if frames[2] == _END:
                    if is_first and self._last >= 0:
                        return self._find_another_process()
                    self.whole |= self._last < 0
                    return not jumped
                if is_first and number > start:
                    if self._last >= 0:  # its buffer does not reach back, or is another's: all that it has, then
                        self._forget()
                        return False
                    self._lose(number)
                elif number <= self._last and not self._is_seen(number, payload):
                    return self._find_another_process()
                is_first = False
                if number == self._last + 1 and not jumped:
                    self._apply(number, payload)
                jumped |= number > self._last

    def _find_another_process(self) -> bool:
        self.counts.restarts += 1
        logger.warning("%s: it was restarted; what it told before is forgotten", self._name)
        self._forget()
        return False

    def _lose(self, number: int) -> None:
        """Go on from a batch whose predecessors cannot be had."""
        restarted = self._last >= 0 and number == 0
        self._forget()
        self._last, self.known = number - 1, True
        if restarted:
            self.counts.restarts += 1
            self.whole = True
        elif number:
            self.counts.lost += 1
            logger.warning(
                "%s: the batches before %d are gone; which blocks it holds is known in part until it clears them. A "
                "larger `buffer_steps` in its --kv-events-config keeps more", self._name, number,
            )  # fmt: skip

    def _forget(self) -> None:
        self.index.clear(self._source)
        self._seen.clear()
        self._last, self.known, self.whole = -1, False, False

    def _is_seen(self, number: int, payload: bytes) -> bool:
        return number <= self._last and self._seen.get(number) == _digest(payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self.whole |= number == 0
        self._last = number
        self._seen[number] = _digest(payload)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        self.counts.batches += 1
        for packed in self._packed(payload):
            try:
                event = read_event(packed)
                self.counts.orphans += not self.index.apply(self._source, event)
                self.whole |= isinstance(event, AllBlocksCleared)
            except MalformedEvent as error:
                self.counts.malformed += 1
                logger.warning("%s: batch %d: %s", self._name, number, error)

    def _packed(self, payload: bytes) -> list[msgspec.Raw]:
        try:
            return _batch.decode(payload).events
        except (msgspec.DecodeError, ValueError):
            self.counts.malformed += 1
            return []


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()
