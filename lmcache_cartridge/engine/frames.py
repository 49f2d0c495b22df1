"""Frames: one MessagePack message each, behind its length of four bytes, over a Unix socket; and how calls are answered."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from ..errors import CartridgeError

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_MAX_CALLS = 64
"""Calls at once in threads; others wait."""


def parent() -> str:
    """Return a directory for the directories of sockets: their paths have at most 107 bytes, which a long $TMPDIR takes alone."""
    return found if len(found := tempfile.gettempdir()) < 64 else "/tmp"


def encode(message: Any) -> bytes:
    """Return one message as a frame."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


async def read(reader: asyncio.StreamReader) -> Any:
    """Return the message of one frame. Raises `EOFError` when the other side is gone, other `OSError`s, and `MsgspecError`."""
    data = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
    return msgspec.msgpack.decode(data)


def loop(name: str) -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread of its own, until it is stopped, which closes it."""
    made = asyncio.SelectorEventLoop()

    def run() -> None:
        made.run_forever()
        made.close()

    threading.Thread(target=run, name=name, daemon=True).start()
    return made


class FrameServer:
    """Listens at a Unix socket. Each connection brings one call, and what the call holds ends with the connection."""

    def __init__(self, path: str) -> None:
        from ..library.workers import Workers  # here, for a connector calls and serves nothing

        self.path, self._calls = path, Workers("cartridge-call", _MAX_CALLS)
        self._loop = loop("cartridge-control")
        starting = asyncio.start_unix_server(self._serve, path, backlog=_BACKLOG)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()

    async def answer(self, held: ExitStack, has_left: Callable[[], bool], method: str, *arguments: Any) -> Any:
        """Return the result of a call. What is put into `held` is closed once the client has left."""
        raise NotImplementedError

    def in_thread(self, call: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        """Do a call that may block."""
        return asyncio.wrap_future(self._calls.submit(object(), partial(call, *arguments)))

    def close(self) -> None:
        """Listen no more; connections that are open go on."""
        self._loop.call_soon_threadsafe(self._server.close)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with ExitStack() as held:
            held.callback(writer.close)
            try:
                writer.write(encode(await self._result(held, reader.at_eof, await read(reader))))
                await writer.drain()
                await reader.read()
            except (OSError, EOFError, msgspec.MsgspecError) as error:  # it broke, or brought no frame of ours
                logger.debug("a connection was ended: %s", error)

    async def _result(self, held: ExitStack, has_left: Callable[[], bool], call: list[Any]) -> list[Any]:
        """Return `[None, result]` of a call, or `[error, None]`; an error that is none of ours is logged too."""
        try:
            return [None, await self.answer(held, has_left, *call)]
        except CartridgeError as error:
            return [str(error), None]
        except Exception as error:
            logger.exception("a call failed")
            return [f"{type(error).__name__}: {error}", None]
