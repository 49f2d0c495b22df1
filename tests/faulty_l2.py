"""The adapter with the faults of `faulty`: chunks it promised are not handed out, or come late."""

from __future__ import annotations

from typing import Any

from faulty import _fault

from lmcache_cartridge.engine import l2


class CartridgeL2Adapter(l2.CartridgeL2Adapter):
    """Promises every chunk at lookup and then fails to deliver one, as no healthy store does."""

    def submit_load_task(self, keys: list, objects: list) -> int:
        """Load as the sound adapter does, without one chunk."""
        broken = _fault("drop")
        return self._loads.submit(len(keys), lambda task: self._load(_Leaky(task, broken), keys, objects))


class _Leaky:
    """A task that one position cannot be added to."""

    def __init__(self, task: Any, broken: int | None) -> None:
        self._task, self._broken = task, broken

    def add(self, positions: list[int], write: Any = None) -> bool:
        return True if self._broken in positions else self._task.add(positions, write)
