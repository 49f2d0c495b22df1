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
    """Number of this process among the workers of its engine: `rank % world` is its tensor-parallel rank."""
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
    quantiser: Quantiser | None = None
    """How its layers write their caches where these are quantised; None: as the model computes."""
