"""L1Copies: what LMCache's server was handed for one rank of an engine, having it drop that, and having it ask for more.

LMCache's server keeps what it loads in memory of its own (`--l2-prefetch-policy retain`), out of reach of the adapter
that it came from. Its HTTP API deletes by key, what is in use left alone; so the keys are remembered.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from ..artifact.lru import Lru

logger = logging.getLogger(__name__)

_MAX_KEYS = 1 << 17
_BATCH = 10_000
"""Keys that LMCache 0.5.6 takes in one request."""
_TIMEOUT_S = 10.0
_POLL_S = 0.02


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
        keys = [key for key in self._keys if gone(key)]
        if keys and self._url is None:
            logger.info(
                "LMCache's server keeps its copies of %d chunks until it needs the memory; with `lmcache_http` in "
                "adapter_params, where it answers HTTP, they are dropped too", len(keys),
            )  # fmt: skip
            return
        for start in range(0, len(keys), _BATCH):
            self._delete(keys[start : start + _BATCH])

    def fill(self, model_name: str, world: int, salt: str, token_ids: Sequence[int]) -> None:
        """Have LMCache copy what we have of a prompt into its memory, for all ranks. Blocks; a failure is logged."""
        if self._url is None:
            return
        body = {"model_name": model_name, "world_size": world, "token_ids": list(token_ids), "cache_salt": salt}
        deadline = time.monotonic() + _TIMEOUT_S
        try:
            job = self._ask("POST", "/cache/prefetches", body)
            # LMCache 0.5.6 remembers a job until it has been told of its end.
            while job["status"] in ("submitted", "pending") and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                job = self._ask("GET", f"/cache/prefetches/{job['request_id']}")
        except (OSError, ValueError) as error:
            logger.warning("LMCache's server may have no copies of what is preloaded yet: %s", error)

    def _delete(self, keys: list[Any]) -> None:
        encoded = [
            {
                "chunk_hash_hex": key.chunk_hash.hex(), "model_name": key.model_name, "kv_rank": key.kv_rank,
                "object_group_id": key.object_group_id, "cache_salt": key.cache_salt,
            }
            for key in keys
        ]  # fmt: skip
        try:
            answer = self._ask("DELETE", "/cache/objects", {"tier": "l1", "keys": encoded})
        except (OSError, ValueError) as error:
            logger.warning("LMCache's server keeps its copies of %d chunks: %s", len(keys), error)
            return
        if answer.get("skipped"):
            logger.info("LMCache's server keeps its copies of %d chunks that are in use", answer["skipped"])
            return
        for key in keys:
            self._keys.pop(key)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            return json.load(reply)
