"""Cartridges for vLLM's offline `LLM`: engine arguments to start it with, prompts and parameters to ask it with."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from vllm import LLM, SamplingParams
from vllm.logger import init_logger

from ..artifact.canary import Comparison
from ..artifact.chat import Chat
from ..artifact.model import from_plain
from ..engine.client import ControlClient, RemoteClaim
from ..engine.contract import CONTROL_METHOD, GRANT, TAG
from ..engine.salts import adapter_name
from ..errors import CartridgeError
from ..settings import Settings
from .adapters import check, read
from .canary import Trial, Trials, Unfinished, examine, trials
from .chat import behind
from .launch import plan
from .request import read_references
from .resolve import Resolver, Selection

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = init_logger("vllm.lmcache_cartridge.serve.offline")
_clients: weakref.WeakKeyDictionary[LLM, ControlClient] = weakref.WeakKeyDictionary()
_chunk_tokens: weakref.WeakKeyDictionary[LLM, int] = weakref.WeakKeyDictionary()
_trials: weakref.WeakKeyDictionary[LLM, Trials] = weakref.WeakKeyDictionary()


def engine_arguments(
    settings: Settings, *, chunk_tokens: int = 256, on_load_failure: Literal["fail", "recompute"] = "fail"
) -> dict[str, Any]:
    """Return keyword arguments for `LLM(model, ...)`, having written the LMCache YAML and set its environment.

    Call it before `LLM` starts the engine; arguments of your own go beside these.
    """
    launch = plan("", settings, chunk_tokens=chunk_tokens, on_load_failure=on_load_failure)
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
    says. Raises `Refusal` for unknown ones and those of another adapter, `CartridgeError` for those that cannot be
    served, are not there in time, or that this engine does not answer right from.
    """
    selection = Resolver(settings).resolve(read_references({"cartridges": list(cartridges)}, None))
    check(selection, None if lora_request is None else read(lora_request))
    selection = selection._replace(adapter=lora_request)
    own = ids_behind(selection.chat, llm.get_tokenizer(), prompt)
    if not own:
        raise CartridgeError("a prompt must have text beside its cartridges")
    params = params.clone() if params is not None else SamplingParams()
    result = Prompt(prompt_token_ids=[*selection.token_ids, *own], cache_salt=selection.salt(None))
    if selection.computed:  # whether the engine's model is theirs is asked as if the first were injected
        first = slice(at := len(selection.injected), at + 1)
        _claim(llm, settings, Selection(selection.manifests[first], selection.places[first], (), ()), Prompt())
    if selection.tag is not None:
        if params.prompt_logprobs is not None and selection.must_inject:
            raise CartridgeError("prompt logprobs need the prompt computed, and a trained cartridge cannot be")
        _claim(llm, settings, selection, result)
        if settings.canary:
            _try(llm, settings, selection)
        granted = {"must_inject": selection.must_inject, "salt": "", "adapter": adapter_name(lora_request)}
        grant = {TAG: selection.tag, GRANT: granted}
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": grant}
    return result, params


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

    claim: RemoteClaim | None = None


def _try(llm: LLM, settings: Settings, selection: Selection) -> None:
    """Try the engine with what it was not tried with yet. Raises `CartridgeError` unless it answers right."""
    client = _clients[llm]
    if llm not in _trials:
        engine = from_plain(client.call("fingerprint")[0])
        _trials[llm] = Trials(settings, llm.llm_engine, _chunk_tokens[llm], engine)
    ended = _trials[llm]
    for trial in trials(selection):
        name = trial.manifest.name
        if (key := ended.key(trial)) is None:
            if settings.canary == "required":
                raise CartridgeError(f"{name} has no canary for this, and the setting `canary` requires one")
            continue
        if key not in ended.problems:
            held = Prompt()
            _claim(llm, settings, trial.selection, held)
            try:
                ended.end(key, trial, _examine(llm, trial))
            except Unfinished as reason:
                raise CartridgeError(f"{name} could not be tried on this engine: {reason}") from None
            if (told := ended.told(trial)) is not None:
                client.call("tried", *told)
        if (problem := ended.problems[key]) is not None:
            raise CartridgeError(f"{name} is set aside on this engine: {problem}")


def _examine(llm: LLM, trial: Trial) -> Comparison | None:
    """Return the engine's first answer to a canary that is not as expected, None if all are."""

    async def ask(prompt: Any, params: SamplingParams) -> Any:
        return llm.generate([prompt], params, use_tqdm=False, lora_request=trial.within.adapter)[0]

    try:  # without an event loop: nothing in it waits, and a notebook has one of its own
        examine(trial, _chunk_tokens[llm], llm.llm_engine.vllm_config, ask).send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("it waited")


def _claim(llm: LLM, settings: Settings, selection: Selection, prompt: Prompt) -> None:
    """Have the selection in memory as long as `prompt` is there. Raises `CartridgeError` if it cannot be."""
    if llm not in _clients:
        _clients[llm] = ControlClient(list(dict.fromkeys(llm.collective_rpc(CONTROL_METHOD))))
        _chunk_tokens[llm] = _clients[llm].call("numbers")[0]["chunk_tokens"]
    claim = _clients[llm].claim(selection.tag or "", selection.located)
    prompt.claim = claim
    deadline = time.monotonic() + settings.ready_timeout_s
    while True:
        ranks = claim.poll()
        if refused := next((rank["refused"] for rank in ranks if rank["refused"]), None):
            raise CartridgeError(f"{selection.names} cannot be served: {refused}")
        if all(rank["ready"] for rank in ranks):
            return
        if time.monotonic() > deadline:
            raise CartridgeError(f"{selection.names} was not loaded within {settings.ready_timeout_s} s")
        time.sleep(0.02)
