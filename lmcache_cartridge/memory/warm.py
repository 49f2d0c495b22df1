"""Warm: brings what warm labels point at into memory before anybody asks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..library.registry import Registry
from .background import Background


class Warm:
    """Follows a registry and preloads; each cartridge once, each time a label comes to point there. Safe from any thread."""

    def __init__(self, registry: Registry, background: Background, is_served: Callable[[str], bool]) -> None:
        self._registry, self._background, self._is_served = registry, background, is_served
        self._begun: set[str] = set()
        self._lock = threading.Lock()

    def follow(self) -> None:
        """Take in what changed, and begin with what is served of it. Raises `RegistryError`."""
        with self._lock:
            labelled = {row.digest for row in self._registry.warm()}
            self._begun &= labelled
            for digest in filter(self._is_served, labelled - self._begun):
                self._begun.add(digest)
                self._background.preload(digest, {})
