"""CartridgePlugin: teaches vLLM's OpenAI server the request field `cartridges` and adds `/v1/cartridges`.

A `vllm.endpoint_plugins` entry point. It wraps the renderer that every endpoint's request passes through after
authentication. What it leans on there vLLM does not promise, so it is checked at start, and the server does not start
where it is missing: a `cartridges` field that nobody reads would be answered without them.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import GracefulHTTPError, RetryableRequestError
from vllm.logger import init_logger

from ..engine.client import ControlClient, RemoteClaim
from ..engine.contract import COMPUTED, CONTROL_METHOD, GRANT, TAG
from ..errors import CartridgeError, UnsupportedEngine
from ..memory.tier import LOAD_SECONDS
from ..settings import Settings, from_environment
from ..sources.reads import Reads
from . import headers, scrape
from .admin import add_routes
from .canary import Canaries
from .gate import COUNTS, Gate
from .metrics import Outcome, StatusCollector, requests
from .request import (
    MAX_READS,
    REQUIRED,
    Found,
    NeedsReading,
    Reference,
    Refusal,
    Resolver,
    Selection,
    Unservable,
    check_params,
)
from .router import Router

logger = init_logger("vllm.lmcache_cartridge.api")

_ASK_AGAIN_S = 0.05
"""How often a read is asked for that another one keeps from starting."""
_LAST_POLL_S = 0.5
"""How long the workers may take to say how far a claim is, when its time is up."""
_HANDLERS = (
    "openai_serving_chat", "openai_serving_chat_batch", "openai_serving_completion", "openai_serving_responses",
    "anthropic_serving_messages", "cohere_serving_chat_v2", "serving_tokens",
)  # fmt: skip
"""vLLM's request handlers that take what a client says of KV transfer to the engine."""


class Granted(dict):
    """`kv_transfer_params` as this server made them: no client can send one.

    The claim ends when the engine has what it needs of it, at the latest when nobody knows of the request any more.
    """

    def __init__(self, own: dict[str, Any], selection: Selection, claim: RemoteClaim, prompts: int) -> None:
        """`own` are the client's own parameters, `prompts` those of the request that the engine has to get."""
        super().__init__(own | {TAG: selection.tag, GRANT: {"must_inject": selection.must_inject}})
        self.selection, self._claim, self._prompts = selection, claim, prompts
        self._cached: int | None = None

    def note(self, cached_tokens: int) -> None:
        """Tell the client how many leading positions of a prompt were not computed; of several prompts the least."""
        if self._cached is None or cached_tokens < self._cached:
            self._cached = cached_tokens
            headers.note(self.selection.used(cached_tokens))

    def used(self) -> None:
        """Note that the engine needs the memory for one prompt less."""
        self._prompts -= 1
        if self._prompts <= 0:
            self._claim.release()


class Apart(dict):
    """`kv_transfer_params` as this server made them for a prompt that no cartridge may answer, nor a part of it."""

    def __init__(self, own: dict[str, Any]) -> None:
        """`own` are the client's own parameters."""
        super().__init__(own | {TAG: COMPUTED})
        self.own = own or None


class CartridgePlugin:
    """The plugin; its `required_tasks` keep it off servers that generate nothing."""

    name = "cartridges"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        """Read the settings. vLLM would log an error here and go on without the plugin, so `init_state` raises it."""
        self.secret = secrets.token_bytes(32)
        try:
            self.settings: Settings = from_environment()
        except CartridgeError as error:
            self._failed: CartridgeError | None = error
        else:
            self._failed = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes and the response headers."""
        app.add_middleware(Gate, plugin=self)
        headers.attach(app)
        add_routes(app, self)
        self._numbers = StatusCollector(LOAD_SECONDS)
        scrape.attach(app, self._numbers)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Wrap what requests pass through. Raises `UnsupportedEngine`, which ends the server's start."""
        if self._failed is not None:
            raise self._failed
        self.engine = engine_client
        self.resolver, self.router = Resolver(self.settings), Router(self.settings)
        self._workers = ControlClient(await self._control_paths())
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="cartridge-request")
        self._reads = Reads(MAX_READS)
        for rank in (ranks := await self.call("numbers")):
            logger.info("rank %d serves %d cartridges", rank["rank"], rank["served"])
        self.canaries = Canaries(self, ranks[0]["chunk_tokens"])
        await self.canaries.begin()
        for name in _HANDLERS:
            serving = getattr(state, name, None)
            if serving is None:
                continue
            if not hasattr(serving, "online_renderer") or getattr(serving, "engine_client", None) is not engine_client:
                raise UnsupportedEngine(f"vLLM's {name} has no online_renderer or engine_client to wrap; use vLLM 0.32")
            serving.online_renderer = CartridgeRenderer(serving.online_renderer, self)
        for serving in state._state.values():
            if getattr(serving, "engine_client", None) is engine_client:
                serving.engine_client = GuardedEngine(engine_client, self)
        with requests().paused():
            await probe(state)
        self._following = asyncio.create_task(scrape.follow(self._numbers, self._look))

    async def _look(self) -> list[Any]:
        """Return the workers' numbers, and have those tried whose text came in prompts that do not name them."""
        ranks = await self.call("numbers")
        self.canaries.follow(ranks)
        return ranks

    async def _control_paths(self) -> list[str]:
        try:
            return await self.engine.collective_rpc(CONTROL_METHOD)
        except Exception as error:
            raise UnsupportedEngine(
                f"the workers have no cartridges: {error}. Start vLLM with the options that `lmcache-cartridge serve MODEL "
                "--print` shows, or without LMCACHE_CONFIG_FILE"
            ) from error

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call every worker's store, past all requests that wait for something, and return each rank's result."""
        return await self._workers.ask(method, *args)

    async def resolve(self, references: Sequence[Reference]) -> Selection:
        """Return the selection; only those whose manifest is not at hand wait for it to be read.

        Raises `Refusal`, 503 where that takes longer than `ready_timeout_s`.
        """
        loop, found = asyncio.get_running_loop(), {}
        try:
            async with asyncio.timeout(self.settings.ready_timeout_s):
                while True:
                    try:
                        return await loop.run_in_executor(self._pool, self.resolver.resolve, references, found)
                    except NeedsReading as needed:
                        found[needed.reference] = await self._read(needed)
        except TimeoutError:
            raise Refusal(503, "the cartridge's manifest is still being read", retry_after_s=5) from None

    async def _read(self, needed: NeedsReading) -> Found:
        """Read a manifest that is not at hand, together with all others that want it. Raises `Refusal`."""
        read = partial(self.resolver.find, needed.reference)
        while (reading := self._reads.join(needed.reference, [needed.location], read)) is None:
            await asyncio.sleep(_ASK_AGAIN_S)
        return await asyncio.wrap_future(reading)

    async def admit(self, selection: Selection) -> RemoteClaim | None:
        """Return a claim on the KV once it may be used, None where the documents' text takes its place.

        Waits, for `ready_timeout_s` at most, until the chunks are in memory; others pass meanwhile. What can be
        computed is not waited for where memory is short or its source fails. The first time the engine's canary is
        awaited too, and where it is not passed it is as if there were no KV. Raises `Refusal` where there is no text,
        or the settings do not allow it.
        """
        if self.settings.admin and selection.afresh and selection.tag is not None:
            for tag in dict.fromkeys((*selection.afresh, selection.tag)):
                await self.call("evict", tag)
        claim, problem = None, self.canaries.known(selection)
        if problem is None:
            claim = await self.hold(selection)
            if claim is None or selection.tag is None:
                return claim
            try:
                problem = await self.canaries.check(selection)
            except BaseException:
                claim.release()
                raise
            if problem is None:
                return claim
            claim.release()
        computable = selection.must_inject == 0 or self.settings.on_miss == "document"
        if selection.document_ids is None or not computable:
            raise problem
        return None

    async def hold(self, selection: Selection) -> RemoteClaim | None:
        """Return a claim as `admit` does, without asking the engine whether it answers right from the KV."""
        claim = self._workers.claim(selection.tag, selection.located)
        try:
            if selection.tag is None or await self._wait(claim, selection):
                return claim
        except BaseException:
            claim.release()
            raise
        claim.release()
        return None

    async def _wait(self, claim: RemoteClaim, selection: Selection) -> bool:
        """Wait until a claim may be used, True, or the documents' text has to do, False. Raises `Refusal`."""
        deadline, pause = time.monotonic() + self.settings.ready_timeout_s, 0.002
        while True:
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), _LAST_POLL_S)):
                    ranks = await asyncio.wrap_future(claim.begin())
            except TimeoutError:
                ranks = []  # not told in time
            refused = next((rank for rank in ranks if rank["refused"]), None)
            if refused is not None and refused["mismatch"]:
                raise selection.refused(refused)
            late = time.monotonic() > deadline
            if ranks and all(rank["ready"] for rank in ranks):
                return True
            loading = [rank for rank in ranks if not rank["ready"] and not rank["opening"]]
            stuck = any(rank["resident"] == rank["admitted"] for rank in loading)
            if selection.must_inject == 0 and (late or refused is not None or stuck):
                return True  # what is missing is computed, from the documents' own tokens
            if late or refused is not None:
                if self.settings.on_miss == "document" and selection.document_ids is not None:
                    return False
                if refused is not None:
                    raise selection.refused(refused)
                eta_s = max((5.0 if rank["eta_s"] is None else rank["eta_s"] for rank in ranks), default=5.0)
                raise Refusal(
                    503, f"{selection.names} is still being loaded", retry_after_s=min(max(math.ceil(eta_s), 1), 60)
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.2)


class CartridgeRenderer:
    """vLLM's renderer, with cartridges put before what it renders."""

    def __init__(self, inner: Any, plugin: CartridgePlugin) -> None:
        self._inner, self._plugin = inner, plugin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def render_chat(self, request: Any, **kwargs: Any) -> Any:
        """Render a chat request."""
        return await self._render(self._inner.render_chat, request, kwargs, lambda result: result[1])

    async def render_completion(self, request: Any, **kwargs: Any) -> Any:
        """Render a completion request."""
        return await self._render(self._inner.render_completion, request, kwargs, lambda result: result)

    async def render_responses(self, request: Any, **kwargs: Any) -> Any:
        """Render a Responses request."""
        return await self._render(self._inner.render_responses, request, kwargs, lambda result: [result.engine_input])

    async def _render(self, render: Any, request: Any, kwargs: dict[str, Any], inputs: Any) -> Any:
        with requests().request() as outcome:
            selection = await self._select(request)
            if selection is not None:
                return await self._render_with(selection, render, request, kwargs, inputs, outcome)
        return await render(request, **kwargs)

    async def _render_with(
        self, selection: Selection, render: Any, request: Any, kwargs: dict[str, Any], inputs: Any, outcome: Outcome
    ) -> Any:
        try:
            selection, claim = await self._claim(request, selection)
        except Refusal as refusal:
            raise _http(refusal) from None
        except CartridgeError:
            logger.exception("%s could not be prepared", selection.names)
            raise GracefulHTTPError("cartridges are not available", HTTPStatus.SERVICE_UNAVAILABLE) from None
        try:
            params = request.kv_transfer_params
            request.kv_transfer_params = None  # the inner renderer has no use for our keys
            result = await render(request, **kwargs)
            engine_inputs = inputs(result) if not hasattr(result, "error") else []
            for engine_input in engine_inputs:
                self._prepend(engine_input, request, selection, claim is not None)
            request.kv_transfer_params = _grant(params, selection, claim, len(engine_inputs))
        except BaseException:
            if claim is not None:
                claim.release()
            raise
        is_granted = isinstance(request.kv_transfer_params, Granted)
        headers.note(selection.used() if claim is not None else selection.replaced, is_pending=is_granted)
        outcome.value = "failed" if not engine_inputs else "used" if claim is not None else "document"
        if claim is not None and selection.tag is not None:
            requests().injected(len(selection.token_ids) * len(engine_inputs))
        return result

    async def _claim(self, request: Any, selection: Selection) -> tuple[Selection, RemoteClaim | None]:
        """Return a claim and what it is on: of an id the newest version that the engine serves. Raises `Refusal`."""
        refusals: dict[str, Unservable] = {}
        while True:
            check_request(request, selection)
            try:
                with requests().wait():
                    return selection, await self._plugin.admit(selection)
            except Unservable as refusal:
                refusals[selection.tag] = refusal
                newest = next(iter(refusals.values()))
                if refusal.digest is None:
                    raise newest from None
                self._plugin.resolver.pass_over(refusal.digest)
                selection = await self._plugin.resolve(selection.references)
                if selection.tag in refusals:
                    raise newest from None
                logger.warning_once(f"{selection.names} answers instead: {refusal}")

    async def _select(self, request: Any) -> Selection | None:
        """Return the request's cartridges, None if it has none. Raises `GracefulHTTPError` for a bad request."""
        params = getattr(request, "kv_transfer_params", None)
        if isinstance(params, Granted):
            return params.selection
        if isinstance(params, Apart):
            params = params.own
        try:
            if "kv_transfer_params" in (getattr(request, "vllm_xargs", None) or ()):
                raise Refusal(400, "vllm_xargs.kv_transfer_params: name cartridges in `cartridges`")
            references = self._plugin.router.choose(
                getattr(request, "model_extra", None) or {}, params, getattr(request, "model", None), headers.api_key()
            )
            if not references:
                if self._plugin.settings.required and headers.path() not in COUNTS:
                    raise Refusal(400, REQUIRED)
                return None
            return await self._plugin.resolve(references)
        except Refusal as refusal:
            raise _http(refusal) from None
        except CartridgeError:
            logger.exception("a request's cartridges could not be resolved")
            raise GracefulHTTPError("cartridges are not available", HTTPStatus.SERVICE_UNAVAILABLE) from None

    def _prepend(self, engine_input: dict[str, Any], request: Any, selection: Selection, granted: bool) -> None:
        if engine_input.get("type") != "token":
            raise GracefulHTTPError("cartridges go with text prompts only", HTTPStatus.UNPROCESSABLE_ENTITY)
        own = engine_input["prompt_token_ids"]
        head = selection.token_ids if granted else selection.document_ids
        bos = getattr(self._inner.renderer.tokenizer, "bos_token_id", None)
        while own and own[0] == bos:  # /v1/responses renders two where the chat template has one (vLLM 0.32)
            own = own[1:]
        limit = self._inner.model_config.max_model_len
        if not own:
            raise GracefulHTTPError("a prompt must have text beside its cartridges", HTTPStatus.BAD_REQUEST)
        if len(head) + len(own) >= limit:
            raise GracefulHTTPError(
                f"{len(head)} positions of cartridges and {len(own)} prompt tokens leave nothing of the context of "
                f"{limit}", HTTPStatus.BAD_REQUEST,
            )  # fmt: skip
        engine_input["prompt_token_ids"] = [*head, *own]
        engine_input["cache_salt"] = selection.salt(getattr(request, "cache_salt", None), self._plugin.secret)
        engine_input.pop("prompt_token_offsets", None)


class GuardedEngine:
    """vLLM's engine client, which turns a cartridge lost on the way into its document or a clear error."""

    def __init__(self, inner: Any, plugin: CartridgePlugin) -> None:
        self._inner, self._plugin = inner, plugin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, prompt: Any, params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        """Generate. Where the engine ends the request because its KV was lost, nothing was sampled from it.

        Raises `GracefulHTTPError` for KV transfer parameters that only this server may make.
        """
        granted = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
        if not isinstance(granted, Granted | Apart):
            try:
                check_params(granted)
                if "cartridge_id" in (granted or ()):
                    raise Refusal(400, "kv_transfer_params.cartridge_id is not read here; name cartridges at the top")
                if self._plugin.settings.required and not headers.is_noted():
                    raise Refusal(400, REQUIRED)
            except Refusal as refusal:
                raise _http(refusal) from None
        if isinstance(granted, Apart):
            async for output in self._inner.generate(prompt, params, request_id, **kwargs):
                yield output
            return
        if not isinstance(granted, Granted):
            async for output in self._generate_plain(prompt, params, request_id, kwargs):
                yield output
            return
        selection, begun, lost = granted.selection, set(), []
        # A document that is preempted later is computed; a trained cartridge cannot be. Of several answers to one prompt
        # the first may come before the last has begun.
        to_the_end = selection.must_inject > 0 or (getattr(params, "n", 1) or 1) > 1
        try:
            async with aclosing(self._inner.generate(prompt, params, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    if gone := _lost(output):
                        if not begun or selection.must_inject or not begun.isdisjoint(gone):
                            break
                        lost += gone  # of several answers, those that have not begun can be asked for alone
                        output.outputs = [o for o in output.outputs if o.index not in gone]
                        if not output.outputs:
                            continue
                    granted.note(output.num_cached_tokens or 0)
                    if not begun and not to_the_end:
                        granted.used()
                    begun.update(o.index for o in output.outputs)
                    yield output
                else:
                    if not lost:
                        return
        finally:
            if to_the_end or not begun:
                granted.used()
        needs_leave = selection.must_inject > 0
        is_broken = bool(begun) and not lost
        if is_broken or selection.document_ids is None or (needs_leave and self._plugin.settings.on_miss != "document"):
            headers.retry_after(1)
            requests().lost("error")
            raise RetryableRequestError(f"the engine lost {selection.names} or could not go on with it; ask again")
        headers.note(selection.replaced)
        requests().lost("document")
        own = prompt["prompt_token_ids"][len(selection.token_ids) :]
        prompt = {**prompt, "prompt_token_ids": [*selection.document_ids, *own]}
        async for output in self._compute(prompt, params, {}, request_id, kwargs, lost):
            yield output

    async def _generate_plain(
        self, prompt: Any, params: Any, request_id: str, kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """Generate for a request that names no cartridge. Its prompt may still begin with a document that has KV, and
        what of that is lost on the way is computed."""
        begun = False
        async with aclosing(self._inner.generate(prompt, params, request_id, **kwargs)) as outputs:
            async for output in outputs:
                if not begun and _lost(output) and isinstance(prompt, dict):
                    break
                begun = True
                yield output
            else:
                return
        own = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params") or {}
        async for output in self._compute(prompt, params, own, request_id, kwargs):
            yield output

    async def _compute(
        self, prompt: Any, params: Any, own: dict[str, Any], request_id: str, kwargs: dict[str, Any],
        only: Sequence[int] = (),
    ) -> AsyncIterator[Any]:  # fmt: skip
        """Generate with nothing injected: all answers, or of several `only` these, one after the other."""
        plain = params.clone()
        plain.extra_args = (params.extra_args or {}) | {"kv_transfer_params": own | {TAG: COMPUTED}}
        if not only:
            async for output in self._inner.generate(prompt, plain, f"{request_id}-document", **kwargs):
                yield output
        for index in only:
            alone = plain.clone()
            alone.n = 1
            if plain.seed is not None:
                alone.seed = plain.seed + index  # as vLLM gives each of several answers its own
            async for output in self._inner.generate(prompt, alone, f"{request_id}-document-{index}", **kwargs):
                for answer in output.outputs:
                    answer.index = index
                yield output


def _lost(output: Any) -> list[int]:
    """Return which of a prompt's answers the engine has ended because it could not load what it had promised."""
    return [answer.index for answer in output.outputs if answer.finish_reason == "error"]


async def probe(state: State) -> None:
    """Ask every handler that takes cartridges for one that cannot be, and see that it is refused.

    Raises `UnsupportedEngine` where the request's field did not reach us: it would be ignored, and answered.
    """
    model = state.openai_serving_models.base_model_paths[0].name
    chat = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    nothing: Any = {"cartridges": [""]}
    asked = {
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
        raise UnsupportedEngine(
            f"vLLM's {name} does not show us the field `cartridges` ({reply!r:.200}); use vLLM 0.32"
        )


def check_request(request: Any, selection: Selection) -> None:
    """Raise `Refusal` for request options under which vLLM would compute a cartridge's positions, or lose them."""

    def asks(name: str) -> Any:
        return getattr(request, name, None)

    if any(key.startswith("lmcache.tag.") for key in asks("kv_transfer_params") or ()):
        raise Refusal(422, "a tag of the client's own keeps cartridges away; use cache_salt to be kept apart")
    if asks("use_beam_search"):
        raise Refusal(422, "beam search drops what the engine must know of cartridges")
    if asks("prompt_embeds") is not None:
        raise Refusal(422, "cartridges go with text prompts only")
    if any(getattr(tool, "type", "function") != "function" for tool in asks("tools") or ()):
        raise Refusal(422, "built-in tools render a request several times; cartridges go with function tools only")
    if not selection.must_inject:
        return
    if asks("prompt_logprobs") is not None or (asks("echo") and asks("logprobs") is not None):
        raise Refusal(422, "prompt logprobs need the prompt computed, and a trained cartridge cannot be")
    if 0 in (asks("max_tokens"), asks("max_completion_tokens"), asks("max_output_tokens")):
        raise Refusal(422, "nothing to generate")


def _grant(
    params: dict[str, Any] | None, selection: Selection, claim: RemoteClaim | None, prompts: int
) -> dict[str, Any] | None:
    """Return the client's own parameters, less the names, and what lets the engine find the KV, or without a claim not."""
    own = {k: v for k, v in (params or {}).items() if k != "cartridge_id"}
    if selection.tag is None:
        return own or None
    if claim is None:
        return Apart(own)
    return Granted(own, selection, claim, prompts)


def _http(refusal: Refusal) -> GracefulHTTPError:
    if refusal.retry_after_s is not None:
        headers.retry_after(refusal.retry_after_s)
    return GracefulHTTPError(str(refusal), HTTPStatus(refusal.status))
