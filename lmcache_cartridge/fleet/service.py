"""Fleet: the servers behind a router, what each holds, and the one that a request should go to.

Scores are llm-d's: prefix 2.0, load 1.0; the highest is picked, ties by chance. A request for cartridges goes to the owner of
its affinity key unless a server holds half of their tokens, so that what is cold is loaded once, also where cartridges begin
alike.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import aiohttp
import msgspec

from ..errors import NoPod, NoTokens, NotReplayed, UnknownModel, UnknownPod
from .affinity import affinity_key
from .config import FleetConfig
from .index import Index, Tokens
from .metrics import Metrics
from .pods import Pod, serving
from .tokens import Renderer

HELD = 0.5
"""Share of a request's cartridges from which on a server counts as one that holds them."""
MAX_WAITING = 128
"""Waiting requests from which on a server has no part for load; llm-d's threshold."""
TIER_WEIGHT = {"gpu": 1.0, "cpu": 0.75, "disk": 0.25}
"""What a token in a tier counts; of those further away by Dynamo's own weights (1.6.1, host and disk)."""


class Score(NamedTuple):
    """What one server scores."""

    total: float
    prefix: float
    """Its part for the share of the prompt that it has, weighted."""
    load: float
    """Its part for how few requests wait, weighted."""
    matched: Mapping[str, int]
    """Leading tokens of the prompt that it has, by tier."""
    share: float
    """Of the prompt that it has in any tier, from 0 to 1."""
    waiting: int


class Pick(NamedTuple):
    """The server of a request."""

    pod: Pod
    receipt: dict[str, Any]
    """Why it was picked, as JSON."""


class Scores(NamedTuple):
    """What the servers score for a prompt."""

    scores: dict[str, float]
    receipt: dict[str, Any]
    """Why, as JSON."""


class Fleet:
    """The servers of a configuration. One event loop."""

    def __init__(self, config: FleetConfig, *, chance: random.Random | None = None) -> None:
        """`chance` chooses between servers of one score."""
        self.config = config
        self.index = Index()
        self.pods = [Pod(number, pod, config, self.index) for number, pod in enumerate(config.pods)]
        self.metrics = Metrics(self.index, self.pods)
        self._chance = chance or random.Random()
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession
        self._renderer: Renderer

    async def start(self) -> None:
        """Begin to follow the servers. Returns at once, before anything of them is known."""
        key = os.environ.get(self.config.api_key_env)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=aiohttp.ClientTimeout(total=self.config.timeout_s),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self._renderer = Renderer(self._session, self.config.names_ttl_s)
        self._tasks = [asyncio.create_task(pod.watch(self._session), name=pod.name) for pod in self.pods]

    async def close(self) -> None:
        """Follow them no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def score(
        self, *, prompt: str | None = None, messages: Sequence[Any] | None = None, token_ids: Sequence[int] | None = None,
        cartridges: Sequence[Any] = (), model: str | None = None, pods: Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Scores:  # fmt: skip
        """Return what the healthy ones of `pods`, all by default, score for a prompt with cartridges before it.

        Text is expanded by a server as for an answer; `token_ids` stand for themselves, with the cartridges' before them.
        Raises `UnknownPod`, `UnknownModel`, `NoTokens`, `NoPod`, and `NotReplayed` where no event was replayed yet.
        """
        with self.metrics.seconds.labels("score").time():
            if unknown := set(pods or ()) - {pod.name for pod in self.pods}:
                raise UnknownPod(f"no server is called {', '.join(sorted(unknown))}; there are {_names(self.pods)}")
            able, left_out = self._healthy([pod for pod in self.pods if pods is None or pod.name in pods])
            if not (able := serving(able, model)):
                raise UnknownModel(f"no server of the fleet serves {model!r}")
            if not any(pod.is_known for pod in able):
                raise NotReplayed(f"the events of {_names(able)} are not replayed yet, or they publish none; ask later")
            if sum(given is not None for given in (prompt, messages, token_ids)) > 1:
                raise NoTokens("give one of prompt, messages and token_ids")
            fields: dict[str, Any] = {"model": model or next(iter(able[0].models), None), "max_tokens": 1}
            fields |= {"cartridges": list(cartridges)} if cartridges else {}
            headers = headers or {}
            if messages is None and prompt is None:
                tokens = await self._named(fields, headers, able)
                tokens = Tokens([*tokens.ids, *(token_ids or ())], able[0].adapter(fields["model"]))
            else:
                name, given = ("prompt", prompt) if messages is None else ("messages", messages)
                path = "/v1/completions" if messages is None else "/v1/chat/completions"
                tokens = await self._renderer.of_request(path, fields | {name: given}, headers, able)
            if not tokens.ids:
                raise NoTokens("name cartridges, or give a prompt, messages or token_ids")
            found = self._scored(tokens, able)
            return Scores({name: one.total for name, one in found.items()}, self._receipt(found, tokens, left_out))

    async def pick(self, headers: Mapping[str, str], body: bytes) -> Pick:
        """Return the server for a request as it came, `headers` with names in lower case.

        Its cartridges are looked for, the rest of its prompt is not; a request without any goes by load. Waits for a server
        only where what the cartridges are was never asked. Raises `NoPod` without a healthy server.
        """
        with self.metrics.seconds.labels("pick").time():
            fields, (able, left_out) = _fields(body), self._healthy(self.pods)
            model = fields.get("model")
            # A server says itself that it does not know a model.
            able = serving(able, model if isinstance(model, str) else None) or able
            problem = {}
            try:
                tokens = await self._named(fields, headers, able)
            except NoTokens as error:
                tokens, problem = Tokens([]), {"problem": str(error)}
            found, key = self._scored(tokens, able), self._key(fields, headers)
            holders = {name: one for name, one in found.items() if one.share >= HELD or not key}
            name = best(holders, self._chance) if holders else owners(key, found)[0]
            by = "score" if holders else "owner"
        self.metrics.picks.labels(name, by).inc()
        self.metrics.asked.inc(len(tokens.ids))
        self.metrics.hit.inc(found[name].share * len(tokens.ids))
        receipt = self._receipt(found, tokens, left_out) | {"pod": name, "by": by, "key": key} | problem
        return Pick(next(pod for pod in able if pod.name == name), receipt)

    def _key(self, fields: Mapping[str, Any], headers: Mapping[str, str]) -> str:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        api_key = key if scheme.lower() == "bearer" else None
        return affinity_key(fields, headers.get("x-cartridges", ""), api_key=api_key, naming=self.config.naming)

    async def _named(self, fields: Mapping[str, Any], headers: Mapping[str, str], pods: Sequence[Pod]) -> Tokens:
        """Return the tokens of a request's cartridges, none without any. Raises `NoTokens`."""
        return await self._renderer.of_names(fields, headers, pods) if self._key(fields, headers) else Tokens([])

    def _healthy(self, pods: Sequence[Pod]) -> tuple[list[Pod], dict[str, str]]:
        """Return those that can be picked, and why others cannot. Raises `NoPod` without any."""
        left_out = {pod.name: pod.problem for pod in pods if pod.problem is not None}
        able = [pod for pod in pods if pod.problem is None]
        if not able:
            reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
            raise NoPod(f"no server is healthy: {reasons or 'none was named'}")
        return able, left_out

    def _scored(self, tokens: Tokens, pods: Sequence[Pod]) -> dict[str, Score]:
        matched, whole = self.index.matches(tokens), self.index.whole(len(tokens.ids))
        weights = self.config.prefix_weight, self.config.load_weight
        return {pod.name: score(matched.get(pod.number, {}), whole, pod.waiting, *weights) for pod in pods}

    def _receipt(self, found: Mapping[str, Score], tokens: Tokens, left_out: Mapping[str, str]) -> dict[str, Any]:
        known = {pod.name: pod.is_known for pod in self.pods}
        scores = {name: one._asdict() | {"known": known[name]} for name, one in found.items()}
        return {"tokens": len(tokens.ids), "scores": scores, "left_out": left_out}


def score(
    matched: Mapping[str, int], tokens: int, waiting: int, prefix_weight: float = 2.0, load_weight: float = 1.0
) -> Score:
    """Return the score of a server that has `matched` leading tokens, by tier, of a prompt of `tokens` in whole blocks."""
    reached, worth = 0, 0.0
    for tier, weight in TIER_WEIGHT.items():
        if (end := matched.get(tier, 0)) > reached:
            worth, reached = worth + weight * (end - reached), end
    prefix = prefix_weight * (worth / tokens if tokens else 0.0)
    load = load_weight * 0.5 * (1 - min(waiting, MAX_WAITING) / MAX_WAITING)
    return Score(prefix + load, prefix, load, matched, reached / tokens if tokens else 0.0, waiting)


def best(scores: Mapping[str, Score], choose: random.Random) -> str:
    """Return a server of the highest score, any of them where several have it."""
    highest = max(one.total for one in scores.values())
    return choose.choice([name for name, one in scores.items() if one.total == highest])


def owners(key: str, servers: Iterable[str]) -> list[str]:
    """Return the servers from the first to the last owner of an affinity key; the same for everybody who asks.

    Rendezvous hashing (Thaler and Ravishankar 1998): a server that comes or goes moves its own keys and no others.
    """
    return sorted(set(servers), key=lambda server: (_hash(f"{_hash(server)}{key}"), server), reverse=True)


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a request; none for what a server will refuse."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _names(pods: Iterable[Pod]) -> str:
    return ", ".join(pod.name for pod in pods)
