"""Web: a fleet's service over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from aiohttp import web
from prometheus_client import generate_latest

from ..errors import FleetError, NoTokens
from .envoy import LIMITS, routes

if TYPE_CHECKING:
    from .service import Fleet

MAX_BODY_BYTES = 64 << 20
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def app(fleet: Fleet) -> web.Application:
    """Return the application; it starts the fleet and closes it. `app[FLEET]` is the fleet."""
    made = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
    made[FLEET] = fleet
    made.cleanup_ctx.append(_running)
    made.router.add_post("/score", _score)
    made.router.add_post("/pick", _pick)
    made.router.add_routes(routes(fleet))
    made.router.add_get("/metrics", _metrics)
    made.router.add_get("/health", _health)
    return made


def serve(fleet: Fleet) -> None:
    """Serve until interrupted or told to end. Raises `OSError` where the address is taken."""
    host, port = fleet.config.host_port
    web.run_app(app(fleet), host=host, port=port, print=None, access_log=None, **LIMITS)


FLEET: web.AppKey[Fleet] = web.AppKey("fleet")


async def _running(made: web.Application) -> AsyncIterator[None]:
    await made[FLEET].start()
    yield
    await made[FLEET].close()


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except FleetError as error:
        return _json({"error": {"type": type(error).__name__, "message": str(error)}}, error.status)


class _Question(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[Any] | None = None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]] | None = None
    cartridges: list[Any] = []
    model: str | None = None
    pods: list[str] | None = None


_decode_question = msgspec.json.Decoder(_Question).decode


async def _score(request: web.Request) -> web.Response:
    try:
        question = _decode_question(await request.read())
    except (msgspec.DecodeError, ValueError) as error:
        raise NoTokens(f"the body: {error}") from None
    scores, receipt = await request.app[FLEET].score(**msgspec.structs.asdict(question), headers=_headers(request))
    return _json({"scores": scores, "receipt": receipt})


async def _pick(request: web.Request) -> web.Response:
    """Answer for the request in the body."""
    picked = await request.app[FLEET].pick(_headers(request), await request.read())
    return _json({"pod": picked.pod, "address": picked.address, "receipt": picked.receipt})


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(
        body=generate_latest(request.app[FLEET].tally.registry), content_type="text/plain", charset="utf-8"
    )


async def _health(request: web.Request) -> web.Response:
    """Answer 200 once a server can be picked and the events of all healthy ones are known."""
    healthy = [pod for pod in request.app[FLEET].pods if pod.problem is None]
    is_ready = bool(healthy) and all(pod.is_known or not pod.followers for pod in healthy)
    return _json({"healthy": [pod.name for pod in healthy], "ready": is_ready}, 200 if is_ready else 503)


def _headers(request: web.Request) -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
