"""Canaries: before a cartridge's first request is answered, the engine answers questions whose answers are known.

Whatever lies between an artefact and the engine's attention may be wrong and say nothing: a layout, a kernel, a rotation.
So the engine is asked as requests ask it, by cartridge tokens, tag and claim, and its logprobs are compared with those that
transformers had from the same KV.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind

from ..artifact.canary import Asked, Comparison, ServedCanary, compare
from ..artifact.manifest import Manifest
from ..engine.client import ControlClient
from ..engine.contract import GRANT, TAG
from ..errors import CartridgeError
from ..library.registry import Registry
from ..settings import Settings
from .claim import Claim
from .metrics import requests
from .request import Reference, Refusal, Unservable
from .resolve import Selection

logger = init_logger("vllm.lmcache_cartridge.serve.canary")

_TOP = 20
"""Likeliest tokens to ask for: more than are expected, as two of them may change places."""


class Unfinished(Exception):
    """The engine could not be asked now."""


class Due(NamedTuple):
    """A cartridge, alone or behind itself, that has to be asked about."""

    manifest: Manifest
    whole: Selection
    """What it is asked for."""
    place: int
    """Which of the selection it is; from the second on it is asked about behind itself."""

    @property
    def twice(self) -> bool:
        """Whether it is asked about behind itself."""
        return self.place > 0

    @property
    def positions(self) -> int:
        """Positions of KV before a question."""
        return self.manifest.positions * (1 + self.twice)

    @property
    def tag(self) -> str:
        """The tag of `selection`."""
        return ".".join([self.manifest.digest] * (1 + self.twice))

    @property
    def selection(self) -> Selection:
        """What the engine is asked with. Copies its ids: for those alone that are asked."""
        times, start = 1 + self.twice, sum(m.positions for m in self.whole.manifests[: self.place])
        ids = self.whole.token_ids[start : start + self.manifest.positions]
        return Selection((self.manifest,) * times, (self.whole.places[self.place],) * times, ids * times, None)

    @property
    def questions(self) -> tuple[Asked, ...]:
        """Those that can be asked of it; none where its manifest has none for this."""
        canary = self.manifest.canary
        return () if canary is None else canary.behind if self.twice else canary.after

    @property
    def longest(self) -> int:
        """Positions that asking the longest question takes, with its answer."""
        return self.positions + max(len(q.question) + len(q.answer.tokens) for q in self.questions)


class Canaries:
    """What is known of the cartridges of one engine. One check at a time of each, whatever number of requests wait."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineClient,
        client: ControlClient,
        resolve: Callable[[Sequence[Reference]], Awaitable[Selection]],
        chunk_tokens: int,
    ) -> None:
        """`chunk_tokens` is LMCache's chunk size."""
        self._settings, self._engine, self._client = settings, engine, client
        self._resolve, self._chunk_tokens = resolve, chunk_tokens
        self._results: dict[tuple[str, ServedCanary], str | None] = {}
        """By tag: None for those that the engine answers from as it should, else how it does not."""
        self._asking: dict[tuple[str, ServedCanary], asyncio.Task[str | None]] = {}
        self._unasked: set[str] = set()
        self._trying: asyncio.Task[None] | None = None

    def outcome(self, digest: str) -> str | None:
        """Return `passed` or `failed`, of the cartridge by itself; None where it was not asked."""
        found = [why for (tag, _), why in self._results.items() if tag == digest]
        return ("failed" if found[-1] else "passed") if found else None

    async def begin(self) -> None:
        """Let no cartridge answer prompts that do not name it before the engine was tried with it."""
        if self._settings.canary:
            await self._client.ask("trust", [])

    def follow(self, ranks: Sequence[Mapping[str, Any]]) -> asyncio.Task[None] | None:
        """Have those tried whose document's text came in prompts that do not name them; return the task under way.

        `ranks` are the workers' numbers. No request waits for the task: until it ends such prompts are computed.
        """
        if any(rank["untried"] for rank in ranks) and (self._trying is None or self._trying.done()):
            self._trying = asyncio.create_task(self._try_unnamed())
        return self._trying

    async def _try_unnamed(self) -> None:
        untried = set(chain.from_iterable(await self._client.ask("untried")))
        registry = Registry(self._settings.registry_path, read_only=True)
        for row in await asyncio.to_thread(registry.having, untried):
            try:
                selection = await self._resolve([Reference(id=row.name, source="registry")])
                refusal = await self.check(selection)
            except (Refusal, CartridgeError) as error:
                refusal = error
            if refusal is None:
                await self._client.ask("trust", [row.digest])
            else:  # the next prompt with its text has it tried again, unless it failed
                logger.warning("%s answers those that name it at most: %s", row.name, refusal)

    def known(self, selection: Selection) -> Refusal | None:
        """Return what to say of a cartridge that the engine was seen not to answer right from; None if there is none."""
        for due in due_of(selection) if self._settings.canary else ():
            if problem := self._results.get(self._key(due)):
                return _failed(due.manifest, problem)
        return None

    async def check(self, selection: Selection) -> Refusal | None:
        """Return None if the engine answers right from each of these cartridges, else what to say to the client.

        Asks the engine about those that it was not asked about since it started, and waits for that, `ready_timeout_s`
        at most. Its claim on the memory must be held meanwhile. A cartridge without a canary passes unless the
        settings require one.
        """
        if not self._settings.canary:
            return None
        required = self._settings.canary == "required"
        for due in due_of(selection):
            name = due.manifest.name
            if (key := self._key(due)) is None:
                if required:
                    message = f"{name} has no canary for this, and the server requires one"
                    return Unservable(422, message, due.manifest.digest)
                continue
            try:
                problem = await self._result(key, due)
            except Unfinished as reason:
                return Refusal(503, f"{name} could not be tried on this engine: {reason}", retry_after_s=2)
            if problem is not None:
                return _failed(due.manifest, problem)
        return None

    def _key(self, due: Due) -> tuple[str, ServedCanary] | None:
        """Return under what a result is kept; None for a cartridge that cannot be asked about."""
        manifest = due.manifest
        if not due.questions:
            return None
        size = due.positions * manifest.fingerprint.token_bytes
        if due.longest > self._engine.model_config.max_model_len or (due.twice and size > self._settings.cpu_bytes):
            if manifest.digest not in self._unasked:
                self._unasked.add(manifest.digest)
                logger.warning(
                    "%s cannot be tried on this engine: no room for %d positions", manifest.name, due.longest
                )
            return None
        return due.tag, manifest.canary

    async def _result(self, key: tuple[str, ServedCanary], due: Due) -> str | None:
        if key in self._results:
            return self._results[key]
        if key not in self._asking:
            self._asking[key] = asyncio.create_task(self._settle(key, due))
            self._asking[key].add_done_callback(lambda task: self._asking.pop(key, None))
        try:
            async with asyncio.timeout(self._settings.ready_timeout_s):
                return await asyncio.shield(self._asking[key])
        except TimeoutError:
            raise Unfinished("it took too long") from None

    async def _settle(self, key: tuple[str, ServedCanary], due: Due) -> str | None:
        try:
            async with asyncio.timeout(self._settings.ready_timeout_s):
                problem = await self._examine(due)
                if problem is not None and not due.twice:
                    await self._client.ask("distrust", due.manifest.digest, problem)
                elif not due.twice:
                    await self._client.ask("trust", [due.manifest.digest])
        except Unfinished as reason:
            requests().canary("unfinished")
            logger.warning("%s could not be tried on this engine: %s", due.manifest.name, reason)
            raise
        except (TimeoutError, Refusal, CartridgeError) as error:
            requests().canary("unfinished")
            logger.warning("%s could not be tried on this engine: %r", due.manifest.name, error)
            raise Unfinished(str(error) or "it took too long") from None
        requests().canary("passed" if problem is None else "failed")
        if problem is not None:
            logger.error("%s is set aside on this engine: %s", due.manifest.name, problem)
        self._results[key] = problem
        return problem

    async def _examine(self, due: Due) -> str | None:
        """Return how the engine's answers differ from those expected, None if they do not."""
        async with Claim(self._client, due.selection) as claim:
            if not await claim.wait(self._settings):
                raise Unfinished("it is not in memory")
            exam = examine(due, self._chunk_tokens, self._engine.model_config)
            output = None
            while True:
                try:
                    prompt, params = exam.send(output)
                except StopIteration as done:
                    return done.value
                output = await self._generate(prompt, params)

    async def _generate(self, prompt: Any, params: SamplingParams) -> Any:
        """Return the engine's last output, None where there is none."""
        last = None
        request_id = f"cartridge-canary-{uuid.uuid4().hex}"
        async for output in self._engine.generate({"type": "token", **prompt}, params, request_id):
            last = output
        return last


def due_of(selection: Selection) -> Iterator[Due]:
    """Yield what an engine must be asked about before it answers from a selection: later ones behind themselves."""
    for place, manifest in enumerate(selection.manifests):
        if manifest.kind != "tokens":
            yield Due(manifest, selection, place)


def examine(due: Due, chunk_tokens: int, config: ModelConfig) -> Generator[tuple[Any, SamplingParams], Any, str | None]:
    """Yield each question, a prompt and its parameters, to be sent the engine's output for it, None for none.

    Returns how the answers differ from those expected, None if they do not. Raises `Unfinished` where an output says
    nothing of the KV. Its claim on the memory must be held meanwhile.
    """
    whole = due.positions // chunk_tokens * chunk_tokens
    # Of its own, so that no request ever gets blocks that this one left; the later questions do.
    salt = uuid.uuid4().hex
    for asked in due.questions if whole else ():  # else nothing of it is ever injected
        output = yield _prompt(due, asked, salt, whole, config.max_logprobs)
        found = _compare(asked, output, whole, config.logprobs_mode)
        logger.info("%s%s: %s", due.manifest.name, " behind itself" if due.twice else "", found)
        if not found.passed:
            return str(found)
    return None


def _prompt(due: Due, asked: Asked, salt: str, whole: int, max_logprobs: int) -> tuple[Any, SamplingParams]:
    """Return the prompt and parameters of one question, whose leading `whole` positions must be injected.

    `max_logprobs` is how many the engine gives at most, -1 for all.
    """
    params = SamplingParams(
        temperature=0, max_tokens=len(asked.answer.tokens), ignore_eos=True, detokenize=False,
        logprobs=_TOP if max_logprobs < 0 else min(_TOP, max_logprobs), output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": {TAG: due.tag, GRANT: {"must_inject": whole}}},
    )  # fmt: skip
    return {"prompt_token_ids": [*due.selection.token_ids, *asked.question], "cache_salt": salt}, params


def _compare(asked: Asked, output: Any, whole: int, logprobs_mode: str) -> Comparison:
    """Compare what the engine gave for a question, None for nothing. Raises `Unfinished` where that says nothing of KV."""
    if output is None or not output.outputs or output.outputs[0].finish_reason == "error":
        raise Unfinished("the engine could not load it")
    if (output.num_cached_tokens or 0) < whole:
        raise Unfinished("the engine computed it")
    answer, expected = output.outputs[0], asked.answer
    logprobs = [{token: found.logprob for token, found in each.items()} for each in answer.logprobs or ()]
    if "logits" in logprobs_mode:  # which differ from logprobs by a number for each position
        for each, values in zip(logprobs, expected.logprobs, strict=False):
            more = values[0] - max(each.values())
            each.update({token: value + more for token, value in each.items()})
    return compare(expected, list(answer.token_ids), logprobs)


def _failed(manifest: Manifest, problem: str) -> Unservable:
    return Unservable(422, f"{manifest.name} is set aside on this engine: {problem}", manifest.digest)
