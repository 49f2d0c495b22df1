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
        # Not by its place among `keys`: a request that LMCache has the first chunks for asks for the others only.
        lost = {i for i, key in enumerate(keys) if broken is not None and broken in self._chunks(key)}
        return self._loads.submit(len(keys), lambda task: self._load(_Leaky(task, lost), keys, objects))

    def _chunks(self, key: Any) -> set[int]:
        """Return which chunk of a cartridge a key stands for."""
        rank, tag = self._find(key)
        index = rank._catalog.index
        return {chunk.chunk for chunk in index.candidates(l2._hash(key), tag)}


class _Leaky:
    """A task that some positions cannot be added to."""

    def __init__(self, task: Any, lost: set[int]) -> None:
        self._task, self._lost = task, lost

    def add(self, positions: list[int], write: Any = None) -> bool:
        return not self._lost.isdisjoint(positions) or self._task.add(positions, write)
