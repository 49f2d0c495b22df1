"""TierEvents: what the tiers below the engine's blocks hold, told as vLLM's own KV events.

Routers that follow a server's events see the engine's blocks only (vLLM 0.32). With the setting `kv_events` they see in
the same stream which cartridges are whole in our memory and on the local disk. vLLM publishes events at an engine step,
so an idle server tells nothing. Rank 0 speaks for all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.logger import init_logger

from ..artifact.lru import Lru
from ..errors import CartridgeError
from ..settings import from_environment
from .client import ControlClient

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.lmcache_cartridge.tier_events")

_LOOK_S = 1.0
"""How often the tiers are looked at."""
_MAX_CONTENTS = 4096
"""Cartridges of which is remembered what they are."""
_MEDIA = {"device": MEDIUM_CPU, "cpu": MEDIUM_CPU, "disk": MEDIUM_STORAGE}
"""vLLM's names. What is in the device tier is no block of the engine's yet, so it is told as the host's memory."""


class Content(NamedTuple):
    """What is known of one cartridge."""

    hashes: list[bytes | int]
    """Names of its blocks in this stream: none of the engine's has them."""
    token_ids: list[int]
    whole: dict[str, int]
    """How many chunks of a tier are all of it."""


class TierEvents:
    """The events of one engine, in its scheduler's process. A thread asks a worker; `take` waits for nothing."""

    def __init__(self, block_tokens: int, ask: Callable[..., list[Any]]) -> None:
        """Look at the tiers from now on; `ask` calls a method of one worker's store. Events are of blocks of `block_tokens`, as
        the engine's own.
        """
        self._block, self._ask = block_tokens, ask
        self._held: dict[tuple[str, str], Content] = {}
        """By medium and digest."""
        self._told: dict[tuple[str, str], Content] = {}
        self._contents: Lru[str, Content] = Lru(_MAX_CONTENTS)
        threading.Thread(target=self._look_on, name="cartridge-events", daemon=True).start()

    def take(self) -> list[KVCacheEvent]:
        """Return what has changed since the last call: blocks stored, and blocks removed."""
        told, held = self._told, self._held
        self._told = held
        events: list[KVCacheEvent] = [
            BlockRemoved(block_hashes=told[medium, digest].hashes, medium=medium)
            for medium, digest in told.keys() - held.keys()
        ]
        for medium, digest in held.keys() - told.keys():
            content = held[medium, digest]
            events.append(
                BlockStored(
                    block_hashes=content.hashes,
                    parent_block_hash=None,
                    token_ids=content.token_ids,
                    block_size=self._block,
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                )
            )
        return events

    def _look(self) -> None:
        held: dict[tuple[str, str], Content] = {}
        for tier, counts in self._ask("chunks_by_tier")[0].items():
            for digest, chunks in counts.items():
                content = self._content(digest)
                if content is not None and chunks >= content.whole[tier]:
                    held[_MEDIA[tier], digest] = content
        self._held = held

    def _content(self, digest: str) -> Content | None:
        """Return what a cartridge is; None for a chain, one that is not served, and one without a whole block."""
        if (content := self._contents.get(digest)) is not None:
            return content
        if "." in digest:  # a chain's, which the worker would say every time
            return None
        token_ids, whole = self._ask("described", digest)[0] or ([], {})
        blocks = len(token_ids) // self._block
        if not blocks:
            return None
        hashes: list[bytes | int] = [
            int.from_bytes(blake3(f"{digest}/{i}".encode()).digest(8), "big") for i in range(blocks)
        ]
        return self._contents.put(digest, Content(hashes, token_ids[: blocks * self._block], whole))

    def _look_on(self) -> None:
        while True:
            try:
                self._look()
            except CartridgeError as error:
                logger.warning_once(f"KV events tell nothing of the cartridges' tiers: {error}")
                self._held = {}
            time.sleep(_LOOK_S)


@dataclass
class WorkersStore(KVConnectorHandshakeMetadata):
    """Where rank 0 answers for its store, which its worker tells the scheduler once both are there."""

    path: str


class TellsTiers:
    """Makes a connector tell what the tiers hold, beside what it tells itself. A class to inherit before vLLM's."""

    _config: VllmConfig
    _events: TierEvents | None = None
    """In the scheduler's process."""
    _store: WorkersStore | None = None
    """In rank 0's worker."""

    def tell_tiers(self, path: str) -> None:
        """Have the scheduler tell what this worker's store has, which answers at `path`, where vLLM publishes events and the
        settings say so.
        """
        events, parallel = self._config.kv_events_config, self._config.parallel_config
        is_first = parallel.rank % parallel.world_size == 0
        if is_first and events is not None and events.enable_kv_cache_events and from_environment().kv_events:
            self._store = WorkersStore(path)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what the scheduler's side should know of this worker."""
        return self._store

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        """Take what the workers told."""
        for store in metadata.values():
            assert isinstance(store, WorkersStore), "LMCache's connectors have none"
            block_tokens = self._config.cache_config.block_size
            self._events = TierEvents(block_tokens, ControlClient([store.path]).call)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the events since the last call, LMCache's own first."""
        yield from super().take_events()  # type: ignore[misc]
        if self._events is not None:
            yield from self._events.take()
