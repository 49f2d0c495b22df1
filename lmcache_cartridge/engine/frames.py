"""Frames: one MessagePack message each, behind its length of four bytes, over a Unix socket; and how calls are answered."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import CartridgeError

MAX_QUESTION_BYTES = 64 << 20
_TIMEOUT_S = 30.0


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


def encode(message: Any) -> bytes:
    """Return one message as a frame."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


def peer_uid(connection: socket.socket) -> int:
    """Return the user whose process listens at the other side, as the kernel knows it."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]


def send(connection: socket.socket, message: Any) -> None:
    """Send one message. Blocks; raises `OSError`."""
    connection.sendall(encode(message))


def receive(connection: socket.socket) -> bytes | None:
    """Return one frame, None when the other side is gone. Blocks; raises `OSError`, for a frame of no sane size too."""
    head = _receive_exactly(connection, 4)
    return None if head is None else _receive_exactly(connection, _size(head, MAX_QUESTION_BYTES))


async def read(reader: asyncio.StreamReader, most_bytes: int = 1 << 32) -> bytes:
    """Return one frame. Raises `IncompleteReadError` when the other side is gone, and other `OSError`s, for too large a frame too."""
    return await reader.readexactly(_size(await reader.readexactly(4), most_bytes))


def _size(head: bytes, most_bytes: int) -> int:
    if (size := int.from_bytes(head, "little")) > most_bytes:
        raise OSError(f"a frame of {size} bytes")
    return size


def loop(name: str) -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread of its own, until it is stopped, which closes it."""
    made = asyncio.SelectorEventLoop()

    def run() -> None:
        made.run_forever()
        made.close()

    threading.Thread(target=run, name=name, daemon=True).start()
    return made


def result(call: Callable[[], Any], logger: logging.Logger, what: str) -> list[Any]:
    """Return `[None, result]` of a call, or `[error, None]`; an error that is none of ours is logged as `what` too."""
    try:
        return [None, call()]
    except CartridgeError as error:
        return [str(error), None]
    except Exception as error:
        logger.exception("%s failed", what)
        return [f"{type(error).__name__}: {error}", None]


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)
