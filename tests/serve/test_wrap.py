"""The guard around vLLM's engine: KV lost on the way is the document's text or a clear error, and no claim is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from blocks import quietly
from fastapi import FastAPI
from homes import Home
from making import make_fingerprint
from test_http import post

from lmcache_cartridge.engine.client import ControlClient
from lmcache_cartridge.engine.contract import GRANT, TAG
from lmcache_cartridge.engine.withdrawals import Withdrawals
from lmcache_cartridge.errors import UnsupportedEngine
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
LORA = SimpleNamespace(lora_name="one", lora_path="/none")
"""An adapter as vLLM knows it."""


class _Engine:
    """Answers the first request by these events, each an answer's index and finish reason, and others by the right answer."""

    def __init__(self, *events: tuple[int, str | None], cached: int = 0) -> None:
        self.prompts: list[Any] = []
        self.params: list[Any] = []
        self.ended = 0
        self._events, self._cached = events, cached

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        self.prompts.append(ids := prompt["prompt_token_ids"])
        self.params.append(params)
        is_first = len(self.prompts) == 1
        try:
            for index, reason in self._events if is_first else [(index, "stop") for index in range(params.n)]:
                answer = SimpleNamespace(text="token" if is_first else "answer", finish_reason=reason, index=index)
                yield SimpleNamespace(
                    outputs=[answer], num_cached_tokens=self._cached if is_first else 0, prompt_token_ids=ids
                )
        finally:
            self.ended += 1

    def transfers(self) -> list[Any]:
        return [params.extra_args["kv_transfer_params"] for params in self.params]


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

    def params(self, **params: Any) -> _Params:
        return _Params(extra_args={"kv_transfer_params": self.grant({}, 1)}, **params)


def _selection(home: Home, *kinds: str, document: bool = False) -> Selection:
    """Make cartridges `c0`, `c1` of 16 and 24 positions, and name them all; trained ones may have a document."""
    given = {"fingerprint": make_fingerprint(pairing="half"), "document_ids": [1, 2, 3] if document else None}
    for number, kind in enumerate(kinds):
        home.make(f"c{number}", positions=16 + 8 * number, kind=kind, seed=number, **given)
    return Resolver(from_mapping({"home": home.path})).resolve([Reference(id=name) for name in home.made])


def _guard(engine: _Engine, workers: Any = None, **settings: Any) -> GuardedEngine:
    return GuardedEngine(engine, from_mapping(settings), Adapters({}), workers or ControlClient([]))


def _guarded(
    home: Home, kind: str, engine: _Engine, settings: dict[str, Any], *, document: bool, **params: Any
) -> list[tuple[int, str]]:
    """Ask with a cartridge; return index and text of all that is sent. Its memory must be let go, whatever comes."""
    selection = _selection(home, kind, document=document)
    claim = _Noted(selection)
    prompt = {"prompt_token_ids": [*selection.token_ids, 7, 8]}

    async def collect() -> list[tuple[int, str]]:
        answers = _guard(engine, home=home.path, **settings).generate(prompt, claim.params(**params), "r")
        return [(o.index, o.text) async for output in answers for o in output.outputs]

    try:
        return asyncio.run(collect())
    finally:
        assert claim.was_released, "the memory is held for a request that has ended"


async def _plain(engine: _Engine, params: Any, **settings: Any) -> list[str | None]:
    """Ask with a prompt that names no cartridge and such transfer parameters; return what each output ended with."""
    given = _Params(extra_args=None if params is None else {"kv_transfer_params": params})
    answers = _guard(engine, **settings).generate({"prompt_token_ids": [1, 2]}, given, "r")
    return [output.outputs[0].finish_reason async for output in answers]


@pytest.mark.parametrize(
    ("kind", "on_miss", "events", "n", "seen", "asked"),
    [
        ("trained", "document", [LOST], 1, [(0, "answer")], [1, 1]),
        ("prefill", "error", [(0, None), (2, "error"), (0, "stop"), (1, "error")], 3,
         [(0, "token"), (0, "token"), (2, "answer"), (1, "answer")], [3, 1, 1]),
    ],
)  # fmt: skip
def test_what_was_lost_is_computed_once_more_and_of_several_answers_those_that_have_not_begun(
    home, kind, on_miss, events, n, seen, asked
):
    """A document whatever the settings say; a trained one's text where they say so."""
    engine = _Engine(*events)
    trained = kind == "trained"
    found = _guarded(home, kind, engine, {"on_miss": on_miss}, document=trained, n=n, seed=40)
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
def test_a_client_that_leaves_in_an_answer_leaves_no_claim(home, kind):
    claim, engine = _Noted(_selection(home, kind)), _Engine(*[(0, None)] * 9)

    async def leave() -> None:
        answer = _guard(engine).generate({"prompt_token_ids": [1]}, claim.params(), "r")
        await anext(answer)
        await anext(answer)
        assert claim.was_released == (kind == "prefill"), "a trained one is needed to the end"
        await answer.aclose()
        assert (claim.was_released, engine.ended) == (True, 1), "at once, not when it is collected"

    asyncio.run(leave())


def test_an_adapter_that_came_in_the_place_of_the_claims_is_not_asked(home):
    claim, engine = _Noted(_selection(home, "prefill")), _Engine()
    answer = _guard(engine).generate({"prompt_token_ids": [1]}, claim.params(), "r", lora_request=LORA)
    with pytest.raises(GracefulHTTPError, match="ask again"):
        asyncio.run(anext(answer))
    assert (claim.was_released, engine.prompts) == (True, [])


@pytest.mark.parametrize("transfer", [None, Computed({})])
def test_nothing_is_found_of_what_an_adapter_computed_before_its_name_was_loaded_again(tmp_path, transfer):
    """vLLM and LMCache know an adapter by its name and path (vLLM 0.33)."""
    salts: list[str | None] = []

    class Engine(_Engine):
        async def add_lora(self, lora_request: Any) -> None:
            """Load what is there now."""

        async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            salts.append(prompt.get("cache_salt"))
            async for output in super().generate(prompt, *args, **kwargs):
                yield output

    async def asked() -> None:
        guard, prompt = _guard(Engine(), home=tmp_path), {"prompt_token_ids": [1, 2], "cache_salt": "mine"}
        params = _Params(extra_args={"kv_transfer_params": transfer} if transfer else None)
        for is_loaded in (False, False, True, False, True):
            if is_loaded:
                await guard.add_lora(LORA)
            for adapter in (LORA, None):
                async for _ in guard.generate(prompt, params, "r", lora_request=adapter):
                    pass

    asyncio.run(asked())
    first, again, second, same, third = salts[::2]
    assert (first, second) == (again, same) and len({first, second, third}) == 3
    assert {*salts[1::2]} == {"mine"}, "the base model is what it was"


@pytest.mark.parametrize(
    ("kind", "events", "on_miss", "document"),
    [
        ("trained", [LOST], "error", True), ("trained", [LOST], "document", False),
        ("trained", [(0, None), (0, None), LOST], "document", True),  # an answer that has begun is not begun again
        ("prefill", [(0, None), (1, None), LOST], "error", False), ("trained", [(0, None), (1, "error")], "error", False),
    ],
)  # fmt: skip
def test_what_can_neither_be_computed_nor_go_on_is_an_error(home, kind, events, on_miss, document):
    engine, n = _Engine(*events), 1 + max(index for index, _ in events)
    settings = {"on_miss": on_miss, "retry_status": 425}
    with pytest.raises(GenerationError, match="ask again") as caught:
        _guarded(home, kind, engine, settings, document=document, n=n)
    assert (caught.value.status_code, len(engine.prompts)) == (425, 1)


def _posted(answer: Any) -> dict[str, str]:
    """Have a request answered by a coroutine; return the headers of the response."""
    app = FastAPI()
    app.add_middleware(http.ResponseHeaders)
    app.post("/")(answer)
    reply = post(app, "/")
    assert reply.status_code == 200
    return reply.headers


def test_an_engine_that_must_inject_answers_no_prompt_that_came_without_a_cartridge():
    """Whatever route it came by: a request that was given its document's text instead has noted that."""
    engine = _Engine()
    with pytest.raises(GracefulHTTPError, match="`required`") as caught:
        asyncio.run(_plain(engine, None, required=True))
    assert (caught.value.http_status, engine.prompts) == (400, [])

    async def answer() -> None:
        http.note("a@1;served=document")
        await _plain(engine, None, required=True)

    _posted(answer)
    assert engine.prompts == [[1, 2]]


def test_the_header_says_of_each_cartridge_what_was_injected_in_the_prompt_with_the_least(home):
    selection = _selection(home, "prefill", "prefill")

    async def answer() -> None:
        claim = _Noted(selection)
        for of_a_prompt in (40, 20, 40):
            claim.note(of_a_prompt)

    assert _posted(answer)["x-cartridges"] == "c0@1;positions=16;injected=16, c1@1;positions=24;injected=4"


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


_ONE, _BOTH = [("a@1", 16)], [("a@1", 16), ("b@2", 32)]


@pytest.mark.parametrize(
    ("ranks", "cached", "given", "said"),
    [
        ([_ONE, _BOTH], [_cached(44, 24)], {},
         "a@1;positions=16;injected=0;cached=16;served=prompt, b@2;positions=32;injected=24;cached=4;served=prompt"),
        ([_ONE], [16], {"lora_request": LORA}, None), (None, [16], {}, None),
        ([_ONE], [None], {}, None),
    ],
)  # fmt: skip
def test_a_prompt_that_names_none_is_told_whose_kv_it_rests_on(tmp_path, ranks, cached, given, said):
    """`cached` is how many tokens of each prompt were not computed, None where the connector lost them."""
    asked = []

    async def ask(method: str, ids: list[int]) -> Any:
        asked.append((method, ids))
        if ranks is None:
            raise UnsupportedEngine("no")
        return ranks

    async def answer() -> None:
        http.hold(len(cached))  # as the renderer does
        for tokens in cached:
            engine = _Engine((0, "stop"), cached=tokens) if tokens is not None else _Engine(LOST, cached=16)
            guard = _guard(engine, SimpleNamespace(ask=ask), home=tmp_path)
            prompt = {"prompt_token_ids": list(range(100))}
            assert [o async for o in guard.generate(prompt, _Params(extra_args={}), "r", **given)]
        assert http.current().pending == 0, "the response would never start"

    assert (_posted(answer).get("x-cartridges"), asked) == (None, []), "nothing ever answered such prompts"
    Withdrawals(from_mapping({"home": tmp_path}).quarantine_dir).note(["00"])
    assert _posted(answer).get("x-cartridges") == said
    told = [("answers", list(range(n))) for n in cached if n] if not given else []
    assert asked == told, "what was not computed, and no more"


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
    with pytest.raises(GracefulHTTPError, match="`required`") as caught:
        _rendered(_request(), required=True)
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"kv_transfer_params": {"cartridge_id": "a"}}, 400, "elsewhere"),
        ({"kv_transfer_params": {"disagg_spec": {}}}, 400, "disagg_spec"), ({"use_beam_search": True}, 422, "beam search"),
        ({"model_extra": {"cartridges": 0}}, 400, "list"),
    ],
)  # fmt: skip
def test_a_request_for_none_that_asks_for_one_is_refused(fields, status, message):
    with pytest.raises(GracefulHTTPError, match=message) as caught:
        _rendered(_request(**fields))
    assert caught.value.http_status == status
