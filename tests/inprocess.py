"""LMCache's half of an engine, in this process: its real engine with our plugin, driven as vLLM's adapter drives it."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from blocks import quietly
from invariants import check
from making import Made, make_artifact
from vllm.config import VllmConfig, set_current_vllm_config
from waiting import until

from lmcache_cartridge.artifact.model import Fingerprint
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.engine.lmcache_file import PLUGIN, lmcache_yaml
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.settings import Settings

with quietly():
    from lmcache.integration.vllm.utils import ENGINE_NAME
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    from lmcache_cartridge.engine import backend, host
    from lmcache_cartridge.engine.backend import CartridgeBackend

    cache_engine = host.module("lmcache.v1.cache_engine")
    host.module("lmcache.integration.vllm.vllm_v1_adapter")
    LMCacheEngine = cache_engine.LMCacheEngine
    GPUConnectorInterface = host.module("lmcache.v1.gpu_connector.gpu_connectors").GPUConnectorInterface
    VllmServiceFactory = host.module("lmcache.integration.vllm.vllm_service_factory").VllmServiceFactory
    PinMonitor = host.module("lmcache.v1.pin_monitor").PinMonitor

CHUNK = 64
"""Tokens in a chunk: two blocks of `blocks.BLOCK`."""


_NOTHING = dict.fromkeys(GPUConnectorInterface.__abstractmethods__, lambda *_, **__: None)
StockConnector = type("StockConnector", (GPUConnectorInterface,), _NOTHING)
"""Any connector but ours. LMCache's own cannot be built without a GPU; ours is told from others by its class."""


def lmcache_config(settings: Settings, chunk_tokens: int = CHUNK, **options: Any) -> LMCacheEngineConfig:
    """Return LMCache's parse of the YAML that `serve` writes; `options` go over it, `extra` over its extra_config."""
    values = yaml.safe_load(lmcache_yaml(settings, chunk_tokens))
    # gc: LMCache switches Python's garbage collection off for the whole process unless told not to.
    values |= {"max_local_cpu_size": 0.01, "py_enable_gc": True}
    values["extra_config"] |= options.pop("extra", {})
    path = settings.home / "lmcache.yaml"
    path.write_text(yaml.safe_dump(values | options))
    config = LMCacheEngineConfig.from_file(str(path))
    config.validate()
    return config


def lmcache_metadata(config: LMCacheEngineConfig, vllm_config: VllmConfig) -> LMCacheMetadata:
    """Return what LMCache makes of vLLM's configuration."""
    return VllmServiceFactory(config, vllm_config, "worker").get_or_create_metadata()


@contextmanager
def lmcache_engine(
    config: LMCacheEngineConfig, vllm_config: VllmConfig, connector: GPUConnectorInterface, *, leaves_threads: bool = False,
) -> Iterator[LMCacheEngine]:  # fmt: skip
    """Build LMCache's engine and load its plugins, with vLLM's configuration set as it is while KV caches register.

    At the end everything that LMCache keeps in the process is taken down, but for threads of what `leaves_threads`.
    """
    metadata = lmcache_metadata(config, vllm_config)
    threads = set(threading.enumerate())
    gc.freeze()  # LMCache collects garbage first, which takes half a second over everything vLLM has imported
    with quietly():
        engine = cache_engine.LMCacheEngineBuilder.get_or_create(
            ENGINE_NAME, config, metadata, connector, lambda tensor, _: tensor, lambda thing, _: thing
        )
    gc.unfreeze()
    try:
        with set_current_vllm_config(vllm_config), quietly():
            engine.post_init()
        yield engine
    finally:
        cache_engine.LMCacheEngineBuilder.destroy(ENGINE_NAME)
        engine.storage_manager.loop.close()
        PinMonitor.DestroyInstance()
        CartridgeBackend.refusal = None
        assert backend._store is None, "a store was left open"
        if not leaves_threads:  # they end on their own, a moment after they were told to
            until(lambda: set(threading.enumerate()) <= threads, timeout_s=5)


class Cartridge(NamedTuple):
    """A cartridge of noise, and a prompt that begins with it."""

    root: Path
    made: Made
    prompt: list[int]
    """Its token ids and others."""
    whole: int
    """Tokens in its whole chunks."""
    configs: dict[str, str]
    """The request configuration under which it is found."""

    @property
    def kv(self) -> torch.Tensor:
        return self.made.kv[:, :, : self.whole]


@cache
def shipped() -> Fingerprint:
    """Return the fingerprint of the shipped model, as an author's tools see it."""
    return CausalModel(str(MODEL_DIR)).fingerprint


def prepare(home: Path, cartridges: Mapping[str, dict[str, Any]], behind: int, **given: Any) -> dict[str, Cartridge]:
    """Register a cartridge for the shipped model of each of these forms, with prompts of `behind` tokens more."""
    found = {}
    for seed, (name, form) in enumerate(cartridges.items()):
        root, positions = home / "cartridges" / name, form["positions"]
        ids = np.random.default_rng(seed).integers(0, 640, positions + behind).tolist()
        given = {"chunk_tokens": CHUNK, "fingerprint": shipped()} | given
        made = make_artifact(root, cartridge_id=name, seed=seed, token_ids=ids[:positions], **given | form)
        Registry(home / "registry.sqlite").register(root)
        configs = tags(made.manifest.digest if made.manifest.kind == "trained" else None)
        found[name] = Cartridge(root, made, ids, positions // CHUNK * CHUNK, configs)
    return found


def plugin(engine: LMCacheEngine) -> CartridgeBackend:
    """Return our plugin as LMCache loaded it."""
    return engine.storage_manager.storage_backends[PLUGIN]


def tags(tag: str | None) -> dict[str, str]:
    """Return the request configuration of a request for the cartridge `tag`."""
    return {} if tag is None else {"lmcache.tag.cartridge": tag}


def keys_of(engine: LMCacheEngine, ids: list[int], configs: dict[str, Any] | None = None) -> list[Any]:
    """Return LMCache's keys of the whole chunks of ids, under a request configuration."""
    return [key for _, _, key in engine.token_database.process_tokens(tokens=ids, request_configs=configs)]


def look_up(engine: LMCacheEngine, ids: list[int], request: str, configs: dict[str, Any] | None = None) -> int:
    """Return how many tokens LMCache promises, asked as its lookup client and server ask it: by hashes, pinning."""
    chunks = list(engine.token_database.process_tokens(tokens=ids, make_key=False))
    return engine.lookup(
        hashes=[chunk_hash for _, _, chunk_hash in chunks],
        offsets=[end - start for start, end, _ in chunks],
        lookup_id=request,
        pin=True,
        request_configs=json.loads(json.dumps(configs)) if configs else None,
    )


def load(
    engine: LMCacheEngine,
    ids: list[int],
    promised: int,
    slots: torch.Tensor,
    request: str,
    configs: dict[str, Any] | None = None,
    cached: int = 0,
) -> int:
    """Load what a lookup promised into `slots` as vLLM's adapter does, and return how many tokens were loaded."""
    mask = torch.ones(len(ids), dtype=torch.bool)
    mask[: cached // engine.config.chunk_size * engine.config.chunk_size] = False
    loaded = engine.retrieve(
        ids[:promised], mask[:promised], kvcaches=[], slot_mapping=slots[:promised], vllm_cached_tokens=cached,
        request_configs=configs or {}, req_id=request,
    )  # fmt: skip
    engine.lookup_unpin(request)
    return int(loaded.sum())


def nothing_is_owed(store: CartridgeStore) -> bool:
    """Whether no chunk is leased or lent; asserts the store's invariants."""
    check(store)
    stats = store.cpu.stats()
    return stats.leased == stats.lent == 0
