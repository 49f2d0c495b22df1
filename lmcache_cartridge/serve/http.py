"""HTTP: what stands between the client and vLLM's routes.

`Gate` refuses a request that names cartridges where nothing reads them: it is never answered without them.
`ResponseHeaders` tells the client beside the body what was used, `X-Cartridges`, and when to ask again, `Retry-After`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from blake3 import blake3
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, QueryParams

from ..settings import Settings
from . import misnamed
from .request import REQUIRED, REQUIRED_FIELD, Refusal, Router, read_flag, read_header, shorten

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
"""The request model of the second drops fields that it does not know, so the gate keeps them for the renderer."""
TAKES = ("/v1/completions", CHAT, "/v1/responses", MESSAGES)
"""Routes whose prompts our renderer sees; checked at start."""
RENDER = "/render"
SHOWS = (*(route + RENDER for route in TAKES), "/v1/cartridges/tokens")
"""Routes behind the API key that show tokens of a request's cartridges: for routers that place by tokens."""
COUNTS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""Routes that generate nothing, so that a cartridge for everybody does not concern them; naming one still does."""
_ANSWERS = (
    "/v1/chat/completions/batch", "/cohere/v2/chat", "/inference/v1/generate", "/generative_scoring", "/invocations",
    "/v1/systemone", "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip
"""Other routes that generate: what takes no cartridges cannot answer where one is required."""
GENERATES = (*TAKES, *_ANSWERS)
_NAMES, _REQUIRED = misnamed.HEADERS


class Gate:
    """ASGI middleware behind authentication: looks into bodies that may have to do with cartridges, and no others."""

    def __init__(self, app: Any, settings: Settings, router: Router) -> None:
        """`router` comes to know the server's models, which names of cartridges may stand in the place of."""
        self._app, self._settings, self._router = app, settings, router

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        path = path_of(scope)
        if path.startswith("/v1/cartridges") and path not in SHOWS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_headers(path, headers)
            self._check(path, body := await _read(receive))
        except Refusal as refusal:
            await error(refusal)(scope, receive, send)
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Any:
            return unread.pop() if unread else await receive()

        await self._app(scope, receive_again, send)

    def _check_headers(self, path: str, headers: Headers) -> None:
        """Note what the headers name. Raises `Refusal` for what they say wrong, and where nothing could read it."""
        if (slip := misnamed.find_header(headers.keys())) is not None:
            raise Refusal(400, f"nothing reads the header {shorten(slip)!r}; name cartridges in X-Cartridges")
        exchange = current()
        named = read_header(headers.getlist(_NAMES))
        required = any(read_flag(value, "the header X-Cartridges-Required") for value in headers.getlist(_REQUIRED))
        if named and path not in (*TAKES, *SHOWS):
            raise Refusal(400, takes_none(path))
        if (self._settings.required or required) and path in _ANSWERS:
            raise Refusal(400, f"{REQUIRED}; {takes_none(path)}")
        exchange.named, exchange.is_required = named, required

    def _check(self, path: str, body: bytes) -> None:
        """Raise `Refusal` if the request means cartridges and would be answered without them, or with others."""
        settings = self._settings
        labels = [settings.label_field] if settings.router in ("label", "composite") else []
        read = ("cartridges", REQUIRED_FIELD, *labels)
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return  # the endpoint will say so
        if not isinstance(fields, Mapping):
            return
        if (field := misnamed.find(fields, read)) is not None:
            raise Refusal(
                400,
                f"nothing reads the field {shorten(field)!r} here; name cartridges in `cartridges`, a list of names",
            )
        exchange = current()
        required = fields.get(REQUIRED_FIELD) is not None and read_flag(fields[REQUIRED_FIELD], f"`{REQUIRED_FIELD}`")
        if required and path in _ANSWERS:
            raise Refusal(400, f"{REQUIRED}; {takes_none(path)}")
        if path in (*TAKES, *SHOWS):
            exchange.is_required |= required
            drops = path.removesuffix(RENDER) == MESSAGES
            exchange.fields = {name: fields[name] for name in read if drops and name in fields}
            if settings.contexts and path in (CHAT, MESSAGES) and b'"cache_control"' in body:
                exchange.marked = fields
            return
        choose, params = self._router.choose, fields.get("kv_transfer_params")
        model = fields.get("model")
        if choose(fields, params, model) != (choose({}, None, model) if path in COUNTS else []):
            raise Refusal(400, takes_none(path))


def takes_none(path: str) -> str:
    """Return why a request with cartridges is refused on a route that would ignore them."""
    return f"{path} does not take cartridges; these do: {', '.join(TAKES)}"


async def _read(receive: Any) -> bytes:
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def error(refusal: Refusal) -> JSONResponse:
    """Return an error as vLLM writes those of the renderer; a client is told whether asking again is of use."""
    body = {"message": str(refusal), "type": HTTPStatus(refusal.status).phrase, "param": None, "code": refusal.status}
    retry_after(refusal.retry_after_s)
    return JSONResponse({"error": body}, status_code=refusal.status)


def tenants_of(salt: Any, api_key: str | None) -> tuple[str, ...]:
    """Return whose contexts a request may name: those of its `cache_salt`, of its key, and everybody's. Of the first are those
    that it has made.
    """
    named = [f"{what} {who}" for what, who in (("salt", salt), ("key", api_key)) if who]
    return (*(blake3(each.encode("utf-8", "surrogatepass")).hexdigest(16) for each in named), "")


class Exchange:
    """One HTTP request: what it says beside what vLLM reads of it, and what its response says beside its body."""

    def __init__(self, path: str | None, api_key: str | None, salt: str | None = None) -> None:
        self.path, self.api_key = path, api_key
        """Less what the server is mounted under; the bearer token, None without one."""
        self.tenants = tenants_of(salt, api_key)
        """Whose contexts it may know of, by its key and the `cache_salt` in its address."""
        self.named: tuple[str, ...] = ()
        """The cartridges that the header names, in order."""
        self.is_required = False
        """Whether, by header or body, no answer without a cartridge is wanted."""
        self.fields: dict[str, Any] = {}
        """The fields for us in the body that the route drops."""
        self.marked: Mapping[str, Any] = {}
        """The body, where a block of it has `cache_control`."""
        self.keep: Callable[[], Awaitable[int]] | None = None
        """Has contexts made of what is marked, and returns how many leading tokens of the prompt that are."""
        self.headers: dict[bytes, bytes] = {}
        self.is_pending = False
        """Whether the response does not start before the next `note`, or its end: what was injected is known with the first
        token only."""


_exchange: ContextVar[Exchange | None] = ContextVar("cartridge_exchange", default=None)


def current() -> Exchange:
    """Return the current request's; outside of one, another that nobody reads."""
    return _exchange.get() or Exchange(None, None)


def path_of(scope: Any) -> str:
    """Return the path that a request asks for, less what the server is mounted under."""
    return scope.get("path", "").removeprefix(scope.get("root_path", ""))


def note(used: str) -> None:
    """Send `X-Cartridges: used` with the response of the current request; the last call before it starts counts."""
    exchange = current()
    exchange.headers[_NAMES.encode()] = used.encode("ascii", "replace")
    exchange.is_pending = False


def is_noted() -> bool:
    """Whether `note` was called for the current request."""
    return _NAMES.encode() in current().headers


def retry_after(seconds: float | None) -> None:
    """Send `Retry-After` with the response of the current request, and what has OpenAI's client heed it.

    With None that asking again is in vain: by itself that client asks three times where it hears 409.
    """
    headers = current().headers
    headers[b"x-should-retry"] = b"false" if seconds is None else b"true"
    if seconds is not None:
        headers[b"retry-after"] = str(max(1, round(seconds))).encode()


class ResponseHeaders:
    """ASGI middleware that sends what `note` and `retry_after` say, and reads no body.

    It holds a response back while a note is pending, and no other response.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        salt = QueryParams(scope.get("query_string", b"")).get("cache_salt")
        exchange = Exchange(path_of(scope), key if scheme.lower() == "bearer" else None, salt)
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
