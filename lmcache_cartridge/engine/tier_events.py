"""TierEvents: what the tiers below the engine's blocks hold, told as vLLM's own KV events.

Routers that follow a server's events see the engine's blocks only (vLLM 0.32). With the setting `kv_events` they see in
the same stream which cartridges are whole in our memory and on the local disk. vLLM publishes events at an engine step,
so an idle server tells nothing. Rank 0 speaks for all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.logger import init_logger

from ..artifact.lru import Lru
from ..errors import CartridgeError
from ..settings import from_environment
from . import host
from .client import ControlClient

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.outputs import KVConnectorOutput

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

    def __init__(self, block_tokens: int) -> None:
        """Events are of blocks of `block_tokens`, as the engine's own."""
        self._block = block_tokens
        self._lock = threading.Lock()
        self._held: dict[str, dict[str, Content]] = {}
        """By medium and digest."""
        self._told: dict[str, dict[str, Content]] = {}
        self._contents: Lru[str, Content] = Lru(_MAX_CONTENTS)
        self._following = False

    def follow(self, ask: Callable[..., Any]) -> None:
        """Look at the tiers from now on; `ask` calls a method of a worker's store. Later calls change nothing."""
        if not self._following:
            self._following = True
            threading.Thread(target=self._look_on, args=(ask,), name="cartridge-events", daemon=True).start()

    def take(self) -> list[KVCacheEvent]:
        """Return what has changed since the last call: blocks stored, and blocks removed."""
        events: list[KVCacheEvent] = []
        with self._lock:
            for medium in sorted(self._held.keys() | self._told.keys()):
                told, held = self._told.get(medium, {}), self._held.get(medium, {})
                self._told[medium] = held
                gone = [hash_ for digest, content in told.items() if digest not in held for hash_ in content.hashes]
                if gone:
                    events.append(BlockRemoved(block_hashes=gone, medium=medium))
                events += [
                    BlockStored(
                        block_hashes=content.hashes,
                        parent_block_hash=None,
                        token_ids=content.token_ids,
                        block_size=self._block,
                        lora_id=None,
                        medium=medium,
                        lora_name=None,
                    )  # fmt: skip
                    for digest, content in held.items()
                    if digest not in told
                ]
        return events

    def tell_again(self) -> None:
        """Tell everything anew: who follows the stream was told that all is gone."""
        with self._lock:
            self._told = {}

    def look(self, ask: Callable[..., Any]) -> None:
        """Take in what the tiers hold. Blocks; raises `CartridgeError` where the worker does not answer."""
        held: dict[str, dict[str, Content]] = {}
        for tier, counts in ask("chunks_by_tier").items():
            for digest, chunks in counts.items():
                content = self._content(digest, ask)
                if content is not None and chunks >= content.whole[tier]:
                    held.setdefault(_MEDIA[tier], {})[digest] = content
        with self._lock:
            self._held = held

    def _content(self, digest: str, ask: Callable[..., Any]) -> Content | None:
        """Return what a cartridge is; None for a chain, one that is not served, and one without a whole block."""
        if (content := self._contents.get(digest)) is not None:
            return content
        if "." in digest:  # a chain's, which the worker would say every time
            return None
        token_ids, whole = ask("described", digest) or ([], {})
        blocks = len(token_ids) // self._block
        if not blocks:
            return None
        hashes: list[bytes | int] = [
            int.from_bytes(blake3(f"{digest}/{i}".encode()).digest(8), "big") for i in range(blocks)
        ]
        return self._contents.put(digest, Content(hashes, token_ids[: blocks * self._block], whole))

    def _look_on(self, ask: Callable[..., Any]) -> None:
        while True:
            try:
                self.look(ask)
            except CartridgeError as error:
                logger.warning_once(f"KV events tell nothing of the cartridges' tiers: {error}")
                with self._lock:
                    self._held = {}
            time.sleep(_LOOK_S)


class WorkersSocket(KVConnectorWorkerMetadata):
    """Where rank 0 answers for its store, and what LMCache's own connector tells the scheduler."""

    def __init__(self, path: str, theirs: KVConnectorWorkerMetadata | None) -> None:
        self.path, self.theirs = path, theirs

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add what another rank tells."""
        self.theirs = other if self.theirs is None else self.theirs.aggregate(other)
        return self


class TellsTiers:
    """Makes a connector tell what the tiers hold, beside what it tells itself. A class to inherit before vLLM's."""

    _events: TierEvents | None = None
    """In the scheduler's process."""
    _socket: str | None = None
    """In rank 0's worker, until it was told."""

    def tell_tiers(self, vllm_config: VllmConfig) -> None:
        """Tell them from now on, where vLLM publishes events and the settings say so. In the scheduler's process."""
        if _are_wanted(vllm_config):
            self._events = TierEvents(vllm_config.cache_config.block_size)

    def tell_socket(self, vllm_config: VllmConfig, path: Callable[[], str]) -> None:
        """Tell the scheduler once where this worker's store answers."""
        is_first = vllm_config.parallel_config.rank % vllm_config.parallel_config.world_size == 0
        if is_first and _are_wanted(vllm_config):
            self._socket = path()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what the scheduler's side should know of this step."""
        theirs = super().build_connector_worker_meta()  # type: ignore[misc]
        path, self._socket = self._socket, None
        return theirs if path is None else WorkersSocket(path, theirs)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers told."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkersSocket):
            connector_output.kv_connector_worker_meta = meta.theirs
            if self._events is not None:
                client = ControlClient([meta.path])
                self._events.follow(lambda *call: client.call(*call)[0])
        super().update_connector_output(connector_output)  # type: ignore[misc]

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Hear of it when vLLM forgets its blocks, after which it publishes that all are gone. Raises `UnsupportedEngine`."""
        super().bind_gpu_block_pool(gpu_block_pool)  # type: ignore[misc]
        if (events := self._events) is not None:
            reset = host.attribute(gpu_block_pool, "reset_prefix_cache")

            def reset_and_tell() -> bool:
                if done := reset():
                    events.tell_again()
                return done

            gpu_block_pool.reset_prefix_cache = reset_and_tell  # type: ignore[method-assign]

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the events since the last call, LMCache's own first."""
        yield from super().take_events()  # type: ignore[misc]
        if self._events is not None:
            yield from self._events.take()


def _are_wanted(vllm_config: VllmConfig) -> bool:
    """Whether vLLM publishes events and the settings want ours among them."""
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events and from_environment().kv_events
