"""What LMCache 0.5.6 lacks to run in-process on vLLM's CPU backend: a connector, without which it gives up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cpu_connector() -> Iterator[None]:
    """Let LMCache build its engine on CPU while this is active, with an `EngineWriteConnector` to be bound later.

    `CreateGPUConnector` raises on CPU and LMCache looks it up at each call, so it is replaced for the call; on other
    devices nothing changes.
    """
    from lmcache import torch_device_type

    if torch_device_type != "cpu":
        yield
        return
    from lmcache.v1 import gpu_connector

    from .inject import EngineWriteConnector

    def create(*_: Any, **__: Any) -> EngineWriteConnector:
        return EngineWriteConnector()

    original = gpu_connector.CreateGPUConnector
    gpu_connector.CreateGPUConnector = create
    try:
        yield
    finally:
        gpu_connector.CreateGPUConnector = original
