"""Described: what the store must know of the engine that it serves, as `engine/describe.py` finds it."""

from __future__ import annotations

from typing import NamedTuple

from ..artifact.model import Fingerprint
from ..library.index import Hasher
from .quantise import Quantiser


class Engine(NamedTuple):
    """What the store must know of the engine it serves."""

    fingerprint: Fingerprint
    chunk_tokens: int
    rank: int
    """Tensor-parallel rank of this process."""
    world: int
    """Tensor-parallel ranks."""
    layout: str
    """How the engine's injector reads chunks: a key of `layout.VIEWS`, or one of `tiles`."""
    hasher: Hasher
    pin_memory: bool
    allow_trained: bool
    """False where the engine computes what it could not load, which would answer from identity tokens."""
    device: str = "cpu"
    """Where the device tier is, if there is one."""
    layers: range | None = None
    """Layers of this process's stage under pipeline parallelism; None: all."""
    worker: int | None = None
    """Number of this process among the workers of all engines that one server has; None: that of its rank."""
    quantiser: Quantiser | None = None
    """How its layers write their caches where these are quantised; None: as the model computes."""

    @property
    def number(self) -> int:
        """What tells this process from the other workers of its server."""
        return self.rank if self.worker is None else self.worker
