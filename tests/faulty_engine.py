"""A plugin whose engine is broken, to be named in an LMCache YAML as `faulty` is, which is in it.

`LMCACHE_FAULTY_FILE` says how: `{"kv": NAME}` for chunks of which something is in a wrong place, a name of `WRONG`;
`{"loads": "nothing"}` for a connector that writes nothing to vLLM's blocks; `{"salts": "ignored"}` for a prefix cache that
all tenants share.
"""

from __future__ import annotations

from typing import Any

import torch
from faulty import CartridgeBackend, _fault
from vllm.v1.core import kv_cache_utils

from lmcache_cartridge.engine import inject
from lmcache_cartridge.memory import tiles

__all__ = ["CartridgeBackend"]

WRONG = {
    "keys one position late": lambda kv: torch.stack([kv[0].roll(1, 1), kv[1]]),
    "a layer of zeros": lambda kv: kv * (torch.arange(kv.shape[1]) != 1).to(kv.dtype)[:, None, None, None],
    "values of another head": lambda kv: torch.stack([kv[0], kv[1].roll(1, 2)]),
}
"""What is done to canonical KV `[2, L, T, H, D]`."""


def break_engine() -> None:
    """Have this process, where vLLM's worker and scheduler are, do as the file says."""
    pack, write = tiles.pack, inject.EngineWriteConnector.batched_to_gpu
    keys = kv_cache_utils.generate_block_hash_extra_keys

    def wrong(kv: Any, *args: Any) -> None:
        pack(WRONG[name](kv) if (name := _fault("kv")) else kv, *args)

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _fault("loads"):
            write(self, *args, **kwargs)

    def shared(*args: Any) -> Any:
        found, place = keys(*args)
        return (None if _fault("salts") else found), place

    tiles.pack, inject.EngineWriteConnector.batched_to_gpu = wrong, nothing
    kv_cache_utils.generate_block_hash_extra_keys = shared


break_engine()
