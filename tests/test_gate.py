"""What stands between vLLM's server and its clients, each part alone: gate, headers, administration, probe, engine guard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from blocks import quietly
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from making import make_artifact

from lmcache_cartridge.engine.contract import GRANT, TAG
from lmcache_cartridge.errors import SettingsError, UnsupportedEngine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.serve import http, misnamed
from lmcache_cartridge.serve.request import Reference
from lmcache_cartridge.serve.resolve import Resolver, Selection
from lmcache_cartridge.settings import from_mapping

with quietly():
    from vllm.exceptions import GracefulHTTPError, RetryableRequestError

    from lmcache_cartridge.engine.client import ControlClient
    from lmcache_cartridge.engine.host import check_handlers
    from lmcache_cartridge.serve.admin import add_routes
    from lmcache_cartridge.serve.claim import Claim
    from lmcache_cartridge.serve.plugin import CartridgePlugin
    from lmcache_cartridge.serve.wrap import GuardedEngine


def _app(**values: Any) -> FastAPI:
    """Return an app whose every route echoes the body it got, behind gate and headers."""
    app = FastAPI()
    app.add_middleware(http.Gate, settings=from_mapping(values))
    app.add_middleware(http.ResponseHeaders)

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


@pytest.mark.parametrize("path", http.TAKES)
def test_routes_that_take_cartridges_get_what_was_sent(path: str) -> None:
    reply = _post(_app(), path, json={"cartridges": ["a"]})
    assert (reply.status_code, reply.json()["body"]) == (200, '{"cartridges":["a"]}')
    assert _post(_app(), path + "/", json={"cartridges": ["a"]}).status_code == 400, "another path is another route"


ROUTES = (*http.TAKES, http.MESSAGES, "/v1/chat/completions/batch", "/tokenize", "/anything")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "field", ["cartridge", "cartridge_ids", "cartridge_id", "Cartridges", "catridges", "cartridge_label"]
)
def test_a_field_that_nothing_reads_is_refused_and_the_right_one_named(path: str, field: str) -> None:
    reply = _post(_app(), path, json={"model": "m", field: ["a"]})
    message = reply.json()["error"]["message"]
    assert (reply.status_code, repr(field) in message) == (400, True)
    assert ("kv_transfer_params.cartridge_id" if path == http.MESSAGES else "`cartridges`") in message
    assert _post(_app(), path, json={"model": "m"}).status_code == 200, "the control: without it the route answers"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("place", ["extra_body", "metadata"])
def test_cartridges_in_a_place_where_nothing_reads_them_are_refused(path: str, place: str) -> None:
    assert _post(_app(), path, json={place: {"cartridges": ["a"]}}).status_code == 400
    assert _post(_app(), path, json={place: {"topic": "cartridges"}}).status_code == 200


@pytest.mark.parametrize("path", ROUTES)
def test_a_field_that_is_there_twice_is_refused(path: str) -> None:
    for body in (b'{"cartridges": ["a"], "cartridges": ["b"]}', b'{"kv_transfer_params": {}, "kv_transfer_params": {}}',
                 b'{"kv_transfer_params": {"cartridge_id": "a", "cartridge_id": "b"}}'):  # fmt: skip
        reply = _post(_app(), path, content=body)
        assert (reply.status_code, "2 times" in reply.json()["error"]["message"]) == (400, True)


def test_a_form_with_a_field_for_cartridges_is_refused() -> None:
    file = {"file": ("a.wav", b"cartridges", "audio/wav")}
    assert _post(_app(), "/v1/audio/transcriptions", files=file, data={"cartridges": "a"}).status_code == 400
    assert _post(_app(), "/v1/audio/transcriptions", files=file, data={"model": "m"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages", "/v1/completions"])
def test_a_large_body_that_has_nothing_to_do_with_cartridges_passes_unparsed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    parse = misnamed.parse
    monkeypatch.setattr(misnamed, "parse", lambda body, names: (parsed.append(len(body)), parse(body, names))[1])
    body = b'{"model": "m", "messages": [], "x": "' + b"x" * (65 << 20) + b'"}'
    assert _post(_app(), path, content=body).status_code == 200
    assert parsed == []
    named = body.replace(b'"x":', b'"cartridge":')
    assert _post(_app(), path, content=named).status_code == 400
    assert parsed == [len(named)]


def test_large_bodies_are_looked_at_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    may_name = misnamed.may_name
    monkeypatch.setattr(
        misnamed, "may_name",
        lambda *a: (threads.append(threading.current_thread() is threading.main_thread()), may_name(*a))[1],
    )  # fmt: skip
    for size in (10, 1 << 20):
        assert _post(_app(), "/anything", content=b'{"x": "' + b"x" * size + b'"}').status_code == 200
    assert threads == [True, False]


def test_a_label_is_refused_where_it_would_be_dropped() -> None:
    labelled, app = {"cartridge_label": "x"}, _app(router="label")
    assert _post(app, http.MESSAGES, json=labelled).status_code == 400
    assert _post(app, "/generative_scoring", json=labelled).status_code == 400
    assert _post(app, "/v1/completions", json=labelled).status_code == 200
    assert _post(_app(), "/v1/completions", json=labelled).status_code == 400, "without that router nothing reads it"
    other = {"ward": "x"}
    assert _post(_app(router="label", label_field="ward"), http.MESSAGES, json=other).status_code == 400
    assert _post(_app(), http.MESSAGES, json=other).status_code == 200, "without that router it is no label"
    twice = b'{"ward": "x", "ward": "y"}'
    assert _post(_app(router="label", label_field="ward"), "/v1/completions", content=twice).status_code == 400


def test_what_everybody_gets_is_not_left_out_where_something_is_generated() -> None:
    app = _app(router="static", static={"*": "a"})
    assert _post(app, "/generative_scoring", json={}).status_code == 400
    assert _post(app, http.MESSAGES, json={}).status_code == 200, "messages get it"
    assert _post(app, "/tokenize", json={}).status_code == 200, "nothing is generated"
    assert _post(app, "/tokenize", json={"cartridges": ["b"]}).status_code == 400


def test_a_route_that_takes_no_cartridges_does_not_answer_where_one_is_required() -> None:
    for path in ("/v1/chat/completions/batch", "/inference/v1/generate", "/invocations", "/v1/audio/transcriptions"):
        reply = _post(_app(required=True), path, json={"model": "m"})
        assert (reply.status_code, "`required`" in reply.json()["error"]["message"]) == (400, True)
        assert _post(_app(), path, json={"model": "m"}).status_code == 200
    assert _post(_app(required=True), "/tokenize", json={"model": "m"}).status_code == 200, "nothing is generated"


@pytest.mark.parametrize(("sent", "key"), [("Bearer k", "k"), ("bearer k", "k"), ("Basic k", None), (None, None)])
def test_the_api_key_is_read_as_vllm_reads_it(sent: str | None, key: str | None) -> None:
    app, seen = FastAPI(), []
    app.add_middleware(http.ResponseHeaders)

    @app.post("/")
    async def look() -> None:
        seen.append(http.api_key())

    _post(app, "/", headers={} if sent is None else {"Authorization": sent})
    assert seen == [key]


def test_what_is_noted_before_a_response_starts_is_in_its_headers() -> None:
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

    reply = _post(app, "/")
    assert (reply.headers["x-cartridges"], reply.headers["retry-after"]) == ("a@1;served=document", "1")
    assert http.api_key() is None, "outside a request there is none"


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


def test_a_response_without_cartridges_starts_at_once() -> None:
    assert _sent(_START, _body(b"x")) == [None, 0, b"x", 1]


def test_a_response_with_cartridges_starts_when_it_is_known_what_was_injected() -> None:
    """Whatever comes before that: /v1/responses and /v1/messages send events before the first token."""
    pending, known = (lambda: http.note("a", is_pending=True)), (lambda: http.note("b"))
    assert _sent(pending, _START, _body(b"x"), known, _body(b"y"), _body(b"z", False)) == [
        0, 1, 2, 3, b"b", b"x", b"y", 4, b"z", 5,
    ]  # fmt: skip
    assert _sent(known, _START, _body(b"x")) == [0, b"b", 1, b"x", 2]
    assert _sent(pending, _START, _body(b"x", False)) == [0, 1, b"a", b"x", 2], "it ends, whether it is known or not"


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
    asyncio.run(check_handlers(_state(**{name: _handler(_SEEN) for name in _NAMES})))


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("reply", ["an answer", GracefulHTTPError("no such model", HTTPStatus.NOT_FOUND)])
def test_a_server_with_a_handler_that_does_not_show_us_the_field_does_not_start(name: str, reply: Any) -> None:
    handlers = {other: _handler(_SEEN) for other in _NAMES} | {name: _handler(reply)}
    with pytest.raises(UnsupportedEngine, match=name):
        asyncio.run(check_handlers(_state(**handlers)))


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


def _output(text: str, reason: str | None, cached: int = 0, index: int = 0) -> Any:
    answer = SimpleNamespace(text=text, finish_reason=reason, index=index)
    return SimpleNamespace(outputs=[answer], num_cached_tokens=cached)


class _Params(SimpleNamespace):
    def clone(self) -> _Params:
        return _Params(**vars(self))


class _Noted(Claim):
    """A claim of no worker, which tells whether it was released."""

    was_released = False

    def __init__(self, selection: Selection) -> None:
        super().__init__(ControlClient([]), selection)

    def release(self) -> None:
        super().release()
        self.was_released = True


def _guarded(tmp_path: Path, kind: str, on_miss: str, engine: _Engine, *, document: bool = False) -> list[str]:
    settings = from_mapping({"home": tmp_path, "on_miss": on_miss})
    made = make_artifact(tmp_path / "c", positions=16, kind=kind).manifest
    Registry(settings.registry_path).register(tmp_path / "c")
    selection: Selection = Resolver(settings).resolve([Reference(id=made.id)])
    if document:
        selection = selection._replace(document_ids=(1, 2, 3))
    claim = _Noted(selection)
    prompt = {"prompt_token_ids": [*selection.token_ids, 7, 8]}

    async def collect() -> list[str]:
        guard = GuardedEngine(engine, settings)
        params = _Params(extra_args={"kv_transfer_params": claim.grant({}, 1)})
        texts = [o.outputs[0].text async for o in guard.generate(prompt, params, request_id="r")]
        assert claim.was_released, "the memory is held for a request that has ended"
        return texts

    return asyncio.run(collect())


@pytest.mark.parametrize("on_miss", ["error", "document"])
def test_a_lost_prefill_cartridge_costs_a_prefill_whatever_the_settings_say(tmp_path: Path, on_miss: str) -> None:
    engine = _Engine()
    assert _guarded(tmp_path, "prefill", on_miss, engine) == ["answer"]
    assert engine.prompts[0] == engine.prompts[1]
    assert GRANT not in engine.params[1]


class _Engine3:
    """Streams three answers; of the first request, some end by an error, before or after their first token."""

    def __init__(self, *events: tuple[int, str | None]) -> None:
        self.asked: list[tuple[int, int | None, Any]] = []
        self._events = events

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        self.asked.append((params.n, params.seed, params.extra_args["kv_transfer_params"].get(TAG)))
        if len(self.asked) == 1:
            for index, reason in self._events:
                yield _output(f"{index}", reason, index=index)
            return
        for index in range(params.n):
            yield _output("again", "stop", index=index)


def _streamed(tmp_path: Path, kind: str, engine: _Engine3) -> list[tuple[int, str]]:
    settings = from_mapping({"home": tmp_path})
    make_artifact(tmp_path / "c", positions=16, kind=kind, cartridge_id="c")
    Registry(settings.registry_path).register(tmp_path / "c")
    selection = Resolver(settings).resolve([Reference(id="c")])
    claim = _Noted(selection)
    params = _Params(extra_args={"kv_transfer_params": claim.grant({}, 1)}, n=3, seed=40)
    prompt = {"prompt_token_ids": [*selection.token_ids, 7]}
    seen: list[tuple[int, str]] = []

    async def collect() -> None:
        async for output in GuardedEngine(engine, settings).generate(prompt, params, "r"):
            seen.extend((o.index, o.text) for o in output.outputs)

    try:
        asyncio.run(collect())
    finally:
        assert claim.was_released
    return seen


def test_of_several_answers_those_that_lost_their_chunks_are_asked_for_again_alone(tmp_path: Path) -> None:
    engine = _Engine3((0, None), (2, "error"), (0, "stop"), (1, "error"))
    assert _streamed(tmp_path, "prefill", engine) == [(0, "0"), (0, "0"), (2, "again"), (1, "again")]
    assert [(n, seed) for n, seed, _ in engine.asked] == [(3, 40), (1, 42), (1, 41)]
    assert {tag for _, _, tag in engine.asked[1:]} == {"computed"}


def test_of_several_answers_all_are_asked_for_again_where_none_has_begun(tmp_path: Path) -> None:
    engine = _Engine3((1, "error"), (0, None))
    assert _streamed(tmp_path, "prefill", engine) == [(0, "again"), (1, "again"), (2, "again")]
    assert [n for n, _, _ in engine.asked] == [3, 3]


@pytest.mark.parametrize("kind", ["prefill", "trained"])
def test_an_answer_that_breaks_off_is_an_error_and_so_is_a_trained_one_beside_others(tmp_path: Path, kind: str) -> None:
    events = [(0, None), (0, "error")] if kind == "prefill" else [(0, None), (1, "error")]
    engine = _Engine3(*events)
    with pytest.raises(RetryableRequestError):
        _streamed(tmp_path, kind, engine)
    assert len(engine.asked) == 1


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_prompt_that_names_no_cartridge_is_computed_where_it_lost_a_documents_chunks(tokens: int) -> None:
    """A document at the head of a prompt is injected without being named, and may be lost as others are."""
    engine, own, seen = _Engine(tokens), {"lmcache.tag.mine": "x"}, []

    async def ask() -> None:
        guard = GuardedEngine(engine, from_mapping({}))
        params = _Params(extra_args={"kv_transfer_params": own})
        async for output in guard.generate({"prompt_token_ids": [1, 2]}, params, request_id="r"):
            seen.append(output.outputs[0].finish_reason)

    asyncio.run(ask())
    if tokens:
        assert (seen, len(engine.prompts)) == ([None, None, "error"], 1), "what has begun is not begun again"
    else:
        assert (seen, engine.prompts) == (["stop"], [[1, 2], [1, 2]])
        assert engine.params == [own, own | {TAG: "computed"}]


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


@pytest.mark.parametrize(
    "params", [{TAG: "00"}, {GRANT: {"must_inject": 0}}, {"disagg_spec": {}}, "a", ["a"], {"cartridge_id": "a"}]
)
def test_parameters_that_come_past_the_router_are_refused_before_the_engine(params: Any) -> None:
    engine = _Engine()

    async def ask() -> None:
        async for _ in GuardedEngine(engine, from_mapping({})).generate(
            {"prompt_token_ids": [1]}, _Params(extra_args={"kv_transfer_params": params}), request_id="r"
        ):
            pass

    with pytest.raises(GracefulHTTPError) as caught:
        asyncio.run(ask())
    assert caught.value.http_status == 400
    assert engine.prompts == []


def test_an_engine_that_must_inject_answers_no_prompt_that_came_without_a_cartridge() -> None:
    """Whatever route it came by: a request that was given its document's text instead has noted that."""
    engine, settings = _Engine(), from_mapping({"required": True})

    async def ask() -> None:
        async for _ in GuardedEngine(engine, settings).generate(
            {"prompt_token_ids": [1]}, _Params(extra_args=None), request_id="r"
        ):
            pass

    with pytest.raises(GracefulHTTPError, match="`required`") as caught:
        asyncio.run(ask())
    assert (caught.value.http_status, engine.prompts) == (400, [])
    app = FastAPI()
    app.add_middleware(http.ResponseHeaders)

    @app.post("/")
    async def answer() -> None:
        http.note("a@1;served=document")
        await ask()

    assert _post(app, "/").status_code == 200
    assert engine.prompts[0] == [1]


@pytest.mark.parametrize(("cached", "first", "second"), [(0, 0, 0), (16, 16, 0), (20, 16, 4), (48, 16, 24)])
def test_the_header_says_of_each_cartridge_what_was_injected(
    tmp_path: Path, cached: int, first: int, second: int
) -> None:
    settings = from_mapping({"home": tmp_path})
    for name, positions in (("a", 16), ("b", 24)):
        make_artifact(tmp_path / name, positions=positions, cartridge_id=name, seed=positions)
        Registry(settings.registry_path).register(tmp_path / name)
    first_one, second_one = (Resolver(settings).resolve([Reference(id=name)]) for name in "ab")
    selection = first_one._replace(
        manifests=first_one.manifests + second_one.manifests, places=first_one.places + second_one.places
    )
    both = f"a@1;positions=16;injected={first}, b@1;positions=24;injected={second}"
    assert selection.used(cached) == both
    assert selection.replaced == "a@1;positions=16;injected=0, b@1;positions=24;injected=0;served=document"
    app = FastAPI()
    app.add_middleware(http.ResponseHeaders)

    @app.post("/")
    async def answer() -> None:
        claim = _Noted(selection)
        for of_a_prompt in (40, cached, 40):
            claim.note(of_a_prompt)

    least = selection.used(min(cached, 40))
    assert _post(app, "/").headers["x-cartridges"] == least, "of several prompts that with the least"
