"""Events: the KV events of one engine, asked of vLLM's replay socket again and again: without a gap, or said to have one.

vLLM 0.32 numbers its batches from 0 in each process, and keeps the last `buffer_steps` of them. Those from a number on are
asked of a ROUTER socket, and end with number -1. What was published before its buffer begins is gone.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import zmq
import zmq.asyncio

from .index import Index, Source

logger = logging.getLogger("lmcache_cartridge.fleet")

_END = (-1).to_bytes(8, "big", signed=True)


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


_batch = msgspec.msgpack.Decoder(_Batch)


class Follower:
    """Takes one engine's events into an index. One event loop."""

    def __init__(self, index: Index, source: Source, replay: str, *, name: str, timeout_s: float) -> None:
        """`replay` is the ZMQ endpoint to connect to."""
        self.lost = 0
        """Times that batches were gone for good, so that what the server holds is known in part only."""
        self.malformed = 0
        """Batches and events that could not be read."""
        self.known = False
        """Whether what was published before is in the index, as far as it can be had."""
        self.index, self._source, self._replay, self._name = index, source, replay, name
        self._timeout_ms = int(timeout_s * 1000)
        self._last, self._payload = -1, b""
        """The number of the last batch, and what it was. By these another process in the server's place is told: it has none
        of this number, or another one, were it but of another time."""

    async def catch_up(self) -> None:
        """Take in what was published since, from the server's buffer; nothing where nobody answers.

        Where the last batch is not there as it came, what was told before is forgotten, and all that there is taken in.
        """
        while True:
            batches, is_end = await self._ask()
            if not (batches or is_end):
                return
            if self._last >= 0 and batches[:1] != [(self._last, self._payload)]:
                logger.warning("%s: it was restarted, or keeps too few batches; what it told is forgotten", self._name)
                self.forget()
                continue
            before = self._last
            if batches and before < 0 < batches[0][0]:
                self._lose(batches[0][0])
            for number, payload in batches:
                if number > self._last + 1:
                    is_end = False  # vLLM's ROUTER drops what exceeds 1,000 messages of a burst
                    break
                if number == self._last + 1:
                    self._apply(number, payload)
                    await asyncio.sleep(0)  # others' turn, where many are waiting
            if is_end or self._last == before:
                if not self.known:
                    logger.info("%s: %d batches replayed", self._name, self._last + 1)
                self.known = True
                return

    def forget(self) -> None:
        """Have nothing of it in the index, until it is told again."""
        self.index.clear(self._source)
        self._last, self.known = -1, False

    async def _ask(self) -> tuple[list[tuple[int, bytes]], bool]:
        """Return the batches from the last one on, and whether they are at an end; nothing if nobody answers."""
        found: list[tuple[int, bytes]] = []
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.set(zmq.RCVHWM, 0)
            socket.set(zmq.LINGER, 0)
            socket.connect(self._replay)
            await socket.send_multipart([b"", max(self._last, 0).to_bytes(8, "big")])
            while await socket.poll(self._timeout_ms):
                frames = await socket.recv_multipart()
                if len(frames) != 4 or len(frames[2]) != 8:
                    self.malformed += 1
                    return [], False
                if frames[2] == _END:
                    return found, True
                found.append((int.from_bytes(frames[2], "big"), frames[3]))
        return found, False

    def _lose(self, number: int) -> None:
        """Begin with a batch whose predecessors cannot be had."""
        self._last = number - 1
        self.lost += 1
        logger.warning(
            "%s: the batches before %d are gone; which blocks it holds is known in part until it clears them. A "
            "larger `buffer_steps` in its --kv-events-config keeps more", self._name, number,
        )  # fmt: skip

    def _apply(self, number: int, payload: bytes) -> None:
        self._last, self._payload = number, payload
        try:
            events = _batch.decode(payload).events
        except msgspec.DecodeError:
            self.malformed += 1
            return
        for packed in events:
            try:
                self.index.apply(self._source, packed)
            except (msgspec.DecodeError, ValueError):
                self.malformed += 1
