"""Lru: a bounded dict that drops what was used least recently."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """The entries that were put or asked for last. Safe from any thread."""

    def __init__(self, capacity: int, size: Callable[[V], int] = lambda value: 1) -> None:
        """`size` returns how much of `capacity` a value takes, always the same. The newest one stays, however large."""
        self._capacity, self._size, self._used = capacity, size, 0
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: K) -> V | None:
        """Return a value, which is now the last to be dropped; None where there is none."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: K, value: V) -> V:
        """Keep a value in place of any other of its key, and return it."""
        with self._lock:
            self.pop(key)
            self._entries[key] = value
            self._used += self._size(value)
            while self._used > self._capacity and len(self._entries) > 1:
                self.pop(next(iter(self._entries)))
            return value

    def pop(self, key: K) -> V | None:
        """Drop an entry and return its value; None where there is none."""
        with self._lock:
            if key not in self._entries:
                return None
            value = self._entries.pop(key)
            self._used -= self._size(value)
            return value

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys of this moment, the next to be dropped first."""
        with self._lock:
            return iter(list(self._entries))

    def __contains__(self, key: K) -> bool:
        """Whether there is an entry; it is no use of it."""
        return key in self._entries
