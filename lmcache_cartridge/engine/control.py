"""Control: answers what the API server, or an offline program, asks of a worker's store, over one Unix socket a worker.

vLLM's `collective_rpc` waits for the engine's step to end and holds up the next one; this does neither. A frame is a
list: `[method, *arguments]` one way, `[error or None, result]` the other. Each call has a connection of its own; a claim ends
with its.
"""

from __future__ import annotations

import asyncio
import atexit
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..artifact.cartridge import Place
from ..artifact.model import ONLINE
from ..errors import CartridgeError, UnsupportedEngine
from . import frames
from .refusals import IN_FP8

if TYPE_CHECKING:
    from .client import ControlClient

_METHODS = (
    "pin", "unpin", "evict", "tried", "untried", "refresh", "status", "numbers", "chunks_by_tier", "described",
)  # fmt: skip
"""Those of a store that a client may call as they are."""


class ControlServer(frames.FrameServer):
    """Answers calls for the store of this process, until the process ends."""

    def __init__(self, store: Callable[[], Any]) -> None:
        """Listen at `path`, which no other user may open. `store` is asked at every call for the `CartridgeStore`, or for
        what has its methods.
        """
        directory = Path(tempfile.mkdtemp(prefix="lmcache-cartridge-control-", dir=frames.parent()))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        self._store = store
        self._methods: dict[str, Callable[..., Any]] = {
            "tail": self._tail,
            "captured": self._captured,
            "fingerprint": lambda: store().engine.fingerprint,
            "preload": lambda tag, places: store().preload(tag, _places(places))._asdict(),
        }
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each claim is a connection
        super().__init__(str(directory / "control"))

    async def answer(self, held: ExitStack, has_left: Callable[[], bool], method: str, *arguments: Any) -> Any:
        """Answer one call. A claim lasts as long as its connection."""
        if method == "claim":
            return await self._claim(held, has_left, *arguments)
        return await self.in_thread(self._method, method, *arguments)

    async def _claim(
        self, held: ExitStack, has_left: Callable[[], bool], tag: str, places: Mapping[str, Sequence[str]],
        wait_s: float, may_compute: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """Return how far a claim is once it has all of it or is refused, after `wait_s` at the latest.

        With `may_compute` also once what is missing finds no memory, or its source fails.
        """
        claim = held.enter_context(closing(self._store().claim(tag, _places(places))))
        began = time.monotonic()
        while True:
            state, left = claim.poll(), began + wait_s - time.monotonic()
            is_stuck = may_compute and not state.opening and state.resident == state.admitted
            if state.ready or state.refused or is_stuck or left <= 0 or has_left():
                return state._asdict() | {"ready": state.ready}
            await asyncio.sleep(min(0.002 + (wait_s - left) / 10, 0.05, left))  # little is added to any load

    def _method(self, method: str, *arguments: Any) -> Any:
        if method in _METHODS:
            return getattr(self._store(), method)(*arguments)
        if method not in self._methods:
            raise CartridgeError(f"there is no method {method!r}")
        return self._methods[method](*arguments)

    def _tail(self, tag: str) -> tuple[list[int], bytes] | None:
        kv = self._store().tail(tag)
        return None if kv is None else (list(kv.shape), kv.view(torch.uint8).numpy().tobytes())

    def _captured(self, *arguments: Any) -> bytes | None:
        from .capture import captured  # loads LMCache

        store = self._store()
        if store.engine.quantiser:
            raise UnsupportedEngine(IN_FP8)
        quantised = str(store.engine.fingerprint.quantisation)
        if quantised.startswith(ONLINE):
            raise UnsupportedEngine(
                f"this engine quantises the weights itself ({quantised}), and what it computes would be taken for the KV of the "
                "checkpoint; quantise the checkpoint"
            )
        return getattr(store, "captured", captured)(*arguments)


def fetch_tail(client: ControlClient, tag: str, dtype: torch.dtype) -> torch.Tensor | None:
    """Return what `CartridgeStore.tail` does, of the one store behind a client. Blocks; raises `CartridgeError`."""
    (answer,) = client.call("tail", tag)
    return None if answer is None else torch.frombuffer(bytearray(answer[1]), dtype=dtype).view(answer[0])


def _places(places: Mapping[str, Sequence[str]]) -> dict[str, Place]:
    return {digest: Place(Path(root), location) for digest, (root, location) in places.items()}
