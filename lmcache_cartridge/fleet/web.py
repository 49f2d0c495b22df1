"""Web: a fleet's service over HTTP, for clients and for Envoy's filter `ext_authz`.

Envoy sends the request's method, path, some headers and body to `PREFIX` + path. The answer is 200 with the server's
address in `HEADER`, which Envoy's policy `override_host` obeys (Envoy 1.40.0), and which the Gateway API's inference
extension uses for the same. Without that header Envoy chooses by a hash: 200 with nothing is the answer to all that
goes wrong here, since Envoy would pass any other 4xx on to the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import generate_latest

from ..errors import CartridgeError, FleetError
from .service import Fleet, Pick

HEADER = "x-gateway-destination-endpoint"
PREFIX = "/envoy"
LIMITS: dict[str, Any] = {"max_line_size": 1 << 16, "max_field_size": 1 << 16}
"""Of the web server's, so that it reads whatever Envoy does: 60 KiB of headers. Else it would answer 400."""
MAX_BODY_BYTES = 64 << 20
_CUT = "x-envoy-auth-partial-body"
_TIMEOUT_MS = "x-envoy-expected-rq-timeout-ms"
_IN_TIME = 0.8
"""Of Envoy's timeout. A picker that exceeds it counts as one that hangs, and is left alone."""
Picker = Callable[[Mapping[str, str], bytes], Awaitable[Pick]]

logger = logging.getLogger(__name__)


def app(fleet: Fleet) -> web.Application:
    """Return the application; it starts the fleet and closes it."""

    async def running(made: web.Application) -> AsyncIterator[None]:
        await fleet.start()
        yield
        await fleet.close()

    async def score(request: web.Request) -> web.Response:
        return _json(await fleet.score(_headers(request), await request.read()))

    async def pick(request: web.Request) -> web.Response:
        pod, receipt = await fleet.pick(_headers(request), await request.read())
        return _json({"pod": pod.name, "address": pod.address, "receipt": receipt})

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(fleet.metrics.registry), content_type="text/plain", charset="utf-8")

    async def health(request: web.Request) -> web.Response:
        """Answer 200 once a server can be picked and the events of all healthy ones are known."""
        healthy = [pod for pod in fleet.pods if pod.problem is None]
        is_ready = bool(healthy) and all(pod.is_known or not pod.followers for pod in healthy)
        return _json({"healthy": [pod.name for pod in healthy], "ready": is_ready}, 200 if is_ready else 503)

    made = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
    made.cleanup_ctx.append(running)
    made.add_routes([
        web.post("/score", score), web.post("/pick", pick), web.get("/metrics", metrics), web.get("/health", health),
        route(fleet.pick),
    ])  # fmt: skip
    return made


def serve(fleet: Fleet) -> None:
    """Serve until interrupted or told to end. Raises `OSError` where the address is taken."""
    host, _, port = fleet.config.listen.rpartition(":")
    web.run_app(app(fleet), host=host or "0.0.0.0", port=int(port), print=None, access_log=None, **LIMITS)


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except FleetError as error:
        return _json({"error": {"type": type(error).__name__, "message": str(error)}}, error.status)


def route(pick: Picker) -> web.RouteDef:
    """Return the route that Envoy asks: its answer is always 200."""

    async def answer(request: web.Request) -> web.Response:
        found = await destination(pick, _headers(request), await request.read())
        return web.Response(headers={HEADER: found} if found else {})

    return web.route("*", PREFIX + r"{path:[\s\S]*}", answer)


async def destination(pick: Picker, headers: Mapping[str, str], body: bytes) -> str | None:
    """Return the addresses of the server for a request, or None if none can be named. Never raises.

    A body that Envoy has cut is not read: then the headers alone decide. Ends before Envoy would give up, if it said when.
    """
    given = headers.get(_TIMEOUT_MS, "")
    limit_s = int(given) / 1000 * _IN_TIME if given.isdecimal() and given.isascii() else None
    try:
        async with asyncio.timeout(limit_s):
            return (await pick(headers, b"" if headers.get(_CUT) == "true" else body)).pod.resolved
    except (CartridgeError, TimeoutError) as error:
        logger.debug("no server is picked: %s", error or "not in time")
    except Exception:
        logger.exception("no server is picked")
    return None


def _headers(request: web.Request) -> dict[str, str]:
    """Return the headers by their names in lower case; of several of one name, their values with commas between them."""
    return {name.lower(): ",".join(request.headers.getall(name)) for name in request.headers}


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
