"""Control: what the API server, or an offline program, asks of the workers' stores, over one Unix socket a worker.

vLLM's `collective_rpc` waits for the engine's step to end and holds up the next one; this does neither. Frames are a
length of four bytes and a MessagePack list: `[method, *arguments]` one way, `[error or None, result]` the other.
"""

from __future__ import annotations

import atexit
import logging
import queue
import shutil
import socket
import socketserver
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ..errors import CartridgeError, UnsupportedEngine
from ..store import CartridgeStore, Claim, Place

logger = logging.getLogger(__name__)

_MAX_FRAME_BYTES = 64 << 20
_TIMEOUT_S = 30.0


class ControlServer:
    """Answers calls for the store of this process, in threads of its own, until the process ends."""

    def __init__(self, store: Callable[[], CartridgeStore]) -> None:
        """Listen at `path`, which no other user may open. `store` is asked for the store at every call."""
        # A socket's path has at most 107 bytes, which a long $TMPDIR takes alone.
        parent = None if len(tempfile.gettempdir()) < 64 else "/tmp"
        directory = Path(tempfile.mkdtemp(prefix="lmcache-cartridge-", dir=parent))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        self.path = str(directory / "control")

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                _answer(self.request, store)

        self._server = socketserver.ThreadingUnixStreamServer(self.path, Connection)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="cartridge-control", daemon=True).start()

    def close(self) -> None:
        """Listen no more; connections that are open go on."""
        self._server.shutdown()
        self._server.server_close()


def _answer(connection: socket.socket, store: Callable[[], CartridgeStore]) -> None:
    """Answer one client until it goes; its claims end with it."""
    claims: dict[str, Claim] = {}

    def claim(name: str, tag: str, places: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        if name not in claims:
            claims[name] = store().claim(tag, _places(places))
        readiness = claims[name].poll()
        return readiness._asdict() | {"ready": readiness.ready}

    def release(name: str) -> None:
        if name in claims:
            claims.pop(name).close()

    methods = {
        "claim": claim,
        "release": release,
        "preload": lambda tag, places: store().preload(tag, _places(places))._asdict(),
        "pin": lambda digest: store().pin(digest),
        "unpin": lambda digest: store().unpin(digest),
        "evict": lambda digest: store().evict(digest),
        "refresh": lambda: store().refresh(),
        "status": lambda: store().status(),
        "numbers": lambda: store().numbers(),
    }
    try:
        while (frame := _receive(connection)) is not None:
            method, *arguments = msgspec.msgpack.decode(frame, type=list)
            try:
                if method not in methods:
                    raise CartridgeError(f"there is no method {method!r}")
                reply = [None, methods[method](*arguments)]
            except CartridgeError as error:
                reply = [str(error), None]
            except Exception as error:
                logger.exception("the call %s failed", method)
                reply = [f"{type(error).__name__}: {error}", None]
            _send(connection, reply)
    except OSError as error:
        logger.debug("a control connection broke: %s", error)
    except ValueError as error:  # no frame of ours; what follows it cannot be told apart either
        logger.warning("a control connection was ended: %s", error)
    finally:
        for held in claims.values():
            held.close()


class Workers:
    """Calls every worker's store. Safe from any thread; one call at a time, each blocking until all have answered."""

    def __init__(self, paths: Sequence[str]) -> None:
        """`paths` are those of the workers' control sockets, by rank. Connects at the first call."""
        self._paths = list(paths)
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._released: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._release_all, name="cartridge-release", daemon=True).start()

    def release(self, claim: str) -> None:
        """Have a claim released soon. Does not block, and may be called where nothing may: in a finalizer."""
        self._released.put(claim)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Return each rank's result. Raises `CartridgeError` with a worker's own error, or when one does not answer."""
        with self._lock:
            try:
                for path in self._paths[len(self._connections) :]:
                    self._connections.append(_connect(path))
                for connection in self._connections:
                    _send(connection, [method, *arguments])
                frames = [_receive(connection) for connection in self._connections]
            except OSError as error:
                self._drop()
                raise UnsupportedEngine(f"a worker does not answer {method}: {error}") from error
            except BaseException:  # an interrupt: the answer under way would be taken for the next call's
                self._drop()
                raise
            if None in frames:
                self._drop()
                raise UnsupportedEngine(f"a worker ended while it was asked for {method}")
        replies = [msgspec.msgpack.decode(frame) for frame in frames]
        if error := next((error for error, _ in replies if error is not None), None):
            raise CartridgeError(error)
        return [result for _, result in replies]

    def close(self) -> None:
        """Disconnect, which ends every claim. Nothing may be called any more."""
        self._released.put(None)
        with self._lock:
            self._drop()

    def _release_all(self) -> None:
        while (claim := self._released.get()) is not None:
            with suppress(CartridgeError):  # the worker is gone, and its claims with it
                self.call("release", claim)

    def _drop(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []


def _places(places: Mapping[str, Sequence[str]]) -> dict[str, Place]:
    return {digest: Place(Path(root), location) for digest, (root, location) in places.items()}


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_TIMEOUT_S)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _send(connection: socket.socket, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(4, "little") + data)


def _receive(connection: socket.socket) -> bytes | None:
    """Return one frame, None when the other side is gone."""
    head = _receive_exactly(connection, 4)
    if head is None:
        return None
    size = int.from_bytes(head, "little")
    if size > _MAX_FRAME_BYTES:
        raise OSError(f"a frame of {size} bytes")
    return _receive_exactly(connection, size)


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)
