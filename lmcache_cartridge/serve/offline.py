"""Cartridges for vLLM's offline `LLM`: engine arguments to start it with, prompts and parameters to ask it with.

Cartridges are admitted as an API server admits them; see `admission`.
"""

from __future__ import annotations

import asyncio
import os
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from vllm import LLM, SamplingParams

from ..artifact.chat import Chat
from ..errors import CartridgeError
from ..settings import Settings
from .adapters import Adapters
from .admission import Admission
from .chat import behind
from .claim import Claim
from .launch import plan
from .request import Refusal, read_references
from .wrap import check_request

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_engines: weakref.WeakKeyDictionary[LLM, _Engine] = weakref.WeakKeyDictionary()


def engine_arguments(settings: Settings, *, chunk_tokens: int = 256) -> dict[str, Any]:
    """Return keyword arguments for `LLM(model, ...)`, having written the LMCache YAML and set its environment.

    Call it before `LLM` starts the engine; arguments of your own go beside these.
    """
    launch = plan("", settings, chunk_tokens=chunk_tokens)
    launch.write()
    os.environ.update(launch.environment)
    return launch.engine


def with_cartridges(
    llm: LLM,
    settings: Settings,
    cartridges: Sequence[str],
    prompt: str | list[int] | list[dict[str, str]],
    params: SamplingParams | None = None,
    lora_request: LoRARequest | None = None,
) -> tuple[Prompt, SamplingParams]:
    """Return a prompt and sampling parameters for `llm.generate` that put cartridges before text, ids or messages.

    With a `lora_request`, which `llm.generate` must be given too, they must have been made with that adapter.

    Waits, `ready_timeout_s` at most, until the cartridges are in memory, where they stay as long as the prompt is
    referred to. The first time of each cartridge the engine is asked its canary's questions, as the setting `canary`
    says. Where a server would answer from a document's text, the prompt has that. Raises `CartridgeError` where a server
    would refuse the request, with the same words.
    """
    params = params.clone() if params is not None else SamplingParams()
    engine = _engines.get(llm) or _engines.setdefault(llm, _Engine(llm))

    async def prepared() -> Prompt:
        admission = await engine.admission(settings)
        name = lora_request.lora_name if lora_request else None
        admission.adapters = Adapters({lora_request.lora_name: lora_request} if lora_request else {})
        selection = await admission.resolve(read_references({"cartridges": list(cartridges)}, None))
        async with admission.admit(selection, partial(check_request, params), name) as claim:
            selection = claim.selection
            own = ids_behind(selection.chat, llm.get_tokenizer(), prompt)
            if not own:
                raise Refusal(400, "a prompt must have text beside its cartridges")
            transfer = claim.grant(None, 1)
        head = selection.document_ids if claim.is_text else selection.token_ids
        result = Prompt(prompt_token_ids=[*(head or ()), *own], cache_salt=selection.salt(None))
        result.claim = claim
        if transfer:
            params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": dict(transfer)}
        return result

    try:
        return engine.run(prepared), params
    except Refusal as refusal:
        raise CartridgeError(str(refusal)) from None


def ids_behind(chat: Chat | None, tokenizer: Any, prompt: str | list[int] | list[dict[str, str]]) -> list[int]:
    """Return the ids of text, ids or messages as they go behind cartridges, the last of which has this `chat`.

    Raises `Refusal` for messages that the chat template does not begin with the cartridge's.
    """
    given: Any = prompt
    how: dict[str, Any] = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    is_messages = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
    if is_messages and chat is not None:
        first = msgspec.to_builtins(list(chat.messages))
        return behind(chat, tokenizer.apply_chat_template([*first, *given], **how, **chat.arguments), None)
    if is_messages:
        ids = tokenizer.apply_chat_template(given, **how)
    else:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(given)
    return ids[1:] if ids and ids[0] == tokenizer.bos_token_id else ids


class Prompt(dict):
    """A prompt for `LLM.generate` that keeps its cartridges in memory."""

    claim: Claim | None = None


class _Engine:
    """What an API server's parts ask of an engine, asked of an `LLM` in the thread that it belongs to."""

    def __init__(self, llm: LLM) -> None:
        self._llm = weakref.proxy(llm)
        self._admission: Admission | None = None
        self.vllm_config = llm.llm_engine.vllm_config
        self.model_config = self.vllm_config.model_config
        self._calls: queue.SimpleQueue[tuple[Future[Any], partial[Any]] | None] = queue.SimpleQueue()

    def run(self, work: Callable[[], Any]) -> Any:
        """Return what the coroutine function `work` returns, which runs in another thread: a notebook has a loop in this one."""
        with ThreadPoolExecutor(1) as other:
            done = other.submit(lambda: asyncio.run(work()))
            done.add_done_callback(lambda _: self._calls.put(None))
            while (asked := self._calls.get()) is not None:
                future, call = asked
                if future.set_running_or_notify_cancel():  # else nobody waits for it any more
                    try:
                        future.set_result(call())
                    except BaseException as error:  # an interrupt ends the other thread's work too
                        future.set_exception(error)
            return done.result()

    async def admission(self, settings: Settings) -> Admission:
        """Return the one of this engine, or another where the settings are not those of before."""
        if (known := self._admission) is None or known.settings != settings:
            known = Admission(settings)
            await known.start(self)  # type: ignore[arg-type]
            self._admission = known
        return known

    async def _ask(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        future: Future[Any] = Future()
        self._calls.put((future, partial(call, *arguments, **options)))
        return await asyncio.wrap_future(future)

    async def collective_rpc(self, method: str) -> list[Any]:
        return await self._ask(self._llm.collective_rpc, method)

    async def generate(self, prompt: Any, params: Any, request_id: str, lora_request: Any = None) -> AsyncIterator[Any]:
        yield (await self._ask(self._llm.generate, [prompt], params, use_tqdm=False, lora_request=lora_request))[0]
