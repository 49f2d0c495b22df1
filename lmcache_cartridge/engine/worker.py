"""CartridgeWorker: how the API server learns where each worker's store answers calls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..errors import UnsupportedEngine

if TYPE_CHECKING:
    from ..memory.store import CartridgeStore
    from .control import ControlServer

adapter_control: str | None = None
"""Where the store of this rank answers if it is in LMCache's server; `CartridgeMPConnector` sets it."""
_server: ControlServer | None = None
_lock = threading.Lock()


class CartridgeWorker:
    """The method that vLLM mixes into its worker class, through `--worker-extension-cls`."""

    def cartridge_control(self) -> str:
        """Return the path of this worker's control socket. Raises `UnsupportedEngine` if the plugin is not there."""
        if adapter_control is not None:
            return adapter_control
        from .control import ControlServer

        global _server
        _store()
        with _lock:
            if _server is None:
                _server = ControlServer(_store)
            return _server.path


def offer() -> None:
    """Have vLLM's workers answer `cartridge_control` without `--worker-extension-cls` too."""
    from vllm.v1.worker.worker_base import WorkerBase

    if not hasattr(WorkerBase, "cartridge_control"):
        WorkerBase.cartridge_control = CartridgeWorker.cartridge_control


def _store() -> CartridgeStore:
    from .backend import stores

    found = stores()
    if len(found) != 1:
        raise UnsupportedEngine(f"this worker has {len(found)} cartridge stores; there must be one")
    return found[0]
