"""Client: how the API server, or an offline program, calls every worker's store at once; see `control`."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from ..errors import CartridgeError, UnsupportedEngine
from . import frames

TIMEOUT_S = 30.0
"""How long a call may take."""


class ControlClient:
    """Calls every worker's store. Safe from any thread; no call waits for another, and a slow worker holds up none but its own."""

    def __init__(self, paths: Sequence[str]) -> None:
        """`paths` are those of the workers' control sockets, by rank. Connects for each call."""
        self.paths, self.loop = list(paths), frames.loop("cartridge-calls")

    def begin(self, method: str, *arguments: Any) -> Future[list[Any]]:
        """Call all workers and return the future of each rank's result. Does not block.

        Its error is a `CartridgeError`: a worker's own, or that one does not answer within `TIMEOUT_S`.
        """
        return asyncio.run_coroutine_threadsafe(_once(self.paths, method, *arguments), self.loop)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Return each rank's result. Blocks; raises `CartridgeError` as `begin` says."""
        return self.begin(method, *arguments).result()

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Do `call` without blocking a thread."""
        return await asyncio.wrap_future(self.begin(method, *arguments))


class _Lines:
    """A connection to each worker for one call."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths, self._closed = paths, False
        self._writers: list[asyncio.StreamWriter] = []

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Return each worker's result. Raises `CartridgeError`."""
        data = frames.encode([method, *arguments])
        answers: list[Any] = await asyncio.gather(
            *(self._one(path, data) for path in self._paths), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise UnsupportedEngine(f"a worker does not answer {method}: {answer}")
            if answer[0] is not None:
                raise CartridgeError(answer[0])
        return [result for _, result in answers]

    async def _one(self, path: str, data: bytes) -> Any:
        reader, writer = await asyncio.open_unix_connection(path)
        self._writers.append(writer)
        if self._closed:  # meanwhile, maybe
            self.close()
        if _peer_uid(writer.get_extra_info("socket")) != os.geteuid():
            raise OSError(f"another user listens at {path}")
        writer.write(data)
        return await frames.read(reader)

    def close(self) -> None:
        """Disconnect; what is asked fails. Calling again is no change."""
        self._closed = True
        for writer in self._writers:
            writer.close()


async def _once(paths: Sequence[str], method: str, *arguments: Any) -> list[Any]:
    with closing(_Lines(paths)) as lines:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await lines.ask(method, *arguments)
        except TimeoutError:
            raise UnsupportedEngine(f"a worker does not answer {method}: timed out") from None


class Held:
    """What one call is given in every worker, until `release()`, at the latest until nobody refers to it any more, or this
    process ends: it is a connection to each, which ends it when it breaks.
    """

    def __init__(self, client: ControlClient) -> None:
        self._loop, self._lines = client.loop, _Lines(client.paths)
        # Runs once, whoever calls it, and waits for nothing, as in a garbage collection nothing may.
        self._end = weakref.finalize(self, self._loop.call_soon_threadsafe, self._lines.close)
        self._end.atexit = False

    def begin(self, method: str, *arguments: Any) -> Future[list[Any]]:
        """Make the call, which may be one only, and return the future of each rank's result. Does not block."""
        return asyncio.run_coroutine_threadsafe(self._lines.ask(method, *arguments), self._loop)

    def release(self) -> None:
        """Let go. Does not wait; releasing twice is no change."""
        self._end()


def _peer_uid(connection: socket.socket) -> int:
    """Return the user whose process listens at the other side, as the kernel knows it."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]
