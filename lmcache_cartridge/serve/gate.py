"""Gate: a request that names cartridges where nothing reads them is refused, never answered without them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers

from . import headers
from .request import Refusal

if TYPE_CHECKING:
    from .api import CartridgePlugin

TAKES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""Routes whose request models keep fields they do not know and whose prompts our renderer sees; `probe` holds it."""
MESSAGES = "/v1/messages"
"""Its model drops `cartridges` and keeps `kv_transfer_params`."""
_COUNTS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""Routes that generate nothing, so that a cartridge for everybody does not concern them; naming one still does."""
MAX_BODY_BYTES = 64 << 20


class Gate:
    """ASGI middleware behind authentication. It reads the JSON bodies of the routes that are not in `TAKES`."""

    def __init__(self, app: Any, plugin: CartridgePlugin) -> None:
        self._app, self._plugin = app, plugin

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        form = Headers(scope=scope).get("content-type", "").startswith("multipart/")
        if path in TAKES or path.startswith("/v1/cartridges") or form:
            await self._app(scope, receive, send)
            return
        try:
            body = await _read(receive)
            self._check(path, body)
        except Refusal as refusal:
            await error(refusal)(scope, receive, send)
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Any:
            return unread.pop() if unread else await receive()

        await self._app(scope, receive_again, send)

    def _check(self, path: str, body: bytes) -> None:
        """Raise `Refusal` if the request would get cartridges elsewhere and gets none at `path`."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return  # the endpoint will say so
        if not isinstance(fields, Mapping):
            return
        choose, params = self._plugin.router.choose, fields.get("kv_transfer_params")
        model, key = fields.get("model"), headers.api_key()
        wanted = choose(fields, params, model, key)
        if path == MESSAGES:
            if wanted != choose({}, params, model, key):
                raise Refusal(400, f"{path} drops fields it does not know; use kv_transfer_params.cartridge_id")
        elif wanted != (choose({}, None, model, key) if path in _COUNTS else []):
            raise Refusal(400, f"{path} does not take cartridges; these do: {', '.join((*TAKES, MESSAGES))}")


async def _read(receive: Any) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise Refusal(413, f"the request has more than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return bytes(body)


def error(refusal: Refusal) -> JSONResponse:
    """Return an OpenAI-style error."""
    body = {"message": str(refusal), "type": "CartridgeError", "param": None, "code": refusal.status}
    return JSONResponse({"error": body}, status_code=refusal.status)
