"""What stands between vLLM's server and its clients, each part alone: gate, headers, administration, probe, engine guard."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from making import make_artifact

from lmcache_cartridge.errors import SettingsError, UnsupportedEngine
from lmcache_cartridge.registry import Registry
from lmcache_cartridge.serve import gate, headers
from lmcache_cartridge.serve.admin import add_routes
from lmcache_cartridge.serve.request import GRANT, TAG, Reference, Resolver, Selection
from lmcache_cartridge.serve.router import Router
from lmcache_cartridge.settings import from_mapping

with warnings.catch_warnings():  # torch's, while vLLM is imported
    warnings.simplefilter("ignore")
    from vllm.exceptions import GracefulHTTPError, RetryableRequestError

    from lmcache_cartridge.serve.api import CartridgePlugin, Granted, GuardedEngine, probe


def _app(**values: Any) -> FastAPI:
    """Return an app whose every route echoes the body it got, behind gate and headers."""
    app = FastAPI()
    plugin = SimpleNamespace(router=Router(from_mapping(values)), settings=from_mapping(values))
    app.add_middleware(gate.Gate, plugin=plugin)
    headers.attach(app)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT"])
    async def echo(request: Request) -> dict[str, str]:
        return {"body": (await request.body()).decode("latin-1")}

    return app


def _post(app: FastAPI, path: str, **kwargs: Any) -> httpx.Response:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, **kwargs)

    return asyncio.run(post())


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"5", b'{"model": "m"}', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_names_nothing_comes_through_the_gate_as_it_is(body: bytes) -> None:
    reply = _post(_app(), "/anything", content=body)
    assert (reply.status_code, reply.json()["body"].encode("latin-1")) == (200, body)


@pytest.mark.parametrize("path", gate.TAKES)
def test_routes_that_take_cartridges_are_not_read(path: str) -> None:
    assert _post(_app(), path, json={"cartridges": ["a"]}).status_code == 200
    assert _post(_app(), path + "/", json={"cartridges": ["a"]}).status_code == 400, "another path is another route"


def test_a_body_beyond_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_BODY_BYTES", 1000)
    assert _post(_app(), "/anything", content=b"x" * 1001).status_code == 413
    assert _post(_app(), "/anything", content=b"x" * 1000).status_code == 200


def test_a_label_is_refused_where_it_would_be_dropped() -> None:
    labelled, app = {"cartridge_label": "x"}, _app(router="label")
    assert _post(app, gate.MESSAGES, json=labelled).status_code == 400
    assert _post(app, "/generative_scoring", json=labelled).status_code == 400
    assert _post(_app(), gate.MESSAGES, json=labelled).status_code == 200, (
        "the control: without that router it is no label"
    )


def test_what_everybody_gets_is_not_left_out_where_something_is_generated() -> None:
    app = _app(router="static", static={"*": "a"})
    assert _post(app, "/generative_scoring", json={}).status_code == 400
    assert _post(app, gate.MESSAGES, json={}).status_code == 200, "messages get it"
    assert _post(app, "/tokenize", json={}).status_code == 200, "nothing is generated"
    assert _post(app, "/tokenize", json={"cartridges": ["b"]}).status_code == 400


@pytest.mark.parametrize(("sent", "key"), [("Bearer k", "k"), ("bearer k", "k"), ("Basic k", None), (None, None)])
def test_the_api_key_is_read_as_vllm_reads_it(sent: str | None, key: str | None) -> None:
    app, seen = FastAPI(), []
    headers.attach(app)

    @app.post("/")
    async def look() -> None:
        seen.append(headers.api_key())

    _post(app, "/", headers={} if sent is None else {"Authorization": sent})
    assert seen == [key]


def test_what_is_noted_before_the_first_piece_of_a_stream_is_in_its_headers() -> None:
    app = FastAPI()
    headers.attach(app)

    @app.post("/")
    async def stream() -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            headers.note("first")
            headers.note("a@1;served=document")
            headers.retry_after(0.2)
            yield "x"
            headers.note("too late")

        return StreamingResponse(pieces())

    reply = _post(app, "/")
    assert (reply.headers["x-cartridges"], reply.headers["retry-after"]) == ("a@1;served=document", "1")
    assert headers.api_key() is None, "outside a request there is none"


@pytest.mark.parametrize("action", ["preload", "pin", "unpin", "evict", "explode"])
def test_nothing_can_be_changed_over_http_unless_that_is_switched_on(action: str) -> None:
    app = FastAPI()
    add_routes(app, SimpleNamespace(settings=from_mapping({})))
    reply = _post(app, f"/v1/cartridges/a/{action}")
    assert reply.status_code == 403
    assert "`admin`" in reply.json()["error"]["message"]


# The probe: does what a request says of cartridges reach us?


def _state(**handlers: Any) -> Any:
    models = SimpleNamespace(base_model_paths=[SimpleNamespace(name="m")])
    return SimpleNamespace(openai_serving_models=models, **handlers)


def _handler(reply: Any) -> Any:
    async def create(request: Any) -> Any:
        if isinstance(reply, Exception):
            raise reply
        return reply

    return SimpleNamespace(create_completion=create, create_chat_completion=create, create_responses=create,
                           create_messages=create)  # fmt: skip


_NAMES = ["openai_serving_completion", "openai_serving_chat", "openai_serving_responses", "anthropic_serving_messages"]
_SEEN = GracefulHTTPError("cartridges.0.id: too short", HTTPStatus.BAD_REQUEST)


def test_a_server_whose_handlers_all_show_us_the_field_starts() -> None:
    asyncio.run(probe(_state(**{name: _handler(_SEEN) for name in _NAMES})))


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("reply", ["an answer", GracefulHTTPError("no such model", HTTPStatus.NOT_FOUND)])
def test_a_server_with_a_handler_that_does_not_show_us_the_field_does_not_start(name: str, reply: Any) -> None:
    handlers = {other: _handler(_SEEN) for other in _NAMES} | {name: _handler(reply)}
    with pytest.raises(UnsupportedEngine, match=name):
        asyncio.run(probe(_state(**handlers)))


def test_a_server_whose_settings_are_wrong_does_not_start_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    plugin = CartridgePlugin()
    with pytest.raises(SettingsError, match="LMCACHE_CONFIG_FILE"):
        asyncio.run(plugin.init_state(None, _state(), SimpleNamespace()))


# The guard around the engine.


class _Engine:
    """Ends the first request by an error after some tokens, and answers the second."""

    def __init__(self, tokens: int = 0) -> None:
        self.prompts: list[Any] = []
        self.params: list[Any] = []
        self._tokens = tokens

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        self.prompts.append(prompt["prompt_token_ids"])
        self.params.append((params.extra_args or {}).get("kv_transfer_params"))
        if len(self.prompts) > 1:
            yield _output("answer", "stop")
            return
        for _ in range(self._tokens):
            yield _output("token", None)
        yield _output("", "error")


def _output(text: str, reason: str | None) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason=reason)])


class _Params(SimpleNamespace):
    def clone(self) -> _Params:
        return _Params(**vars(self))


def _guarded(tmp_path: Path, kind: str, on_miss: str, engine: _Engine, *, document: bool = False) -> list[str]:
    settings = from_mapping({"home": tmp_path, "on_miss": on_miss})
    made = make_artifact(tmp_path / "c", positions=16, kind=kind).manifest
    Registry(settings.registry_path).register(tmp_path / "c")
    selection: Selection = Resolver(settings).resolve([Reference(id=made.id)])
    if document:
        selection = selection._replace(document_ids=(1, 2, 3))
    claim = SimpleNamespace(release=lambda: released.append(True))
    granted, released = Granted({}, selection, claim, 1), []
    plugin = SimpleNamespace(settings=settings)
    prompt = {"prompt_token_ids": [*selection.token_ids, 7, 8]}

    async def collect() -> list[str]:
        guard = GuardedEngine(engine, plugin)
        params = _Params(extra_args={"kv_transfer_params": granted})
        texts = [o.outputs[0].text async for o in guard.generate(prompt, params, request_id="r")]
        assert released, "the memory is held for a request that has ended"
        return texts

    return asyncio.run(collect())


@pytest.mark.parametrize("on_miss", ["error", "document"])
def test_a_lost_prefill_cartridge_costs_a_prefill_whatever_the_settings_say(tmp_path: Path, on_miss: str) -> None:
    engine = _Engine()
    assert _guarded(tmp_path, "prefill", on_miss, engine) == ["answer"]
    assert engine.prompts[0] == engine.prompts[1]
    assert GRANT not in engine.params[1]


def test_a_lost_trained_cartridge_is_replaced_by_its_document_if_the_settings_say_so(tmp_path: Path) -> None:
    engine = _Engine()
    assert _guarded(tmp_path, "trained", "document", engine, document=True) == ["answer"]
    assert engine.prompts[1] == [1, 2, 3, 7, 8]


@pytest.mark.parametrize(("on_miss", "document"), [("error", True), ("document", False), ("error", False)])
def test_a_lost_trained_cartridge_is_an_error_otherwise(tmp_path: Path, on_miss: str, document: bool) -> None:
    engine = _Engine()
    with pytest.raises(RetryableRequestError, match="ask again"):
        _guarded(tmp_path, "trained", on_miss, engine, document=document)
    assert len(engine.prompts) == 1


def test_an_answer_that_has_begun_is_not_begun_again(tmp_path: Path) -> None:
    engine = _Engine(tokens=2)
    with pytest.raises(RetryableRequestError):
        _guarded(tmp_path, "trained", "document", engine, document=True)
    assert len(engine.prompts) == 1


@pytest.mark.parametrize("params", [{TAG: "00"}, {GRANT: {"must_inject": 0}}, {"disagg_spec": {}}, "a", ["a"]])
def test_parameters_that_come_past_the_router_are_refused_before_the_engine(params: Any) -> None:
    engine = _Engine()

    async def ask() -> None:
        async for _ in GuardedEngine(engine, SimpleNamespace()).generate(
            {"prompt_token_ids": [1]}, _Params(extra_args={"kv_transfer_params": params}), request_id="r"
        ):
            pass

    with pytest.raises(GracefulHTTPError) as caught:
        asyncio.run(ask())
    assert caught.value.http_status == 400
    assert engine.prompts == []
