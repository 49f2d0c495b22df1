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

from ..errors import NoPod, NoTokens, NotReplayed
from .affinity import affinity_key
from .config import FleetConfig
from .index import Index, Tokens
from .metrics import Metrics
from .pods import Pod
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
    """For the share of the prompt that it has, and for how few requests wait, each by its weight."""
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


class Fleet:
    """The servers of a configuration. One event loop."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.index = Index()
        self.pods = [Pod(number, pod, config, self.index) for number, pod in enumerate(config.pods)]
        self.metrics = Metrics(self.index, self.pods)
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
        self._renderer = Renderer(self._session)
        self._tasks = [asyncio.create_task(pod.watch(self._session), name=pod.name) for pod in self.pods]

    async def close(self) -> None:
        """Follow them no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def score(self, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """Return what the healthy servers score for a request as it came, and why, as JSON.

        Its cartridges are looked for, and its prompt behind them where that is token ids. Raises `NoTokens` where there is
        neither, `NoPod`, and `NotReplayed` where no server's past events were replayed yet.
        """
        fields, able = _fields(body), self._able()
        if not any(pod.is_known for pod in able):
            raise NotReplayed("no server's past events are replayed yet, or they publish none; ask later")
        tokens = await self._named(fields, headers, able)
        prompt = fields.get("prompt")
        try:
            tokens = Tokens([*tokens.ids, *(prompt if isinstance(prompt, list) else ())])
        except (TypeError, OverflowError):
            raise NoTokens("`prompt` is text, of which nothing is looked for, or a list of token ids") from None
        if not tokens.ids:
            raise NoTokens("name cartridges, or give token ids as `prompt`")
        found = self._scored(tokens, able)
        return {
            "scores": {name: one.total for name, one in found.items()}, "receipt": self._receipt(found, tokens)
        }  # fmt: skip

    async def pick(self, headers: Mapping[str, str], body: bytes) -> Pick:
        """Return the server for a request as it came, `headers` with names in lower case.

        Its cartridges are looked for, its prompt is not; a request without any goes by load. Waits for a server only where
        what the cartridges are was not asked for a while. Raises `NoPod` without a healthy server.
        """
        fields, able = _fields(body), self._able()
        problem, tokens = {}, Tokens([])
        try:
            tokens = await self._named(fields, headers, able)
        except NoTokens as error:
            problem = {"problem": str(error)}
        found, key = self._scored(tokens, able), self._key(fields, headers)
        holders = {name: one for name, one in found.items() if one.share >= HELD or not key}
        name, by = (best(holders), "score") if holders else (owner(key, found), "owner")
        self.metrics.picks.labels(name, by).inc()
        self.metrics.asked.inc(len(tokens.ids))
        self.metrics.hit.inc(found[name].share * len(tokens.ids))
        receipt = self._receipt(found, tokens) | {"pod": name, "by": by, "key": key} | problem
        return Pick(next(pod for pod in able if pod.name == name), receipt)

    def _key(self, fields: Mapping[str, Any], headers: Mapping[str, str]) -> str:
        return affinity_key(fields, headers.get("x-cartridges", ""), naming=self.config.naming)

    async def _named(self, fields: Mapping[str, Any], headers: Mapping[str, str], pods: Sequence[Pod]) -> Tokens:
        """Return the tokens of a request's cartridges, none without any. Raises `NoTokens`."""
        return await self._renderer.of_names(fields, headers, pods) if self._key(fields, headers) else Tokens([])

    def _able(self) -> list[Pod]:
        """Return the healthy servers. Raises `NoPod` without any."""
        if able := [pod for pod in self.pods if pod.problem is None]:
            return able
        raise NoPod("no server is healthy: " + "; ".join(f"{pod.name}: {pod.problem}" for pod in self.pods))

    def _scored(self, tokens: Tokens, pods: Sequence[Pod]) -> dict[str, Score]:
        matched, weights = self.index.matches(tokens), (self.config.prefix_weight, self.config.load_weight)
        return {pod.name: score(matched.get(pod.number, {}), len(tokens.ids), pod.waiting, *weights) for pod in pods}

    def _receipt(self, found: Mapping[str, Score], tokens: Tokens) -> dict[str, Any]:
        known = {pod.name: pod.is_known for pod in self.pods}
        scores = {name: one._asdict() | {"known": known[name]} for name, one in found.items()}
        left_out = {pod.name: pod.problem for pod in self.pods if pod.name not in found}
        return {"tokens": len(tokens.ids), "scores": scores, "left_out": left_out}


def score(
    matched: Mapping[str, int], tokens: int, waiting: int, prefix_weight: float = 2.0, load_weight: float = 1.0
) -> Score:
    """Return the score of a server that has `matched` leading tokens, by tier, of a prompt of `tokens`."""
    reached, worth = 0, 0.0
    for tier, weight in TIER_WEIGHT.items():
        if (end := matched.get(tier, 0)) > reached:
            worth, reached = worth + weight * (end - reached), end
    load = 0.5 * (1 - min(waiting, MAX_WAITING) / MAX_WAITING)
    total = prefix_weight * worth / (tokens or 1) + load_weight * load
    return Score(total, matched, reached / (tokens or 1), waiting)


def best(scores: Mapping[str, Score]) -> str:
    """Return a server of the highest score, any of them where several have it."""
    highest = max(one.total for one in scores.values())
    return random.choice([name for name, one in scores.items() if one.total == highest])


def owner(key: str, servers: Iterable[str]) -> str:
    """Return the server that owns an affinity key; the same for everybody who asks.

    Rendezvous hashing (Thaler and Ravishankar 1998): a server that comes or goes moves its own keys and no others.
    """
    return max(servers, key=lambda server: _hash(f"{server} {key}"))


def _hash(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass")).digest()


def _fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a request; none for what a server will refuse."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}
