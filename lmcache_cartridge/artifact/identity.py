"""Identity tokens: the token ids that stand for a trained cartridge, which no tokens produced."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from blake3 import blake3

from ..errors import UnsupportedModel

DISTINCT = 16
"""The first ids of a cartridge are distinct: vLLM's smallest block, so that no block of one repeated id is among them."""
_POOL = 1024
"""Ids drawn to find distinct ones among; with 32 ordinary ids the chance of not finding 16 is below 1e-200."""


class Identity(NamedTuple):
    """How a trained cartridge of `positions` positions gets its ids, once all else of it is known."""

    positions: int
    ordinary_ids: np.ndarray
    """Ids that mean nothing to a server: no special, added, reasoning or tool tokens, no multimodal placeholders."""

    def tokens(self, digest: str) -> np.ndarray:
        """Return `positions` ids, uint32, drawn from blake3 of `digest`, that of all else; the same for the same vocabulary.

        The ids are no secret and no key: a cartridge is served under its tag only. Raises `UnsupportedModel` for a
        vocabulary with too few ordinary ids to tell cartridges apart.
        """
        if len(self.ordinary_ids) < 2 * DISTINCT:
            raise UnsupportedModel(f"{len(self.ordinary_ids)} ordinary token ids are too few to name cartridges with")
        words = blake3(bytes.fromhex(digest)).digest(8 * (_POOL + self.positions))
        drawn = np.asarray(self.ordinary_ids, dtype="<u4")[np.frombuffer(words, "<u8") % len(self.ordinary_ids)]
        _, first_seen = np.unique(drawn[:_POOL], return_index=True)
        head = drawn[np.sort(first_seen)[: min(DISTINCT, self.positions)]]
        return np.concatenate([head, drawn[_POOL : _POOL + self.positions - len(head)]])
