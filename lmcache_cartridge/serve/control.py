"""Control: what the API server, or an offline program, asks of the workers' stores, over one Unix socket a worker.

vLLM's `collective_rpc` waits for the engine's step to end and holds up the next one; this does neither. A frame is a
list: `[method, *arguments]` one way, `[error or None, result]` the other.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import shutil
import socket
import socketserver
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..claim import Claim
from ..errors import CartridgeError, UnsupportedEngine
from ..store import CartridgeStore, Place
from . import frames

logger = logging.getLogger(__name__)

_PREFIX, _SOCKET = "lmcache-cartridge-control-", "control"
_STARTING_S = 60.0
"""A directory younger than this may be that of a server which does not listen yet."""


class ControlServer:
    """Answers calls for the store of this process, in threads of its own, until the process ends."""

    def __init__(self, store: Callable[[], CartridgeStore]) -> None:
        """Listen at `path`, which no other user may open. `store` is asked for the store at every call.

        Removes what servers left whose process was killed.
        """
        # A socket's path has at most 107 bytes, which a long $TMPDIR takes alone.
        parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < 64 else "/tmp"
        _remove_left(Path(parent))
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        self.path = str(directory / _SOCKET)

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

    def call(method: Any, *arguments: Any) -> Any:
        if method not in methods:
            raise CartridgeError(f"there is no method {method!r}")
        return methods[method](*arguments)

    try:
        while (frame := frames.receive(connection)) is not None:
            method, *arguments = msgspec.msgpack.decode(frame, type=list)
            frames.reply(connection, partial(call, method, *arguments), logger, f"the call {method}")
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
                    self._connections.append(frames.connect(path))
                for connection in self._connections:
                    frames.send(connection, [method, *arguments])
                received = [frames.receive(connection) for connection in self._connections]
            except OSError as error:
                self._drop()
                raise UnsupportedEngine(f"a worker does not answer {method}: {error}") from error
            except BaseException:  # an interrupt: the answer under way would be taken for the next call's
                self._drop()
                raise
            if None in received:
                self._drop()
                raise UnsupportedEngine(f"a worker ended while it was asked for {method}")
        replies = [msgspec.msgpack.decode(frame) for frame in received]
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


def _remove_left(parent: Path) -> None:
    """Remove our own directories whose socket nobody listens at any more."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = directory.lstat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if ours and found.st_mtime < time.time() - _STARTING_S and not _listened_at(directory / _SOCKET):
                (directory / _SOCKET).unlink(missing_ok=True)
                directory.rmdir()


def _listened_at(path: Path) -> bool:
    try:
        frames.connect(str(path)).close()
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    return True


def _places(places: Mapping[str, Sequence[str]]) -> dict[str, Place]:
    return {digest: Place(Path(root), location) for digest, (root, location) in places.items()}
