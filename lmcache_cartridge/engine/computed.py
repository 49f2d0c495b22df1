"""Computed: what the engine makes of token ids that no request brought: its KV, chunk by chunk, and its answers behind them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from ..artifact.canary import Asked, Expected, ServedCanary
from ..artifact.model import DTYPE_BYTES, Fingerprint
from ..errors import UnsupportedEngine
from .client import ControlClient
from .contract import CAPTURE, COMPUTED, GRANT, SKIP_SAVE, TAG
from .salts import adapter_name

_SAVE_S = 60.0
"""How long LMCache may take to save a chunk that is computed."""
_POLL_S = 0.03
"""The pause between two looks for a chunk."""
QUESTION, ANSWER, _TOP = 12, 8, 10
"""Tokens of a question and of its answer, and how many of the likeliest are compared."""
_PLACES = (0.05, 0.35, 0.65, 0.95)
"""Where in a text the questions begin: a model that reads words again looks there for what follows."""
_NOISE = {"float32": 0.005, "float16": 0.0125, "bfloat16": 0.05}
"""By how much rounding is taken to change logprobs: nothing measures it here."""


async def answer(
    engine: Any, ids: list[int], salt: str, transfer: dict[str, Any], tokens: int = 1, logprobs: int | None = None,
    adapter: Any = None,
) -> Any:  # fmt: skip
    """Return the engine's greedy output behind some tokens, as an `adapter` computes it, with so many `logprobs` or all it gives.

    Raises `UnsupportedEngine` where it has none.
    """
    most = engine.vllm_config.model_config.max_logprobs  # -1: any number
    if logprobs and most >= 0:
        logprobs = min(logprobs, most)
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs,
        output_kind=RequestOutputKind.FINAL_ONLY, extra_args={"kv_transfer_params": transfer},
    )  # fmt: skip
    prompt = {"type": "token", "prompt_token_ids": ids, "cache_salt": salt}
    async for output in engine.generate(prompt, params, f"cartridge-{uuid.uuid4().hex}", lora_request=adapter):
        if output.outputs and output.outputs[0].finish_reason != "error":
            return output
    raise UnsupportedEngine("the engine could not compute it")


async def kv_of(
    engine: Any, client: ControlClient, ids: list[int], name: str, model: Fingerprint, chunk_tokens: int, adapter: Any
) -> AsyncIterator[bytes]:
    """Have the engine compute some tokens, with an `adapter` or None, alone under the salt `name`, and yield the KV of each chunk
    as an artefact has it.

    Each chunk comes as soon as LMCache has saved it. Raises `UnsupportedEngine` where it does not.
    """
    # LMCache saves whole chunks: the last is filled up with tokens that no earlier one sees.
    whole = [*ids, *[ids[-1]] * (-len(ids) % chunk_tokens)]
    await client.ask("captured", name, [], 0)  # from now on it is kept
    transfer: dict[str, Any] = {CAPTURE: name}
    if adapter is not None:  # whose KV is saved by the name alone then, as the base model's is
        transfer[GRANT] = {"must_inject": 0, "adapter": adapter_name(adapter)}
    computing = asyncio.create_task(answer(engine, [*whole, ids[-1]], name, transfer, adapter=adapter))
    size, deadline = model.head_size * DTYPE_BYTES[model.dtype], float("inf")
    try:
        for start in range(0, len(ids), chunk_tokens):
            ranks: list[Any] = [None]
            while None in ranks:
                found = await client.ask("captured", name, whole, start // chunk_tokens)
                ranks = [new or old for new, old in zip_longest(found, ranks)]
                if computing.done() and deadline == float("inf"):
                    deadline = time.monotonic() + (0 if computing.result().num_cached_tokens else _SAVE_S)
                if time.monotonic() > deadline:
                    raise UnsupportedEngine(
                        "LMCache did not save all: give --l1-bytes more than the KV of the text has"
                    )
                if None in ranks:
                    await asyncio.sleep(_POLL_S)
            raw: Any = np.frombuffer(b"".join(ranks), np.uint8).reshape(-1, 2 * model.layers, chunk_tokens, size)
            # Of a head that several ranks have, the first.
            yield raw[:: len(raw) // model.kv_heads, :, : len(ids) - start].tobytes()
        await computing  # so that it is counted
    finally:
        computing.cancel()


async def first_alone(ask: Callable[[Any], Awaitable[Any]], questions: Sequence[Any]) -> list[Any]:
    """Return the answers to questions behind the same tokens: the others are asked at once when the first has brought these in."""
    first = [await ask(question) for question in questions[:1]]
    return [*first, *await asyncio.gather(*map(ask, questions[1:]))]


async def canary(engine: Any, ids: list[int], salt: str, dtype: str, adapter: Any) -> ServedCanary:
    """Return what the engine answers behind tokens that it has just computed, and that vLLM may still have under a salt."""

    async def asked(share: float) -> Asked:
        start = max(0, int(share * (len(ids) - QUESTION)))
        question = ids[start : start + QUESTION]
        output = await answer(
            engine, [*ids, *question], salt, {TAG: COMPUTED, SKIP_SAVE: True}, ANSWER, _TOP, adapter
        )  # fmt: skip
        found = output.outputs[0].logprobs
        logprobs = tuple(tuple(each.logprob for each in place.values()) for place in found)
        return Asked(tuple(question), Expected(tuple(map(tuple, found)), logprobs, _NOISE[dtype]))

    return ServedCanary(tuple(await first_alone(asked, _PLACES)), 0.0)
