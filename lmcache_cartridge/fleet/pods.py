"""Pods: a fleet's servers as the service sees them: healthy or not, how many requests wait, what they serve and publish."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
import msgspec

from .config import FleetConfig, PodConfig
from .events import Counts, Follower
from .index import Index, Source

logger = logging.getLogger("lmcache_cartridge.fleet")

_WAITING = re.compile(r"^vllm:num_requests_waiting(?:\{[^\n]*\})? ([0-9.e+]+)$", re.M)
_ANYWHERE = ("*", "0.0.0.0", "[::]", "::")
UNREACHABLE = (aiohttp.ClientError, OSError, TimeoutError)
"""What a server that does not answer raises."""


class Pod:
    """One server. One event loop."""

    def __init__(self, number: int, config: PodConfig, fleet: FleetConfig, index: Index) -> None:
        self.number, self.name, self.address = number, config.name, config.address
        self.resolved = ""
        """All `ip:port` of the address, with commas between them, as its name was last resolved."""
        self.url = config.url.rstrip("/")
        self.problem: str | None = "it was not asked yet"
        """Why it gets no requests; None for a healthy one."""
        self.waiting = 0
        """Requests that wait at it."""
        self.models: dict[str, str | None] = {}
        """Names that it serves, each with what it belongs to: a LoRA adapter or cartridge to a model, a model to nothing.
        Empty until it told."""
        self.followers: dict[int, Follower] = {}
        """Its events, by data-parallel rank."""
        self.counts = Counts()
        """What they came to, of all ranks."""
        self._endpoints = {0: (config.events, config.replay)} if config.events and config.replay else {}
        self._fleet, self._index = fleet, index

    @property
    def is_known(self) -> bool:
        """Whether what it told before the service was started is in the index, as far as it can be had."""
        return bool(self.followers) and all(follower.known for follower in self.followers.values())

    def adapter(self, model: str | None) -> str | None:
        """Return `model` where it is the name of a LoRA adapter, whose blocks are its own."""
        parent = self.models.get(model or "")
        if model in self._fleet.naming.model_aliases:
            return None
        return model if parent in self.models and not str(model).startswith(f"{parent}:") else None

    def serves(self, model: object) -> bool:
        """Return whether it is known to serve a model, `MODEL` or `MODEL:CARTRIDGE`; so it is where none is named."""
        return not isinstance(model, str) or any(model == name or model.startswith(f"{name}:") for name in self.models)

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Ask it again and again, and follow its events, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self.poll(session)
                for rank in self._endpoints.keys() - self.followers.keys():
                    events, replay = self._endpoints[rank]
                    self.followers[rank] = follower = Follower(
                        self._index, Source(self.number, rank), events, replay, name=self.name,
                        timeout_s=self._fleet.timeout_s, verify_s=self._fleet.verify_s, counts=self.counts,
                    )  # fmt: skip
                    tasks.create_task(self._keep_following(follower))
                await asyncio.sleep(self._fleet.poll_s)

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """Ask once for its health, load and models, and for its events until it tells of some."""
        try:
            await self._ask(session)
            problem = None
        except aiohttp.ClientResponseError as error:
            problem = f"{error.request_info.url.path} answers {error.status}"
        except UNREACHABLE as error:
            problem = f"no answer: {error or type(error).__name__}"
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
            problem = f"its answer is not vLLM's: {error!r}"
        if (problem is None) != (self.problem is None):
            logger.info("%s: %s", self.name, "healthy" if problem is None else f"left out: {problem}")
        self.problem = problem

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        await self._get(session, "/health")
        self.waiting = sum(int(float(value)) for value in _WAITING.findall(await self._get(session, "/metrics")))
        cards = msgspec.json.decode(await self._get(session, "/v1/models"))["data"]
        self.models = {card["id"]: card.get("parent") for card in cards}
        if not self._endpoints:
            self._endpoints = _endpoints(await self._get(session, "/kv_event_sources"), self.url)
        with suppress(OSError):  # what its name meant is good while it answers
            async with asyncio.timeout(self._fleet.timeout_s):
                await self.resolve()

    async def _get(self, session: aiohttp.ClientSession, path: str) -> str:
        async with session.get(self.url + path, raise_for_status=True) as response:
            return await response.text()

    async def resolve(self) -> None:
        """Look its address up, by which Envoy knows it. Raises `OSError` for a name that is not found."""
        host, _, port = self.address.rpartition(":")
        look_up = asyncio.get_running_loop().getaddrinfo
        found = await look_up(host.strip("[]"), port, type=socket.SOCK_STREAM)
        hosts = dict.fromkeys(str(place[0]) for *_, place in found)
        self.resolved = ",".join(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in hosts)

    async def _keep_following(self, follower: Follower) -> None:
        """Follow until cancelled; what goes wrong is logged, and everything is asked for again."""
        while True:
            try:
                await follower.follow()
            except Exception:
                logger.exception("%s: its events are followed no more; again in %g s", self.name, self._fleet.poll_s)
            await asyncio.sleep(self._fleet.poll_s)


def _endpoints(told: str, url: str) -> dict[int, tuple[str, str]]:
    """Return the endpoints to connect to, by rank, in what `GET /kv_event_sources` tells of a server."""
    found: dict[int, tuple[str, str]] = {}
    sources = msgspec.json.decode(told)
    host = urlsplit(url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    for rank, source in sources.items():
        if source.get("publisher") == "zmq" and source.get("enable_kv_cache_events"):
            events, replay = (_reached(source.get(name), host) for name in ("endpoint", "replay_endpoint"))
            if events and replay:
                found[int(rank)] = events, replay
    return found


def _reached(endpoint: str | None, host: str) -> str | None:
    """Return where to connect to a socket that is bound to `endpoint` on `host`."""
    scheme, _, rest = (endpoint or "").partition("://")
    bound, _, port = rest.rpartition(":")
    return f"tcp://{host}:{port}" if scheme == "tcp" and bound in _ANYWHERE else endpoint
