"""L1Copies: what LMCache's server was handed for one rank of an engine, and having it drop that.

LMCache's server keeps what it loads in memory of its own (`--l2-prefetch-policy retain`), out of reach of the adapter
that it came from. Its HTTP API deletes by key, what is in use left alone; so the keys are remembered.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Callable
from typing import Any

from ..artifact.lru import Lru

logger = logging.getLogger(__name__)

_MAX_KEYS = 1 << 17
_BATCH = 10_000
"""Keys that LMCache 0.5.6 takes in one request."""
_TIMEOUT_S = 10.0


class L1Copies:
    """The keys of the chunks that LMCache's server may have copies of. Safe from any thread."""

    def __init__(self, url: str | None) -> None:
        """`url` is where LMCache's server answers HTTP; without it nothing can be dropped."""
        self._url = url
        self._keys: Lru[Any, None] = Lru(_MAX_KEYS)

    def note(self, key: Any) -> None:
        """Remember a key that was loaded; the oldest are forgotten, and their copies left to LMCache."""
        self._keys.put(key, None)

    def drop(self, gone: Callable[[Any], bool]) -> None:
        """Have LMCache delete the copies under the keys that are `gone`. Blocks for its answer; a failure is logged."""
        if self._url is None:
            return
        keys = [key for key in self._keys if gone(key)]
        for start in range(0, len(keys), _BATCH):
            self._delete(keys[start : start + _BATCH])

    def _delete(self, keys: list[Any]) -> None:
        encoded = [
            {
                "chunk_hash_hex": key.chunk_hash.hex(), "model_name": key.model_name, "kv_rank": key.kv_rank,
                "object_group_id": key.object_group_id, "cache_salt": key.cache_salt,
            }
            for key in keys
        ]  # fmt: skip
        request = urllib.request.Request(
            f"{self._url}/cache/objects",
            json.dumps({"tier": "l1", "keys": encoded}).encode(),
            {"Content-Type": "application/json"},
            method="DELETE",
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                answer = json.load(reply)
        except (OSError, ValueError) as error:
            logger.warning("LMCache's server keeps its copies of %d chunks: %s", len(keys), error)
            return
        if not answer.get("skipped"):  # those that are in use
            for key in keys:
                self._keys.pop(key)
