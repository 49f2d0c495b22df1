"""The request API on a real server, asked by the stock OpenAI client: right answers, right usage, and no leak."""

from __future__ import annotations

import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from recall.ward import Fact, ask, encode
from serving import SERVER_ARGS
from waiting import until
from wards import MODEL, Asker, Ward, content, margins, patients, prefill, register, sure, write_ward
from watching import value

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.cli import top
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.engine.contract import GRANT, TAG
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.serve.request import Reference
from lmcache_cartridge.serve.resolve import Resolver
from lmcache_cartridge.settings import Settings, from_mapping

KEY = "sk-test"
CHUNK = 256
BY_CHANCE = 0.25
"""Largest share of right answers taken for guessing: the mean over attributes is 0.05."""
KINDS = {"a": "prefill", "b": "prefill", "c": "trained"}


class Served(NamedTuple):
    asker: Asker
    model: CausalModel
    settings: Settings
    wards: dict[str, Ward]
    """By cartridge id. Facts of the trained ones are those in their p positions."""

    @property
    def url(self) -> str:
        return str(self.asker.http.base_url)


@pytest.fixture(scope="module")
def mode():
    """How LMCache runs; `test_l2_api` has the other one."""
    return "in-process"


@pytest.fixture(scope="module")
def served(tmp_path_factory, mode):
    home = tmp_path_factory.mktemp("home")
    settings = from_mapping(
        {"home": home, "cpu_bytes": 256 << 20, "admin": True, "roots": [str(home / "allowed")],
         "composites": {"both": ["a", "b"], "loop": ["loop"]}}
    )  # fmt: skip
    model = CausalModel(MODEL)
    wards = {name: write_ward(model, patients(i, 4), name) for i, name in enumerate(KINDS)}
    wards["c"] = _cut(model, wards["c"], 1024)
    for name, kind in KINDS.items():
        register(model, settings, wards[name].ids, name=name, kind=kind)
    launch = plan(
        MODEL, settings, chunk_tokens=CHUNK, on_load_failure="fail", mode=mode,
        vllm_args=[*SERVER_ARGS, "--api-key", KEY, "--enable-scale-out", "--enable-auto-tool-choice",
                   "--tool-call-parser", "pythonic"],
    )  # fmt: skip
    with ServerProcess(launch, home / "server.log") as server, Asker(server.url, KEY) as asker:
        yield Served(asker, model, settings, wards)


def _cut(model: CausalModel, ward: Ward, positions: int) -> Ward:
    """Return what is left of a sheet in its first positions."""
    ids = ward.ids[:positions]
    return Ward(ward.document, ids, sure(model, prefill(model, ids), ward.facts))


def _status(call: Any, *args: Any, **kwargs: Any) -> tuple[int, str]:
    with pytest.raises(openai.APIStatusError) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value.body, dict), "no OpenAI-style error"
    return caught.value.status_code, caught.value.body["message"]


# Where nothing would read the field.

_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
TAKING = {
    "/v1/completions": {"model": MODEL, "prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": _CHAT,
    "/v1/responses": {"model": MODEL, "input": "x", "max_output_tokens": 1},
    "/v1/messages": _CHAT,
}
SHOWING = {f"{path}/render": body for path, body in TAKING.items()}
UNAWARE = {
    "/v1/chat/completions/batch": {**_CHAT, "messages": [_CHAT["messages"]]},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": _CHAT["messages"]},
    "/inference/v1/generate": {"model": MODEL, "token_ids": [5, 6], "sampling_params": {"max_tokens": 1}},
    "/generative_scoring": {"model": MODEL, "query": "a", "items": ["b"], "label_token_ids": [5, 6]},
    "/invocations": _CHAT,
    "/tokenize": {"model": MODEL, "prompt": "x"},
}


def _wrong(served: Served, requests: list[tuple[str, Fact]]) -> list[tuple[str, Fact, str]]:
    """Ask by 16 threads, completions and chat in turn; return the answers that are not the cartridge's own."""

    def one(number: int) -> tuple[str, Fact, str] | None:
        name, fact = requests[number]
        if number % 2:
            text = served.asker.complete(ask(fact, 0), name).text
        else:
            text = served.asker.chat(content(fact), name).text
        return None if text.strip() == fact.value else (name, fact, text)

    with ThreadPoolExecutor(16) as pool:
        return [found for found in pool.map(one, range(len(requests))) if found]


async def _leave(served: Served, body: dict[str, Any], after_s: float) -> None:
    """Send a request and hang up."""
    url = httpx.URL(served.url)
    data = json.dumps({"model": MODEL, "temperature": 0} | body).encode()
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    )
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    with suppress(TimeoutError):
        await asyncio.wait_for(reader.read(1), after_s)
    writer.transport.abort()


# Fuzz.

_IDS = st.sampled_from(
    ["a", "b", "c", "a@1", "a@2", "both", "loop", "nope", "", "/", "s3://x/y", "a\0", "\ud800", "..", "a" * 1100]
)
_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_REFERENCE = _IDS | st.fixed_dictionaries(
    {"id": _IDS | _JUNK},
    optional={"source": st.sampled_from(["registry", "local", "s3", "x", 1]), "force_redownload": _JUNK, "path": _JUNK},
)
_PARAMS = st.dictionaries(
    st.sampled_from(["cartridge_id", TAG, GRANT, "lmcache.tag.x", "lmcache.skip_save", "lmcache.", "disagg_spec", "x"]),
    _IDS | st.lists(_IDS, max_size=3) | _JUNK, max_size=3,
)  # fmt: skip
_NEARLY_RIGHT = st.fixed_dictionaries(
    {"cartridges": st.lists(_IDS, min_size=1, max_size=2)},
    optional={"n": st.just(2), "stream": st.just(True), "echo": st.booleans(), "cache_salt": st.sampled_from("xy")},
)
_FIELDS = _NEARLY_RIGHT | st.fixed_dictionaries(
    {},
    optional={
        "cartridges": st.lists(_REFERENCE, max_size=3)
        | _JUNK
        | _IDS
        | st.lists(st.just("a"), min_size=15, max_size=18),
        "kv_transfer_params": _PARAMS | _JUNK,
        "vllm_xargs": st.fixed_dictionaries({"kv_transfer_params": _JUNK}) | _JUNK,
        "cache_salt": st.text(max_size=8) | _JUNK,
        "cartridge_label": _IDS | _JUNK,
        "echo": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None, 0, 1, -1]),
        "truncate_prompt_tokens": st.sampled_from([None, 1, 5, -1]),
        "max_tokens": st.sampled_from([0, 1]),
        "n": st.sampled_from([1, 2]),
        "use_beam_search": st.booleans(),
        "add_special_tokens": st.booleans(),
        "stream": st.booleans(),
        "return_token_ids": st.booleans(),
    },
)


class ApiTests:
    """In each way LMCache runs: a subclass and a `mode` for each."""

    def test_the_same_kv_under_other_identity_tokens_is_another_cartridge(self, served):
        """As two tools make it that take other ids for ordinary ones."""
        ward = served.wards["c"]
        register(served.model, served.settings, ward.ids, name="c-again", kind="trained", unusual=1)
        try:
            assert not _wrong(served, [(name, fact) for fact in ward.facts[:6] for name in ("c", "c-again")])
        finally:
            Registry(served.settings.registry_path).remove("c-again@1")

    @pytest.mark.parametrize("name", KINDS)
    def test_completions_and_chat_answer_from_the_cartridge_and_count_it(self, served, name):
        ward = served.wards[name]
        positions, whole = len(ward.ids), len(ward.ids) // CHUNK * CHUNK
        for fact in ward.facts[:8]:
            for reply, own in (
                (served.asker.complete(ask(fact, 0), name), encode(ask(fact, 0))),
                (served.asker.chat(content(fact), name), encode(ask(fact, 0))),
            ):
                assert reply.text.strip() == fact.value
                assert reply.used == f"{name}@1;positions={positions}"
                assert reply.prompt_tokens == positions + len(own), "a second <s>, or something lost"
                # vLLM's prefix cache may hold more: the tail of the document in blocks of 128, computed before.
                assert whole <= reply.cached_tokens <= positions
                assert reply.injected + reply.had == reply.cached_tokens

    def test_a_request_without_cartridges_is_left_alone(self, served):
        fact = served.wards["a"].facts[0]
        reply = served.asker.complete(ask(fact, 0))
        assert reply.prompt_tokens == 1 + len(encode(ask(fact, 0))), "<s> and the question"
        assert (reply.used, reply.cached_tokens) == (None, 0)
        right = [served.asker.right(fact, None) for fact in served.wards["a"].facts[:40]]
        assert sum(right) / len(right) <= BY_CHANCE

    @pytest.mark.parametrize("name", KINDS)
    def test_a_stream_gives_the_same_answer_usage_and_header(self, served, name):
        ward, fact = served.wards[name], served.wards[name].facts[1]
        positions, whole = len(ward.ids), len(ward.ids) // CHUNK * CHUNK
        reply, _ = served.asker.stream(ask(fact, 0), name)
        assert (reply.text.strip(), reply.used) == (fact.value, f"{name}@1;positions={positions}")
        assert reply.prompt_tokens == positions + len(encode(ask(fact, 0)))
        assert reply.injected + reply.had == reply.cached_tokens >= whole
        events = served.asker.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content(fact)}], max_tokens=2, temperature=0, stream=True,
            extra_body={"cartridges": [name]},
        )  # fmt: skip
        assert "".join(event.choices[0].delta.content or "" for event in events if event.choices).strip() == fact.value

    @pytest.mark.parametrize("name", KINDS)
    def test_several_choices_prompts_logprobs_echo_and_stop_words_work(self, served, name):
        facts = served.wards[name].facts[:3]

        def choices(prompt: Any, **options: Any) -> list[Any]:
            given = {"max_tokens": 1, "temperature": 0} | options
            extra = {"cartridges": [name]}
            return served.asker.openai.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **given).choices

        several = choices([ask(fact, 0) for fact in facts], n=2, temperature=1e-3, logprobs=3)
        assert [choice.text.strip() for choice in several] == [fact.value for fact in facts for _ in range(2)]
        assert all(choice.logprobs.token_logprobs[0] > -2 for choice in several)
        [stopped] = choices(ask(facts[0], 0), max_tokens=8, stop=[facts[0].value])
        assert (stopped.text.strip(), stopped.finish_reason) == ("", "stop")
        [echoed] = choices(ask(facts[0], 0), echo=True)
        told = [*ask(facts[0], 0).split(), facts[0].value]
        assert echoed.text.split() == told, "the cartridge is not echoed"

    def test_a_clients_own_tag_would_keep_the_cartridge_away_and_is_refused(self, served):
        tagged = {"lmcache.tag.tenant": "x"}
        assert served.asker.complete("Q: x? A:", kv_transfer_params=tagged).used is None
        for name in KINDS:
            status, message = _status(served.asker.complete, "Q: x? A:", name, kv_transfer_params=tagged)
            assert (status, "cache_salt" in message) == (422, True)

    def test_responses_and_messages_answer_from_the_cartridge(self, served):
        for fact in served.wards["c"].facts[:4]:
            named = {"cartridges": ["c"]}
            reply = served.asker.openai.responses.create(
                model=MODEL, input=content(fact), max_output_tokens=2, temperature=0, extra_body=named
            )
            assert reply.output_text.strip() == fact.value
            assert reply.usage.input_tokens == 1024 + len(encode(ask(fact, 0)))
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": content(fact)}],
                "max_tokens": 2,
                "temperature": 0,
            }
            for name in (named, {"kv_transfer_params": {"cartridge_id": "c"}}):
                reply = served.asker.http.post("/v1/messages", json=body | name)
                assert reply.json()["content"][0]["text"].strip() == fact.value
                assert reply.headers["x-cartridges"].startswith("c@1;positions=1024;injected=")

    def test_a_cartridge_of_another_model_is_a_conflict(self, served):
        for kind in ("prefill", "trained"):
            register(served.model, served.settings, served.wards["a"].ids[:512], name=f"foreign-{kind}", kind=kind,
                     weights_digest="00" * 32)  # fmt: skip
            status, message = _status(served.asker.complete, "Q: x? A:", f"foreign-{kind}")
            assert status == 409
            assert message.startswith(
                f"foreign-{kind}@1 cannot be used with the model served here: made for another model"
            )
            assert f"weights_digest: {'00' * 32}, not" in message
        assert served.asker.http.post("/v1/cartridges/foreign-trained/pin").status_code == 409
        assert served.asker.right(served.wards["a"].facts[0], "a")

    def test_an_id_is_answered_by_its_newest_version_that_this_engine_serves(self, served):
        ward, fact = served.wards["b"], served.wards["b"].facts[0]
        register(served.model, served.settings, ward.ids, name="moving")
        before = served.asker.complete(ask(fact, 0), "moving")
        register(served.model, served.settings, ward.ids[:512], name="moving", version=2, weights_digest="00" * 32)
        for _ in range(3):
            for again in (served.asker.complete(ask(fact, 0), "moving"), served.asker.chat(content(fact), ["moving"])):
                assert (again.text.strip(), again.used) == (fact.value, f"moving@1;positions={len(ward.ids)}")
                assert again.cached_tokens >= before.cached_tokens > 0
        chained = served.asker.complete(ask(fact, 0), ["a", "moving"])
        assert chained.used.endswith(f", moving@1;positions={len(ward.ids)}")
        assert _status(served.asker.complete, "Q: x? A:", "moving@2")[0] == 409
        states = {1: "resident", 2: "refused"}
        until(
            lambda: {v: served.asker.http.get(f"/v1/cartridges/moving@{v}").json()["state"] for v in states} == states
        )

    def test_two_hundred_requests_by_sixteen_threads_get_their_own_documents_answers(self, served):
        rng, names = random.Random(1), list(KINDS)
        requests = [(name, rng.choice(served.wards[name].facts)) for name in rng.choices(names, k=200)]
        assert _wrong(served, requests) == []
        crossed = [(names[i % 3], rng.choice(served.wards[names[(i + 1) % 3]].facts)) for i in range(60)]
        assert 1 - len(_wrong(served, crossed)) / 60 <= BY_CHANCE, "the control: questions on another's document"

    @pytest.mark.parametrize("kind", ["prefill", "trained"])
    def test_a_cartridge_replaced_under_its_id_is_never_answered_from_old_blocks(self, served, kind):
        """Both versions are about the same patients, with other values."""
        name, names = f"replaced-{kind}", patients(3, 4)[:150]
        old, new = (_cut(served.model, write_ward(served.model, names, f"{kind}{version}"), 1024) for version in (1, 2))
        register(served.model, served.settings, old.ids, name=name, kind=kind)
        assert _wrong(served, [(name, fact) for fact in old.facts[:40]]) == []
        register(served.model, served.settings, new.ids, name=name, kind=kind, version=2)
        rng = random.Random(3)
        requests = [
            (name, rng.choice(new.facts)) if i % 2 else (f"{name}@1", rng.choice(old.facts)) for i in range(200)
        ]
        assert _wrong(served, requests) == []
        known = {fact[:2]: fact.value for fact in old.facts}
        changed = [fact for fact in new.facts if known.get(fact[:2], fact.value) != fact.value]
        assert len(changed) >= 10, "the control: the versions contradict each other"
        assert len(_wrong(served, [(f"{name}@1", fact) for fact in changed])) == len(changed)

    @pytest.mark.parametrize("plain_first", [True, False])
    def test_a_plain_prompt_of_identity_tokens_neither_gets_the_cartridge_nor_poisons_it(self, served, plain_first):
        name = f"secret-{plain_first}"
        ward = _cut(served.model, write_ward(served.model, patients(3, 4), name, tokens=530), 512)
        manifest = register(served.model, served.settings, ward.ids, name=name, kind="trained")
        identity = reading.load_token_ids(manifest, served.settings.cartridges_dir / name / "1").tolist()
        guess = Resolver(served.settings).resolve([Reference(id=name)]).salt(None)
        facts = ward.facts[:8]

        def plain() -> None:
            for salt in ({}, {"cache_salt": guess}):
                replies = [served.asker.complete([*identity, *encode(ask(fact, 0))], **salt) for fact in facts]
                # Blocks of 128 that such prompts themselves computed before may be reused among them.
                right = [reply.text.strip() == fact.value for reply, fact in zip(replies, facts, strict=True)]
                assert sum(right) <= 2
                assert replies[0].cached_tokens == 0

        def cartridge() -> None:
            assert [fact for fact in facts if not served.asker.right(fact, name)] == []

        if plain_first:
            plain()
            cartridge()
        else:
            cartridge()
            plain()
            cartridge()

    @pytest.mark.parametrize("named", [["both"], ["a", "c"], ["a", "c", "b"]])
    def test_a_chain_answers_questions_on_all_its_documents_as_well_as_all_of_them_in_the_prompt(self, served, named):
        names = ["a", "b"] if named == ["both"] else named
        wards = [served.wards[name] for name in names]
        facts = [fact for ward in wards for fact in ward.facts[::8]]
        whole = prefill(served.model, [wards[0].ids[0], *(i for ward in wards for i in ward.ids[1:])])
        expected = int((margins(served.model, whole, facts) > 0).sum())
        replies = [served.asker.complete(ask(fact, 0), named) for fact in facts]
        right = sum(reply.text.strip() == fact.value for reply, fact in zip(replies, facts, strict=True))
        assert right >= expected - 0.05 * len(facts)
        assert right > 0.8 * len(facts)
        total = sum(len(ward.ids) for ward in wards)
        assert replies[0].used == ", ".join(f"{n}@1;positions={len(w.ids)}" for n, w in zip(names, wards, strict=True))
        if named[-1] == "c":
            assert total % CHUNK and {reply.cached_tokens for reply in replies} == {total}, "to its end inside a chunk"
        assert all(reply.cached_tokens >= total // CHUNK * CHUNK for reply in replies)
        assert replies[0].prompt_tokens == total + len(encode(ask(facts[0], 0)))

    def test_cartridges_are_listed_and_moved_between_the_tiers(self, served):
        http = served.asker.http

        def state(name: str) -> dict[str, Any]:
            return http.get(f"/v1/cartridges/{name}").json()

        listed = {row["id"]: row for row in http.get("/v1/cartridges").json()["data"]}
        assert {"a", "b", "c"} <= set(listed)
        assert str(served.settings.home) not in http.get("/v1/cartridges").text
        assert http.post("/v1/cartridges/c/evict").status_code == 200
        reply = http.post("/v1/cartridges/c/preload")
        assert reply.status_code in (200, 202)
        assert reply.json() | {"eta_s": 0, "resident_chunks": 0} == {
            "id": "c@1", "action": "preload", "chunks": 4, "resident_chunks": 0, "eta_s": 0
        }  # fmt: skip
        until(lambda: http.post("/v1/cartridges/c/preload").status_code == 200)
        assert state("c")["state"] == "resident"
        assert state("c")["tiers"] == {"cpu": {"resident_chunks": 4, "chunks": 4}}
        assert (state("c")["loading"], state("c")["pinned"]) == (None, False)
        assert http.post("/v1/cartridges/c/pin").json()["chunks"] == 4
        assert state("c")["pinned"]
        reply = http.post("/v1/cartridges/c/evict")
        assert (reply.status_code, reply.json()["error"]["type"]) == (409, "Conflict"), "a pinned cartridge stays"
        assert "c@1 is pinned" in reply.text and reply.headers["x-should-retry"] == "false"
        assert http.post("/v1/cartridges/c/unpin").json()["chunks"] == 4
        assert http.post("/v1/cartridges/c/evict").json()["chunks"] == 4
        assert state("c")["state"] == "cold"
        assert served.asker.complete(ask(served.wards["c"].facts[0], 0), "c", cache_salt="cold").cached_tokens == 1024
        assert state("c")["state"] == "resident"
        for path in ("nope", "nope/pin", "a/explode", "%00/pin"):
            reply = http.post(f"/v1/cartridges/{path}") if "/" in path else http.get(f"/v1/cartridges/{path}")
            assert reply.status_code == 404
            assert reply.json()["error"]["code"] == 404

    def test_a_thousand_clients_that_leave_leave_nothing_behind(self, served, monkeypatch):
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        rng, facts = random.Random(4), {name: served.wards[name].facts for name in KINDS}

        async def leave() -> None:
            name = rng.choice(list(KINDS))
            body = {"prompt": ask(rng.choice(facts[name]), 0), "max_tokens": rng.choice((1, 64)), "cartridges": [name]}
            await _leave(served, body | {"stream": rng.random() < 0.5}, rng.choice((0.001, 0.005, 0.02, 0.1)))

        async def all_leave() -> None:
            for _ in range(25):
                await asyncio.gather(*(leave() for _ in range(40)))
                # What comes next has to be loaded, and is waited for.
                await asyncio.to_thread(served.asker.http.post, f"/v1/cartridges/{rng.choice(list(KINDS))}/evict")

        asyncio.run(all_leave())

        def owed() -> dict[str, float]:
            now, _ = top.read(served.url.rstrip("/"))
            chunks = {name: now[name]["cpu"] for name in ("held_chunks", "leased_chunks", "lent_chunks")}
            return chunks | {name: now[name][""] for name in ("open_claims", "waiting_claims", "waiting_requests")}

        until(lambda: not any(owed().values()))
        assert served.asker.http.get("/v1/cartridges").json()["claims"] == {"open": 0, "oldest_s": 0.0}
        for name in KINDS:
            assert served.asker.right(facts[name][0], name)


class TestApi(ApiTests):
    """And what is decided before a request comes to LMCache, which is the same in both."""

    def test_a_server_that_makes_no_contexts_is_said_so_to_whoever_builds_by_it(
        self, served, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        (tmp_path / "x").write_text("A document.")
        where = ["--url", served.url, "--home", str(tmp_path)]
        assert main(["build", *where, "--id", "x", "--document", str(tmp_path / "x")]) == 1
        assert "it has to be `serve --l1-bytes BYTES --set contexts=true`" in capsys.readouterr().err

    def test_function_tools_go_with_cartridges(self, served):
        fact = served.wards["c"].facts[0]
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        for choice in ("none", "auto"):
            reply = served.asker.chat(content(fact), "c", tools=[tool], tool_choice=choice)
            assert reply.text.strip() == fact.value
            assert reply.cached_tokens >= 1024
        web = {"type": "web_search"}
        status, _ = _status(
            served.asker.openai.responses.create, model=MODEL, input="x", tools=[web], extra_body={"cartridges": ["c"]}
        )
        assert status == 422, "built-in tools render again on every turn"

    @pytest.mark.parametrize(
        "named",
        [{"cartridges": ["b"]}, {"cartridges": [{"id": "b@1", "source": "registry"}]}, {"cartridges": [{"id": "b", "force_redownload": True}]},
         {"kv_transfer_params": {"cartridge_id": "b"}}, {"kv_transfer_params": {"cartridge_id": ["b"], "lmcache.skip_save": True}}],
    )  # fmt: skip
    def test_every_way_of_naming_a_cartridge_is_understood(self, served, named):
        for fact in served.wards["b"].facts[:3]:
            reply = served.asker.complete(ask(fact, 0), **named)
            assert (reply.text.strip(), reply.used) == (fact.value, f"b@1;positions={len(served.wards['b'].ids)}")

    @pytest.mark.parametrize("path", TAKING)
    def test_a_header_names_cartridges_as_the_body_does(self, served, path):
        def post(headers: dict[str, str], **fields: Any) -> httpx.Response:
            return served.asker.http.post(path, json=TAKING[path] | fields, headers=headers)

        alone = post({"X-Cartridges": "c"})
        assert alone.headers["x-cartridges"].startswith("c@1;positions=1024;injected="), alone.text
        again = post({"x-cartridges": "c@1"}, cartridges=["c@1"])
        assert again.headers["x-cartridges"] == "c@1;positions=1024;injected=0;cached=1024", "vLLM still has it"
        chain = post({"X-Cartridges": "c, a"}).headers["x-cartridges"]
        assert [one.strip().partition(";")[0] for one in chain.split(",")] == ["c@1", "a@1"]
        for headers, fields in (
            ({"X-Cartridges": "c"}, {"cartridges": ["a"]}), ({"X-Cartridges": "c, a"}, {"cartridges": ["a", "c"]}),
            ({"X-Cartridges": ""}, {}), ({"X-Cartridges": "c,,a"}, {}), ({"X-Cartridge": "c"}, {}),
            ({"Cartridges": "c"}, {}), ({"X-Cartridges": "c"}, {"kv_transfer_params": {"cartridge_id": "a"}}),
            ({"X-Cartridges-Required": "yes"}, {}), ({}, {"cartridges_required": 5}),
        ):  # fmt: skip
            assert post(headers, **fields).status_code == 400, (headers, fields)
        assert post({"X-Cartridges": "nope"}).status_code == 404
        for headers, fields in (({"X-Cartridges-Required": "true"}, {}), ({}, {"cartridges_required": True})):
            lost = post(headers, **fields)
            assert (lost.status_code, "X-Cartridges-Required" in lost.text) == (400, True), lost.text
            assert post(headers, **fields, cartridges=["c"]).status_code == 200
            assert post(headers | {"X-Cartridges": "c"}, **fields).status_code == 200
        assert post({"X-Cartridges-Required": "false"}).status_code == 200, "the control: without any it answers"

    @pytest.mark.parametrize("path", SHOWING)
    @pytest.mark.parametrize("name", ["a", "both"])
    def test_a_route_that_shows_tokens_shows_those_that_the_engine_gets(self, served, path, name):
        def tokens(extra: dict[str, Any]) -> list[int]:
            reply = served.asker.http.post(path, json=SHOWING[path] | extra).raise_for_status()
            named = reply.headers.get("x-cartridges", "")
            assert [one.split("@")[0] for one in named.split(", ") if one] == (
                ["a", "b"][: 1 + (name == "both")] if extra else []
            )
            shown = reply.json()
            shown = shown[0] if isinstance(shown, list) else shown
            return shown["token_ids"]

        head = Resolver(served.settings).resolve(
            [Reference(id=one) for one in (["a", "b"] if name == "both" else ["a"])]
        )
        own = tokens({})
        while own[0] == served.model.tokenizer.bos_token_id:  # /v1/responses renders two (vLLM 0.32)
            own = own[1:]
        assert tokens({"cartridges": [name]}) == [*head.token_ids, *own]
        assert tokens({"model": f"{MODEL}:{name}"}) == [*head.token_ids, *own]
        if path in ("/v1/completions/render", "/v1/chat/completions/render"):
            used = served.asker.http.post(
                path.removesuffix("/render"), json=SHOWING[path] | {"cartridges": [name]}
            ).json()
            assert used["usage"]["prompt_tokens"] == len(head.token_ids) + len(own), "as many as the engine had"

    def test_what_was_shown_cannot_be_generated_from(self, served):
        for path in SHOWING:
            for extra, status in (({}, 200), ({"cartridges": ["a"]}, 400), ({"cartridges": ["b"]}, 400)):
                shown = served.asker.http.post(path, json=SHOWING[path] | extra).raise_for_status().json()
                shown = shown[0] if isinstance(shown, list) else shown
                reply = served.asker.http.post("/inference/v1/generate", json=shown | {"stream": False})
                assert reply.status_code == status, (path, extra, reply.text)

    def test_no_route_without_the_key_shows_a_document_or_reads_one(self, served):
        """Every way to name a cartridge that was never asked for, on every route of the app that wants no key."""
        register(served.model, served.settings, served.wards["c"].ids[:CHUNK], name="unasked")
        every = served.asker.http.get("/openapi.json").json()["paths"]
        ways: list[tuple[dict[str, Any], dict[str, str]]] = [
            ({"cartridges": ["unasked"]}, {}), ({"cartridges": [str(served.settings.cartridges_dir / "unasked")]}, {}),
            ({"kv_transfer_params": {"cartridge_id": "unasked"}}, {}), ({"model": f"{MODEL}:unasked"}, {}),
            ({}, {"X-Cartridges": "unasked"}),
        ]  # fmt: skip
        opened = set()
        with httpx.Client(base_url=served.url, timeout=60) as nobody:
            for path, method in [(path, method) for path, methods in every.items() for method in methods]:
                reply = nobody.request(method, path, json={} if method == "post" else None)
                if reply.status_code == 401:
                    continue
                opened.add(path)
                for fields, headers in ways if method == "post" else ():
                    body = {"model": MODEL, "prompt": "x"} | fields
                    reply = nobody.post(path, json=body, headers=headers)
                    if "model" in fields:  # a name that no other route knows; /ping reads nothing
                        assert reply.status_code in (400, 404, 501) or not reply.content, (path, reply.text)
                    else:
                        assert (reply.status_code, "cartridge" in reply.text) == (400, True), (path, reply.text)
        assert {"/tokenize", "/detokenize", "/invocations", "/health"} <= opened, opened
        assert not [path for path in opened if path.startswith("/v1")]
        [shown] = [row for row in served.asker.http.get("/v1/cartridges").json()["data"] if row["id"] == "unasked"]
        assert (shown["state"], shown["loading"]) == ("cold", None)
        lower = {"Authorization": f"bearer {KEY}"}
        unknown = TAKING["/v1/completions"] | {"cartridges": ["nope"]}
        assert served.asker.http.post("/v1/completions", json=unknown, headers=lower).status_code == 404

    def test_the_tokens_of_cartridges_are_told_with_the_key_and_nothing_is_loaded(self, served):
        def tokens(body: dict[str, Any], **headers: str) -> tuple[int, Any]:
            reply = served.asker.http.post("/v1/cartridges/tokens", json=body, headers=headers)
            return reply.status_code, reply.json()

        heads = {name: Resolver(served.settings).resolve([Reference(id=name)]).token_ids for name in "ab"}
        for body, headers in (({"cartridges": ["a"]}, {}), ({"model": f"{MODEL}:a"}, {}), ({}, {"X-Cartridges": "a"})):
            assert tokens(body, **headers) == (200, {"token_ids": list(heads["a"])})
        assert tokens({"cartridges": ["both"]}) == (200, {"token_ids": [*heads["a"], *heads["b"]]})
        assert tokens({}) == (200, {"token_ids": []})
        for body, status in (({"cartridges": ["nope"]}, 404), ({"cartridges": 5}, 400), ({"cartridge": ["a"]}, 400)):
            assert tokens(body)[0] == status

    @pytest.mark.parametrize("path", [*TAKING, *UNAWARE, *SHOWING])
    def test_what_a_route_would_not_read_is_refused_and_never_answered_without_the_document(self, served, path):
        def refused(status: int, headers: dict[str, str] | None = None, **named: Any) -> str:
            reply = served.asker.http.post(path, json=body | named, headers=headers)
            assert reply.status_code == status, (named, headers, reply.text)
            return reply.json()["error"]["message"]

        body = (TAKING | UNAWARE | SHOWING)[path]
        assert served.asker.http.post(path, json=body).status_code == 200, "the control: without any it answers"
        for named in ({"cartridge": ["a"]}, {"cartridge_ids": ["a"]}, {"cartridge_id": "a"}, {"Cartridges": ["a"]},
                      {"cartrigdes": ["a"]}, {"cartridge_label": "a"}, {"metadata": {"cartridges": "a"}},
                      {"extra_body": {"kv_transfer_params": {"cartridge_id": "a"}}}):  # fmt: skip
            assert "name cartridges in" in refused(400, **named)
        assert "cartridge" in refused(400, cartridges=5)
        if path not in UNAWARE:
            refused(404, cartridges=["nope"])
            return
        assert "does not take cartridges" in refused(400, {"X-Cartridges": "a"})
        for named in ({"cartridges": ["a"]}, {"cartridges": ["nope"]}, {"kv_transfer_params": {"cartridge_id": "a"}},
                      {"kv_transfer_params": {TAG: "00"}}):  # fmt: skip
            assert "cartridge" in refused(400, **named)

    def test_an_escaped_or_oddly_encoded_field_is_seen_too(self, served):
        body = json.dumps({**_CHAT, "cartridges": ["c"]})
        for data in (
            body.replace("cartridges", "cartr\\u0069dges").encode(),
            body.encode("utf-16"),
            body.encode("utf-32-le"),
        ):
            reply = served.asker.http.post("/v1/messages", content=data, headers={"content-type": "application/json"})
            assert reply.headers["x-cartridges"].startswith("c@1;positions=1024;injected=")

    def test_every_route_that_generates_is_known(self, served):
        every = served.asker.http.get("/openapi.json").json()["paths"]
        paths = {path for path, methods in every.items() if "post" in methods}
        taken = {
            *TAKING,
            "/v1/cartridges",
            "/v1/cartridges/{name}/{action}",
            "/v1/cartridges/drain",
            "/v1/cartridges/tokens",
        }
        harmless = {"/detokenize", "/ping", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/responses/{response_id}/cancel",
                    "/v1/systemone", "/inference/v1/abort_requests"}  # fmt: skip
        derendering = {path for path in paths if path.endswith("derender")}
        assert set(SHOWING) <= paths
        assert paths <= taken | harmless | derendering | set(UNAWARE) | set(SHOWING), (
            "a new route: does it take cartridges?"
        )

    @pytest.mark.parametrize("params", [{TAG: "00" * 32}, {GRANT: {"must_inject": 0}}, {"disagg_spec": {}}])
    def test_parameters_only_the_server_may_set_are_refused_on_every_way_in(self, served, params):
        given = {"kv_transfer_params": params}
        ways = {path: TAKING[path] | given for path in TAKING}
        sampling = {"max_tokens": 1, "extra_args": given}
        ways["/inference/v1/generate"] = UNAWARE["/inference/v1/generate"] | {"sampling_params": sampling}
        for path, body in ways.items():
            reply = served.asker.http.post(path, json=body)
            assert reply.status_code == 400, (path, reply.text)
        body = TAKING["/v1/completions"] | {"vllm_xargs": {"kv_transfer_params": "a"}}
        assert served.asker.http.post("/v1/completions", json=body).status_code == 400
        assert served.asker.right(served.wards["a"].facts[0], "a"), "the engine lives"

    @pytest.mark.parametrize(
        ("cartridge", "status"),
        [("nope", 404), ("a@9", 404), ("/etc/passwd", 404), ("/", 404), ("s3://bucket/key", 404), ("../a", 404), (["a"] * 8, 400), ({"id": ""}, 400),
         ({"id": "a", "x": 1}, 400), (5, 400), ("x" * 2000, 400), ("loop", 404)],
    )  # fmt: skip
    def test_what_cannot_be_had_is_an_openai_error(self, served, cartridge, status):
        chain = cartridge if isinstance(cartridge, list) else [cartridge]
        for ask_for in (served.asker.complete, served.asker.chat, served.asker.stream):
            found, message = _status(ask_for, "Q: x? A:", chain)
            assert found == status
            assert str(served.settings.home) not in message

    def test_every_error_of_ours_has_one_shape_and_says_whether_asking_again_is_of_use(self, served):
        http, completion = served.asker.http, TAKING["/v1/completions"]
        long = completion | {"prompt": [5] * 8000, "cartridges": ["a"]}
        bos = served.model.tokenizer.bos_token_id
        for reply in (
            http.post("/tokenize", json={"model": MODEL, "prompt": "x", "cartridges": ["a"]}),
            http.post("/v1/completions", json=completion | {"cartridge": ["a"]}),
            http.post("/v1/completions", json=completion | {"cartridges": ["nope"]}),
            http.post("/v1/completions", json=completion | {"prompt": [bos], "cartridges": ["a"]}),
            http.post("/v1/completions", json=long),
            http.post("/v1/chat/completions", json=_CHAT | {"cartridges": ["a"], "n": 2, "use_beam_search": True}),
            http.get("/v1/cartridges/nope"),
            http.post("/v1/cartridges/nope/pin"),
            http.post("/v1/cartridges/a/explode"),
        ):
            told = reply.json()["error"]
            assert set(told) == {"message", "type", "param", "code"} and reply.is_client_error, reply.text
            assert (told["type"], told["code"]) == (HTTPStatus(reply.status_code).phrase, reply.status_code), told
            assert reply.headers["x-should-retry"] == "false", (reply.request.url.path, told)

    def test_what_requests_did_is_counted_and_told_without_the_key(self, served):
        ward, where = served.wards["a"], {"tier": "cpu", "rank": "0"}

        def told() -> list[float]:
            """Return the counts that the workers were asked for after now."""
            since, text = time.monotonic(), ""

            def is_new() -> bool:
                nonlocal text
                text = httpx.get(f"{served.url}/metrics").raise_for_status().text
                return time.monotonic() - value(text, "status_age_seconds") > since + 0.5

            until(is_new)
            assert "vllm:request_success_total" in text, "vLLM's own are there too"
            found = [value(text, name, **where) for name in ("hits_total", "misses_total")]
            found += [value(text, "requests_total", outcome=outcome) for outcome in ("used", "refused_404")]
            return [each or 0 for each in found + [value(text, "positions_total"), value(text, "waiting_requests")]]

        served.asker.http.post("/v1/cartridges/a/evict").raise_for_status()
        before = told()
        for salt in ("counted cold", "counted hot"):
            served.asker.complete(ask(ward.facts[0], 0), "a", cache_salt=salt)
        served.asker.complete("Q: x? A:")
        assert _status(served.asker.complete, "Q: x? A:", "nope")[0] == 404
        moved = [now - then for now, then in zip(told(), before, strict=True)]
        whole = len(ward.ids) // CHUNK
        assert moved == [whole, whole, 2, 1, 2 * len(ward.ids), 0]

    def test_bench_measures_every_way_on_a_real_engine(self, served, tmp_path, monkeypatch):
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        home = str(served.settings.home)
        options = ["--model", MODEL, "--home", home, "--p", "256", "--c", "1,2", "--repeat", "2"]
        status = main(["bench", "--url", served.url, *options, "--output", str(tmp_path)])
        found = json.loads((tmp_path / "bench.json").read_text())
        assert status == 0, found["remarks"]
        rows = {(row["p"], row["c"], row["way"]): row for row in found["rows"]}
        assert len(rows) == 2 * 4
        for (p, c, way), row in rows.items():
            count = 2 * (c if way == "cold" else 2 * c)
            assert row["requests"] == count and row["ttft_ms"]["number"] == count
            assert row["cached"] == [count * p * (way == "prefix"), count * p * (way in ("warm", "cold"))]
        compared = [row["equal"] for row in rows.values() if row["equal"]]
        assert sum(count for _, count in compared) == (2 + 2 + 1) * (2 + 4)
        assert sum(same for same, _ in compared) >= (2 + 2 + 1) * (2 + 4) / 2, "rounding may part some, not most"
        assert found["server"]["version"] and found["memory"]["seconds_and_bytes"]
        left = [row.id for row in Registry(served.settings.registry_path).all()]
        assert not [name for name in left if name.startswith("trial-")], "its cartridges are taken away"

    def test_odd_requests_get_an_error_of_their_own_or_the_right_answer(self, served):
        fact, home, http = served.wards["a"].facts[0], str(served.settings.home), served.asker.http
        statuses: dict[int, int] = {}

        @examples(
            max_examples=800, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
        )
        @given(fields=_FIELDS)
        def one(fields: dict[str, Any]) -> None:
            body = {"model": MODEL, "prompt": ask(fact, 0), "max_tokens": 1, "temperature": 0} | fields
            data = json.dumps(body)
            reply = http.post("/v1/completions", content=data, headers={"content-type": "application/json"})
            statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
            assert reply.status_code == 200 or 400 <= reply.status_code < 500, reply.text
            used, params = reply.headers.get("x-cartridges", ""), fields.get("kv_transfer_params")
            named = all(fields.get("cartridges") is not none for none in (None, False)) or bool(
                isinstance(params, dict) and params.get("cartridge_id") is not None
            )
            assert bool(used) <= named
            assert home not in reply.text.replace(MODEL, "")
            if reply.status_code != 200 or fields.get("stream"):
                return
            assert bool(used) == named, "cartridges were named, and the answer came without"
            altered = {"truncate_prompt_tokens", "max_tokens", "use_beam_search"} & set(fields)
            if used.startswith("a@1;") and "," not in used and not altered:
                answers = [choice["text"].split()[-1] for choice in reply.json()["choices"]]
                assert answers == [fact.value] * len(answers)

        one()
        assert sum(statuses.values()) >= 800
        assert min(statuses.get(200, 0), statuses.get(400, 0), statuses.get(404, 0)) > 20, "only one kind proves little"
        assert served.asker.right(fact, "a")
