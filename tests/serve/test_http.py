"""HTTP: requests that name cartridges where nothing reads them are refused, and responses say what was used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from lmcache_cartridge.serve import http
from lmcache_cartridge.serve.request import Router
from lmcache_cartridge.settings import from_mapping


def _app(look: Callable[[], Any] = lambda: None, **values: Any) -> FastAPI:
    """Return an app of model `m`, behind gate and headers, whose every route echoes its body, once it has looked."""
    app, settings = FastAPI(), from_mapping(values)
    router = Router(settings)
    router.models = ["m"]
    app.add_middleware(http.Gate, settings=settings, router=router)
    app.add_middleware(http.ResponseHeaders)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT"])
    async def echo(request: Request) -> dict[str, str]:
        look()
        return {"body": (await request.body()).decode("latin-1")}

    return app


def post(app: FastAPI, path: str, **kwargs: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, **kwargs)

    return asyncio.run(send())


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"5", b'{"model": "m"}', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_names_nothing_comes_through_the_gate_as_it_is(body):
    reply = post(_app(), "/anything", content=body)
    assert (reply.status_code, reply.json()["body"].encode("latin-1")) == (200, body)


NAMED = {"cartridges": ["a"]}
WARD = {"router": "label", "label_field": "ward"}
EVERYBODY: dict[str, Any] = {"router": "static", "static": {"*": "a"}}
ROUTED = [
    ({}, "/v1/completions/", {"json": NAMED}, 400),  # another path is another route
    *((values, path, {"json": body}, status) for values, path, body, status in (
        (WARD, "/detokenize", {"ward": "x"}, 400), (EVERYBODY, "/generative_scoring", {}, 400),
        (EVERYBODY, "/detokenize", {}, 200),  # nothing is generated
        ({}, "/invocations", {"cartridges_required": True}, 400), ({}, "/tokenize", {"cartridges_required": True}, 200),
        *(({}, "/tokenize", {"cartridges_required": flag}, status) for flag, status in (
            ("TRUE", 200), (1, 400), ([True], 400), (None, 200),
        )),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("values", "path", "sent", "status"), ROUTED)
def test_what_would_be_dropped_is_refused_where_it_would_be(values, path, sent, status):
    assert post(_app(**values), path, **sent).status_code == status


def sent(*steps: Any) -> list[Any]:
    """Return what is sent of a response, headers or a body, with a number after each step: a message, or something to do."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for number, step in enumerate(steps):
            if callable(step):
                step()
            else:
                await send(step)
            sent.append(number)

    async def send(message: Any) -> None:
        sent.append(dict(message["headers"]) if "headers" in message else message["body"])

    asyncio.run(http.ResponseHeaders(app)({"type": "http", "headers": []}, None, send))
    return sent


_START = {"type": "http.response.start", "status": 200, "headers": []}


def _body(text: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


def test_a_response_with_cartridges_starts_when_it_is_known_what_was_injected():
    """Without any at once; else whatever comes before that: /v1/responses and /v1/messages send events before the first token."""
    assert sent(_START, _body(b"x")) == [{}, 0, b"x", 1]

    def pending() -> None:
        http.current().is_pending = True

    def known() -> None:
        http.note("b")
        http.retry_after(0.2)

    told = {b"x-cartridges": b"b", b"retry-after": b"1", b"x-should-retry": b"true"}
    assert sent(pending, _START, _body(b"x"), known, _body(b"y"), lambda: http.note("too late"), _body(b"z", False)) == [
        0, 1, 2, 3, told, b"x", b"y", 4, 5, b"z", 6,
    ]  # fmt: skip
    assert sent(pending, _START, _body(b"x", False)) == [0, 1, {}, b"x", 2], "one in the background says nothing yet"
