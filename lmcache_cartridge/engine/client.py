"""Client: how the API server, or an offline program, calls every worker's store at once; see `control`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from ..errors import CartridgeError, UnsupportedEngine
from . import frames

TIMEOUT_S = 30.0
"""How long a call may take."""


class ControlClient:
    """Calls every worker's store. Safe from any thread; no call waits for another, and a slow worker holds up none but its own."""

    def __init__(self, paths: Sequence[str]) -> None:
        """`paths` are those of the workers' control sockets, by rank. Connects for each call, and for each claim."""
        self._paths = list(paths)
        self._loop = frames.loop("cartridge-calls")
        self._claims: weakref.WeakSet[_Lines] = weakref.WeakSet()

    def begin(self, method: str, *arguments: Any) -> Future[list[Any]]:
        """Call all workers and return the future of each rank's result. Does not block.

        Its error is a `CartridgeError`: a worker's own, or that one does not answer within `TIMEOUT_S`.
        """
        return self._run(_once(_Lines(self._paths), [method, *arguments]))

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Return each rank's result. Blocks; raises `CartridgeError` as `begin` says."""
        return self.begin(method, *arguments).result()

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Do `call` without blocking a thread."""
        return await asyncio.wrap_future(self.begin(method, *arguments))

    def close(self) -> None:
        """Disconnect, which ends every claim and every call. Nothing may be called any more."""

        def end() -> None:
            for lines in list(self._claims):
                lines.close()
            for task in asyncio.all_tasks():
                task.cancel()
            self._loop.call_later(1.0, self._loop.stop)

        _soon(self._loop, end)

    def _run(self, asking: Coroutine[Any, Any, list[Any]]) -> Future[list[Any]]:
        return asyncio.run_coroutine_threadsafe(asking, self._loop)


class _Lines:
    """A connection to each worker, made when something is asked."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths, self._turn, self._closed = paths, asyncio.Lock(), False
        self._open: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def ask(self, message: list[Any]) -> list[Any]:
        """Return each worker's result. Raises `CartridgeError`."""
        async with self._turn:
            data = frames.encode(message)
            answers = await asyncio.gather(
                *(self._one(rank, data) for rank in range(len(self._paths))), return_exceptions=True
            )
        results = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise UnsupportedEngine(f"a worker does not answer {message[0]}: {answer}")
            if answer[0] is not None:
                raise CartridgeError(answer[0])
            results.append(answer[1])
        return results

    async def _one(self, rank: int, data: bytes) -> tuple[str | None, Any]:
        if rank not in self._open:
            self._open[rank] = await asyncio.open_unix_connection(self._paths[rank])
        reader, writer = self._open[rank]
        if self._closed:  # meanwhile, maybe
            writer.close()
            raise OSError("closed")
        writer.write(data)
        return msgspec.msgpack.decode(await frames.read(reader))

    def close(self) -> None:
        """Disconnect; what is asked fails. Calling again is no change."""
        self._closed = True
        for _, writer in self._open.values():
            writer.close()


async def _once(lines: _Lines, message: list[Any]) -> list[Any]:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await lines.ask(message)
    except TimeoutError:
        raise UnsupportedEngine(f"a worker does not answer {message[0]}: timed out") from None
    finally:
        lines.close()


class RemoteClaim:
    """A claim in every worker, until `release()`, at the latest until nobody refers to it any more, or this process ends.

    It is a connection to each, which ends it when it breaks.
    """

    def __init__(self, workers: ControlClient, tag: str, places: Mapping[str, tuple[str, str]]) -> None:
        self._workers, self._what = workers, ["claim", tag, places]
        self._lines = _Lines(workers._paths)
        workers._claims.add(self._lines)
        # Runs once, whoever calls it, and waits for nothing, as in a garbage collection nothing may.
        self._end = weakref.finalize(self, _soon, workers._loop, self._lines.close)
        self._end.atexit = False

    def begin(self, wait_s: float = 0.0, *, may_compute: bool = False) -> Future[list[dict[str, Any]]]:
        """Return the future of how far each worker is once it has all of it or refuses it, after `wait_s` at the latest.

        With `may_compute` also once what is missing finds no memory, or its source fails. Does not block.
        """
        return self._workers._run(_shielded(self._lines, [*self._what, wait_s, may_compute]))

    def release(self) -> None:
        """Let the memory go. Does not wait; releasing twice is no change."""
        self._end()


async def _shielded(lines: _Lines, message: list[Any]) -> list[Any]:
    """Ask to the end whether or not the caller still wants to know: the next answer on these lines is the next question's."""
    asking = asyncio.ensure_future(lines.ask(message))
    asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else may look, who has left
    return await asyncio.shield(asking)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # it is closed, and with it every connection
        loop.call_soon_threadsafe(call)
