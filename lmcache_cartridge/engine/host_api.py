"""Host, of vLLM's API server: names that it does not promise, most of live objects. `host` has the rest and the list."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ArtifactError, UnsupportedEngine
from .contract import CONTROL_METHOD
from .host import CHAT, attribute, changed

_HANDLERS = (
    "openai_serving_chat", "openai_serving_chat_batch", "openai_serving_completion", "openai_serving_responses",
    "anthropic_serving_messages", "cohere_serving_chat_v2", "serving_tokens",
)  # fmt: skip
"""vLLM's request handlers that take what a client says of KV transfer to the engine."""


def wrap_handlers(
    state: Any, engine_client: Any, renderer: Callable[[Any], Any], engine: Callable[[Any], Any],
    showing: Callable[[Any], Any],
) -> None:  # fmt: skip
    """Put `renderer` and `engine` around what vLLM's request handlers, in the app's `state`, render and generate with,
    and `showing` around what renders where tokens alone are returned.

    Raises `UnsupportedEngine` where a handler has no such thing.
    """
    if (serving := getattr(state, "serving_render", None)) is not None:
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


class Around:
    """Something of vLLM's with methods of ours in the place of some of its own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Cached(int):
    """Leading tokens of a prompt that were not computed."""

    external: int
    """How many of them the connector brought; vLLM had the others, before those."""


def share(start: int, positions: int, cached_tokens: int) -> str:
    """Return what is told of a cartridge of so many `positions` from `start` on, of a prompt whose first `cached_tokens`
    were not computed: what the connector injected, and what vLLM had in its prefix cache, as `Cached` divides them.
    """
    end, local = start + positions, cached_tokens - getattr(cached_tokens, "external", cached_tokens)
    cached = max(min(end, local) - start, 0)
    injected = max(min(end, cached_tokens) - max(start, local), 0)
    return f"positions={positions};injected={injected}" + (f";cached={cached}" if cached else "")


def split_cached(engine_client: Any) -> None:
    """Have `num_cached_tokens` of an engine's outputs be `Cached`. Raises `UnsupportedEngine`."""
    processor = attribute(engine_client, "output_processor")
    process = attribute(processor, "process_outputs")

    def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for stats in filter(None, (output.prefill_stats for output in outputs)):
            stats.num_cached_tokens = cached = Cached(stats.num_cached_tokens)
            cached.external = stats.num_external_cached_tokens
        return process(outputs, *args, **kwargs)

    processor.process_outputs = process_outputs


def before_shutdown(engine_client: Any, wait: Callable[[float], None]) -> None:
    """Have vLLM call `wait` once, with how many seconds what runs may take, before it stops the engine.

    vLLM's API server stops its engine first of all when a signal comes, in a thread, and serves until that is done.
    Raises `UnsupportedEngine`.
    """
    stop, timeout_s = attribute(engine_client, "shutdown"), attribute(engine_client.vllm_config, "shutdown_timeout")

    def shutdown(timeout: float | None = None) -> None:
        engine_client.shutdown = stop
        if not engine_client.errored:
            wait(timeout_s)
        stop(timeout=timeout)

    engine_client.shutdown = shutdown


def refuse_sleep(engine_client: Any, reason: str) -> None:
    """Have vLLM answer whoever sends its engine to sleep with 409 and a reason."""
    from vllm.exceptions import GracefulHTTPError

    async def sleep(*_: Any, **__: Any) -> None:
        raise GracefulHTTPError(reason, HTTPStatus.CONFLICT)

    attribute(engine_client, "sleep")
    engine_client.sleep = sleep


def extend_models(state: Any, takes: Callable[[str], bool]) -> list[str]:
    """Let vLLM's handlers accept model names that `takes` knows, and return the names that are served.

    Raises `UnsupportedEngine` where a handler asks for models elsewhere.
    """
    models = attribute(state, "openai_serving_models")
    served = [path.name for path in attribute(models, "base_model_paths")]
    is_base = attribute(models, "is_base_model")
    for handler in _HANDLERS:
        if getattr(getattr(state, handler, None), "models", models) is not models:
            raise changed(f"models of {handler}", "it has others than the server")

    models.is_base_model = lambda model: is_base(model) or takes(model)
    return served


async def tokenized(raw_request: Any, **asked: Any) -> list[int]:
    """Return the token ids that vLLM's `/tokenize` makes of a `prompt` or of `messages`.

    Raises `ArtifactError` with its reason where it does not.
    """
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
    from vllm.exceptions import VLLMValidationError

    handler = attribute(raw_request.app.state, "serving_tokenization")
    kind = TokenizeChatRequest if "messages" in asked else TokenizeCompletionRequest
    try:
        reply = await handler.create_tokenize(kind(**asked), raw_request)
    except (ValueError, VLLMValidationError) as problem:
        raise ArtifactError(str(problem)) from None
    if (error := getattr(reply, "error", None)) is not None:
        raise ArtifactError(error.message)
    return reply.tokens


def chat_messages(body: Any, turns: list[Any]) -> list[Any]:
    """Return the messages that vLLM renders for a body of `/v1/messages` with other `turns`, of which the system's is one."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    asked = AnthropicMessagesRequest(**body | {"system": None, "messages": turns})
    return AnthropicServingMessages.to_chat_completion_request(asked).messages


async def control_paths(engine_client: Any) -> list[str]:
    """Return the control sockets of the workers of all engines that this API server may hand a request to.

    `collective_rpc` asks all engines under data parallelism and returns the first one's answer alone (vLLM 0.32).
    Raises `UnsupportedEngine` for an engine on another machine.
    """
    core = getattr(engine_client, "engine_core", None)
    if len(getattr(core, "core_engines", ())) < 2:
        paths = await engine_client.collective_rpc(CONTROL_METHOD)
    else:
        ask = attribute(core, "call_utility_all_async")
        paths = [path for engine in await ask("collective_rpc", CONTROL_METHOD, None, (), {}) for path in engine]
    if away := [path for path in paths if not Path(path).exists()]:
        raise UnsupportedEngine(
            f"{len(away)} of {len(paths)} workers are on another machine, where this API server cannot claim cartridges; "
            "start a server on each machine, and a router before them"
        )
    # Ranks that share one store, those of latent attention in multiprocess mode, have one socket.
    return list(dict.fromkeys(paths))


def retryable(message: str, status: int) -> Exception:
    """Return the error of a request that may be sent again, which vLLM answers with `status`.

    vLLM has a class for it since 0.32; before that the answer's `type` is `InternalServerError`.
    """
    from vllm.exceptions import GenerationError

    kind = getattr(sys.modules[GenerationError.__module__], "RetryableRequestError", GenerationError)
    error = kind(message)
    error.status_code = HTTPStatus(status)
    return error


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
    chat: Any = {"model": model, **CHAT}
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


def choose_connectors(choose: Callable[[Any], tuple[str, str] | None]) -> None:
    """Have vLLM take the connector, by module and class, that `choose` returns for a transfer configuration; its own choice
    where that is None. Doing so again is no change.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    theirs = KVConnectorFactory.get_connector_class
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def get_connector_class(cls: Any, kv_transfer_config: Any) -> Any:
        if (ours := choose(kv_transfer_config)) is None:
            return theirs(kv_transfer_config)
        return getattr(import_module(ours[0]), ours[1])

    KVConnectorFactory.get_connector_class = classmethod(get_connector_class)  # type: ignore[method-assign, assignment]
