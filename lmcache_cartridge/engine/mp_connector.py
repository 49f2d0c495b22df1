"""CartridgeMPConnector: LMCache's multiprocess connector with what cartridges need: proof, names and all or nothing.

With `kv_both` LMCache saves what vLLM computes, as without us: plain prompts, and what comes after cartridges. What a
cartridge should have had and did not get is never saved.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from ..errors import UnsupportedEngine
from ..memory import tiles
from ..memory.quantise import Quantiser, quantiser
from . import host
from .client import ControlClient, Held
from .contract import CONTROL, SKIP_SAVE
from .control import fetch_tail
from .describe import answering, computed_dtype, fingerprint_of, own_layers, started, transfer_of
from .latent import check_latents
from .probe import Written, written_layout, written_rules
from .report import Report, check_ids, confirm, key_name
from .salts import adapter_salt, check_salt, grant_of, is_apart, key_salt, own_shifts, shared_salt, shifted
from .tier_events import TellsTiers
from .versions import versions
from .whole import InjectsWhole, Whole, positions_to_inject

if TYPE_CHECKING:
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.lmcache_cartridge.mp_connector")


_RETRY_S, _PAUSE_S = 4.0, 0.1
"""How long a cartridge that is in memory is looked up again after a miss, and the pauses.

LMCache 0.5.6 makes room in its own memory once a second, a fifth of it each time unless it is told otherwise.
"""


_CHECK_TIMEOUT_S = 60.0
"""How long LMCache's server may take for the lookup that shows how it names chunks."""


class CartridgeMPConnector(TellsTiers, InjectsWhole, LMCacheMPConnector):
    """Tells the adapter what this engine is, names its keys, and never lets a trained cartridge be computed."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Called by vLLM. Raises `UnsupportedEngine` for a configuration under which cartridges are not safe."""
        self._control = transfer_of(vllm_config).get_from_extra_config(CONTROL, "")
        kv_cache_config = started(vllm_config, kv_cache_config, "multiprocess")
        self._engine = _describe(vllm_config, kv_cache_config)
        self._retries: dict[str, tuple[float, float]] = {}
        """Of requests whose cartridge LMCache had no room for at its last look: the monotonic times of the next one, and after
        which a miss counts.
        """
        self._loading: set[str] = set()
        """Requests for which LMCache loads, and those that ended meanwhile, until LMCache says that it has saved them."""
        self._keys: dict[str, _Keys] = {}
        self._config = vllm_config
        with host.model_name(self._engine.model_name):
            super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._chunk = self.scheduler_adapter.lmcache_tokens_per_chunk
            self.whole = Whole(self._chunk, vllm_config.cache_config.block_size)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find out how this engine writes KV, and tell the adapter. Raises `UnsupportedEngine`: the start ends."""
        try:
            host.allow_amx()
            names = sorted(answering(kv_caches), key=host.layer_index)
            kv_caches = own = {name: kv_caches[name] for name in names}
            layers, rules = host.attention_layers(self._config), {}
            if self._engine.fingerprint.planes == 1:
                check_latents(kv_caches, layers, self._engine.fingerprint)
                layout = "heads"
            else:
                if kv_caches[names[0]].dtype == torch.uint8:
                    rules = written_rules(kv_caches, layers, computed_dtype(self._config, torch.uint8))
                layout, kv_caches = self._shown(kv_caches, layers, rules)
            super().register_kv_caches(kv_caches)
            quantised = quantiser([rules[name].rule for name in names]) if rules else None
            control, self._reported = self._confirm(layout, quantised)
            store, dtype = ControlClient([control]), own[names[0]].dtype
            self.write_tails(
                lambda tag: fetch_tail(store, tag, dtype), [(layers[name], own[name]) for name in names], quantised,
                computed_dtype(self._config, dtype),
            )  # fmt: skip
            host.offer(control)
            self.tell_tiers(control)
        except Exception:
            self.shutdown()  # LMCache's threads would keep the failed process, and so the server, hanging
            raise

    def _shown(
        self, kv_caches: dict[str, torch.Tensor], layers: Mapping[str, Any], rules: Mapping[str, Written]
    ) -> tuple[str, dict[str, torch.Tensor]]:
        """Return the layout in which LMCache moves chunks, and the caches as LMCache is shown them.

        Tiles have no rows of tokens, as which LMCache would move them. It is shown one head of words, so that a block of a
        layer is one run of bytes.
        """
        layout = written_layout(kv_caches, layers, rules=rules)
        if not tiles.is_tiled(layout) or host.maps_caches(self._config):
            return layout, kv_caches
        layout = written_layout(kv_caches, layers, in_blocks=True, rules=rules)
        shown = {
            name: cache.view(len(cache), 1, cache.shape[2], -1).view(tiles.WORD) for name, cache in kv_caches.items()
        }
        return layout, shown

    def _confirm(self, layout: str, quantised: Quantiser | None) -> tuple[str, Held]:
        parallel, layers = self._config.parallel_config, own_layers(self._config)
        rank, world = parallel.rank % parallel.world_size, parallel.world_size
        if self._engine.fingerprint.planes == 1:  # every tensor-parallel rank has all of it, and LMCache keeps one
            rank, world = self.worker_adapter.worker_id, self.worker_adapter.world_size
        report = msgspec.structs.replace(
            self._engine,
            chunk_tokens=self.worker_adapter.lmcache_tokens_per_chunk,
            layout=layout,
            rank=rank,
            world=world,
            layers=(layers.start, layers.stop),
            quantiser=quantised,
        )
        logger.info("this engine writes KV as %s; its keys at LMCache are those of %s", layout, report.model_name)
        return confirm(self._control, report, self._look_up_check())

    def _look_up_check(self) -> str:
        """Have LMCache's server look up a chunk that nobody has, so that our adapter sees its key; return its salt."""
        adapter, salt = self.worker_adapter, check_salt()
        client, ids = adapter.req_client, check_ids(adapter.lmcache_tokens_per_chunk)
        deadline = time.monotonic() + _CHECK_TIMEOUT_S
        key = host.lookup_key(self._engine.model_name, adapter.world_size, ids, salt)
        client.lookup(key, 1).result(timeout=_CHECK_TIMEOUT_S)
        while client.query_prefetch_status(salt).result(timeout=_CHECK_TIMEOUT_S) is None:
            if time.monotonic() > deadline:
                raise UnsupportedEngine(f"LMCache's server did not answer a lookup within {_CHECK_TIMEOUT_S:g} s")
            time.sleep(0.01)
        client.end_session(salt)
        return salt

    def wait_for_save(self) -> None:
        """Have LMCache save what this step computed, less what rests on a tail that could not be written."""
        self.metadata.requests = [
            one for one in self.metadata.requests if one.direction != "STORE" or one.request_id not in self.spoilt
        ]
        super().wait_for_save()

    # The scheduler's side.

    def _get_or_create_request_tracker(self, request: Request) -> LMCacheMPRequestTracker:
        tracker = super()._get_or_create_request_tracker(request)
        params = request.kv_transfer_params or {}
        if request.request_id not in self._keys:
            self._keys[request.request_id] = _keys(request, self._chunk)
        keys = self._keys[request.request_id]
        tracker.cache_salt = keys.salt
        if keys.own:
            host.rename_tokens(tracker, keys.renamed)
        if positions_to_inject(request):  # found whole or not at all
            tracker.need_full_lookup = True  # LMCache 0.5.7: from its first token on, whatever vLLM has of it
        # LMCache 0.5.6 knows skip_save in the workers only, and leaves out of its memory what lies behind this limit.
        if params.get(SKIP_SAVE):
            tracker.max_offload_tokens = 0
        return tracker

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return what LMCache found; for a trained cartridge all of it, whether found or not.

        What a claim holds in memory is asked for again where LMCache misses it. Nothing can compute a trained cartridge's
        positions. Where they are not all there, they are claimed and reported as not loaded in the same step, so vLLM
        ends the request (`kv_load_failure_policy: fail`) before it samples.
        """
        name = request.request_id
        needed = 0 if self._engine.groups else positions_to_inject(request)
        if time.monotonic() < self._retries.get(name, (0.0,))[0]:
            return None, True
        matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if matched is None:
            return matched, is_async
        tracker, found = self._get_request_tracker(name), num_computed_tokens + matched
        if found < self._resident(request) and self._look_up_again(tracker):
            return None, True
        self._retries.pop(name, None)
        whole = needed // self._chunk * self._chunk
        tracker.num_stored_tokens = max(tracker.num_stored_tokens, whole)  # not LMCache's to keep
        is_async = is_async and matched > 0
        until = needed and self.whole.owes(request, num_computed_tokens, found, is_async=is_async)
        if not until:
            return matched, is_async
        if found >= whole:
            return until - num_computed_tokens, is_async
        # What LMCache did find is let go: as if vLLM had it, so that nothing is retrieved into a request that ends, and
        # nothing saved of what it computes after positions that nobody filled.
        tracker.num_vllm_hit_tokens = max(tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens)
        tracker.max_offload_tokens = 0
        return until - num_computed_tokens, False

    def _resident(self, request: Request) -> int:
        """Return how many leading positions the request's claim has in memory, in whole chunks as LMCache finds them."""
        resident = grant_of(request.kv_transfer_params).get("resident", 0)
        return max(resident, positions_to_inject(request)) // self._chunk * self._chunk

    def _look_up_again(self, tracker: LMCacheMPRequestTracker) -> bool:
        """Have LMCache look a request up once more, after a pause; False when it has missed long enough.

        LMCache 0.5.6 tells a miss where another request for the same chunks brought them into its memory between its
        two looks at it, and where its memory is full at the moment.
        """
        now = time.monotonic()
        _, until = self._retries.get(tracker.request_id, (now, now + _RETRY_S))
        if now > until or not self.scheduler_adapter.is_healthy or tracker.state.name != "PREFETCHING":
            return False
        self._retries[tracker.request_id] = now + _PAUSE_S, until
        if tracker.num_lmcache_hit_tokens:
            host.unlock_hits(self.scheduler_adapter, tracker)
            tracker.num_lmcache_hit_tokens = tracker.num_stored_tokens = 0
        self.scheduler_adapter.cleanup_lookup_result(tracker.request_id)
        return True

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Return what the workers do in this step.

        While a cartridge waits for room in LMCache's memory nothing more is saved there: what is saved is faster to take
        the room that LMCache makes. Requests that go on are saved later.
        """
        metadata = super().build_connector_meta(scheduler_output)
        stores = [one for one in metadata.requests if one.direction == "STORE"]
        if transfer_of(self._config).is_kv_producer:  # others are told of nothing that is saved
            self._loading |= {one.request_id for one in metadata.requests if one.direction != "STORE"}
        for store in stores if self._retries else ():
            metadata.requests.remove(store)
            self._get_request_tracker(store.request_id).num_stored_tokens = store.op.start
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers told.

        vLLM lets go of a request that ended while LMCache loaded for it as soon as that is done. LMCache 0.5.6 tells of it too
        that it has saved it, and vLLM, which would let go of it then as well, or before that is done, ends.
        """
        super().update_connector_output(connector_output)
        self._loading -= (connector_output.finished_recving or set()) & self._keys.keys()
        saved = connector_output.finished_sending or set()
        connector_output.finished_sending, self._loading = saved - self._loading, self._loading - saved

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request."""
        name = request.request_id
        self._retries.pop(name, None)
        self._keys.pop(name, None)
        return super().request_finished(request, block_ids)


class _Keys(NamedTuple):
    """What tells a request's keys at LMCache from those of others with the same tokens."""

    salt: str
    own: tuple[int, ...] = ()
    """Its tenant's `own_shifts`, for the tokens from `start` on."""
    start: int = 0

    def renamed(self, token_ids: list[int]) -> list[int]:
        return shifted(token_ids, self.start, self.own)


def _keys(request: Request, chunk_tokens: int) -> _Keys:
    params, lora_request = request.kv_transfer_params, request.lora_request
    salt = key_salt(params, request.cache_salt)
    shared = shared_salt(salt)
    if is_apart(params, lora_request):
        return _Keys(adapter_salt(salt, lora_request))
    positions = grant_of(params).get("positions")
    if shared in (None, salt) or positions is None:
        return _Keys(salt)
    return _Keys(shared, own_shifts(salt, chunk_tokens), positions // chunk_tokens * chunk_tokens)


def _describe(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Report:
    """Return what the configuration tells of an engine, in every process alike."""
    groups = kv_cache_config.kv_cache_groups
    specs: list[Any] = [group.kv_cache_spec for group in groups]
    known = FullAttentionSpec, SlidingWindowSpec, *((MLAAttentionSpec,) if len(specs) == 1 else ())
    if strange := {type(spec).__name__ for spec in specs if type(spec) not in known}:
        raise UnsupportedEngine(f"the model caches {', '.join(sorted(strange))}, not K and V of every token")
    kinds = {(s.block_size, s.num_kv_heads, s.head_size, s.dtype) for s in specs}
    if len(kinds) != 1:
        raise UnsupportedEngine(f"the model's KV caches are of {len(kinds)} kinds, and a cartridge's KV is of one")
    [(block_tokens, _, _, cached)] = kinds
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if (layers := vllm_config.model_config.get_total_num_hidden_layers()) % stages:
        raise UnsupportedEngine(
            f"LMCache's server has one size for the chunks of all stages, and {layers} layers do not divide among "
            f"{stages}; serve in-process, or with another --pipeline-parallel-size"
        )
    dtype = computed_dtype(vllm_config, cached)
    own = sum(len(group.layer_names) for group in groups)
    fingerprint = fingerprint_of(vllm_config, dtype, None if stages > 1 else range(own))
    # Of several groups vLLM 0.32 cannot be told which blocks of a trained cartridge were not loaded.
    order = sorted(tuple(sorted(map(host.layer_index, group.layer_names))) for group in groups[1:] and groups)
    allow_trained = transfer_of(vllm_config).kv_load_failure_policy == "fail" and not order
    kind = vllm_config.cache_config.cache_dtype if dtype != cached else None  # the scales are among the weights
    name = key_name(
        vllm_config.model_config.model, fingerprint, block_tokens, allow_trained, versions(), stages, kind, order
    )
    return Report(name, fingerprint, allow_trained, stages=stages, groups=tuple(order))
