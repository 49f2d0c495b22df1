"""CartridgeConnector: vLLM's LMCacheConnectorV1 with the checks and the injector that cartridges need.

This module is imported in every vLLM process and must not import lmcache: on CPU that import breaks vLLM's
compilation of Triton stubs when it comes too early (vLLM 0.32).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from vllm.logger import init_logger

from . import host, host_inprocess
from .saving import Lost, keep_apart
from .tier_events import TellsTiers
from .whole import InjectsWhole, Whole, positions_to_inject

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.lmcache_cartridge.connector")


class CartridgeConnector(TellsTiers, InjectsWhole, LMCacheConnectorV1):
    """Stops the server, with the reason, where LMCache would go on without cartridges or with wrong KV."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Called by vLLM. Raises `UnsupportedEngine` for a configuration under which cartridges are not safe."""
        try:
            from .describe import started
            from .inject import EngineWriteConnector

            kv_cache_config = started(vllm_config, kv_cache_config, "in-process")
            with host_inprocess.own_connector(EngineWriteConnector, in_worker=role == KVConnectorRole.WORKER):
                super().__init__(vllm_config, role, kv_cache_config)
            self._config = vllm_config
            self._lmcache = host_inprocess.InProcess(self)
            if role == KVConnectorRole.SCHEDULER:
                self.whole = Whole(self._lmcache.chunk_tokens, vllm_config.cache_config.block_size)
            self._lost = Lost(vllm_config.cache_config.block_size)
        except Exception:
            host_inprocess.end_storage()
            raise

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Choose the injector for these caches, let LMCache load its plugins, and make sure that ours is there.

        Raises `UnsupportedEngine` otherwise, which ends the server's start.
        """
        from .describe import answering

        try:
            self._register(answering(kv_caches))
        except Exception:
            host_inprocess.end_storage()
            raise

    def _register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from ..errors import UnsupportedEngine
        from .backend import CartridgeBackend, worker_store
        from .control import ControlServer

        if self._lmcache.engine is None:
            raise UnsupportedEngine(f"LMCache did not start: {self._lmcache.failure}")
        host.allow_amx()
        self._bind_injector(kv_caches)
        super().register_kv_caches(kv_caches)
        if not any(isinstance(backend, CartridgeBackend) for backend in self._lmcache.backends()):
            unnamed = "storage_plugins, or a flat key of extra_config, does not name it; see `lmcache-cartridge config lmcache.yaml`"
            raise UnsupportedEngine(
                f"LMCache did not load the cartridge plugin: {CartridgeBackend.refusal or self._lmcache.failure or unnamed}"
            )
        self._lmcache.ask_first(CartridgeBackend)
        control = ControlServer(worker_store).path
        host.offer(control)
        self.tell_tiers(control)

    def _bind_injector(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from ..memory.layout import ChunkShape
        from .backend import worker_store
        from .describe import computed_dtype, own_layers, saves

        engine = self._lmcache.engine
        layers, planes, tokens, heads, head_size = engine.metadata.kv_shape
        dtype = str(engine.metadata.kv_dtype).removeprefix("torch.")
        shape = ChunkShape(heads, layers, tokens, head_size, dtype, planes)
        first = own_layers(self._config).start
        injector, computed = engine.gpu_connector, computed_dtype(self._config, engine.metadata.kv_dtype)
        injector.bind(
            kv_caches, host.attention_layers(self._config), shape, saves=saves(self._config), first_layer=first,
            computed=computed,
        )  # fmt: skip
        self.write_tails(lambda tag: worker_store().tail(tag), injector.layers, injector.quantiser, computed)
        quantised = f"/{injector.quantiser.digest}" if injector.quantiser else ""
        self._lmcache.name_layout(injector.layout + quantised)

    def shutdown(self) -> None:
        """End LMCache's storage thread. LMCache's own connector does not (vLLM 0.32), and an engine that may take its time
        to stop, `--shutdown-timeout`, then hangs for all of it.
        """
        host_inprocess.end_storage()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Have LMCache load what this step needs, and note what it could not.

        LMCache 0.5.6 loads nothing, and reports nothing, for a context without attention metadata, of which it reads no
        more. vLLM replays a step as one CUDA graph outside of any, and hands the metadata over as a keyword alone.
        """
        self._lmcache.settle(self.metadata.requests)
        if forward_context.attn_metadata is None:
            forward_context = replace(forward_context, attn_metadata=kwargs.get("attn_metadata") or {})
        super().start_load_kv(forward_context, **kwargs)
        # vLLM may take and clear them before it has LMCache save.
        self._failed = self.failed | self._lmcache.failed_blocks()

    def wait_for_save(self) -> None:
        """Have LMCache save what this step computed, less what rests on KV that could not be loaded."""
        self._lost.withhold(self.metadata.requests, self._failed)
        super().wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Forget requests that have ended."""
        self._lost.forget(finished_req_ids)
        return super().get_finished(finished_req_ids)

    def on_new_request(self, request: Request) -> None:
        """Keep what LMCache saves for a request from those of another `cache_salt`."""
        super().on_new_request(request)
        keep_apart(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return what LMCache found; for a trained cartridge all of it, whether found or not.

        Nothing can compute a trained cartridge's positions. Where they are not all there, the missing ones are claimed
        and cannot be loaded, so vLLM ends the request (`kv_load_failure_policy: fail`) before it samples a token.
        """
        keep_apart(request)  # a session that goes on has new parameters
        matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        found = num_computed_tokens + (matched or 0)
        until = self.whole.owes(request, num_computed_tokens, found)
        if until is None:
            if not matched:
                self._lmcache.skip_saving(request.request_id, positions_to_inject(request))
            return matched, is_async
        self._lmcache.promise(request.request_id, num_computed_tokens, found, until)
        return until - num_computed_tokens, False
