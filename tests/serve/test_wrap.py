"""The guard around vLLM's engine: KV lost on the way is the document's text or a clear error, and no claim is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blocks import quietly
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from making import make_artifact
from test_http import post

from lmcache_cartridge.engine.client import ControlClient
from lmcache_cartridge.engine.contract import GRANT, TAG
from lmcache_cartridge.engine.withdrawals import Withdrawals
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.serve import http
from lmcache_cartridge.serve.claim import Claim
from lmcache_cartridge.serve.request import Reference, Router
from lmcache_cartridge.serve.resolve import Resolver, Selection
from lmcache_cartridge.settings import from_mapping

with quietly():
    from vllm.exceptions import GenerationError, GracefulHTTPError

    from lmcache_cartridge.engine.host_api import Cached, share, split_cached
    from lmcache_cartridge.serve.adapters import Adapters
    from lmcache_cartridge.serve.claim import Computed
    from lmcache_cartridge.serve.wrap import CartridgeRenderer, GuardedEngine


LOST = 0, "error"


class _Engine:
    """Answers the first request by these events, each an answer's index and finish reason, and others by the right answer."""

    def __init__(self, *events: tuple[int, str | None]) -> None:
        self.prompts: list[Any] = []
        self.params: list[Any] = []
        self._events = events

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        self.prompts.append(prompt["prompt_token_ids"])
        self.params.append(params)
        is_first = len(self.prompts) == 1
        for index, reason in self._events if is_first else [(index, "stop") for index in range(params.n)]:
            yield _output("token" if is_first else "answer", reason, index)

    def transfers(self) -> list[Any]:
        return [params.extra_args["kv_transfer_params"] for params in self.params]


def _output(text: str, reason: str | None, index: int = 0) -> Any:
    answer = SimpleNamespace(text=text, finish_reason=reason, index=index)
    return SimpleNamespace(outputs=[answer], num_cached_tokens=0)


class _Params(SimpleNamespace):
    n, seed, extra_args = 1, None, None

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


def _selection(home: Path, kind: str) -> Selection:
    given = from_mapping({"home": home})
    make_artifact(home / "c", positions=16, kind=kind, cartridge_id="c")
    Registry(given.registry_path).register(home / "c")
    return Resolver(given).resolve([Reference(id="c")])


def _guarded(
    tmp_path: Path,
    kind: str,
    engine: _Engine,
    *,
    document: bool = False,
    settings: dict[str, Any] | None = None,
    **params: Any,
) -> list[tuple[int, str]]:
    """Ask with a cartridge; return index and text of all that is sent. Its memory must be let go, whatever comes."""
    selection = _selection(tmp_path, kind)
    if document:
        selection = selection._replace(document_ids=(1, 2, 3))
    given = from_mapping({"home": tmp_path} | (settings or {}))
    claim, guard = _Noted(selection), GuardedEngine(engine, given, Adapters({}), ControlClient([]))
    asked = _Params(extra_args={"kv_transfer_params": claim.grant({}, 1)}, **params)

    async def collect() -> list[tuple[int, str]]:
        answers = guard.generate({"prompt_token_ids": [*selection.token_ids, 7, 8]}, asked, request_id="r")
        return [(o.index, o.text) async for output in answers for o in output.outputs]

    try:
        return asyncio.run(collect())
    finally:
        assert claim.was_released, "the memory is held for a request that has ended"


async def _plain(engine: _Engine, params: Any, **settings: Any) -> list[str | None]:
    """Ask with a prompt that names no cartridge and such transfer parameters; return what each output ended with."""
    guard = GuardedEngine(engine, from_mapping(settings), Adapters({}), ControlClient([]))
    given = _Params(extra_args=None if params is None else {"kv_transfer_params": params})
    return [o.outputs[0].finish_reason async for o in guard.generate({"prompt_token_ids": [1, 2]}, given, "r")]


@pytest.mark.parametrize(
    ("kind", "on_miss", "events", "n", "seen", "asked"),
    [
        ("prefill", "error", [LOST], 1, [(0, "answer")], [1, 1]), ("prefill", "document", [LOST], 1, [(0, "answer")], [1, 1]),
        ("trained", "document", [LOST], 1, [(0, "answer")], [1, 1]),
        ("prefill", "error", [(1, "error"), (0, None)], 3, [(0, "answer"), (1, "answer"), (2, "answer")], [3, 3]),
        ("prefill", "error", [(0, None), (2, "error"), (0, "stop"), (1, "error")], 3,
         [(0, "token"), (0, "token"), (2, "answer"), (1, "answer")], [3, 1, 1]),
    ],
)  # fmt: skip
def test_what_was_lost_is_computed_once_more_and_of_several_answers_those_that_have_not_begun(
    tmp_path, kind, on_miss, events, n, seen, asked
):
    """A document whatever the settings say; a trained one's text where they say so."""
    engine = _Engine(*events)
    trained = kind == "trained"
    found = _guarded(tmp_path, kind, engine, document=trained, settings={"on_miss": on_miss}, n=n, seed=40)
    assert (found, [params.n for params in engine.params]) == (seen, asked)
    if asked == [3, 1, 1]:
        assert [params.seed for params in engine.params] == [40, 42, 41]
    assert engine.prompts[1] == ([1, 2, 3, 7, 8] if trained else engine.prompts[0])
    assert all(GRANT not in each for each in engine.transfers()[1:])
    assert trained or {each[TAG] for each in engine.transfers()[1:]} == {"computed"}


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_prompt_that_names_no_cartridge_is_computed_where_it_lost_a_documents_chunks(tokens):
    """A document at the head of a prompt is injected without being named, and may be lost as others are."""
    engine, own = _Engine(*[(0, None)] * tokens, LOST), {"lmcache.tag.mine": "x"}
    seen = asyncio.run(_plain(engine, own))
    if tokens:
        assert (seen, len(engine.prompts)) == ([None, None, "error"], 1), "what has begun is not begun again"
    else:
        assert (seen, engine.prompts) == (["stop"], [[1, 2], [1, 2]])
        assert engine.transfers() == [own, own | {TAG: "computed"}]


@pytest.mark.parametrize("kind", ["prefill", "trained"])
@pytest.mark.parametrize("adapter", [None, object()])
def test_a_client_that_leaves_in_an_answer_and_one_of_an_adapter_leave_no_claim(tmp_path, kind, adapter):
    claim, closed = _Noted(_selection(tmp_path, kind)), []

    class Endless:
        async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
            try:
                while True:
                    yield _output("token", None)
                    await asyncio.sleep(0)
            finally:
                closed.append(True)

    async def leave() -> None:
        params = _Params(extra_args={"kv_transfer_params": claim.grant({}, 1)})
        guard = GuardedEngine(Endless(), from_mapping({}), Adapters({}), ControlClient([]))
        answer = guard.generate({"prompt_token_ids": [1]}, params, "r", lora_request=adapter)
        if adapter:
            with pytest.raises(GracefulHTTPError, match="ask again"):
                await anext(answer)
            assert (claim.was_released, closed) == (True, [])
            return
        await anext(answer)
        await anext(answer)
        assert claim.was_released == (kind == "prefill"), "a trained one is needed to the end"
        await answer.aclose()
        assert (claim.was_released, closed) == (True, [True]), "at once, not when it is collected"

    asyncio.run(leave())


@pytest.mark.parametrize(
    ("kind", "events", "on_miss", "document"),
    [
        ("trained", [LOST], "error", True), ("trained", [LOST], "document", False), ("trained", [LOST], "error", False),
        ("trained", [(0, None), (0, None), LOST], "document", True),  # an answer that has begun is not begun again
        ("prefill", [(0, None), (1, None), LOST], "error", False), ("trained", [(0, None), (1, "error")], "error", False),
    ],
)  # fmt: skip
def test_what_can_neither_be_computed_nor_go_on_is_an_error(tmp_path, kind, events, on_miss, document):
    for retry_status in (503, 425):
        engine, n = _Engine(*events), 1 + max(index for index, _ in events)
        with pytest.raises(GenerationError, match="ask again") as caught:
            _guarded(
                tmp_path / f"{retry_status}", kind, engine, document=document, n=n,
                settings={"on_miss": on_miss, "retry_status": retry_status},
            )  # fmt: skip
        assert (caught.value.status_code, len(engine.prompts)) == (retry_status, 1)


@pytest.mark.parametrize(
    "params", [{TAG: "00"}, {GRANT: {"must_inject": 0}}, {"disagg_spec": {}}, "a", ["a"], {"cartridge_id": "a"}]
)
def test_parameters_that_come_past_the_router_are_refused_before_the_engine(params):
    engine = _Engine()
    with pytest.raises(GracefulHTTPError) as caught:
        asyncio.run(_plain(engine, params))
    assert (caught.value.http_status, engine.prompts) == (400, [])


def test_an_engine_that_must_inject_answers_no_prompt_that_came_without_a_cartridge():
    """Whatever route it came by: a request that was given its document's text instead has noted that."""
    engine = _Engine()
    with pytest.raises(GracefulHTTPError, match="`required`") as caught:
        asyncio.run(_plain(engine, None, required=True))
    assert (caught.value.http_status, engine.prompts) == (400, [])
    app = FastAPI()
    app.add_middleware(http.ResponseHeaders)

    @app.post("/")
    async def answer() -> None:
        http.note("a@1;served=document")
        await _plain(engine, None, required=True)

    assert post(app, "/").status_code == 200
    assert engine.prompts[0] == [1, 2]


@pytest.mark.parametrize(("cached", "first", "second"), [(0, 0, 0), (16, 16, 0), (20, 16, 4), (48, 16, 24)])
def test_the_header_says_of_each_cartridge_what_was_injected(tmp_path, cached, first, second):
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
    assert post(app, "/").headers["x-cartridges"] == least, "of several prompts that with the least"


def _cached(tokens: int, external: int) -> Cached:
    """Return what the engine says of a prompt, of the tokens that its statistics have."""
    seen: list[Any] = []
    processor = SimpleNamespace(process_outputs=lambda outputs: seen.extend(outputs))
    split_cached(SimpleNamespace(output_processor=processor))
    stats = SimpleNamespace(num_cached_tokens=tokens, num_external_cached_tokens=external)
    processor.process_outputs([SimpleNamespace(prefill_stats=None), SimpleNamespace(prefill_stats=stats)])
    return seen[1].prefill_stats.num_cached_tokens


@pytest.mark.parametrize(
    ("cached", "external", "told"),
    [
        (0, 0, "injected=0"), (40, 40, "injected=24"), (40, 0, "injected=0;cached=24"), (20, 20, "injected=4"),
        (40, 16, "injected=16;cached=8"), (20, 3, "injected=3;cached=1"), (16, 8, "injected=0"), (90, 4, "injected=0;cached=24"),
    ],
)  # fmt: skip
def test_injected_is_what_the_connector_brought_and_not_what_vllm_had(cached, external, told):
    """Of a cartridge at positions 16 to 40, where what vLLM had is before what the connector brought."""
    counted = _cached(cached, external)
    assert (counted, counted.external) == (cached, external)
    assert share(16, 24, counted) == f"positions=24;{told}"


class _Says:
    """An engine whose outputs for a prompt are what `prompts` says of its first token: how many tokens were not computed,
    or None where the connector lost them. It ends no prompt before `end` was called."""

    def __init__(self, prompts: dict[int, Cached | None]) -> None:
        self._prompts, self._ended = prompts, asyncio.Event()

    def end(self) -> None:
        self._ended.set()

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        ids = prompt["prompt_token_ids"]
        cached = 0 if request_id.endswith("-document") else self._prompts[ids[0]]
        output = _output("token", "error" if cached is None else None)
        output.num_cached_tokens, output.prompt_token_ids = cached or 0, ids
        yield output
        await self._ended.wait()
        yield output


class _Answers:
    """Workers that know whose KV a prompt begins with; without any they do not answer."""

    def __init__(self, *ranks: list[tuple[str, int]]) -> None:
        self.ranks, self.asked = ranks, list[Any]()

    async def ask(self, method: str, ids: list[int]) -> Any:
        self.asked.append((method, ids))
        if not self.ranks:
            raise UnsupportedEngine("no")
        return self.ranks


def _told(
    home: Path, workers: _Answers, prompts: dict[int, Cached | None], *, noted: bool = True, adapter: Any = None
) -> tuple[str | None, bool]:
    """Ask with prompts that begin so; return the header, and whether the response began before the first one ended."""
    settings = from_mapping({"home": home})
    if noted:
        Withdrawals(settings.quarantine_dir).note(["00"])
    app, began = FastAPI(), []

    @app.post("/")
    async def answer() -> Any:
        engine = _Says(prompts)
        guard = GuardedEngine(engine, settings, Adapters({}), workers)

        async def one(first: int) -> AsyncIterator[Any]:
            params = _Params(extra_args={})
            async for output in guard.generate(
                {"prompt_token_ids": [first, *range(100)]}, params, f"{first}", lora_request=adapter
            ):
                yield output

        async def pieces() -> AsyncIterator[str]:
            running = [one(first) for first in prompts]
            for each in running:
                await anext(each)
                yield "x"
            await asyncio.sleep(0)
            began.append(len(sent) > 0)
            engine.end()
            for each in running:
                async for _ in each:
                    yield "x"

        http.hold(len(prompts))  # as the renderer does
        return StreamingResponse(pieces())

    sent: list[Any] = []
    headers = http.ResponseHeaders(app)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def noting(message: Any) -> None:
            sent.append(message)
            await send(message)

        await headers(scope, receive, noting)

    reply = post(watched, "/")
    assert reply.status_code == 200
    return reply.headers.get("x-cartridges"), began[0]


_ONE, _BOTH = [("a@1", 16)], [("a@1", 16), ("b@2", 32)]
_SAID = "a@1;positions=16;injected=16;served=prompt"


@pytest.mark.parametrize(
    ("ranks", "prompts", "given", "said"),
    [
        ([_ONE, _BOTH], {7: _cached(44, 24)}, {},
         "a@1;positions=16;injected=0;cached=16;served=prompt, b@2;positions=32;injected=24;cached=4;served=prompt"),
        ([_ONE], {7: _cached(0, 0)}, {}, None), ([_ONE], {7: _cached(16, 16)}, {"noted": False}, None),
        ([_ONE], {7: _cached(16, 0)}, {"adapter": object()}, None), ([[]], {7: _cached(16, 0)}, {}, None),
        ([], {7: _cached(16, 0)}, {}, None), ([_ONE], {7: None}, {}, None),
        ([_ONE], {7: _cached(16, 16), 8: _cached(0, 0)}, {}, _SAID), ([_ONE], {8: _cached(0, 0), 7: _cached(16, 16)}, {}, _SAID),
    ],
    ids=["both", "computed", "nothing ever answered", "an adapter's are its own", "vLLM's cache of what was computed",
         "no answer is lost with the workers", "lost and computed", "several", "in the other order"],
)  # fmt: skip
def test_a_prompt_that_names_none_is_told_whose_kv_it_rests_on(tmp_path, ranks, prompts, given, said):
    """The response begins before the first prompt has ended, and waits for what all of them say."""
    workers = _Answers(*ranks)
    assert _told(tmp_path, workers, prompts, **given) == (said, True)
    assert len(workers.asked) == (said is not None or ranks in ([], [[]]))
    assert said in (None, _SAID) or workers.asked == [("answers", [7, *range(43)])], (
        "what was not computed, and no more"
    )


class _Renders:
    """Renders any request to one prompt."""

    async def render_completion(self, request: Any) -> Any:
        return [{"type": "token", "prompt_token_ids": [1, 2], "cache_salt": request.cache_salt}]


def _request(**fields: Any) -> Any:
    given = {"kv_transfer_params": None, "cache_salt": None, "model": "m", "model_extra": {"cartridges": False}}
    return SimpleNamespace(**given | fields)


def _rendered(request: Any, **settings: Any) -> Any:
    given = from_mapping(settings)
    admission = SimpleNamespace(settings=given, router=Router(given), secret=b"secret", maker=None)
    return asyncio.run(CartridgeRenderer(_Renders(), admission).render_completion(request))[0]


def test_a_request_for_none_is_computed_and_finds_nothing_that_was_not():
    """By a salt that other requests do not have, of each client its own, and parameters that no cartridge has."""
    first, own, plain = _request(), _request(cache_salt="a"), _request(model_extra={})
    salts = [_rendered(request)["cache_salt"] for request in (first, own, plain, _request())]
    assert salts[0] == salts[3] and len(set(salts)) == 3 and salts[2] is None
    assert first.kv_transfer_params == {TAG: "computed"} and isinstance(first.kv_transfer_params, Computed)
    assert plain.kv_transfer_params is None
    saved = _request(kv_transfer_params={"lmcache.skip_save": True})
    _rendered(saved)
    assert saved.kv_transfer_params == {TAG: "computed", "lmcache.skip_save": True}
    _rendered(routed := _request(), router="static", static={"*": "a"})
    assert routed.kv_transfer_params == {TAG: "computed"}, "the server's choice is for those that make none"


@pytest.mark.parametrize(
    ("fields", "settings", "status", "message"),
    [
        ({"kv_transfer_params": {"cartridge_id": "a"}}, {}, 400, "elsewhere"),
        ({"kv_transfer_params": {"disagg_spec": {}}}, {}, 400, "disagg_spec"),
        ({"kv_transfer_params": {TAG: "00"}}, {}, 400, "set by the server"),
        ({}, {"required": True}, 400, "`required`"), ({"use_beam_search": True}, {}, 422, "beam search"),
        ({"model": "alias"}, {"model_aliases": {"alias": ["a"]}}, 400, "elsewhere"),
        ({"model_extra": {"cartridges": 0}}, {}, 400, "list"),
        ({"model_extra": {"cartridges": True}}, {}, 400, "list"),
    ],
)  # fmt: skip
def test_a_request_for_none_that_asks_for_one_is_refused(fields, settings, status, message):
    with pytest.raises(GracefulHTTPError, match=message) as caught:
        _rendered(_request(**fields), **settings)
    assert caught.value.http_status == status
