"""Envoy: what its filter `ext_authz` is told about a request, so that it goes to the server that a picker names.

Envoy sends the request's method, path, some headers and body to `PREFIX` + path. The answer is 200 with the server's
address in `HEADER`, which Envoy's policy `override_host` obeys (Envoy 1.40.0), and which the Gateway API's inference
extension uses for the same. Without that header Envoy chooses by a hash: 200 with nothing is the answer to all that
goes wrong here, since Envoy would pass any other 4xx on to the client.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any, Protocol

from aiohttp import web

from ..errors import CartridgeError

HEADER = "x-gateway-destination-endpoint"
PREFIX = "/envoy"
LIMITS: dict[str, Any] = {"max_line_size": 1 << 16, "max_field_size": 1 << 16}
"""Of the web server's, so that it reads whatever Envoy does: 60 KiB of headers. Else it would answer 400."""
_CUT = "x-envoy-auth-partial-body"
_TIMEOUT_MS = "x-envoy-expected-rq-timeout-ms"
_IN_TIME = 0.8
"""Of Envoy's timeout. A picker that exceeds it counts as one that hangs, and is left alone."""
_RESOLVED_S = 5.0
"""Envoy's own STRICT_DNS looks a name up as often."""

logger = logging.getLogger(__name__)


class Picked(Protocol):
    """What a picker says."""

    @property
    def address(self) -> str:
        """Return `host:port` of a server's API."""


class Picker(Protocol):
    """Names a server for a request, or raises a `CartridgeError` that says why it cannot."""

    async def pick(self, headers: Mapping[str, str], body: bytes) -> Picked:
        """Return the server for a request; names of headers are in lower case."""


class Addresses:
    """Names of hosts as the IP addresses by which Envoy knows them. Used by one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, str]] = {}

    async def of(self, address: str) -> str:
        """Return all `ip:port` of a `host:port`, with commas between them; what was last known if its name is gone.

        Does not block the event loop. Raises `OSError` for a name that was never found, and `ValueError` without a port.
        """
        host, _, port = address.rpartition(":")
        number = int(port)
        try:
            ip_address(host.strip("[]"))
            return address
        except ValueError:
            pass
        expires, known = self._known.get(address, (0.0, ""))
        if known and self._clock() < expires:
            return known
        self._known[address] = self._clock() + _RESOLVED_S, known  # others need not ask meanwhile
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, number, type=socket.SOCK_STREAM)
        except OSError:
            if not known:
                raise
            return known
        hosts = dict.fromkeys(f"[{place[0]}]" if family == socket.AF_INET6 else place[0] for family, *_, place in found)
        known = ",".join(f"{host}:{number}" for host in hosts)
        self._known[address] = self._clock() + _RESOLVED_S, known
        return known


class EnvoyAnswers:
    """What Envoy is told about each request."""

    def __init__(self, picker: Picker, addresses: Addresses | None = None) -> None:
        self._picker, self._addresses = picker, addresses or Addresses()

    async def destination(self, headers: Mapping[str, str], body: bytes) -> str | None:
        """Return the addresses of the server for a request, or None if none can be named. Never raises.

        A body that Envoy has cut is not read: then the headers alone decide. Ends before
        Envoy would give up, if it said when.
        """
        try:
            async with asyncio.timeout(_time_s(headers)):
                whole = b"" if headers.get(_CUT) == "true" else body
                picked = await self._picker.pick(headers, whole)
                return await self._addresses.of(picked.address)
        except (CartridgeError, TimeoutError) as error:
            logger.debug("no server is picked: %s", error or "not in time")
        except Exception:
            logger.exception("no server is picked")
        return None

    async def answer(self, request: web.Request) -> web.Response:
        """Answer Envoy: always 200."""
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            headers[name.lower()] = f"{headers[name.lower()]},{value}" if name.lower() in headers else value
        found = await self.destination(headers, await request.read())
        return web.Response(headers={HEADER: found} if found else {})


def _time_s(headers: Mapping[str, str]) -> float | None:
    given = headers.get(_TIMEOUT_MS, "")
    return int(given) / 1000 * _IN_TIME if given.isdecimal() and given.isascii() else None


def routes(picker: Picker) -> list[web.RouteDef]:
    """Return the routes that Envoy asks."""
    return [web.route("*", PREFIX + r"{path:[\s\S]*}", EnvoyAnswers(picker).answer)]
