"""Canaries: before a cartridge's first request is answered, the engine answers questions whose answers are known.

Whatever lies between an artefact and the engine's attention may be wrong and say nothing: a layout, a kernel, a
rotation. So the engine is asked as requests ask it, by cartridge tokens, tag and claim, and its logprobs are compared
with those that transformers had from the same KV.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
from blake3 import blake3
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger

from ..artifact.canary import Asked, Comparison, Expected, compare
from ..artifact.model import DTYPE_BYTES, Fingerprint
from ..engine.client import ControlClient
from ..engine.computed import answer, first_alone
from ..engine.contract import GRANT, SKIP_SAVE, TAG
from ..engine.refusals import QUANTISED_CACHES
from ..engine.salts import adapter_name
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


Key = tuple[str, str]
"""A tag, and the digest of the canary that was asked: of contexts that come and go no more is kept."""


class Unfinished(Exception):
    """The engine could not be asked now."""


def trials(selection: Selection) -> Iterator[tuple[Selection, int]]:
    """Yield what an engine must answer right from before it answers from a selection: the first cartridge alone, later ones behind
    themselves, with rotated keys. They have no token ids yet, which would be copied for each request, but where theirs begin.
    """
    start = 0
    for manifest, place in zip(selection.injected, selection.places, strict=False):
        times = 2 if start else 1
        yield Selection((manifest,) * times, (place,) * times, (), None, adapter=selection.adapter), start
        start += manifest.positions


def _questions(trial: Selection) -> tuple[Asked, ...]:
    """Return the canary's questions; none where the manifest has none for this."""
    canary = trial.manifests[0].canary
    return () if canary is None else canary.after if len(trial.manifests) == 1 else canary.behind


def prefix(trial: Selection, chunk_tokens: int) -> tuple[int, int] | None:
    """Return how many positions stand before a question, and how many of those are injected.

    Of a trained one all are. Of others the rest is computed, which gives a cartridge alone the same KV. Behind itself it
    gives other KV, so there are whole chunks only; None where they are not whole on this engine.
    """
    manifest, positions = trial.manifests[0], trial.positions
    whole = positions // chunk_tokens * chunk_tokens
    injected = positions if manifest.kind == "trained" else whole
    if len(trial.manifests) == 1:
        return positions, injected
    reach = (manifest.canary and manifest.canary.behind_positions) or positions
    return (reach, reach) if reach <= injected and (reach > whole or not reach % chunk_tokens) else None


class Canaries:
    """Which cartridges one engine answers right from, each cartridge's own canary: copies with one digest may have several.

    Requests for the same cartridge share one trial.
    """

    def __init__(
        self,
        settings: Settings,
        engine: EngineClient,
        client: ControlClient,
        resolve: Callable[[Sequence[Reference]], Awaitable[Selection]],
        chunk_tokens: int,
        fingerprint: Fingerprint,
    ) -> None:
        """`chunk_tokens` is LMCache's chunk size, `fingerprint` the engine's, for the setting `accept_weights`."""
        self._settings, self._engine, self._client = settings, engine, client
        self._resolve, self._chunk_tokens = resolve, chunk_tokens
        self._fingerprint = fingerprint if settings.accept_weights and settings.canary != "required" else None
        self._ended: dict[Key, tuple[str, str | None]] = {}
        """How trials ended, as `outcome` says it."""
        self._keys: dict[str, Key] = {}
        """Of cartridges alone, by `id@version`: a copy of the same content may have another canary."""
        self._asking: dict[Key, asyncio.Task[None]] = {}
        self._trying: asyncio.Task[None] | None = None

    def outcome(self, name: str, digest: str) -> tuple[str | None, str | None]:
        """Return `passed`, `accepted` or `failed` for `id@version`, and why it failed; None where the engine was not tried with it.

        Those are accepted that differ and are served: the setting `accept_weights` says that it was measured.
        """
        key = self._keys.get(name)
        return self._ended.get(key, (None, None)) if key and key[0] == digest else (None, None)

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
                refusal: Exception | None = await self.check(selection)
                if await self._tell(next(trials(selection))[0]):
                    continue
                refusal = refusal or CartridgeError("it has no canary that this engine could be asked")
            except (Refusal, CartridgeError) as error:
                refusal = error
            logger.warning("%s answers those that name it at most: %s", row.name, refusal)

    async def _tell(self, trial: Selection) -> bool:
        """Tell the workers how a trial of a cartridge alone ended, or that there can be none; return whether it is trusted for all
        we know."""
        key = self._key(trial)
        if key and (len(trial.manifests) > 1 or key not in self._ended):
            return True  # nothing to tell
        is_right = key is not None and self._ended[key][1] is None
        await self._client.ask("tried", trial.tag, key[1] if key else "", is_right)
        return is_right

    def known(self, selection: Selection) -> Refusal | None:
        """Return the refusal for a selection with a cartridge whose trial failed; None without one. Does not block."""
        for trial, _ in trials(selection) if self._settings.canary else ():
            key, manifest = self._key(trial), trial.manifests[0]
            if key in self._ended and (problem := self._ended[key][1]):
                return Unservable(422, f"{manifest.name} is set aside on this engine: {problem}", manifest.digest)
        return None

    async def check(self, selection: Selection) -> Refusal | None:
        """Return None if the engine answers right from each of these cartridges, else the refusal.

        Tries the engine with those it was not tried with since it started, and waits for that, `ready_timeout_s` at
        most. A cartridge without a canary passes unless the settings require one.
        """
        for trial, start in trials(selection) if self._settings.canary else ():
            manifest = trial.manifests[0]
            if not (key := self._key(trial)):
                if self._settings.canary == "required":
                    message = f"{manifest.name} has no canary for this, and the server requires one"
                    return Unservable(422, message, manifest.digest)
                continue
            try:
                if key not in self._ended:
                    if key not in self._asking:
                        ids = selection.token_ids[start : start + manifest.positions] * len(trial.manifests)
                        self._asking[key] = asyncio.create_task(self._settle(key, trial._replace(token_ids=ids)))
                    await asyncio.shield(self._asking[key])
            except Unfinished as reason:
                return Refusal(503, f"{manifest.name} could not be tried on this engine: {reason}", retry_after_s=2)
            if refusal := self.known(selection):
                return refusal
        return None

    def _key(self, trial: Selection) -> Key | None:
        """Return the key of a trial's result; None where there can be no trial."""
        manifest = trial.manifests[0]
        if trial.tag is None or not (questions := _questions(trial)):
            return None
        longest = trial.positions + max(len(each.question) + len(each.answer.tokens) for each in questions)
        size = trial.positions * manifest.fingerprint.token_bytes
        if _in_fp8(self._engine.vllm_config):
            size //= DTYPE_BYTES[manifest.fingerprint.dtype]
        if longest > self._engine.vllm_config.model_config.max_model_len or (
            len(trial.manifests) > 1 and size > self._settings.cpu_bytes
        ):
            reason = f"no room for {longest} positions"
        elif prefix(trial, self._chunk_tokens) is None:
            reason = f"its questions in a chain are not for chunks of {self._chunk_tokens}"
        else:
            key = trial.tag, blake3(msgspec.json.encode(manifest.canary)).hexdigest(16)
            if len(trial.manifests) == 1:
                self._keys[manifest.name] = key
            return key
        logger.warning_once("%s cannot be tried on this engine: %s", manifest.name, reason)
        return None

    def _end(self, key: Key, trial: Selection, found: Comparison | None) -> None:
        """Note how a trial ended: with the first answer that was not as expected, None if all were."""
        manifest, engine = trial.manifests[0], self._fingerprint
        weights = engine and "; ".join(manifest.fingerprint.base.differences(engine))  # in which it is of another model
        if found is None:
            self._ended[key] = "passed", None
        # Logprobs that are no numbers, or fewer than were asked for, are an engine's fault, whatever its weights.
        elif weights and math.isfinite(found.difference):
            logger.warning("%s is served, as its weights are accepted (%s): %s", manifest.name, weights, found)
            self._ended[key] = "accepted", None
        else:
            logger.error("%s is set aside on this engine: %s", manifest.name, found)
            self._ended[key] = "failed", str(found)

    async def _settle(self, key: Key, trial: Selection) -> None:
        """Try the engine, within `ready_timeout_s`. Raises `Unfinished`."""
        try:
            async with asyncio.timeout(self._settings.ready_timeout_s):
                self._end(key, trial, await self._examine(trial))
                await self._tell(trial)
        except (TimeoutError, Unfinished, Refusal, CartridgeError) as error:
            requests().count("canaries", "unfinished")
            logger.warning("%s could not be tried on this engine: %r", trial.names, error)
            raise Unfinished(str(error) or "it took too long") from None
        finally:
            del self._asking[key]
        requests().count("canaries", self._ended[key][0])

    async def _examine(self, trial: Selection) -> Comparison | None:
        """Return the first answer of the engine that is not as expected, None if all are."""
        async with Claim(self._client, trial) as claim:
            if not await claim.wait(self._settings) or not claim.is_whole:
                raise Unfinished("it is not in memory")

            config = self._engine.vllm_config
            before, whole = prefix(trial, self._chunk_tokens) or (0, 0)
            # Of its own, so that no request ever gets blocks that this one left; the later questions do.
            salt, model = uuid.uuid4().hex, config.model_config
            ids, adapter = trial.token_ids[:before], trial.adapter
            transfer = {
                TAG: trial.tag, GRANT: {"must_inject": whole, "adapter": adapter_name(adapter)}, SKIP_SAVE: True,
            }  # fmt: skip

            async def compared(asked: Asked) -> Comparison:
                output = await answer(
                    self._engine, [*ids, *asked.question], salt, transfer, len(asked.answer.tokens), _TOP, adapter
                )
                found = _compare(asked.expected(in_fp8=_in_fp8(config)), output, whole, model.logprobs_mode)
                logger.info("%s: %s", trial.names, found)
                return found

            found = await first_alone(
                compared, _questions(trial) if whole else ()
            )  # else nothing of it is ever injected
            return next((each for each in found if not each.passed), None)


def _in_fp8(config: VllmConfig) -> bool:
    return config.cache_config.cache_dtype in QUANTISED_CACHES


def _compare(expected: Expected, output: Any, whole: int, logprobs_mode: str) -> Comparison:
    """Compare the engine's output with the answer. Raises `Unfinished` if it says nothing of the KV."""
    if (output.num_cached_tokens or 0) < whole:
        raise Unfinished("the engine computed it")
    given = output.outputs[0]
    logprobs = [{token: found.logprob for token, found in each.items()} for each in given.logprobs or ()]
    if "logits" in logprobs_mode:  # which differ from logprobs by a number for each position
        for each, values in zip(logprobs, expected.logprobs, strict=False):
            more = values[0] - max(each.values())
            each.update({token: value + more for token, value in each.items()})
    return compare(expected, list(given.token_ids), logprobs)
