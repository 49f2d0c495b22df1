"""Capture: the KV that this engine computed for a request, from what LMCache saved of it. In-process mode."""

from __future__ import annotations

import torch

from ..errors import UnsupportedEngine
from ..memory.layout import to_heads
from . import host_inprocess
from .contract import CAPTURE
from .saving import tenant


def captured(name: str, token_ids: list[int], chunk: int) -> bytes:
    """Return chunk number `chunk` of this rank's KV for `token_ids`, heads `[H, 2, L, T, D]` in the model's dtype.

    The request had `name` as `CAPTURE` and as its `cache_salt`, so nothing of it was found anywhere and all of it computed.
    LMCache lets go of the chunk. Raises `UnsupportedEngine` where LMCache did not save it. Safe from any thread.
    """
    engine = host_inprocess.lmcache_engine()
    if engine is None:
        raise UnsupportedEngine("KV can be fetched where LMCache runs in vLLM's workers; here it does not")
    if engine.gpu_connector.quantiser:
        raise UnsupportedEngine(
            "this engine caches KV in fp8, not as it computes it; take it from one without --kv-cache-dtype"
        )
    size = engine.config.chunk_size
    tags = {CAPTURE: name} | tenant(name)
    tokens = token_ids[: (chunk + 1) * size]
    keys = [key for _, _, key in engine.token_database.process_tokens(tokens=tokens, request_configs=tags)]
    local = engine.storage_manager.local_cpu_backend
    memory = local.get_blocking(keys[chunk]) if chunk < len(keys) else None
    if memory is None:
        raise UnsupportedEngine(
            f"LMCache has not saved chunk {chunk} of the request: start the server with --l1-bytes, larger than its KV"
        )
    try:
        return to_heads(engine.gpu_connector.canonical(memory)).view(torch.uint8).numpy().tobytes()
    finally:
        memory.ref_count_down()
        local.remove(keys[chunk])
