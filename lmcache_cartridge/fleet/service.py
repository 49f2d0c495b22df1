"""Fleet: the servers behind a router, what each holds, and the one that a request should go to.

Scores are llm-d's: prefix 2.0, load 1.0; the highest is picked, ties by chance. A request for cartridges goes to the owner of
its affinity key unless a server holds half of their tokens, so that what is cold is loaded once, also where cartridges begin
alike.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from ..errors import NoPod, NoTokens, NotReplayed, UnknownModel, UnknownPod
from .affinity import Naming, affinity_key
from .config import FleetConfig
from .index import Index, Tokens
from .owners import owners
from .pods import Pod, serving
from .scores import Score, best, score
from .tally import Tally
from .tokens import Renderer

HELD = 0.5
"""Share of a request's cartridges from which on a server counts as one that holds them."""


class Pick(NamedTuple):
    """The server of a request."""

    pod: str
    address: str
    """Host and port."""
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
        self.tally = Tally(self.index, self.pods)
        self._naming = Naming(**config.naming)
        self._chance = chance or random.Random()
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._renderer = Renderer(self._sessions, config.names_ttl_s)

    async def start(self) -> None:
        """Begin to follow the servers. Returns at once, before anything of them is known."""
        key = self.config.api_key
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=aiohttp.ClientTimeout(total=self.config.timeout_s),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self._tasks = [asyncio.create_task(pod.watch(self._session), name=pod.name) for pod in self.pods]

    async def close(self) -> None:
        """Follow them no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
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
        began = time.perf_counter()
        if unknown := set(pods or ()) - {pod.name for pod in self.pods}:
            names = ", ".join(pod.name for pod in self.pods)
            raise UnknownPod(f"no server is called {', '.join(sorted(unknown))}; there are {names}")
        able, left_out = self._healthy([pod for pod in self.pods if pods is None or pod.name in pods])
        if not (able := serving(able, model)):
            raise UnknownModel(f"no server of the fleet serves {model!r}")
        if not any(pod.is_known for pod in able):
            names = ", ".join(pod.name for pod in able)
            raise NotReplayed(f"the events of {names} are not replayed yet, or they publish none; ask later")
        if sum(given is not None for given in (prompt, messages, token_ids)) > 1:
            raise NoTokens("give one of prompt, messages and token_ids")
        fields: dict[str, Any] = {"model": model or next(iter(able[0].models), None), "max_tokens": 1}
        fields |= {"cartridges": list(cartridges)} if cartridges else {}
        headers = headers or {}
        if messages is not None:
            fields["messages"] = messages
            tokens = await self._renderer.of_request("/v1/chat/completions", fields, headers, able)
        elif prompt is not None:
            fields["prompt"] = prompt
            tokens = await self._renderer.of_request("/v1/completions", fields, headers, able)
        else:
            tokens = await self._named(fields, headers, able)
            tokens = Tokens([*tokens.ids, *(token_ids or ())], able[0].adapter(fields["model"]))
        if not tokens.ids:
            raise NoTokens("name cartridges, or give a prompt, messages or token_ids")
        found = self._scored(tokens, able)
        self.tally.scored(time.perf_counter() - began)
        return Scores({name: one.total for name, one in found.items()}, self._receipt(found, tokens, left_out))

    async def pick(self, headers: Mapping[str, str], body: bytes) -> Pick:
        """Return the server for a request as it came, `headers` with names in lower case.

        Its cartridges are looked for, the rest of its prompt is not; a request without any goes by load. Waits for a server
        only where what the cartridges are was never asked. Raises `NoPod` without a healthy server.
        """
        began = time.perf_counter()
        fields = _fields(body)
        able, left_out = self._healthy(self.pods)
        able = serving(able, _text(fields.get("model"))) or able  # a server says itself that it does not know a model
        problem = {}
        try:
            tokens = await self._named(fields, headers, able)
        except NoTokens as error:
            tokens, problem = Tokens([]), {"problem": str(error)}
        found = self._scored(tokens, able)
        key = self._key(fields, headers)
        holders = {name: one for name, one in found.items() if one.share >= HELD} if key else found
        name = best(holders, self._chance) if holders else owners(key, found)[0]
        by = "score" if holders else "owner"
        self.tally.picked(name, by, found[name].share, len(tokens.ids), time.perf_counter() - began)
        receipt = self._receipt(found, tokens, left_out) | {"pod": name, "by": by, "key": key} | problem
        return Pick(name, next(pod.address for pod in able if pod.name == name), receipt)

    def _key(self, fields: Mapping[str, Any], headers: Mapping[str, str]) -> str:
        scheme, _, api_key = headers.get("authorization", "").partition(" ")
        return affinity_key(
            fields,
            headers.get("x-cartridges", ""),
            api_key=api_key if scheme.lower() == "bearer" else None,
            naming=self._naming,
        )

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
        matched = self.index.matches(tokens) if tokens.ids else {}
        whole = max((len(tokens.ids) // size * size for size in self.index.sizes()), default=0)
        weights = {"prefix_weight": self.config.prefix_weight, "load_weight": self.config.load_weight}
        return {pod.name: score(matched.get(pod.number, {}), whole, pod.waiting, **weights) for pod in pods}

    def _receipt(self, found: Mapping[str, Score], tokens: Tokens, left_out: Mapping[str, str]) -> dict[str, Any]:
        known = {pod.name: pod.is_known for pod in self.pods}
        scores = {name: one._asdict() | {"known": known[name]} for name, one in found.items()}
        return {"tokens": len(tokens.ids), "scores": scores, "left_out": left_out}

    def _sessions(self) -> aiohttp.ClientSession:
        assert self._session is not None, "start() comes first"
        return self._session


def _fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a request; none for what a server will refuse."""
    try:
        fields = msgspec.json.decode(body) if body else {}
    except (msgspec.DecodeError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
