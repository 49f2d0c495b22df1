"""Control: answers what the API server, or an offline program, asks of a worker's store, over one Unix socket a worker.

vLLM's `collective_rpc` waits for the engine's step to end and holds up the next one; this does neither. A frame is a
list: `[number, method, *arguments]` one way, `[number, error or None, result]` the other, as soon as there is a result.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import socket
import socketserver
import stat
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ..artifact.cartridge import Place
from ..artifact.model import ONLINE
from ..errors import CartridgeError, UnsupportedEngine
from ..memory.claims import Claim
from ..memory.readiness import Readiness
from ..memory.store import CartridgeStore
from . import frames, host

if TYPE_CHECKING:
    from .client import ControlClient

logger = logging.getLogger(__name__)

_PREFIX, _SOCKET = "lmcache-cartridge-control-", "control"
_STARTING_S = 60.0
"""A directory younger than this may be that of a server which does not listen yet."""
_METHODS = (
    "pin", "unpin", "evict", "tried", "untried", "refresh", "status", "numbers", "chunks_by_tier", "described",
)  # fmt: skip
"""Those of a store that a client may call as they are."""
_MAX_CALLS = 64
"""Calls of one client at once that are no claims."""
_MAX_RELEASED = 1 << 14
"""Names of a client's claims that are remembered after their release."""


class ControlServer:
    """Answers calls for the store of this process, in threads of its own, until the process ends."""

    def __init__(self, store: Callable[[], Any]) -> None:
        """Listen at `path`, which no other user may open. `store` is asked at every call for the `CartridgeStore`, or for
        what has its methods.

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


def _call(store: Callable[[], Any], method: str, *arguments: Any) -> Any:
    return getattr(store(), method)(*arguments)


def _tail(store: Callable[[], Any], tag: str) -> tuple[list[int], bytes] | None:
    kv = store().tail(tag)
    return None if kv is None else (list(kv.shape), kv.view(torch.uint8).numpy().tobytes())


def fetch_tail(client: ControlClient, tag: str, dtype: torch.dtype) -> torch.Tensor | None:
    """Return what `CartridgeStore.tail` does, of the one store behind a client. Blocks; raises `CartridgeError`."""
    (answer,) = client.call("tail", tag)
    return None if answer is None else torch.frombuffer(bytearray(answer[1]), dtype=dtype).view(answer[0])


def _captured(store: Callable[[], Any], *arguments: Any) -> bytes:
    from .capture import captured  # loads LMCache

    quantised = str(store().engine.fingerprint.quantisation)
    if quantised.startswith(ONLINE):
        raise UnsupportedEngine(
            f"this engine quantises the weights itself ({quantised}), and what it computes would be taken for the KV of the "
            "checkpoint; quantise the checkpoint"
        )
    return captured(*arguments)


def _answer(connection: socket.socket, store: Callable[[], Any]) -> None:
    """Answer one client until it goes; its claims end with it.

    Claims are answered in the order in which they come, which waits for nothing. Every other call has a thread.
    """
    claims, sending, threads = _Claims(store), threading.Lock(), threading.BoundedSemaphore(_MAX_CALLS)
    at_once: dict[str, Callable[..., Any]] = {"claim": claims.poll, "release": claims.release, "still": claims.keep}
    methods: dict[str, Callable[..., Any]] = {name: partial(_call, store, name) for name in _METHODS}
    methods["tail"] = partial(_tail, store)
    methods["captured"] = partial(_captured, store)
    methods["answers"] = lambda token_ids: store().trust.answers(store().engine, token_ids)
    methods["fingerprint"] = lambda: store().engine.fingerprint
    methods["preload"] = lambda tag, places: store().preload(tag, _places(places))._asdict()

    def answer(number: Any, method: Any, call: Callable[[], Any]) -> None:
        result = frames.result(call, logger, f"the call {method}")
        with sending:
            frames.send(connection, [number, *result])

    def answer_and_end(*call: Any) -> None:
        try:
            with suppress(OSError):  # whoever called is gone
                answer(*call)
        finally:
            threads.release()

    def refuse(problem: str) -> None:
        raise CartridgeError(problem)

    try:
        while (frame := frames.receive(connection)) is not None:
            number, method, *arguments = msgspec.msgpack.decode(frame, type=list)
            if (found := at_once.get(method)) is not None:
                answer(number, method, partial(found, *arguments))
            elif (found := methods.get(method)) is None:
                answer(number, method, partial(refuse, f"there is no method {method!r}"))
            elif not threads.acquire(blocking=False):
                answer(number, method, partial(refuse, f"{_MAX_CALLS} calls are under way already; ask again"))
            else:
                call = number, method, partial(found, *arguments)
                threading.Thread(target=answer_and_end, args=call, name="cartridge-call", daemon=True).start()
    except OSError as error:
        logger.debug("a control connection broke: %s", error)
    except (ValueError, TypeError) as error:  # no frame of ours; what follows it cannot be told apart either
        logger.warning("a control connection was ended: %s", error)
    finally:
        claims.keep(())


class _Claims:
    """One client's claims, by the names it gave them. A name that was released is never claimed again."""

    def __init__(self, store: Callable[[], CartridgeStore]) -> None:
        self._store = store
        self._open: dict[str, Claim] = {}
        self._released: OrderedDict[str, None] = OrderedDict()

    def poll(self, name: str, tag: str, places: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Claim something, unless it is claimed already, and return how far that is. Does not wait."""
        if name in self._released:
            readiness = Readiness(0, 0, 0, "its claim was released")
        else:
            if name not in self._open:
                self._open[name] = self._store().claim(tag, _places(places))
            readiness = self._open[name].poll()
        return readiness._asdict() | {"ready": readiness.ready}

    def release(self, name: str) -> None:
        """End a claim, if there is one, and refuse its name from now on."""
        if claim := self._open.pop(name, None):
            claim.close()
        self._released[name] = None
        while len(self._released) > _MAX_RELEASED:
            self._released.popitem(last=False)

    def keep(self, names: Sequence[str]) -> None:
        """End every claim but these: nobody has the others any more."""
        for name in self._open.keys() - set(names):
            self.release(name)


class CartridgeWorker:
    """The method that vLLM mixes into its worker class, through `--worker-extension-cls`."""

    def cartridge_control(self) -> str:
        """Return the path of this worker's control socket. Raises `UnsupportedEngine` if the plugin is not there."""
        global _server
        if _adapter_path is not None:
            return _adapter_path
        _only_store()
        with _server_lock:
            if _server is None:
                _server = ControlServer(_only_store)
            return _server.path


_adapter_path: str | None = None
"""The control socket of this rank's store where that is in LMCache's server."""
_server: ControlServer | None = None
_server_lock = threading.Lock()


def offer(adapter_path: str | None = None) -> None:
    """Have vLLM's workers answer `cartridge_control` without `--worker-extension-cls` too.

    `adapter_path` is the control socket of this rank's store where LMCache's server has the store.
    """
    global _adapter_path
    _adapter_path = adapter_path
    host.add_to_workers(CartridgeWorker.cartridge_control)


def _only_store() -> CartridgeStore:
    from .backend import stores

    found = stores()
    if len(found) != 1:
        raise UnsupportedEngine(f"this worker has {len(found)} cartridge stores; there must be one")
    return found[0]


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
