"""Wrap: vLLM's renderer and engine client with cartridges, for every endpoint whose request names them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger

from ..engine.contract import COMPUTED, TAG
from ..engine.host_api import Around, retryable
from ..engine.withdrawals import Withdrawals, apart
from ..errors import CartridgeError
from ..settings import Settings
from . import http
from .adapters import Adapters, Prefix
from .admission import Admission
from .chat import BEHIND, ChatRenderer
from .claim import Claim, Computed, Grant
from .marks import find
from .metrics import Outcome, requests
from .request import REQUIRED, Reference, Refusal, check_params
from .resolve import Selection

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from .making import Maker

logger = init_logger("vllm.lmcache_cartridge.serve.wrap")


SHOWN = {"cartridge_id": "these token ids were shown; name the cartridge where an answer is wanted"}
"""KV transfer parameters of a rendered request, which `GuardedEngine` refuses."""
COMPUTE = Selection((), (), (), ())
"""What a request selects by `"cartridges": false`: that nothing is injected."""


def _rendering(how: str, has: Callable[[Any], Any]) -> Any:
    """Return what renders by vLLM's method `how`; `has` returns the engine's inputs of its result."""

    async def render(self: CartridgeRenderer, request: Any, **kwargs: Any) -> Any:
        return await self._render(how, request, kwargs, has)

    return render


class CartridgeRenderer(Around):
    """vLLM's renderer, with cartridges put before what it renders."""

    def __init__(self, inner: Any, admission: Admission) -> None:
        super().__init__(inner)
        self._admission = admission

    render_chat = _rendering("render_chat", lambda result: result[1])
    render_completion = _rendering("render_completion", lambda result: result)
    render_responses = _rendering("render_responses", lambda result: [result.engine_input])

    async def _render(self, how: str, request: Any, kwargs: dict[str, Any], has: Any) -> Any:
        """Render a request by vLLM's method `how`; `has` returns the engine's inputs of what that returned, if it is no error."""

        def inputs(result: Any) -> Any:
            return () if hasattr(result, "error") else has(result)

        with requests().request() as outcome, _refusals_as_http(self._admission.settings):
            selection = await self._select(request)
            if selection is not None and selection is not COMPUTE:
                chat = selection.chat
                inner = self.inner if chat is None else ChatRenderer(self.inner, chat)
                render = partial(getattr(inner, how), request, **kwargs)
                return await self._render_with(selection, render, request, inputs, outcome)
        result = await getattr(self.inner, how)(request, **kwargs)
        engine_inputs = inputs(result)
        if self._admission.maker and await self._read_marked(self._admission.maker, request, engine_inputs, selection):
            return result
        if selection is COMPUTE:
            for engine_input in engine_inputs:
                own_salt = getattr(request, "cache_salt", None)
                engine_input["cache_salt"] = COMPUTE.salt(own_salt, self._admission.secret)
            request.kv_transfer_params = Computed(request.kv_transfer_params or {})
        return result

    async def _select(self, request: Any) -> Selection | None:
        """Return the request's cartridges, None if it has none. Raises `Refusal` and `CartridgeError`."""
        params = getattr(request, "kv_transfer_params", None)
        if isinstance(params, Grant):
            return params.claim.selection
        if isinstance(params, Computed):
            params = params.own
        exchange = http.current()
        fields = exchange.fields | (getattr(request, "model_extra", None) or {})
        model, router = getattr(request, "model", None), self._admission.router
        is_computed = fields.get("cartridges") is False
        if is_computed:
            check_params(params)
            check_request(request, COMPUTE)
            if "cartridge_id" in (params or ()) or exchange.named or router.named_by(model):
                raise Refusal(400, "`cartridges` is false, and the request names cartridges elsewhere")
        elif references := router.choose(fields, params, model, exchange.named):
            exchange.tenants = http.tenants_of(getattr(request, "cache_salt", None), exchange.api_key)
            return await self._admission.resolve(references)
        if (self._admission.settings.required or exchange.is_required) and exchange.path not in http.COUNTS:
            raise Refusal(400, REQUIRED)
        return COMPUTE if is_computed else None

    async def _render_with(self, selection: Selection, render: Any, request: Any, inputs: Any, outcome: Outcome) -> Any:
        async with self._admission.admit(
            selection, partial(check_request, request), getattr(request, "model", None)
        ) as claim:
            params = request.kv_transfer_params
            request.kv_transfer_params = None  # the inner renderer has no use for our keys
            result = await render()
            engine_inputs = inputs(result)
            selection = claim.selection
            head = selection.document_ids if claim.is_text else selection.token_ids
            assert head is not None  # a claim is on the text only where there is one
            for engine_input in engine_inputs:
                self._join(head, engine_input)
                engine_input["cache_salt"] = selection.salt(self._own_salt(request), self._admission.secret)
            request.kv_transfer_params = claim.grant(params, len(engine_inputs), self._own_salt(request))
        self._admission.resolver.contexts.used.update(manifest.id for manifest in selection.manifests)
        outcome.value = "failed" if not engine_inputs else "document" if claim.is_text else "used"
        if isinstance(request.kv_transfer_params, Grant):
            http.current().is_pending = True
            requests().positions.inc(selection.positions * len(engine_inputs))
        else:
            http.note(selection.replaced if claim.is_text else selection.used())
        return result

    async def _read_marked(
        self, maker: Maker, request: Any, engine_inputs: Sequence[dict[str, Any]], named: Selection | None
    ) -> bool:
        """Have a prompt that begins with a context by its client's marks read it; return whether it does.

        What is marked is kept once the engine answers. No request is refused for its marks.
        """
        exchange, params = http.current(), request.kv_transfer_params
        exchange.keep = partial(maker.keep, Prefix([]), [], "")
        if not exchange.marked or named is not None or [each.get("type") for each in engine_inputs] != ["token"]:
            return False
        (engine_input,) = engine_inputs
        ids, rendered = engine_input["prompt_token_ids"], {**engine_input}
        is_anthropic = exchange.path == http.MESSAGES

        async def behind() -> list[dict[str, Any]]:
            engine_input.update({"prompt_token_ids": ids[len(selection.token_ids) :], BEHIND: True})
            return [engine_input]

        with requests().request() as outcome, suppress(Refusal, CartridgeError):
            check_request(request, COMPUTE)
            adapter = await self._admission.adapters.of(request.model)
            if adapter is not None:
                adapter.check_digest()
            marks = await find(
                self.inner.render_chat, request, exchange.marked, ids, maker.chunk, is_anthropic=is_anthropic
            )
            exchange.tenants = http.tenants_of(request.cache_salt, exchange.api_key)
            exchange.keep = partial(maker.keep, Prefix(ids, None, adapter), marks, exchange.tenants[0])
            end = marks[-1].tokens if marks else 0
            found = await asyncio.to_thread(maker.longest, Prefix(ids[:end], None, adapter), exchange.tenants[0])
            if found is None:
                return False
            selection = await self._admission.resolve([Reference(id=found.id, source="registry")])
            if list(selection.token_ids) == ids[: found.tokens]:
                await self._render_with(selection, behind, request, list, outcome)
                return True
        engine_input.update(rendered)
        request.kv_transfer_params = params
        return False

    def _own_salt(self, request: Any) -> str | None:
        """Return what keeps apart what is computed for a request: its `cache_salt`, or its key where keys have contexts."""
        tenant = http.current().tenants[0] if self._admission.maker else None
        return getattr(request, "cache_salt", None) or tenant or None

    def _join(self, head: Sequence[int], engine_input: dict[str, Any]) -> None:
        """Put token ids before a prompt. Raises `Refusal` where they do not go together."""
        if engine_input.get("type") != "token":
            raise Refusal(422, "cartridges go with text prompts only")
        own = engine_input["prompt_token_ids"]
        bos = getattr(self.inner.renderer.tokenizer, "bos_token_id", None)
        is_behind = engine_input.pop(BEHIND, False)  # a template's own BOS of a later turn
        while (
            own and own[0] == bos and not is_behind
        ):  # /v1/responses renders two where the chat template has one (vLLM 0.32)
            own = own[1:]
        limit = self.inner.model_config.max_model_len
        if not own:
            raise Refusal(400, "a prompt must have text beside its cartridges")
        if len(head) + len(own) >= limit:
            raise Refusal(
                400,
                f"{len(head)} positions of cartridges and {len(own)} prompt tokens leave nothing of the context of {limit}",
            )
        engine_input["prompt_token_ids"] = [*head, *own]
        engine_input.pop("prompt_token_offsets", None)


class ShowingRenderer(CartridgeRenderer):
    """vLLM's renderer for routes that show tokens and generate nothing: it puts a selection's token ids before a prompt.

    It claims nothing and waits for no KV. What comes of a request for tokens cannot be sent back to be generated from:
    token ids of a trained cartridge say nothing without its KV.
    """

    async def _render_with(self, selection: Selection, render: Any, request: Any, inputs: Any, outcome: Outcome) -> Any:
        request.kv_transfer_params = None
        result = await render()
        for engine_input in inputs(result):
            self._join(selection.token_ids, engine_input)
        request.kv_transfer_params = SHOWN
        http.note(selection.used())
        return result


class GuardedEngine(Around):
    """vLLM's engine client, which turns a cartridge lost on the way into its document or a clear error."""

    def __init__(self, inner: Any, settings: Settings, adapters: Adapters) -> None:
        super().__init__(inner)
        self._settings, self._adapters = settings, adapters
        self._withdrawals = Withdrawals(settings.quarantine_dir)

    async def add_lora(self, lora_request: LoRARequest) -> Any:
        """Load a LoRA adapter, and read what it is."""
        return await self._adapters.load(self.inner.add_lora, lora_request)

    async def generate(self, prompt: Any, params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        """Generate. Where the engine ends the request because its KV was lost, nothing was sampled from it.

        Raises `GracefulHTTPError` for KV transfer parameters that only this server may make, and for cartridges with a
        LoRA adapter that came in the place of theirs.
        """
        transfer = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
        if (adapter := kwargs.get("lora_request")) is not None:
            prompt = apart(prompt, self._adapters.loads[adapter.lora_name])
        if isinstance(transfer, Grant):
            if adapter is not transfer.claim.selection.adapter:
                transfer.claim.end_prompt()
                with _refusals_as_http(self._settings):
                    raise Refusal(
                        503, "the LoRA adapter is not the one that the request's cartridges were compared with; ask again",
                        retry_after_s=1,
                    )  # fmt: skip
            outputs: Any = self._generate_granted(transfer.claim, prompt, params, request_id, kwargs)
        elif isinstance(transfer, Computed):
            outputs = self.inner.generate(prompt, params, request_id, **kwargs)
        else:
            with _refusals_as_http(self._settings):
                check_params(transfer)
                if "cartridge_id" in (transfer or ()):
                    raise Refusal(400, "kv_transfer_params.cartridge_id is not read here; name cartridges at the top")
                if (self._settings.required or http.current().is_required) and not http.is_noted():
                    raise Refusal(400, REQUIRED)
            outputs = self._generate_plain(prompt, params, transfer or {}, request_id, kwargs)
        keep, kept = http.current().keep, None
        async with aclosing(outputs):
            async for output in outputs:
                if keep is not None:
                    kept = await keep() if kept is None else kept
                    output.num_cache_creation_tokens = max(kept - (output.num_cached_tokens or 0), 0)
                yield output

    async def _generate_granted(
        self, claim: Claim, prompt: Any, params: Any, request_id: str, kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        selection, begun = claim.selection, False
        if selection.must_inject:
            params.repetition_penalty = 1.0  # the model's own default would count identity tokens
        # A document that is preempted later is computed; a trained cartridge cannot be. Of several answers to one
        # prompt the first may come before the last has begun.
        to_the_end = selection.must_inject > 0 or (getattr(params, "n", 1) or 1) > 1
        try:
            async with aclosing(self.inner.generate(prompt, params, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    if _is_lost(output, params):
                        break
                    if not _ended(output, "abort"):  # a server that stops answers so, with nothing
                        claim.note(output.num_cached_tokens or 0)
                    if not begun and not to_the_end:
                        claim.end_prompt()
                    begun = True
                    yield output
                else:
                    return
        finally:
            if to_the_end or not begun:
                claim.end_prompt()
        must_inject = selection.must_inject and self._settings.on_miss != "document"
        if begun or selection.document_ids is None or must_inject:
            http.retry_after(1)
            requests().count("lost_prompts", "error")
            lost_it = f"the engine lost {selection.names} or could not go on with it; ask again"
            raise retryable(lost_it, self._settings.retry_status)
        http.note(selection.replaced)
        requests().count("lost_prompts", "document")
        own = prompt["prompt_token_ids"][len(selection.token_ids) :]
        prompt = {**prompt, "prompt_token_ids": [*selection.document_ids, *own]}
        async for output in self._compute(prompt, params, {}, request_id, kwargs):
            yield output

    async def _generate_plain(
        self, prompt: Any, params: Any, own: dict[str, Any], request_id: str, kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """Generate for a request that names no cartridge. Its prompt may still begin with a document that has KV, and
        what of that is lost on the way is computed."""
        begun = False
        prompt = apart(prompt, self._withdrawals.stamp())
        async with aclosing(self.inner.generate(prompt, params, request_id, **kwargs)) as outputs:
            async for output in outputs:
                if not begun and _is_lost(output, params) and isinstance(prompt, dict):
                    break
                begun = True
                yield output
            else:
                return
        async for output in self._compute(prompt, params, own, request_id, kwargs):
            yield output

    async def _compute(
        self, prompt: Any, params: Any, own: dict[str, Any], request_id: str, kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """Generate with nothing injected."""
        plain = params.clone()
        plain.extra_args = (params.extra_args or {}) | {"kv_transfer_params": own | {TAG: COMPUTED}}
        async for output in self.inner.generate(prompt, plain, f"{request_id}-document", **kwargs):
            yield output


def check_request(request: Any, selection: Selection) -> None:
    """Raise `Refusal` for request options under which vLLM would compute a cartridge's positions, or lose them."""

    def asks(name: str) -> Any:
        return getattr(request, name, None)

    if any(key.startswith("lmcache.tag.") for key in asks("kv_transfer_params") or ()):
        raise Refusal(422, "a tag of the client's own keeps cartridges away; use cache_salt to be kept apart")
    if asks("use_beam_search"):
        raise Refusal(422, "beam search drops what the engine must know of cartridges")
    if any(getattr(tool, "type", "function") != "function" for tool in asks("tools") or ()):
        raise Refusal(422, "built-in tools render a request several times; cartridges go with function tools only")
    if not selection.must_inject:
        return
    if (
        asks("prompt_logprobs") is not None
        or (asks("echo") and asks("logprobs") is not None)
        or asks("repetition_penalty") not in (None, 1)
    ):
        raise Refusal(
            422, "prompt logprobs and repetition_penalty are of a prompt's words, and a trained cartridge has none"
        )
    if 0 in (asks("max_tokens"), asks("max_completion_tokens"), asks("max_output_tokens")):
        raise Refusal(422, "nothing to generate")


def _ended(output: Any, reason: str) -> bool:
    return any(answer.finish_reason == reason for answer in output.outputs)


def _is_lost(output: Any, params: Any) -> bool:
    """Whether the engine has ended an answer because it could not load what it had promised.

    What a grammar has ended comes with the tokens that it does not take, and would end so again.
    """
    is_by_grammar = params.structured_outputs and any(answer.token_ids for answer in output.outputs)
    return _ended(output, "error") and not is_by_grammar


@contextmanager
def _refusals_as_http(settings: Settings) -> Iterator[None]:
    """Raise vLLM's own errors in the place of ours, with the setting's status where the client is told to ask again."""
    try:
        yield
    except Refusal as refusal:
        status = refusal.status if refusal.retry_after_s is None else settings.retry_status
        http.retry_after(refusal.retry_after_s)
        raise GracefulHTTPError(str(refusal), HTTPStatus(status)) from None
    except CartridgeError:
        logger.exception("a request's cartridges could not be prepared")
        http.retry_after(1)
        raise GracefulHTTPError("cartridges are not available", HTTPStatus.SERVICE_UNAVAILABLE) from None
