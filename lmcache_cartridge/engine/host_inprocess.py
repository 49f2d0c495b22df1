"""Host, of LMCache in vLLM's process: names that it does not promise, of live objects. `host` has the rest and the list."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from .host import attribute, changed, module, replaced

_ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"


class InProcess:
    """LMCache behind vLLM's own connector."""

    def __init__(self, connector: Any) -> None:
        """Raises `UnsupportedEngine` where a part of it is not where it was."""
        self._adapter = attribute(connector, "_lmcache_engine")
        self._manager = attribute(self._adapter, "_manager")
        self._load_specs = attribute(self._adapter, "load_specs")

    @property
    def engine(self) -> Any:
        """LMCache's engine, None where it did not start."""
        return self._manager.lmcache_engine

    @property
    def failure(self) -> str:
        """Why LMCache did not start, empty where it says nothing."""
        return self._manager._init_failed_reason

    def backends(self) -> list[Any]:
        """Return the storage backends that LMCache has loaded."""
        storage = attribute(self.engine, "storage_manager")
        return [] if storage is None else list(attribute(storage, "storage_backends").values())

    def ask_first(self, kind: type) -> None:
        """Have LMCache ask the backends of a class before its own.

        It asks each backend once, for what is left of a prompt's chunks. So what it saved after a prefix is found only
        where the prefix was found before.
        """
        backends = attribute(attribute(self.engine, "storage_manager"), "storage_backends")
        for name in [name for name, backend in backends.items() if isinstance(backend, kind)]:
            backends.move_to_end(name, last=False)

    def name_layout(self, layout: str) -> None:
        """Put the layout of the chunks in LMCache's keys: what is saved in one may be found by engines of the same only.

        Raises `UnsupportedEngine` where the keys are not made with it.
        """
        self.engine.metadata.model_name += "#" + layout.replace("/", "-")
        named = [key.model_name for _, _, key in self.engine.token_database.process_tokens([0] * self.chunk_tokens)]
        if named != [self.engine.metadata.model_name]:
            raise changed("token_database.metadata", f"a chunk's key names the model {named}")

    @property
    def chunk_tokens(self) -> int:
        """LMCache's chunk size."""
        return attribute(self._adapter, "_lmcache_chunk_size")

    def failed_blocks(self) -> set[int]:
        """Return the blocks that LMCache could not load in this step."""
        return set(attribute(self._adapter, "_invalid_block_ids"))

    def skip_saving(self, request_id: str, until: int) -> None:
        """Have LMCache save nothing of a request before the position `until`, where it has nothing to load for it."""
        spec = self._load_specs.get(request_id)
        if spec is not None:
            spec.lmcache_cached_tokens = max(spec.lmcache_cached_tokens, until)

    def promise(self, request_id: str, computed: int, found: int, until: int) -> None:
        """Have LMCache take the positions up to `until` for found, until `settle` tells it that it has them up to `found`."""
        spec = module(_ADAPTER).LoadSpec(vllm_cached_tokens=computed, lmcache_cached_tokens=until, can_load=False)
        spec.has = found
        self._load_specs[request_id] = spec

    def settle(self, requests: Sequence[Any]) -> None:
        """Have LMCache load in a step what it has, of `requests` that more was promised for."""
        for spec in (request.load_spec for request in requests):
            if (has := getattr(spec, "has", None)) is not None:
                spec.lmcache_cached_tokens, spec.can_load = has, spec.can_load and has > spec.vllm_cached_tokens


def lmcache_engine() -> Any:
    """Return LMCache's engine in this vLLM worker, None outside of one."""
    from lmcache.integration.vllm.utils import ENGINE_NAME

    return module("lmcache.v1.cache_engine").LMCacheEngineBuilder.get(ENGINE_NAME)


def end_storage() -> None:
    """End the storage thread of LMCache's engine in this process, which would keep one that failed, and so the server, hanging.

    Where the scheduler refuses to start in the worker's process (`--distributed-executor-backend uni`), vLLM 0.32 does
    not end the worker, and the process would wait for that thread.
    """
    if "lmcache.integration.vllm.utils" not in sys.modules:
        return
    # Not by `stop_services`: that aborts in libzmq (LMCache 0.5.6), and the reason of the failure would be lost.
    if (engine := lmcache_engine()) is not None and engine.storage_manager is not None:
        engine.storage_manager.close()


def end_process(reason: str) -> NoReturn:
    """End this worker, and so the server, with the reason: LMCache drops a plugin that raises, and its threads would keep a
    process that wants to end.
    """
    print(f"lmcache-cartridge: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def keep_from_adopting(local_cpu: Any, is_lent: Callable[[Any], bool]) -> None:
    """Have LMCache's CPU cache take in no memory object that `is_lent`. Doing so again is no change.

    What a storage plugin returns, LMCache 0.5.6 puts there by reference, without a copy (`StorageManager.batched_get`):
    it would be held for good, and answered with when the plugin has something else.
    """
    put = attribute(local_cpu, "submit_put_task")
    if "submit_put_task" not in vars(local_cpu):
        local_cpu.submit_put_task = lambda key, chunk, *a, **k: None if is_lent(chunk) else put(key, chunk, *a, **k)


def over_ranks(blocks: set[int]) -> set[int]:
    """Return the union of what the tensor-parallel ranks pass, all of which must call this. Blocks until they do."""
    from torch import distributed
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return blocks
    found: list[set[int]] = [set()] * group.world_size
    distributed.all_gather_object(found, blocks, group=group.cpu_group)
    return set().union(*found)


def hasher(engine: Any) -> Callable[[np.ndarray | list[int]], list[int]]:
    """Return how LMCache names the chunks of a prompt. Raises `UnsupportedEngine` where it cannot be asked."""
    process = attribute(attribute(engine, "token_database"), "process_tokens")

    def hashes(token_ids: np.ndarray | list[int]) -> list[int]:
        return [chunk_hash for _, _, chunk_hash in process(tokens=np.asarray(token_ids).tolist(), make_key=False)]

    tokens = engine.config.chunk_size
    try:
        named = hashes(list(range(tokens + 1)))
    except (TypeError, ValueError) as error:
        raise changed("token_database.process_tokens", str(error)) from error
    if len(named) != 1 or not isinstance(named[0], int):
        raise changed("token_database.process_tokens", f"one chunk of {tokens} tokens is named {named}")
    return hashes


def transfer_kernel() -> tuple[Callable[..., None], Any, Any]:
    """Return the call by which LMCache moves chunks of all layers, its names of layouts, and of directions.

    Not among `NAMES`: where one is not there, `kernel.proven` refuses the kernel, and vLLM's ops are used.
    """
    native = module("lmcache.lmcache_native")
    return module("lmcache").device_ops.multi_layer_kv_transfer, native.EngineKVFormat, native.TransferDirection


@contextmanager
def own_connector(make: Callable[[], Any], *, in_worker: bool) -> Iterator[None]:
    """Let LMCache build its engine while this is active, with the connector to the engine's blocks that `make` returns.

    LMCache 0.5.6 has none for CPU, and those for GPUs write wrong KV. It looks `CreateGPUConnector` up at each call, so
    that is replaced for the call. Raises `UnsupportedEngine` where a worker's engine was built without asking for it.
    """
    sys.modules.setdefault(_ADAPTER, module(_ADAPTER))  # from where vLLM 0.32 imports it, before LMCache 0.5.7
    with replaced(module("lmcache.v1.gpu_connector"), "CreateGPUConnector", make) as calls:
        yield
    if in_worker and not calls:
        raise changed("lmcache.v1.gpu_connector:CreateGPUConnector", "LMCache did not ask for it")
