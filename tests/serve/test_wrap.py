"""The guard around vLLM's engine: KV lost on the way is the document's text or a clear error, and no claim is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from blocks import quietly
from homes import Home
from making import make_fingerprint
from test_http import sent

from lmcache_cartridge.engine.client import ControlClient
from lmcache_cartridge.serve.claim import Claim
from lmcache_cartridge.serve.request import Reference, Router
from lmcache_cartridge.serve.resolve import Resolver, Selection
from lmcache_cartridge.settings import from_mapping

with quietly():
    from vllm.exceptions import GenerationError, GracefulHTTPError

    from lmcache_cartridge.engine.host_api import Cached, share
    from lmcache_cartridge.serve.adapters import Adapters
    from lmcache_cartridge.serve.wrap import CartridgeRenderer, GuardedEngine


LOST = 0, "error"
LORA = SimpleNamespace(lora_name="one", lora_path="/none")
"""An adapter as vLLM knows it."""


class _Engine:
    """Answers the first request by these events, each an answer's index and finish reason, and others by the right answer."""

    def __init__(self, *events: tuple[int, str | None]) -> None:
        self.prompts: list[Any] = []
        self.params: list[Any] = []
        self.ended = 0
        self._events = events

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        self.prompts.append(ids := prompt["prompt_token_ids"])
        self.params.append(params)
        is_first = len(self.prompts) == 1
        try:
            for index, reason in self._events if is_first else [(index, "stop") for index in range(params.n)]:
                text = "token" if is_first else "answer"
                answer = SimpleNamespace(text=text, finish_reason=reason, index=index, token_ids=[1])
                yield SimpleNamespace(outputs=[answer], num_cached_tokens=0, prompt_token_ids=ids)
        finally:
            self.ended += 1


class _Params(SimpleNamespace):
    n, seed, extra_args, structured_outputs = 1, None, None, None

    def clone(self) -> _Params:
        return _Params(**vars(self))


def _claim(selection: Selection) -> Any:
    """Return a claim of no worker, whose `release` tells whether it was called."""
    claim: Any = Claim(ControlClient([]), selection)
    claim.release = Mock(side_effect=claim.release)
    return claim


def _params(claim: Claim, **params: Any) -> _Params:
    return _Params(extra_args={"kv_transfer_params": claim.grant({}, 1)}, **params)


def _selection(home: Home, *kinds: str, document: bool = False) -> Selection:
    """Make cartridges `c0`, `c1` of 16 and 24 positions, and name them all; trained ones may have a document."""
    given = {"fingerprint": make_fingerprint(pairing="half"), "document_ids": [1, 2, 3] if document else None}
    for number, kind in enumerate(kinds):
        home.make(f"c{number}", positions=16 + 8 * number, kind=kind, seed=number, **given)
    return Resolver(from_mapping({"home": home.path})).resolve([Reference(id=name) for name in home.made])


def _guard(engine: _Engine, **settings: Any) -> GuardedEngine:
    return GuardedEngine(engine, from_mapping(settings), Adapters({}))


def _guarded(
    home: Home, kind: str, engine: _Engine, settings: dict[str, Any], *, document: bool, **params: Any
) -> list[tuple[int, str]]:
    """Ask with a cartridge; return index and text of all that is sent. Its memory must be let go, whatever comes."""
    selection = _selection(home, kind, document=document)
    claim = _claim(selection)
    prompt = {"prompt_token_ids": [*selection.token_ids, 7, 8]}

    async def collect() -> list[tuple[int, str]]:
        answers = _guard(engine, home=home.path, **settings).generate(prompt, _params(claim, **params), "r")
        return [(o.index, o.text) async for output in answers for o in output.outputs]

    try:
        return asyncio.run(collect())
    finally:
        assert claim.release.called, "the memory is held for a request that has ended"


def test_a_prompt_that_names_no_cartridge_and_loses_its_document_in_its_answer_is_not_begun_again():
    engine = _Engine((0, None), LOST)

    async def ask() -> list[str | None]:
        answers = _guard(engine).generate({"prompt_token_ids": [1, 2]}, _Params(), "r")
        return [output.outputs[0].finish_reason async for output in answers]

    assert (asyncio.run(ask()), len(engine.prompts)) == ([None, "error"], 1)


@pytest.mark.parametrize(("kind", "penalty"), [("prefill", 1.1), ("trained", 1)])
def test_a_models_own_repetition_penalty_is_for_words_and_not_for_identity_tokens(home, kind, penalty):
    _guarded(home, kind, engine := _Engine((0, "stop")), {}, document=False, repetition_penalty=1.1)
    assert engine.params[0].repetition_penalty == penalty


@pytest.mark.parametrize("kind", ["prefill", "trained"])
def test_a_client_that_leaves_in_an_answer_leaves_no_claim(home, kind):
    claim, engine = _claim(_selection(home, kind)), _Engine(*[(0, None)] * 9)

    async def leave() -> None:
        answer = _guard(engine).generate({"prompt_token_ids": [1]}, _params(claim), "r")
        await anext(answer)
        await anext(answer)
        assert claim.release.called == (kind == "prefill"), "a trained one is needed to the end"
        await answer.aclose()
        assert (claim.release.called, engine.ended) == (True, 1), "at once, not when it is collected"

    asyncio.run(leave())


def test_what_a_grammar_has_ended_is_vllms_to_tell_and_is_not_asked_for_again(home):
    """vLLM ends an answer so whose tokens its grammar does not take (`Unexpected: grammar rejected tokens`)."""
    engine = _Engine(LOST)
    assert _guarded(home, "trained", engine, {}, document=False, structured_outputs=True) == [(0, "token")]
    assert len(engine.prompts) == 1


@pytest.mark.parametrize(("reason", "count"), [("abort", 0), ("stop", 1)])
def test_an_answer_that_the_server_ends_as_it_stops_is_not_said_to_be_of_a_cartridge(home, monkeypatch, reason, count):
    noted: list[int] = []
    monkeypatch.setattr(Claim, "note", lambda claim, cached: noted.append(cached))
    _guarded(home, "prefill", _Engine((0, reason)), {}, document=False)
    assert len(noted) == count


def test_an_adapter_that_came_in_the_place_of_the_claims_is_not_asked(home):
    claim, engine = _claim(_selection(home, "prefill")), _Engine()
    answer = _guard(engine).generate({"prompt_token_ids": [1]}, _params(claim), "r", lora_request=LORA)
    with pytest.raises(GracefulHTTPError, match="ask again"):
        asyncio.run(anext(answer))
    assert (claim.release.called, engine.prompts) == (True, [])


@pytest.mark.parametrize(
    ("kind", "events", "on_miss", "document"),
    [
        ("trained", [LOST], "error", True),
        ("trained", [(0, None), (0, None), LOST], "document", True),  # an answer that has begun is not begun again
        ("prefill", [(0, None), (1, "error")], "error", False),
    ],
)  # fmt: skip
def test_what_can_neither_be_computed_nor_go_on_is_an_error(home, kind, events, on_miss, document):
    engine, n = _Engine(*events), 1 + max(index for index, _ in events)
    settings = {"on_miss": on_miss, "retry_status": 425}
    with pytest.raises(GenerationError, match="ask again") as caught:
        _guarded(home, kind, engine, settings, document=document, n=n)
    assert (caught.value.status_code, len(engine.prompts)) == (425, 1)


def test_beam_search_is_refused_to_who_wants_nothing_injected_too():
    """It would drop the tag by which nothing is found."""
    settings = from_mapping({})
    admission = SimpleNamespace(settings=settings, router=Router(settings))
    request = SimpleNamespace(model="m", model_extra={"cartridges": False}, use_beam_search=True)
    with pytest.raises(GracefulHTTPError, match="beam search"):
        asyncio.run(CartridgeRenderer(None, admission).render_completion(request))


def test_the_header_says_of_each_cartridge_what_was_injected_in_the_prompt_with_the_least(home):
    claim = _claim(_selection(home, "prefill", "prefill"))
    start = {"type": "http.response.start", "status": 200}
    told, *_ = sent(*(partial(claim.note, cached) for cached in (40, 20, 40)), start)[3:]
    assert told[b"x-cartridges"] == b"c0@1;positions=16;injected=16, c1@1;positions=24;injected=4"


@pytest.mark.parametrize(
    ("cached", "external", "told"),
    [
        (0, 0, "injected=0"), (40, 40, "injected=24"), (40, 0, "injected=0;cached=24"), (20, 20, "injected=4"),
        (40, 16, "injected=16;cached=8"), (20, 3, "injected=3;cached=1"), (16, 8, "injected=0"), (90, 4, "injected=0;cached=24"),
    ],
)  # fmt: skip
def test_injected_is_what_the_connector_brought_and_not_what_vllm_had(cached, external, told):
    """Of a cartridge at positions 16 to 40, where what vLLM had is before what the connector brought."""
    counted = Cached(cached)
    counted.external = external
    assert share(16, 24, counted) == f"positions=24;{told}"
