"""Host: every name of vLLM and LMCache that they do not promise, in this file and, of LMCache in-process, `host_inprocess`.

`NAMES` lists the names. `verify` resolves and tries those of one part when that part starts, so that a release which
renamed one is refused at once, by name, and never found by a request. Nothing is imported until it is asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import SettingsError, UnsupportedEngine
from ..settings import Settings, from_environment
from .contract import CONTROL_METHOD
from .versions import PROVEN, check_versions, versions

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig

Part = Literal["api", "worker", "in-process", "multiprocess", "adapter"]
"""What starts: the API server, a vLLM worker, one of the two connectors, or the adapter in LMCache's server."""


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


def _resolved(path: str) -> Any:
    module, _, attributes = path.partition(":")
    found = import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute of a live object of theirs. Raises `UnsupportedEngine` where there is none."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise changed(f"{type(owner).__name__}.{name}", str(error)) from None


# vLLM's API server.

_HANDLERS = (
    "openai_serving_chat", "openai_serving_chat_batch", "openai_serving_completion", "openai_serving_responses",
    "anthropic_serving_messages", "cohere_serving_chat_v2", "serving_tokens",
)  # fmt: skip
"""vLLM's request handlers that take what a client says of KV transfer to the engine."""


_SHOWING = ("serving_render", "serving_tokenization")
"""vLLM's handlers that return the tokens of a prompt."""


def wrap_handlers(
    state: Any, engine_client: Any, renderer: Callable[[Any], Any], engine: Callable[[Any], Any],
    showing: Callable[[Any], Any],
) -> None:  # fmt: skip
    """Put `renderer` and `engine` around what vLLM's request handlers, in the app's `state`, render and generate with,
    and `showing` around what those render with that return tokens.

    Raises `UnsupportedEngine` where a handler has no such thing.
    """
    for name in _SHOWING:
        if (serving := getattr(state, name, None)) is not None:
            serving.online_renderer = showing(attribute(serving, "online_renderer"))
    for name in _HANDLERS:
        if (serving := getattr(state, name, None)) is None:
            continue
        if not hasattr(serving, "online_renderer") or getattr(serving, "engine_client", None) is not engine_client:
            raise changed(f"online_renderer and engine_client of {name}", "one of them is not there")
        serving.online_renderer = renderer(serving.online_renderer)
    for serving in attribute(state, "_state").values():
        if getattr(serving, "engine_client", None) is engine_client:
            serving.engine_client = engine(engine_client)


def extend_models(
    state: Any, takes: Callable[[str], bool], answered: Callable[[], str | None],
    more: Callable[[], Awaitable[Mapping[str, str]]],
) -> list[str]:  # fmt: skip
    """Let vLLM's handlers accept model names that `takes` knows, and return the names that are served.

    `answered` is what a request's answer calls the model in the place of the first name, `more` the names that
    `GET /v1/models` lists beside those, with what each stands for. Raises `UnsupportedEngine` where a handler asks for
    models elsewhere.
    """
    from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelPermission

    models = attribute(state, "openai_serving_models")
    served = [path.name for path in attribute(models, "base_model_paths")]
    is_base, name, show = (attribute(models, n) for n in ("is_base_model", "model_name", "show_available_models"))
    for handler in _HANDLERS:
        if getattr(getattr(state, handler, None), "models", models) is not models:
            raise changed(f"models of {handler}", "it has others than the server")

    def model_name(lora_request: Any = None) -> str:
        return (None if lora_request else answered()) or name(lora_request)

    async def show_available_models() -> Any:
        shown = await show()
        shown.data += [
            ModelCard(id=name, root=root, parent=served[0], permission=[ModelPermission()])
            for name, root in (await more()).items()
        ]
        return shown

    models.is_base_model = lambda model: is_base(model) or takes(model)
    models.model_name = model_name
    models.show_available_models = show_available_models
    return served


async def control_paths(engine_client: Any) -> list[str]:
    """Return the control sockets of the workers of all engines that this API server may hand a request to.

    `collective_rpc` asks all engines under data parallelism and returns the first one's answer alone (vLLM 0.32).
    Raises `UnsupportedEngine` for an engine on another machine.
    """
    core = getattr(engine_client, "engine_core", None)
    if len(getattr(core, "core_engines", ())) < 2:
        return await engine_client.collective_rpc(CONTROL_METHOD)
    ask = attribute(core, "call_utility_all_async")
    paths = [path for engine in await ask("collective_rpc", CONTROL_METHOD, None, (), {}) for path in engine]
    if away := [path for path in paths if not Path(path).exists()]:
        raise UnsupportedEngine(
            f"{len(away)} of {len(paths)} workers are on another machine, where this API server cannot claim cartridges; "
            "start a server on each machine, and a router before them"
        )
    return list(dict.fromkeys(paths))


async def check_handlers(state: Any) -> None:
    """Ask every handler that takes cartridges for one that cannot be, and see that it is refused.

    Raises `UnsupportedEngine` where the request's field did not reach us: it would be ignored, and answered.
    """
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.exceptions import GracefulHTTPError

    model = state.openai_serving_models.base_model_paths[0].name
    chat: Any = {"model": model, **_CHAT}
    nothing: Any = {"cartridges": [""]}
    asked: dict[str, Callable[[Any], Any]] = {
        "openai_serving_completion": lambda s: s.create_completion(
            CompletionRequest(model=model, prompt="x", max_tokens=1, **nothing)
        ),
        "openai_serving_chat": lambda s: s.create_chat_completion(ChatCompletionRequest(**chat, **nothing)),
        "openai_serving_responses": lambda s: s.create_responses(
            ResponsesRequest(model=model, input="x", max_output_tokens=1, store=False, **nothing)
        ),
        "anthropic_serving_messages": lambda s: s.create_messages(
            AnthropicMessagesRequest(**chat, kv_transfer_params={"cartridge_id": ""})
        ),
    }
    for name, ask in asked.items():
        if (serving := getattr(state, name, None)) is None:
            continue
        try:
            reply = await ask(serving)
        except GracefulHTTPError as refusal:
            if str(refusal).startswith("cartridges.0"):
                continue
            reply = refusal
        raise changed(f"{name} and the field `cartridges` in its requests", f"it answers {reply!r:.200}")


def replace_connectors(ours: Mapping[str, tuple[str, str]]) -> None:
    """Have vLLM load our connectors, by module and class, under names of its own. Doing so again is no change."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, (module, class_name) in ours.items():
        if name not in KVConnectorFactory._registry:
            raise changed(f"the connector {name}", "vLLM does not know it")
        del KVConnectorFactory._registry[name]
        KVConnectorFactory.register_connector(name, module, class_name)


# vLLM's worker.


def is_connector_ours(transfer: KVTransferConfig) -> bool:
    """Whether the connector that vLLM takes by this configuration is one of ours, whatever its name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.get_connector_class(transfer).__module__.startswith(f"{__package__}.")


def add_to_workers(method: Callable[[Any], str]) -> None:
    """Give vLLM's worker class our method, unless `--worker-extension-cls` did."""
    from vllm.v1.worker.worker_base import WorkerBase

    if not hasattr(WorkerBase, CONTROL_METHOD):
        setattr(WorkerBase, CONTROL_METHOD, method)


def current_vllm_config() -> VllmConfig | None:
    """Return the configuration that vLLM has set in this process while it builds an engine."""
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def attention_layers(config: VllmConfig) -> Mapping[str, Any]:
    """Return the engine's attention layers, by name."""
    return attribute(config.compilation_config, "static_forward_context")


def layer_index(name: str) -> int:
    """Return the number of the layer that a name of vLLM's stands for."""
    from vllm.model_executor.models.utils import extract_layer_index

    return extract_layer_index(name)


def can_write(layer: Any) -> bool:
    """Whether an attention layer has an op that writes its KV cache; `probe` shows that it writes what it is given."""
    return hasattr(getattr(layer, "impl", None), "do_kv_cache_update")


def write_kv(layer: Any, keys: torch.Tensor, values: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Have an attention layer write K and V, `[T, H, D]` each, to these slots of a cache laid out as its own."""
    layer.impl.do_kv_cache_update(layer, keys, values, kv_cache, slots)


def rope_frequencies(kind: str, config: Any) -> tuple[list[float], float]:
    """Return the inverse frequencies and attention factor that transformers derives from a model's config."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
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

    return IPCCacheServerKey(
        model, world, None, tuple(token_ids), 0, len(token_ids), salt, cache_salt=salt, num_kv_readers=1
    )


def may_look_up_again(tracker: Any) -> bool:
    """Whether a request that LMCache tells a miss for is still where another lookup makes sense."""
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestState

    return tracker.state == LMCacheMPRequestState.PREFETCHING


def let_go_of_hits(tracker: Any) -> None:
    """Have LMCache retrieve nothing for a request, as if vLLM had what LMCache found."""
    tracker.num_vllm_hit_tokens = max(tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens)


def _is_asked_for_trackers(connector: Any) -> bool:
    """Whether a lookup goes through the method that `CartridgeMPConnector` overrides to name the request's keys."""

    class Asked(Exception):
        pass

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


def _puts_one_by_one(put: Any) -> bool:
    """Whether LMCache's CPU cache takes objects in through the method that `keep_from_adopting` replaces."""
    from types import SimpleNamespace

    taken: list[Any] = []
    put(SimpleNamespace(use_hot=True, submit_put_task=lambda *a, **_: taken.append(a)), ["key"], ["chunk"])
    return taken == [("key", "chunk")]


def _is_memory_object(kind: Any) -> bool:
    import torch

    described = _resolved("lmcache.v1.memory_management:MemoryObjMetadata")(
        torch.Size([1]), torch.uint8, 0, 1, ref_count=1, shapes=[torch.Size([1])], dtypes=[torch.uint8]
    )
    made = kind(torch.zeros(1, dtype=torch.uint8), described, None)
    return made.get_ref_count() == 1 and made.tensor.numel() == 1


def _is_hasher(hasher: Any) -> bool:
    """Whether LMCache's server still names chunks by the chain of hashes that it was seen to use."""
    from blake3 import blake3

    seed = blake3(bytes(12)).digest()
    first = blake3(seed + b"\0\0\0\1\0\0\0\2").digest()
    return list(hasher(2, "blake3").compute_chunk_hashes([1, 2, 3])) == [first]


def _reads(**fields: Any) -> Callable[[Any], bool]:
    """Return a check that a request class takes these fields and has what we read of it."""
    return lambda kind: kind(model="m", **fields).kv_transfer_params is None


_CHAT: Any = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
_CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector"
_SCHEDULER = "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPSchedulerAdapter"
_METADATA = "lmcache.integration.vllm.lmcache_mp_metadata"
_TRACKER = f"{_METADATA}:LMCacheMPRequestTracker"
_TRACKED = "cache_salt", "max_offload_tokens", "num_stored_tokens", "num_vllm_hit_tokens", "num_lmcache_hit_tokens"

NAMES: dict[Part, dict[str, Callable[[Any], Any]]] = {
    "api": {
        "vllm.exceptions:GracefulHTTPError": lambda kind: str(kind("x", 400)) == "x",
        "vllm.exceptions:RetryableRequestError": lambda kind: str(kind("x")) == "x",
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest": _reads(prompt="x"),
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": _reads(**_CHAT),
        "vllm.entrypoints.openai.responses.protocol:ResponsesRequest": _reads(input="x"),
        "vllm.entrypoints.anthropic.protocol:AnthropicMessagesRequest": _reads(**_CHAT),
        "vllm.entrypoints.serve.engine.protocol:ModelCard": lambda kind: (
            kind(id="m:a", root="a@1", parent="m").parent == "m"
        ),
        "vllm.entrypoints.serve.engine.protocol:ModelPermission": lambda kind: kind(),
        "vllm.renderers.online_renderer:OnlineRenderer.preprocess_chat": callable,
    },
    "worker": {
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory._registry": lambda names: (
            {"LMCacheConnectorV1", "LMCacheMPConnector"} <= set(names)
        ),
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.get_connector_class": callable,
        "vllm.config:get_current_vllm_config_or_none": lambda get: get() or True,
        "vllm.model_executor.models.utils:extract_layer_index": lambda index: index("model.layers.3.attn") == 3,
        "vllm.v1.worker.worker_base:WorkerBase": callable,
        "transformers.modeling_rope_utils:ROPE_INIT_FUNCTIONS": lambda kinds: "llama3" in kinds,
    },
    "in-process": {
        "lmcache:torch_device_type": lambda kind: isinstance(kind, str),
        "lmcache.v1.gpu_connector:CreateGPUConnector": callable,
        "lmcache.integration.vllm.utils:ENGINE_NAME": lambda name: isinstance(name, str),
        "lmcache.v1.cache_engine:LMCacheEngineBuilder.get": lambda get: get("nobody") is None,
        "lmcache.integration.vllm.vllm_v1_adapter:LoadSpec": lambda kind: kind(
            vllm_cached_tokens=1, lmcache_cached_tokens=2, can_load=False
        ),
        "lmcache.v1.memory_management:TensorMemoryObj": _is_memory_object,
        "lmcache.v1.storage_backend.local_cpu_backend:LocalCPUBackend.batched_submit_put_task": _puts_one_by_one,
        "vllm.distributed.parallel_state:get_tp_group": callable,
    },
    "multiprocess": {
        f"{_CONNECTOR}:LMCacheMPConnector._get_or_create_request_tracker": callable,
        f"{_CONNECTOR}:LMCacheMPConnector": _is_asked_for_trackers,
        f"{_CONNECTOR}:LMCacheMPConnector._get_request_tracker": callable,
        f"{_CONNECTOR}:get_dcp_decorated_model_name": callable,
        **{f"{_TRACKER}.{name}": lambda value: not value for name in _TRACKED},
        f"{_TRACKER}.state": lambda state: state.name == "PREFETCHING",
        f"{_METADATA}:LMCacheMPRequestState.PREFETCHING": lambda _: True,
        f"{_METADATA}:LMCacheMPConnectorMetadata": lambda kind: "requests" in vars(kind()),
        **{f"{_SCHEDULER}.{name}": bool for name in ("cleanup_lookup_result", "free_lookup_locks", "is_healthy")},
        "lmcache.v1.multiprocess.custom_types:IPCCacheServerKey": lambda _: (
            lookup_key("m", 1, [1, 2], "salt").cache_salt == "salt"
        ),
    },
    "adapter": {
        "lmcache.v1.multiprocess.token_hasher:TokenHasher": _is_hasher,
        "lmcache.lmcache_native:Bitmap": lambda kind: not kind(2).test(1),
        "lmcache.v1.distributed.internal_api:L2StoreResult": lambda kind: kind(True, 0) is not None,
        "lmcache.v1.platform:create_event_notifier": callable,
        "lmcache.v1.distributed.api:ObjectKey": lambda kind: kind(b"h", "m", 1, 0, "salt").cache_salt == "salt",
    },
}
"""By what needs them, every such name as `module:attribute.attribute`, and a trial of what it stands for.

A trial that returns something false or raises has found a change. Some names are of live objects and so are looked at
where those are: `wrap_handlers`, `model_name`, and in `host_inprocess`.
"""
