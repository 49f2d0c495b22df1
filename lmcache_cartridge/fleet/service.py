"""Fleet: the servers behind a router, what each holds, and the one that a request should go to.

Scores and the pick are llm-d's: prefix 2.0, load 1.0, the highest, ties by chance. The index is Dynamo's. Where nobody holds
anything of a request, its affinity key has one owner, so that a cold cartridge is loaded once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from ..errors import NoPod, NoTokens, NotReplayed, UnknownModel, UnknownPod
from ..library.placement import owners
from .affinity import Naming, affinity_key
from .config import FleetConfig
from .index import Index, Tokens
from .pods import Pod, serving
from .scores import Score, best, score
from .tally import Tally
from .tokens import Renderer

logger = logging.getLogger("lmcache_cartridge.fleet")

LOG_EVERY_S = 60.0


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
        """`chance` chooses between servers of one score. Raises `SettingsError` where Dynamo is not installed."""
        self.config = config
        self.index = Index()
        self.pods = [Pod(number, pod, config, self.index) for number, pod in enumerate(config.pods)]
        self.tally = Tally()
        self._naming = Naming(**config.naming)
        self._chance = chance or random.Random()
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.renderer = Renderer(self._sessions, config.names_ttl_s)

    async def start(self) -> None:
        """Begin to follow the servers. Returns at once, before anything of them is known."""
        key = self.config.api_key
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=aiohttp.ClientTimeout(total=self.config.timeout_s),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self._tasks = [asyncio.create_task(pod.watch(self._session), name=pod.name) for pod in self.pods]
        self._tasks.append(asyncio.create_task(self._log_on(), name="log"))

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
        wanted = self._named(pods)
        able, left_out = self._healthy(wanted)
        if model is not None and not (able := serving(able, model)):
            raise UnknownModel(f"no server of the fleet serves {model!r}")
        if not any(pod.is_known for pod in able):
            raise NotReplayed(
                f"the events of {', '.join(pod.name for pod in able)} are not replayed yet, or they publish none; ask later"
            )
        fields: dict[str, Any] = {"cartridges": list(cartridges)} if cartridges else {}
        fields["model"] = model or next(iter(able[0].models), None)
        tokens = await self._expanded(fields, prompt, messages, token_ids, headers or {}, able)
        if not tokens.ids:
            raise NoTokens("name cartridges, or give a prompt, messages or token_ids")
        found = self._scored(tokens, able)
        self.tally.scored(found, time.perf_counter() - began)
        return Scores({name: one.total for name, one in found.items()}, self._receipt(found, tokens, left_out))

    async def pick(self, path: str, headers: Mapping[str, str], body: bytes) -> Pick:
        """Return the server for a request as it came, `headers` with names in lower case.

        Waits for a server's rendering only where a request's cartridges were never asked for, or where the configuration
        has `render_picks`. Raises `UnknownPod` never, `NoPod` without a healthy server.
        """
        began = time.perf_counter()
        fields = _fields(body)
        able, left_out = self._healthy(self.pods)
        able = serving(able, _text(fields.get("model"))) or able  # a server says itself that it does not know a model
        key = affinity_key(fields, headers.get("x-cartridges", ""), api_key=_bearer(headers), naming=self._naming)
        tokens, problem = Tokens([]), None
        try:
            if self.config.render_picks:
                tokens = await self.renderer.of_request(path, headers, body, able)
            elif key:
                tokens = await self.renderer.of_names(fields, headers, able)
        except NoTokens as error:
            problem = str(error)
        found = self._scored(tokens, able)
        receipt = self._receipt(found, tokens, left_out)
        if key and not any(one.matched for one in found.values()):
            name, by = owners(key, found)[0], "owner"
        else:
            name, by = best(found, self._chance), "score"
        receipt |= {"pod": name, "by": by, "key": key} | ({"problem": problem} if problem else {})
        self.tally.picked(name, by, found[name], len(tokens.ids), time.perf_counter() - began)
        return Pick(name, next(pod.address for pod in able if pod.name == name), receipt)

    async def _expanded(
        self, fields: dict[str, Any], prompt: str | None, messages: Sequence[Any] | None,
        token_ids: Sequence[int] | None, headers: Mapping[str, str], pods: Sequence[Pod],
    ) -> Tokens:  # fmt: skip
        if sum(given is not None for given in (prompt, messages, token_ids)) > 1:
            raise NoTokens("give one of prompt, messages and token_ids")
        if messages is not None:
            body = msgspec.json.encode(fields | {"messages": messages, "max_tokens": 1})
            return await self.renderer.of_request("/v1/chat/completions", headers, body, pods)
        if prompt is not None:
            body = msgspec.json.encode(fields | {"prompt": prompt, "max_tokens": 1})
            return await self.renderer.of_request("/v1/completions", headers, body, pods)
        adapter = pods[0].adapter(fields["model"])
        if not affinity_key(fields, headers.get("x-cartridges", ""), naming=self._naming):
            return Tokens(token_ids or (), adapter)
        named = await self.renderer.of_names(fields, headers, pods)
        return named if token_ids is None else Tokens([*named.ids, *token_ids], adapter)

    def _named(self, names: Sequence[str] | None) -> list[Pod]:
        by_name = {pod.name: pod for pod in self.pods}
        if unknown := set(names or ()) - set(by_name):
            raise UnknownPod(f"no server is called {', '.join(sorted(unknown))}; there are {', '.join(by_name)}")
        return self.pods if names is None else [by_name[name] for name in dict.fromkeys(names)]

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
        return {
            "tokens": len(tokens.ids),
            "scores": {name: one._asdict() | {"known": known[name]} for name, one in found.items()},
            "left_out": dict(left_out),
        }

    def _sessions(self) -> aiohttp.ClientSession:
        assert self._session is not None, "start() comes first"
        return self._session

    async def _log_on(self) -> None:
        while True:
            await asyncio.sleep(LOG_EVERY_S)
            logger.info("%s", self.tally.line(self.index, self.pods))


def _fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a request; none for what a server will refuse."""
    try:
        fields = msgspec.json.decode(body) if body else {}
    except (msgspec.DecodeError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _bearer(headers: Mapping[str, str]) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else None
