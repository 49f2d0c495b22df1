"""Pods: a fleet's servers as the service sees them: healthy or not, how many requests wait, and what they publish."""

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
from .events import Follower
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
        self.followers: dict[int, Follower] = {}
        """Its events, by data-parallel rank; none until it told where it publishes them."""
        self._config, self._fleet, self._index = config, fleet, index

    @property
    def is_known(self) -> bool:
        """Whether what it told before the service was started is in the index, as far as it can be had."""
        return bool(self.followers) and all(follower.known for follower in self.followers.values())

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Ask it again and again, and for its events beside, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            while True:
                await self.poll(session)
                await asyncio.sleep(self._fleet.poll_s)

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """Ask once for its health and load, and where its events are, until it tells."""
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
        if not self.followers:
            replays = {0: self._config.replay} if self._config.replay else None
            if replays is None:
                replays = _replays(await self._get(session, "/kv_event_sources"), self.url)
            self.followers = {
                rank: Follower(
                    self._index, Source(self.number, rank), replay, name=self.name, timeout_s=self._fleet.timeout_s
                )
                for rank, replay in replays.items()
            }
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

    async def _follow(self) -> None:
        """Take in its events until cancelled; what goes wrong is logged, and everything is asked for again."""
        while True:
            for follower in self.followers.values():
                try:
                    await follower.catch_up()
                except Exception:
                    logger.exception("%s: its events cannot be taken in; all are asked for again", self.name)
                    follower.forget()
            await asyncio.sleep(self._fleet.poll_s)


def _replays(told: str, url: str) -> dict[int, str]:
    """Return the replay endpoints to connect to, by rank, in what `GET /kv_event_sources` tells of a server."""
    host = urlsplit(url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    found = {}
    for rank, source in msgspec.json.decode(told).items():
        endpoint = source.get("replay_endpoint")
        if source.get("publisher") == "zmq" and source.get("enable_kv_cache_events") and endpoint:
            bound, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            found[int(rank)] = f"tcp://{host}:{port}" if bound in _ANYWHERE else endpoint
    return found
