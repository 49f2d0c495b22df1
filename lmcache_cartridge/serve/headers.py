"""Headers: `X-Cartridges` tells what was used, `Retry-After` when to ask again; the API key comes in by one."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers

USED = b"x-cartridges"


class _Exchange:
    """What one HTTP exchange has to say beside its body."""

    def __init__(self, api_key: str | None) -> None:
        self.api_key = api_key
        self.headers: dict[bytes, bytes] = {}


_exchange: ContextVar[_Exchange | None] = ContextVar("cartridge_exchange", default=None)


def attach(app: FastAPI) -> None:
    """Have `app` send what `note` and `retry_after` say."""
    app.add_middleware(_Middleware)


def note(used: str) -> None:
    """Send `X-Cartridges: used` with the response of the current request; the last call counts."""
    if exchange := _exchange.get():
        exchange.headers[USED] = used.encode("ascii", "replace")


def is_noted() -> bool:
    """Whether `note` was called for the current request."""
    exchange = _exchange.get()
    return exchange is not None and USED in exchange.headers


def retry_after(seconds: float) -> None:
    """Send `Retry-After` with the response of the current request."""
    if exchange := _exchange.get():
        exchange.headers[b"retry-after"] = str(max(1, round(seconds))).encode()


def api_key() -> str | None:
    """Return the bearer token of the current request, None if it has none."""
    exchange = _exchange.get()
    return exchange.api_key if exchange else None


class _Middleware:
    """ASGI middleware that adds headers and reads none of the body. It holds back the start of a response that has
    cartridges until the first piece of its body, and no other."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        exchange = _Exchange(key if scheme.lower() == "bearer" else None)
        held = None

        def complete(start: Any) -> Any:
            return {**start, "headers": [*start.get("headers", ()), *exchange.headers.items()]}

        async def send_with_headers(message: Any) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                if USED in exchange.headers:
                    # Only with a stream's first token is it known what was injected.
                    held = message
                    return
                message = complete(message)
            elif held is not None:
                start, held = held, None
                await send(complete(start))
            await send(message)

        token = _exchange.set(exchange)
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            _exchange.reset(token)
