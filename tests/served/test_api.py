"""The request API on a real server in each mode, asked by the stock OpenAI client: right answers, right usage, and no leak."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from recall.ward import Fact, ask, encode
from serving import serving
from waiting import until
from wards import MODEL, Asker, Ward, content, patients, register, write_ward

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.cli import top
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.engine.contract import GRANT, TAG
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.request import Reference
from lmcache_cartridge.serve.resolve import Resolver
from lmcache_cartridge.settings import Settings, from_mapping

KEY = "sk-test"
CHUNK = 256
KINDS = {"a": "prefill", "b": "prefill", "c": "trained"}


class Served(NamedTuple):
    asker: Asker
    model: CausalModel
    settings: Settings
    wards: dict[str, Ward]
    """By cartridge id. Facts of the trained ones are those in their p positions."""


@pytest.fixture(scope="module", params=["in-process", "multiprocess"])
def served(request, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    settings = from_mapping(
        {"home": home, "cpu_bytes": 256 << 20, "admin": True, "roots": [str(home / "allowed")],
         "composites": {"both": ["a", "b"], "loop": ["loop"]}}
    )  # fmt: skip
    model = CausalModel(MODEL)
    wards = {
        name: write_ward(model, patients(i, 4), name, positions=1024 if name == "c" else None)
        for i, name in enumerate(KINDS)
    }
    for name, kind in KINDS.items():
        register(model, settings, wards[name].ids, name=name, kind=kind)
    options = ["--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "pythonic"]
    with serving(
        settings,
        home / "server.log",
        MODEL,
        *options,
        key=KEY,
        chunk_tokens=CHUNK,
        on_load_failure="fail",
        mode=request.param,
    ) as asker:
        yield Served(asker, model, settings, wards)


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


@pytest.mark.parametrize("served", ["multiprocess"], indirect=True)
def test_evicting_reaches_what_lmcaches_server_keeps(served):
    """First in this mode: where a request was refused, LMCache 0.5.6 may hold on to its chunks for a while."""
    log = served.settings.home / "server.log"

    def complete() -> tuple[str, str]:
        """Return from where LMCache had the chunks of a request: its own memory, and us."""

        def sources() -> list[tuple[str, str]]:
            return re.findall(r"\((\d+) L1, (\d+) L2\)", log.read_text(errors="replace"))

        before = len(sources())
        # Of a tenant of its own: LMCache 0.5.7 does not look up what vLLM has in its prefix cache.
        reply = served.asker.complete(ask(served.wards["c"].facts[0], 0), "c", cache_salt=f"tenant {before}")
        assert reply.cached_tokens == reply.injected == 1024
        until(lambda: len(sources()) > before)
        return sources()[-1]

    complete()
    assert complete() == ("4", "0"), "the control: LMCache keeps what it loads"
    assert served.asker.http.post("/v1/cartridges/c/evict").json()["chunks"] == 4
    assert complete() == ("0", "4")


class TestApi:
    @pytest.mark.parametrize("name", KINDS)
    def test_completions_chats_and_streams_answer_from_the_cartridge_and_count_it(self, served, name):
        ward = served.wards[name]
        positions, whole = len(ward.ids), len(ward.ids) // CHUNK * CHUNK
        for fact in ward.facts[:3]:
            question = ask(fact, 0)
            for reply in (
                served.asker.complete(question, name), served.asker.chat(content(fact), name), served.asker.stream(question, name),
            ):  # fmt: skip
                assert reply.text.strip() == fact.value
                assert reply.used == f"{name}@1;positions={positions}"
                assert reply.prompt_tokens == positions + len(encode(question)), "a second <s>, or something lost"
                # vLLM's prefix cache may hold more: the tail of the document in blocks of 128, computed before.
                assert whole <= reply.cached_tokens <= positions
                assert reply.injected + reply.had == reply.cached_tokens
            plain = served.asker.complete(question)
            assert (plain.used, plain.cached_tokens) == (None, 0), "without cartridges it is left alone"
            assert plain.prompt_tokens == 1 + len(encode(question)), "<s> and the question"

    @pytest.mark.parametrize("name", ["a", "c"])
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
        body = {"prompt": "Q: x? A:", "max_tokens": 1, "kv_transfer_params": {"lmcache.tag.tenant": "x"}}
        assert served.asker.post(**body).is_success
        reply = served.asker.post(**body, cartridges=["c"])
        assert (reply.status_code, "cache_salt" in reply.text) == (422, True)

    @pytest.mark.parametrize("kind", ["prefill", "trained"])
    def test_a_cartridge_replaced_under_its_id_is_never_answered_from_old_blocks(self, served, kind):
        """Both versions are about the same patients, with other values."""
        name, names = f"replaced-{kind}", patients(3, 4)[:75]
        old, new = (write_ward(served.model, names, f"{kind}{version}", tokens=520) for version in (1, 2))
        register(served.model, served.settings, old.ids, name=name, kind=kind)
        assert _wrong(served, [(name, fact) for fact in old.facts[:40]]) == []
        register(served.model, served.settings, new.ids, name=name, kind=kind, version=2)
        rng = random.Random(3)
        requests = [
            (name, rng.choice(new.facts)) if i % 2 else (f"{name}@1", rng.choice(old.facts)) for i in range(200)
        ]
        assert _wrong(served, requests) == []
        known = {fact[:2]: fact.value for fact in old.facts}
        changed = [fact for fact in new.facts if known.get(fact[:2], fact.value) != fact.value][:20]
        assert len(changed) >= 10, "the control: the versions contradict each other"
        assert len(_wrong(served, [(f"{name}@1", fact) for fact in changed])) == len(changed)

    @pytest.mark.parametrize("turns", [("plain", "named"), ("named", "plain", "named")], ids="-".join)
    def test_a_plain_prompt_of_identity_tokens_neither_gets_the_cartridge_nor_poisons_it(self, served, turns):
        name = f"secret-{len(turns)}"
        ward = write_ward(served.model, patients(3, 4), name, tokens=530, positions=512)
        manifest = register(served.model, served.settings, ward.ids, name=name, kind="trained")
        identity = reading.load_token_ids(manifest, served.settings.cartridges_dir / name / "1").tolist()
        guess, facts = Resolver(served.settings).resolve([Reference(id=name)]).salt(None), ward.facts[:8]
        for turn in turns:
            if turn == "named":
                assert all(served.asker.right(fact, name) for fact in facts)
                continue
            for salt in ({}, {"cache_salt": guess}):
                replies = [served.asker.complete([*identity, *encode(ask(fact, 0))], **salt) for fact in facts]
                # Blocks of 128 that such prompts themselves computed before may be reused among them.
                assert sum(reply.text.strip() == fact.value for reply, fact in zip(replies, facts, strict=True)) <= 2
                assert replies[0].cached_tokens == 0

    def test_cartridges_are_listed_and_moved_between_the_tiers(self, served):
        http, state = served.asker.http, served.asker.state
        listed = http.get("/v1/cartridges")
        assert {"a", "b", "c"} <= {row["id"] for row in listed.json()["data"]}
        assert str(served.settings.home) not in listed.text
        assert http.post("/v1/cartridges/c/evict").status_code == 200
        until(lambda: http.post("/v1/cartridges/c/preload").status_code == 200)
        told = {
            "tiers": {"cpu": {"resident_chunks": 4, "chunks": 4}},
            "state": "resident",
            "loading": None,
            "pinned": False,
        }
        assert told.items() <= state("c").items()
        assert http.post("/v1/cartridges/c/pin").json()["chunks"] == 4 and state("c")["pinned"]
        reply = http.post("/v1/cartridges/c/evict")
        assert (reply.status_code, "c@1 is pinned" in reply.text) == (409, True)
        assert [http.post(f"/v1/cartridges/c/{action}").json()["chunks"] for action in ("unpin", "evict")] == [4, 4]
        assert state("c")["state"] == "cold"
        assert served.asker.complete(ask(served.wards["c"].facts[0], 0), "c", cache_salt="cold").cached_tokens == 1024
        assert state("c")["state"] == "resident"

    def test_hundreds_of_clients_that_leave_leave_nothing_behind(self, served, monkeypatch):
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        rng, facts = random.Random(4), {name: served.wards[name].facts for name in KINDS}

        def leave(_: int) -> None:
            name = rng.choice(list(KINDS))
            body = {"prompt": ask(rng.choice(facts[name]), 0), "max_tokens": rng.choice((1, 64)), "cartridges": [name]}
            wait = httpx.Timeout(60, read=rng.choice((0.001, 0.005, 0.02, 0.1)))
            with suppress(httpx.ReadTimeout):
                body |= {"model": MODEL, "stream": rng.random() < 0.5}
                served.asker.http.post("/v1/completions", json=body, timeout=wait)

        with ThreadPoolExecutor(40) as pool:
            for _ in range(10):
                list(pool.map(leave, range(40)))
                # What comes next has to be loaded, and is waited for.
                served.asker.http.post(f"/v1/cartridges/{rng.choice(list(KINDS))}/evict")

        def owed() -> dict[str, float]:
            now, _ = top.read(served.asker.url)
            chunks = {name: now[name]["cpu"] for name in ("held_chunks", "leased_chunks", "lent_chunks")}
            return chunks | {name: now[name][""] for name in ("open_claims", "waiting_claims", "waiting_requests")}

        until(lambda: not any(owed().values()))
        for name in KINDS:
            assert served.asker.right(facts[name][0], name)


@pytest.mark.parametrize("served", ["in-process"], indirect=True)
class TestBeforeLmcache:
    """What is decided before a request comes to LMCache, which is the same in both."""

    def test_function_tools_go_with_cartridges(self, served):
        fact = served.wards["c"].facts[0]
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        for choice in ("none", "auto"):
            reply = served.asker.chat(content(fact), "c", tools=[tool], tool_choice=choice)
            assert reply.text.strip() == fact.value
            assert reply.cached_tokens >= 1024
        body = {"model": MODEL, "input": "x", "tools": [{"type": "web_search"}], "cartridges": ["c"]}
        reply = served.asker.http.post("/v1/responses", json=body)
        assert reply.status_code == 422, "built-in tools render again on every turn"

    @pytest.mark.parametrize("path", SHOWING)
    @pytest.mark.parametrize("name", ["a", "both"])
    def test_a_route_that_shows_tokens_shows_those_that_the_engine_gets(self, served, path, name):
        """And nothing can be generated from what it shows of a cartridge."""
        names, http = {"a": ["a"], "both": ["a", "b"]}[name], served.asker.http

        def shown(extra: dict[str, Any]) -> dict[str, Any]:
            reply = http.post(path, json=SHOWING[path] | extra).raise_for_status()
            named = reply.headers.get("x-cartridges", "")
            assert re.findall(r"(\w+)@", named) == (names if extra else [])
            return reply.json()[0] if isinstance(reply.json(), list) else reply.json()

        head = Resolver(served.settings).resolve([Reference(id=one) for one in names]).token_ids
        own, with_it = shown({}), shown({"cartridges": [name]})
        for body, status in ((own, 200), (with_it, 400)):
            assert http.post("/inference/v1/generate", json=body | {"stream": False}).status_code == status
        behind = own["token_ids"]
        while behind[0] == served.model.tokenizer.bos_token_id:  # /v1/responses renders two (vLLM 0.32)
            behind = behind[1:]
        assert with_it["token_ids"] == [*head, *behind]
        assert shown({"model": f"{MODEL}:{name}"})["token_ids"] == [*head, *behind]
        if "completions" in path:
            used = http.post(path.removesuffix("/render"), json=SHOWING[path] | {"cartridges": [name]}).json()
            assert used["usage"]["prompt_tokens"] == len(head) + len(behind), "as many as the engine had"

    @pytest.mark.parametrize("path", TAKING)
    def test_who_requires_cartridges_and_names_none_is_refused(self, served, path):
        for headers, fields in (({"X-Cartridges-Required": "true"}, {}), ({}, {"cartridges_required": True})):
            for more, names, status in (
                ({}, {}, 400),
                ({"cartridges": ["c"]}, {}, 200),
                ({}, {"X-Cartridges": "c"}, 200),
            ):
                reply = served.asker.http.post(path, json=TAKING[path] | fields | more, headers=headers | names)
                assert reply.status_code == status, reply.text

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
        with httpx.Client(base_url=served.asker.url, timeout=60) as nobody:
            for path, method in [(path, method) for path, methods in every.items() for method in methods]:
                if nobody.request(method, path, json={} if method == "post" else None).status_code == 401:
                    continue
                opened.add(path)
                for fields, headers in ways if method == "post" else ():
                    reply = nobody.post(path, json={"model": MODEL, "prompt": "x"} | fields, headers=headers)
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

    @pytest.mark.parametrize("path", [*TAKING, *UNAWARE, *SHOWING])
    def test_what_a_route_would_not_read_is_refused_and_never_answered_without_the_document(self, served, path):
        def refused(status: int, headers: dict[str, str] | None = None, **named: Any) -> str:
            reply = served.asker.http.post(path, json=body | named, headers=headers)
            assert reply.status_code == status, (named, headers, reply.text)
            return reply.json()["error"]["message"]

        body = (TAKING | UNAWARE | SHOWING)[path]
        assert served.asker.http.post(path, json=body).status_code == 200, "the control: without any it answers"
        for named in ({"cartridge": ["a"]}, {"metadata": {"cartridges": "a"}},
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
        for data in (body.replace("cartridges", "cartr\\u0069dges").encode(), body.encode("utf-16")):
            reply = served.asker.http.post("/v1/messages", content=data, headers={"content-type": "application/json"})
            assert reply.headers["x-cartridges"].startswith("c@1;positions=1024;injected=")

    def test_every_route_that_generates_is_known(self, served):
        every = served.asker.http.get("/openapi.json").json()["paths"]
        paths = {path for path, methods in every.items() if "post" in methods and not path.endswith("derender")}
        others = {"/detokenize", "/ping", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/responses/{response_id}/cancel",
                  "/v1/systemone", "/inference/v1/abort_requests", "/v1/cartridges", "/v1/cartridges/{name}/{action}",
                  "/v1/cartridges/tokens"}  # fmt: skip
        assert set(SHOWING) <= paths <= others | {*TAKING, *UNAWARE, *SHOWING}, "a new route: does it take cartridges?"

    @pytest.mark.parametrize("params", [{TAG: "00" * 32}, {GRANT: {"must_inject": 0}}, {"disagg_spec": {}}])
    def test_parameters_only_the_server_may_set_are_refused_on_every_way_in(self, served, params):
        given = {"kv_transfer_params": params}
        generate, sampling = "/inference/v1/generate", {"max_tokens": 1, "extra_args": given}
        ways = [(path, TAKING[path] | given) for path in TAKING]
        ways += [(generate, UNAWARE[generate] | {"sampling_params": sampling})]
        ways += [("/v1/completions", TAKING["/v1/completions"] | {"vllm_xargs": {"kv_transfer_params": "a"}})]
        for path, body in ways:
            reply = served.asker.http.post(path, json=body)
            assert reply.status_code == 400, (path, reply.text)
        assert served.asker.right(served.wards["a"].facts[0], "a"), "the engine lives"

    def test_every_error_of_ours_has_one_shape_and_says_whether_asking_again_is_of_use(self, served):
        for path, body in (
            ("tokenize", TAKING["/v1/completions"] | {"cartridges": ["a"]}), ("v1/completions", {"cartridges": ["nope"]}),
            ("v1/completions", {"prompt": [served.model.tokenizer.bos_token_id], "cartridges": ["a"]}),
            ("v1/completions", {"prompt": [5] * 8000, "cartridges": ["a"]}), ("v1/cartridges/nope", None),
            ("v1/cartridges/nope/pin", {}), ("v1/cartridges/a/explode", {}),
        ):  # fmt: skip
            method = "GET" if body is None else "POST"
            reply = served.asker.http.request(method, path, json=TAKING["/v1/completions"] | (body or {}))
            told = reply.json()["error"]
            assert set(told) == {"message", "type", "param", "code"} and reply.is_client_error, reply.text
            assert (told["type"], told["code"]) == (HTTPStatus(reply.status_code).phrase, reply.status_code), told
            assert reply.headers["x-should-retry"] == "false", (reply.request.url.path, told)

    def test_bench_measures_every_way_on_a_real_engine(self, served, tmp_path, monkeypatch):
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        home = str(served.settings.home)
        options = ["--model", MODEL, "--home", home, "--p", "256", "--c", "1,2", "--repeat", "2"]
        status = main(["bench", "--url", served.asker.url, *options, "--output", str(tmp_path)])
        found = json.loads((tmp_path / "bench.json").read_text())
        assert status == 0, found["remarks"]
        rows = {(row["p"], row["c"], row["way"]): row for row in found["rows"]}
        assert len(rows) == 2 * 4
        for (p, c, way), row in rows.items():
            count = 2 * (c if way == "cold" else 2 * c)
            assert row["requests"] == row["ttft_ms"]["number"] == count
            assert row["cached"] == [count * p * (way == "prefix"), count * p * (way in ("warm", "cold"))]
        page = (tmp_path / "report.html").read_text()
        assert page.count("data:image/png;base64,") == 2 and "<script" not in page and 'src="http' not in page
        left = [row.id for row in Registry(served.settings.registry_path).all()]
        assert not [name for name in left if name.startswith("trial-")], "its cartridges are taken away"

    def test_odd_requests_get_an_error_of_their_own_or_the_right_answer(self, served):
        fact, home, http = served.wards["a"].facts[0], str(served.settings.home), served.asker.http
        statuses: dict[int, int] = {}

        @examples(
            max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
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
        assert sum(statuses.values()) >= 400
        assert min(statuses.get(200, 0), statuses.get(400, 0), statuses.get(404, 0)) > 20, "only one kind proves little"
        assert served.asker.right(fact, "a")
