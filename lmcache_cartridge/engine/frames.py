"""Frames: one MessagePack message each, behind its length of four bytes, over a Unix socket; and how calls are answered."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import tempfile
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ..errors import CartridgeError

_TIMEOUT_S = 30.0
_BACKLOG = 1024


def connect(path: str) -> socket.socket:
    """Return a connection to the socket at `path`, on which nothing blocks for ever. Raises `OSError`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_TIMEOUT_S)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def parent() -> str:
    """Return a directory for the directories of sockets: their paths have at most 107 bytes, which a long $TMPDIR takes alone."""
    return found if len(found := tempfile.gettempdir()) < 64 else "/tmp"


def encode(message: Any) -> bytes:
    """Return one message as a frame."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


def peer_uid(connection: socket.socket) -> int:
    """Return the user whose process listens at the other side, as the kernel knows it."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]


def ask(connection: socket.socket, message: Any) -> Any:
    """Send one message and return the answer. Blocks; raises `ValueError` when the other side is gone, and `OSError`."""
    connection.sendall(encode(message))
    with connection.makefile("rb") as answers:
        return msgspec.msgpack.decode(answers.read(int.from_bytes(answers.read(4), "little")))


async def read(reader: asyncio.StreamReader) -> bytes:
    """Return one frame. Raises `EOFError` when the other side is gone, and other `OSError`s."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))


def loop(name: str) -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread of its own, until it is stopped, which closes it."""
    made = asyncio.SelectorEventLoop()

    def run() -> None:
        made.run_forever()
        made.close()

    threading.Thread(target=run, name=name, daemon=True).start()
    return made


class FrameServer:
    """Listens at a Unix socket, and has every client answered in an event loop of its own."""

    def __init__(
        self, path: str, answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    ) -> None:
        self._loop = loop("cartridge-control")
        starting = asyncio.start_unix_server(answer, path, backlog=_BACKLOG)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()

    def close(self) -> None:
        """Listen no more; connections that are open go on."""
        self._loop.call_soon_threadsafe(self._server.close)


async def result(call: Awaitable[Any], logger: logging.Logger, what: str) -> list[Any]:
    """Return `[None, result]` of a call, or `[error, None]`; an error that is none of ours is logged as `what` too."""
    try:
        return [None, await call]
    except CartridgeError as error:
        return [str(error), None]
    except Exception as error:
        logger.exception("%s failed", what)
        return [f"{type(error).__name__}: {error}", None]
