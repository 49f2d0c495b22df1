"""Headers: `X-Cartridges` tells what was used, `Retry-After` when to ask again; the API key comes in by one."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers

USED = b"x-cartridges"


def path_of(scope: Any) -> str:
    """Return the path that a request asks for, less what the server is mounted under."""
    return scope.get("path", "").removeprefix(scope.get("root_path", ""))


class _Exchange:
    """What one HTTP exchange has to say beside its body."""

    def __init__(self, path: str, api_key: str | None) -> None:
        self.path, self.api_key = path, api_key
        self.headers: dict[bytes, bytes] = {}
        self.is_pending = False


_exchange: ContextVar[_Exchange | None] = ContextVar("cartridge_exchange", default=None)


def attach(app: FastAPI) -> None:
    """Have `app` send what `note` and `retry_after` say."""
    app.add_middleware(_Middleware)


def note(used: str, *, is_pending: bool = False) -> None:
    """Send `X-Cartridges: used` with the response of the current request; the last call before it starts counts.

    While the last one `is_pending` the response does not start: what was injected is known with the first token only.
    """
    if exchange := _exchange.get():
        exchange.headers[USED] = used.encode("ascii", "replace")
        exchange.is_pending = is_pending


def is_noted() -> bool:
    """Whether `note` was called for the current request."""
    exchange = _exchange.get()
    return exchange is not None and USED in exchange.headers


def retry_after(seconds: float) -> None:
    """Send `Retry-After` with the response of the current request."""
    if exchange := _exchange.get():
        exchange.headers[b"retry-after"] = str(max(1, round(seconds))).encode()


def path() -> str | None:
    """Return the path of the current request."""
    exchange = _exchange.get()
    return exchange.path if exchange else None


def api_key() -> str | None:
    """Return the bearer token of the current request, None if it has none."""
    exchange = _exchange.get()
    return exchange.api_key if exchange else None


class _Middleware:
    """ASGI middleware that adds headers and reads none of the body. It holds back a response while what is noted of it
    is pending, and no other."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        exchange = _Exchange(path_of(scope), key if scheme.lower() == "bearer" else None)
        held: list[Any] = []

        async def send_with_headers(message: Any) -> None:
            held.append(message)
            is_last = message["type"] != "http.response.start" and not message.get("more_body")
            if exchange.is_pending and not is_last:
                return
            ready, held[:] = held[:], []
            for piece in ready:
                if piece["type"] == "http.response.start":
                    piece = {**piece, "headers": [*piece.get("headers", ()), *exchange.headers.items()]}
                await send(piece)

        token = _exchange.set(exchange)
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            _exchange.reset(token)
