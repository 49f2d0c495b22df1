"""Capture: the KV that this engine computed for a request, from what LMCache saved of it."""

from __future__ import annotations

import torch

from ..artifact.lru import Lru
from ..errors import UnsupportedEngine
from ..memory.layout import to_heads
from . import host_inprocess
from .contract import CAPTURE
from .salts import key_salt
from .saving import tenant


def captured(name: str, token_ids: list[int], chunk: int) -> bytes | None:
    """Return chunk number `chunk` of this rank's KV for `token_ids`, heads `[H, 2, L, T, D]` in the model's dtype.

    In-process mode. The request had `name` as `CAPTURE` and as its `cache_salt`, so nothing of it was found anywhere and all
    of it computed. None where LMCache has not saved the chunk, or not yet; it lets go of what is returned. Raises `UnsupportedEngine` where it
    never will. Safe from any thread.
    """
    engine = host_inprocess.lmcache_engine()
    if not engine.config.local_cpu:
        raise UnsupportedEngine("LMCache saves nothing that could be fetched: start the server with --l1-bytes")
    tags = {CAPTURE: name} | tenant(name)
    tokens = token_ids[: (chunk + 1) * engine.config.chunk_size]
    keys = [key for _, _, key in engine.token_database.process_tokens(tokens=tokens, request_configs=tags)]
    local = engine.storage_manager.local_cpu_backend
    memory = local.get_blocking(keys[chunk]) if chunk < len(keys) else None
    if memory is None:
        return None
    try:
        return as_heads(engine.gpu_connector.canonical(memory))
    finally:
        memory.ref_count_down()
        local.remove(keys[chunk])


def as_heads(canonical: torch.Tensor) -> bytes:
    """Return a canonical chunk as bytes of heads, one after the other."""
    return to_heads(canonical).view(torch.uint8).numpy().tobytes()


class Captures:
    """What LMCache's server saved of requests whose KV somebody means to fetch: one rank's chunks, as they are packed.

    Safe from any thread.
    """

    def __init__(self, most: int) -> None:
        """Keeps `most` chunks of each of the last requests, that are few."""
        self._most = most
        self._wanted: Lru[str, dict[int, torch.Tensor]] = Lru(4)

    def take(self, name: str, chunk_hash: int) -> torch.Tensor | None:
        """Return one chunk of the request `name` and keep it no more; None if it has not come. From now on those of the request
        are kept.
        """
        kept = self._wanted.get(salt := key_salt({CAPTURE: name}, name))
        return (self._wanted.put(salt, {}) if kept is None else kept).pop(chunk_hash, None)

    def keep(self, salt: str, chunk_hash: int, raw: torch.Tensor) -> None:
        """Copy a chunk that LMCache saved, if it is wanted and there is room."""
        if (chunks := self._wanted.get(salt)) is not None and len(chunks) < self._most:
            chunks[chunk_hash] = raw.clone()
