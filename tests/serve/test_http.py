"""HTTP: requests that name cartridges where nothing reads them are refused, and responses say what was used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from lmcache_cartridge.serve import http
from lmcache_cartridge.serve.request import Refusal, Router, read_header
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


@pytest.mark.parametrize("value", ["a b", "é", "a\x00", "\x7f", "a\nb", "x" * 1100, ",".join("a" * 17)])
def test_a_header_that_names_no_cartridge_is_refused(value):
    with pytest.raises(Refusal, match="X-Cartridges") as caught:
        read_header([value])
    assert caught.value.status == 400


NAMED = {"cartridges": ["a"]}
WARD = {"router": "label", "label_field": "ward"}
EVERYBODY: dict[str, Any] = {"router": "static", "static": {"*": "a"}}
ROUTED = [
    ({}, "/v1/completions/", {"json": NAMED}, 400),  # another path is another route
    *((values, path, {"json": body}, status) for values, path, body, status in (
        (WARD, "/detokenize", {"ward": "x"}, 400), (WARD, "/v1/completions", {"ward": "x"}, 200),
        (EVERYBODY, "/generative_scoring", {}, 400), (EVERYBODY, http.MESSAGES, {}, 200),
        (EVERYBODY, "/detokenize", {}, 200),  # nothing is generated
        ({}, "/invocations", {"cartridges_required": True}, 400), ({}, "/tokenize", {"cartridges_required": True}, 200),
        *(({}, "/tokenize", {"cartridges_required": flag}, status) for flag, status in (
            ("TRUE", 200), (1, 400), ([True], 400), (None, 200),
        )),
    )),
    # /invocations puts SageMaker's adapter in the place of `model` (vLLM 0.32), and the base model would answer.
    *(({"model_aliases": {"ward": ["a"]}}, path, {"json": {"model": model}}, status) for path, model, status in (
        ("/invocations", "m", 200), ("/invocations", "ward", 400), ("/inference/v1/generate", "m:a", 400), ("/inference/v1/generate", "m", 200),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("values", "path", "sent", "status"), ROUTED)
def test_what_would_be_dropped_is_refused_where_it_would_be(values, path, sent, status):
    assert post(_app(**values), path, **sent).status_code == status


def test_what_is_noted_before_a_response_starts_is_in_its_headers():
    app = FastAPI()
    app.add_middleware(http.ResponseHeaders)

    @app.post("/")
    async def stream() -> StreamingResponse:
        http.note("first", is_pending=True)

        async def pieces() -> AsyncIterator[str]:
            http.note("a@1;served=document")
            http.retry_after(0.2)
            yield "x"
            http.note("too late")

        return StreamingResponse(pieces())

    reply = post(app, "/")
    assert (reply.headers["x-cartridges"], reply.headers["retry-after"]) == ("a@1;served=document", "1")
    assert reply.headers["x-should-retry"] == "true"


def _sent(*steps: Any) -> list[Any]:
    """Return what is sent of a response, with a number after each step: a message, or something to do."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for number, step in enumerate(steps):
            if callable(step):
                step()
            else:
                await send(step)
            sent.append(number)

    async def send(message: Any) -> None:
        sent.append(dict(message["headers"]).get(b"x-cartridges") if "headers" in message else message["body"])

    asyncio.run(http.ResponseHeaders(app)({"type": "http", "headers": []}, None, send))
    return sent


_START = {"type": "http.response.start", "status": 200, "headers": []}


def _body(text: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


def test_a_response_with_cartridges_starts_when_it_is_known_what_was_injected():
    """Without any at once; else whatever comes before that: /v1/responses and /v1/messages send events before the first token."""
    assert _sent(_START, _body(b"x")) == [None, 0, b"x", 1]
    pending, known = (lambda: http.note("a", is_pending=True)), (lambda: http.note("b"))
    assert _sent(pending, _START, _body(b"x"), known, _body(b"y"), _body(b"z", False)) == [
        0, 1, 2, 3, b"b", b"x", b"y", 4, b"z", 5,
    ]  # fmt: skip
    assert _sent(pending, _START, _body(b"x", False)) == [0, 1, b"a", b"x", 2], "it ends, whether it is known or not"
