"""Which canaries are asked, when, and what becomes of requests meanwhile: over the real store, with an engine that is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from blocks import quietly
from homes import CHUNK, STILL, Home
from invariants import check
from making import make_fingerprint, sha256_hasher
from test_admission import serve  # noqa: F401

with quietly():
    from lmcache_cartridge.serve.admission import Admission

from lmcache_cartridge.artifact.canary import Asked, Expected, ServedCanary
from lmcache_cartridge.artifact.reading import load_token_ids
from lmcache_cartridge.engine.contract import TAG
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.serve import canary as asking
from lmcache_cartridge.serve.adapters import Adapter
from lmcache_cartridge.serve.request import Reference, Refusal
from lmcache_cartridge.serve.resolve import Selection

RIGHT = Expected(((5, 7), (6, 8)), ((-0.1, -2.0), (-0.2, -1.5)), noise=0.01)
BEHIND = Expected(((9, 7),), ((-0.3, -1.0),), noise=0.01)
SHAPE = make_fingerprint(pairing="half")
OTHER = msgspec.structs.replace(SHAPE, weights_digest="00" * 32, quantisation="awq 4")
CANARY = ServedCanary((Asked((3, 4), RIGHT),), 2.0, (Asked((4, 3), BEHIND),))


class Engine:
    """Answers canaries: right, wrong, or as it is told; notes what it was asked."""

    model_config = SimpleNamespace(max_model_len=4096, max_logprobs=20, logprobs_mode="raw_logprobs", model="none")

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []
        self.wrong: set[str] = set()
        """Tags after which the answer is wrong."""
        self.off = 1.0
        """By how much."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.cached: int | None = None
        self.finish = "length"

    @property
    def vllm_config(self) -> Any:
        cache = SimpleNamespace(cache_dtype="auto")
        return SimpleNamespace(model_config=self.model_config, cache_config=cache)

    async def was_asked(self) -> None:
        """Wait until it was."""
        while not self.asked:
            await asyncio.sleep(0.001)

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        self.asked.append((prompt, params))
        await self.may_answer.wait()
        tag = params.extra_args["kv_transfer_params"][TAG]
        expected = BEHIND if "." in tag else RIGHT
        more = self.off if tag in self.wrong else 0.0
        rows = [
            {
                token: SimpleNamespace(logprob=value - more * n)
                for n, (token, value) in enumerate(zip(tokens, values, strict=True))
            }
            for tokens, values in zip(expected.tokens, expected.logprobs, strict=True)
        ]
        cached = len(prompt["prompt_token_ids"]) - 2 if self.cached is None else self.cached
        answer = SimpleNamespace(
            token_ids=[tokens[0] for tokens in expected.tokens], logprobs=rows, finish_reason=self.finish
        )
        yield SimpleNamespace(outputs=[answer], num_cached_tokens=cached)


@pytest.fixture
def store(home, request):
    """With True as parameter `a` and `doc` are of other weights than the engine's, which are accepted."""
    accepts = getattr(request, "param", False)
    for seed, (name, kind) in enumerate({"a": "trained", "b": "trained", "doc": "prefill", "plain": "trained"}.items()):
        shape, canary = OTHER if accepts and name in ("a", "doc") else SHAPE, None if name == "plain" else CANARY
        home.make(name, kind=kind, positions=4 * CHUNK, seed=seed, fingerprint=shape, canary=canary)
    settings = {"lookup_timeout_s": 20, "accept_weights": accepts, "plain_prompts": "trusted"}
    return home.open(settings=STILL | settings, chunks=64, fingerprint=SHAPE)


@pytest.fixture
def run(serve):  # noqa: F811
    """Return a function that runs a coroutine of a admission and its engine."""

    def run(work: Callable[[Admission, Engine], Any], **settings: Any) -> Any:
        engine = Engine()
        admission = serve(engine=engine, **settings)
        return asyncio.run(asyncio.wait_for(work(admission, engine), 120))

    return run


async def _ask(admission: Admission, *names: str) -> str | int:
    """Return `kv` or `document` for a request that is let in, else the status."""
    try:
        async with admission.admit(await admission.resolve([Reference(id=name) for name in names]), id, None) as claim:
            return "document" if claim.is_text else "kv"
    except Refusal as refusal:
        return refusal.status


async def _each(admission: Admission, *names: str) -> list[str | int]:
    """Return the same for requests of one cartridge each, one after the other."""
    return [await _ask(admission, name) for name in names]


async def _tags(admission: Admission, *names: str) -> list[str]:
    return [(await admission.resolve([Reference(id=name)])).tag for name in names]


def _hashes(home: Home, name: str, *more: int) -> list[Any]:
    """Return the keys of the chunks of a cartridge's ids, and of more behind them."""
    ids = load_token_ids(home.made[name].manifest, home.root(name)).tolist()
    return list(sha256_hasher(CHUNK)([*ids, *more]))


async def _found(store: CartridgeStore, hashes: list[Any], *digest: str) -> int:
    return await asyncio.to_thread(store.lookup, hashes, *digest)


async def _look(admission: Admission) -> None:
    """Try what workers want tried, as the keeper does each second."""
    if trying := admission.canaries.follow(await admission.client.ask("numbers")):
        await trying


def test_a_canary_is_asked_as_requests_ask_and_others_do_not_wait(run):
    """That requests for one share it is counted in test_canary_served."""

    async def work(admission: Admission, engine: Engine) -> None:
        engine.may_answer.clear()
        leaving, asking = (asyncio.create_task(_ask(admission, "a")) for _ in range(2))
        await engine.was_asked()
        assert await _ask(admission, "plain") == "kv"
        leaving.cancel()  # who does not take the canary with it
        assert not asking.done()
        engine.may_answer.set()
        assert await asking == "kv"
        [(prompt, params)] = engine.asked
        selection = await admission.resolve([Reference(id="a")])
        assert prompt["prompt_token_ids"] == [*selection.token_ids, 3, 4]
        assert prompt["cache_salt"] not in (None, selection.salt(None, b""))
        assert params.extra_args["kv_transfer_params"]["lmcache.skip_save"] is True
        assert (params.temperature, params.ignore_eos) == (0, True)

    run(work)


@pytest.mark.parametrize("why", ["error", "computed", "late"])
def test_one_that_could_not_be_asked_is_no_pass_and_asked_again(run, why):
    async def work(admission: Admission, engine: Engine) -> None:
        assert await _ask(admission, "plain") == "kv"
        if why == "error":
            engine.finish = "error"
        elif why == "computed":
            engine.cached = CHUNK
        else:
            engine.may_answer.clear()
        assert await _each(admission, "a", "doc") == [503, "document"]
        engine.finish, engine.cached = "length", None
        engine.may_answer.set()
        assert await _each(admission, "a", "doc") == ["kv", "kv"]

    run(work, ready_timeout_s=1.0 if why == "late" else 60.0)


def test_one_that_was_tried_while_another_adapter_took_the_place_of_its_own_is_asked_again(run):
    old, new = (SimpleNamespace(lora_name="one", lora_path="/none", lora_int_id=1) for _ in range(2))

    async def work(admission: Admission, engine: Engine) -> None:
        selection = (await admission.resolve([Reference(id="a")]))._replace(adapter=old)
        for adapter, is_wrong, status in (
            (Adapter(new, "b"), True, 503),
            (Adapter(old, None), True, 503),
            (Adapter(old, "a"), False, None),
        ):
            engine.wrong = {selection.tag} if is_wrong else set()
            admission.adapters.of = AsyncMock(return_value=adapter)
            assert getattr(await admission.canaries.check(selection), "status", None) == status

    run(work)


def test_what_is_not_in_memory_is_not_tried(run, home):
    async def work(admission: Admission, engine: Engine) -> None:
        home.payload("doc").unlink()
        assert await _each(admission, "doc", "doc") == ["document"] * 2
        assert engine.asked == [], "each question would cost a prefill of the document"

    run(work)


@pytest.mark.parametrize(("kind", "reach", "chunk", "prefix"), [
    ("prefill", None, 64, (512, 512)), ("prefill", None, 96, None), ("prefill", 448, 64, (448, 448)),
    ("prefill", 576, 64, None),  # more than there is
    ("trained", None, 96, (512, 512)), ("trained", 448, 96, None), ("trained", 496, 96, (496, 496)),
])  # fmt: skip
def test_behind_itself_what_is_whole_or_injected_is_asked_after(kind, reach, chunk, prefix):
    canary = msgspec.structs.replace(CANARY, behind_positions=reach)
    manifest = SimpleNamespace(positions=256, canary=canary, kind=kind)
    alone, behind = (Selection((manifest,) * times, (), (), None) for times in (1, 2))
    assert asking.prefix(behind, chunk) == prefix
    assert asking.prefix(alone, chunk) == (256, 256 if kind == "trained" else 256 // chunk * chunk)


def test_the_setting_switches_it_off_or_requires_it(run):
    async def off(admission: Admission, engine: Engine) -> None:
        assert await _each(admission, "a", "plain") == ["kv", "kv"]
        assert engine.asked == []

    async def required(admission: Admission, engine: Engine) -> None:
        assert await _each(admission, "a", "plain") == ["kv", 422]

    run(off, canary=False)
    run(required, canary="required")


@pytest.mark.parametrize("store", [True], indirect=True)
@pytest.mark.parametrize(("canary", "off"), [(True, 1.0), ("required", 1.0), (True, float("nan"))])
def test_what_accepted_weights_change_is_said_and_blocks_nothing_unless_canaries_are_required(
    run, home, store, canary, off
):
    """`a` and `doc` are of other weights, `b` of the engine's own: what is wrong there is wrong. No weights make logprobs that are
    no numbers."""
    hashes, is_served = _hashes(home, "doc"), (canary, off) == (True, 1.0)

    async def work(admission: Admission, engine: Engine) -> None:
        a, b, doc = await _tags(admission, "a", "b", "doc")
        engine.wrong, engine.off = {b, doc, f"{a}.{a}"}, off
        assert await _ask(admission, "doc", "a") == ("kv" if is_served else 422)
        assert admission.canaries.outcome("doc@1", doc)[0] == ("accepted" if is_served else "failed")
        assert await _found(store, hashes) == (4 if is_served else 0)
        assert await _each(admission, "b", "a") == [422, "kv"]

    run(work, canary=canary, accept_weights=True)


def test_where_the_context_has_no_room_for_it_a_chain_is_served_as_it_is(run, monkeypatch):
    short = SimpleNamespace(**vars(Engine.model_config) | {"max_model_len": 4 * CHUNK + 8})
    monkeypatch.setattr(Engine, "model_config", short)

    async def work(admission: Admission, engine: Engine) -> None:
        assert await _ask(admission, "a", "b") == "kv"
        assert len(engine.asked) == 1

    run(work)


@pytest.mark.parametrize("fate", ["passed", "failed", "late"])
def test_prompts_that_carry_a_documents_text_get_its_kv_once_the_engine_was_tried_with_it(run, store, home, fate):
    digest, hashes = home.made["doc"].manifest.digest, _hashes(home, "doc", *range(CHUNK))

    async def work(admission: Admission, engine: Engine) -> None:
        engine.wrong = {digest} if fate == "failed" else set()
        engine.finish = "error" if fate == "late" else "length"
        await _look(admission)
        assert not engine.asked, "nothing to try"
        assert await _found(store, hashes) == 0
        check(store)
        assert store.cpu.stats().leased == 0, "what is refused is not promised"
        await _look(admission)
        await _look(admission)
        assert len(engine.asked) == 1
        engine.finish = "length"
        assert await _found(store, hashes) == (4 if fate == "passed" else 0)
        await _look(admission)
        assert await _found(store, hashes) == (4 if fate in ("passed", "late") else 0)
        assert len(engine.asked) == 1 + (fate == "late")

    run(work)
