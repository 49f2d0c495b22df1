"""Host: every name of vLLM and LMCache that they do not promise, in this file and the two beside it.
`host_api` has those of vLLM's API server, `host_inprocess` those of LMCache in vLLM's process.

A release which renamed one is refused at start, and never found by a request. Most are used at start anyway, and missed by
name there; `NAMES` lists the others, which `verify` resolves and tries. Nothing is imported until it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from blake3 import blake3

from ..errors import SettingsError, UnsupportedEngine
from ..settings import Settings, from_environment
from .contract import CONTROL_METHOD
from .versions import PROVEN, check_versions, versions

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

Part = Literal["api", "in-process", "multiprocess"]
"""What starts: the API server, or one of the two connectors."""


def start(part: Part) -> None:
    """Check the versions and every name of a part. Raises `UnsupportedEngine`.

    Whether unproven versions may run is read from the YAML that `LMCACHE_CONFIG_FILE` names, if there is one.
    """
    try:
        unproven = from_environment().unproven_versions
    except SettingsError:
        unproven = Settings().unproven_versions
    check_versions(unproven=unproven)
    verify(part)


def verify(part: Part) -> None:
    """Resolve and try every name that a part needs. Raises `UnsupportedEngine` with the name and the versions."""
    for path, is_sound in NAMES[part].items():
        try:
            problem = None if is_sound(_resolved(path)) else "it is not what it was"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            raise changed(path, problem)


def changed(name: str, problem: str) -> UnsupportedEngine:
    """Return the error for a name of vLLM's or LMCache's that is not what it was."""
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    proven = ", ".join(f"{name} {version}" for name, version in PROVEN.items())
    return UnsupportedEngine(
        f"cartridges need {name}, which has changed ({problem}). Found {found}; proven with {proven}"
    )


def module(path: str) -> Any:
    """Import a module of theirs: of LMCache's in-process code from where LMCache 0.5.7 has it, else from `path`."""
    moved = path.replace("lmcache.", "lmcache.inprocess.", 1)
    try:
        return import_module(moved)
    except ModuleNotFoundError as error:
        if not moved.startswith(str(error.name)):  # it is there, and misses something else
            raise
        return import_module(path)


def _resolved(path: str) -> Any:
    owner, _, attributes = path.partition(":")
    found = module(owner)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute of a live object of theirs. Raises `UnsupportedEngine` where there is none."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise changed(f"{type(owner).__name__}.{name}", str(error)) from None


# vLLM's worker.


def allow_amx() -> None:
    """Have Linux let this process use AMX, as vLLM's attention for CPU does.

    torch asks as it first multiplies several rows. A step of one token alone, behind injected KV, came first and ended the
    worker (vLLM 0.32).
    """
    module("torch.cpu")._init_amx()


def offer(path: str) -> None:
    """Have vLLM's worker say where this rank's store answers: at the control socket at `path`."""
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, CONTROL_METHOD, lambda worker: path)


def current_vllm_config() -> VllmConfig:
    """Return the configuration that vLLM has set in this process while it builds an engine."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def attention_layers(config: VllmConfig) -> Mapping[str, Any]:
    """Return the engine's attention layers, by name; vLLM has a model's experts in the same place."""
    layers = attribute(config.compilation_config, "static_forward_context")
    return {name: layer for name, layer in layers.items() if hasattr(layer, "get_kv_cache_spec")}


def layer_index(name: str) -> int:
    """Return the number of the layer that a name of vLLM's stands for."""
    from vllm.model_executor.models.utils import extract_layer_index

    return extract_layer_index(name)


def write_kv(layer: Any, keys: torch.Tensor, values: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Have an attention layer write K and V, `[T, H, D]` each, to these slots of a cache laid out as its own."""
    layer.impl.do_kv_cache_update(layer, keys, values, kv_cache, slots)


def latent_size(layer: Any) -> int | None:
    """Return the elements of the latent vectors that an attention layer caches, None for one that caches none."""
    impl = getattr(layer, "impl", None)
    return getattr(impl, "kv_lora_rank", None) if hasattr(impl, "do_kv_cache_update") else None


def write_latents(
    layer: Any, latents: torch.Tensor, keys: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Have a layer write latent vectors `[T, C]` and rotary keys `[T, 1, R]` to these slots of a cache like its own."""
    layer.impl.do_kv_cache_update(latents, keys, kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)


def rope_frequencies(
    rope_type: str, config: Any, layers: str | None, tokens: int | None = None
) -> tuple[list[float], float]:
    """Return the inverse frequencies and attention factor that transformers derives from a config, for a kind of layers.

    Where they depend on a prompt's length, those of one of `tokens`.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    of_kind = {"layer_type": layers} if layers else {}
    inverse, factor = ROPE_INIT_FUNCTIONS[rope_type](config, device="cpu", seq_len=tokens, **of_kind)
    return inverse.tolist(), factor


@contextmanager
def replaced(module: Any, name: str, make: Callable[[], Any]) -> Iterator[list[None]]:
    """Let a function of a module return what `make` does; yields a list with one entry for each call."""
    calls: list[None] = []

    def function(*_: Any, **__: Any) -> Any:
        calls.append(None)
        return make()

    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield calls
    finally:
        setattr(module, name, original)


# LMCache's own connector to its server.


@contextmanager
def model_name(name: str) -> Iterator[None]:
    """Let LMCache's connector call the model `name` in its keys; it looks the name up once, while it is built.

    Raises `UnsupportedEngine` where it did not: its keys would not tell engines apart.
    """
    from lmcache.integration.vllm import lmcache_mp_connector

    with replaced(lmcache_mp_connector, "get_dcp_decorated_model_name", lambda: name) as calls:
        yield
    if not calls:
        raise changed("lmcache_mp_connector:get_dcp_decorated_model_name", "the connector did not ask for it")


def lookup_key(model: str, world: int, token_ids: list[int], salt: str) -> Any:
    """Return the key of a lookup by the session `salt` for one chunk, under that salt."""
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

    return IPCCacheServerKey.from_token_ids(
        model, world, None, token_ids, 0, len(token_ids), salt, cache_salt=salt, num_kv_readers=1
    )


def rename_tokens(tracker: Any, rename: Callable[[list[int]], list[int]]) -> None:
    """Have LMCache make a request's keys of what `rename` returns for its token ids."""

    def ids() -> list[int]:
        return rename(type(tracker).get_token_ids(tracker))

    tracker.get_token_ids = ids
    # What LMCache 0.5.7 asks for.
    tracker.packed_token_ids = lambda: module("lmcache.v1.multiprocess.token_codec").pack_token_ids(ids())


def unlock_hits(adapter: Any, tracker: Any) -> None:
    """Have LMCache's server let go of what it found for a request."""
    is_packed = hasattr(type(tracker), "packed_token_ids")  # LMCache 0.5.7
    adapter.free_lookup_locks(
        tracker.packed_token_ids() if is_packed else tracker.get_token_ids(), start=0, end=tracker.num_lmcache_hit_tokens, request_id=tracker.request_id,
        cache_salt=tracker.cache_salt, request_configs=tracker.request_configs,
    )  # fmt: skip


def maps_caches(config: VllmConfig) -> bool:
    """Whether LMCache's server is to move blocks itself, as it does on GPUs unless it is told otherwise. On CPU it puts other
    memory behind the caches that it is shown.
    """
    extra = attribute(config.kv_transfer_config, "kv_connector_extra_config")
    mode = extra.get("lmcache.mp.mp_transfer_mode") or os.environ.get("LMCACHE_MP_TRANSFER_MODE", "")
    mode = str(getattr(mode, "value", mode)).lower()
    return mode == "lmcache_driven" or (mode in ("", "auto") and config.device_config.device_type == "cuda")


class Asked(Exception):
    """A trial has seen that it was asked."""


def _is_asked_for_trackers(connector: Any) -> bool:
    """Whether a lookup goes through the method that `CartridgeMPConnector` overrides to name the request's keys."""

    class Probe(connector):
        def __init__(self) -> None:
            """Build nothing."""

        def _get_or_create_request_tracker(self, request: Any) -> Any:
            raise Asked

    try:
        Probe().get_num_new_matched_tokens(object(), 0)
    except Asked:
        return True
    return False


def _names_by_tracker(make: Any) -> bool:
    """Whether what LMCache saves is named by the token ids that `rename_tokens` replaces."""
    from types import SimpleNamespace

    request = SimpleNamespace(
        request_id="r", cache_salt="", kv_transfer_params=None, sampling_params=None, all_token_ids=[1, 2],
        prompt_token_ids=[1, 2], num_prompt_tokens=2, mm_features=[],
    )  # fmt: skip
    tracker, asked = _resolved(_TRACKER)(request), list[int]()
    tracker.num_scheduled_tokens, tracker.allocated_block_ids = 2, {0: [1]}
    rename_tokens(tracker, asked.__iadd__)
    make(tracker, 2, [2])
    return asked == [1, 2]


def _is_whole(ours: Any) -> bool:
    """Whether a class of ours has every method that its base asks for. Raises `TypeError` with those that it has not."""
    return object.__new__(ours) is not None


def _puts_one_by_one(put: Any) -> bool:
    """Whether LMCache's CPU cache takes objects in through the method that `keep_from_adopting` replaces."""
    from types import SimpleNamespace

    taken: list[Any] = []
    put(SimpleNamespace(use_hot=True, submit_put_task=lambda *a, **_: taken.append(a)), ["key"], ["chunk"])
    return taken == [("key", "chunk")]


def server_hasher(chunk_tokens: int) -> Callable[[np.ndarray | list[int]], Iterator[int]]:
    """Return how LMCache's server names chunks, as numbers: by its default algorithm, which has no seed.

    Whether it does so is seen at each start, of a chunk that it looked up. Its `TokenHasher` takes lists alone, and several
    times as long.
    """
    size, seed = 4 * chunk_tokens, blake3(bytes(12)).digest()

    def hashes(token_ids: np.ndarray | list[int]) -> Iterator[int]:
        data, previous = np.asarray(token_ids, ">u4").tobytes(), seed
        for end in range(size, len(data) + 1, size):
            previous = blake3(previous + data[end - size : end]).digest()
            yield int.from_bytes(previous, "big")

    return hashes


CHAT: Any = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
"""The fields of a smallest chat request, but for the model."""
_CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector"
_SCHEDULER = "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPSchedulerAdapter"
_METADATA = "lmcache.integration.vllm.lmcache_mp_metadata"
_TRACKER = f"{_METADATA}:LMCacheMPRequestTracker"
_TRACKED = "cache_salt", "num_stored_tokens", "num_vllm_hit_tokens", "num_lmcache_hit_tokens", "max_offload_tokens"

NAMES: dict[Part, dict[str, Callable[[Any], Any]]] = {
    "api": {
        "vllm.exceptions:GenerationError": lambda kind: str(kind("x")) == "x",
        "vllm.exceptions:VLLMValidationError": callable,
        "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.to_chat_completion_request": callable,
        "vllm.entrypoints.serve.tokenize.protocol:TokenizeCompletionRequest": lambda kind: (
            kind(prompt="x").prompt == "x"
        ),
        "vllm.entrypoints.serve.tokenize.protocol:TokenizeChatRequest": lambda kind: (
            kind(messages=CHAT["messages"], add_generation_prompt=False, chat_template_kwargs={}).messages
        ),
        "vllm.v1.metrics.stats:PrefillStats": lambda kind: kind().num_external_cached_tokens == 0,
        "vllm.v1.engine:EngineCoreOutput.prefill_stats": lambda field: True,
        "vllm.renderers.online_renderer:OnlineRenderer.preprocess_chat": callable,
        "vllm.renderers.online_renderer:OnlineRenderer.render_responses": callable,
    },
    "in-process": {
        f"{__package__}.backend:CartridgeBackend": _is_whole,
        "lmcache.integration.vllm.vllm_v1_adapter:LoadSpec": lambda kind: kind(
            vllm_cached_tokens=1, lmcache_cached_tokens=2, can_load=False
        ),
        "lmcache.v1.storage_backend.local_cpu_backend:LocalCPUBackend.batched_submit_put_task": _puts_one_by_one,
        "vllm.distributed.parallel_state:get_tp_group": callable,
    },
    "multiprocess": {
        f"{_CONNECTOR}:LMCacheMPConnector": _is_asked_for_trackers,
        f"{_CONNECTOR}:LMCacheMPConnector._get_request_tracker": callable,
        **{f"{_TRACKER}.{name}": lambda value: not value for name in _TRACKED},
        f"{_TRACKER}.state": lambda state: state.name == "PREFETCHING",
        f"{_METADATA}:LMCacheMPRequestMetadata.GetStoreMetadata": _names_by_tracker,
        f"{_METADATA}:LMCacheMPConnectorMetadata": lambda kind: "requests" in vars(kind()),
        **{f"{_SCHEDULER}.{name}": bool for name in ("cleanup_lookup_result", "free_lookup_locks", "is_healthy")},
    },
}
"""By what needs them, the names that no start uses, as `module:attribute.attribute`, and a trial of what each stands for.

A trial that returns something false or raises has found a change.
"""
