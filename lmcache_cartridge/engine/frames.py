"""Frames: one MessagePack message each, behind its length of four bytes, over a Unix socket; and how calls are answered."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import CartridgeError

_MAX_FRAME_BYTES = 512 << 20
"""A chunk of 256 tokens of a model of 7 billion parameters without grouped heads has 128 MiB."""
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
    if head is None:
        return None
    size = int.from_bytes(head, "little")
    if size > _MAX_FRAME_BYTES:
        raise OSError(f"a frame of {size} bytes")
    return _receive_exactly(connection, size)


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
