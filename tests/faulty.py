"""A plugin with one fault, to be named in an LMCache YAML: the chunk of `FAULTY_CHUNK` is never handed out."""

from __future__ import annotations

import os

from lmcache_cartridge.serve.backend import CartridgeBackend


class FaultyBackend(CartridgeBackend):
    """Promises every chunk at lookup and then fails to deliver one, as no healthy store does."""

    def batched_get_blocking(self, keys: list) -> list:
        """Return what `CartridgeBackend` does, with None in the place of one chunk."""
        found = super().batched_get_blocking(keys)
        broken = int(os.environ["FAULTY_CHUNK"])
        if found[broken] is not None:
            found[broken].ref_count_down()
            found[broken] = None
        return found
