"""A plugin with faults, to be named in an LMCache YAML: chunks it promised are not handed out, or come late.

The JSON file `LMCACHE_FAULTY_FILE` says which, and may change while the server runs:
`{"drop": 3}` for a chunk that is never handed out, `{"slow_s": 1.5}` for every load taking that long,
`{"unpacked": true}` for chunks in another layout than the engine's, `{"rotate": "all"}` for keys rotated in every layer,
`{"captured": "swapped"}` for what is fetched of the engine with keys for values, and
`{"capture_s": 1}` for each chunk of that taking so long.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from lmcache_cartridge.engine import backend, capture
from lmcache_cartridge.memory import loader, rope, tiles


class CartridgeBackend(backend.CartridgeBackend):
    """Promises every chunk at lookup and then fails to deliver one, as no healthy store does."""

    def batched_get_blocking(self, keys: list) -> list:
        """Return what the sound plugin does, with None in the place of one chunk."""
        found = super().batched_get_blocking(keys)
        broken = _fault("drop")
        if broken is not None and broken < len(found) and found[broken] is not None:
            found[broken].ref_count_down()
            found[broken] = None
        return found


def break_kv() -> None:
    """Have this process load KV slowly, as releases did that packed chunks from S3 not at all, and rotated every layer."""
    pack, shift, read, fetch = tiles.pack, loader.shift, loader.ChunkLoader.read, capture.as_heads

    def fetched(kv: Any) -> bytes:
        time.sleep(_fault("capture_s") or 0)
        return fetch(kv.flip(0) if _fault("captured") else kv)

    def slow(*args: Any) -> Any:
        time.sleep(_fault("slow_s") or 0)
        return read(*args)

    def unpacked(heads: Any, out: Any, *args: Any) -> None:
        if _fault("unpacked"):
            out.copy_(heads.permute(3, 0, 1, 2, 4).contiguous().flatten().view(out.dtype))
        else:
            pack(heads, out, *args)

    def everywhere(kv: Any, shape: Any, offset: int) -> Any:
        if _fault("rotate"):
            return torch.stack([rope.rotate(kv[0], shape.rope[0], offset), kv[1]])
        return shift(kv, shape, offset)

    tiles.pack, loader.shift, loader.ChunkLoader.read = unpacked, everywhere, slow
    capture.as_heads = fetched


break_kv()


def _fault(name: str) -> Any:
    path = os.environ.get("LMCACHE_FAULTY_FILE")
    return json.loads(Path(path).read_text()).get(name) if path and Path(path).exists() else None
