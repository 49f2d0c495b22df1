"""Whatever goes wrong, nobody gets a token computed from identity tokens, and everybody else notices nothing. In both modes."""

from __future__ import annotations

import itertools
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from making import flip_bit
from recall.ward import NAMES, ask, encode
from serving import clear_lmcache, faulty, serving
from waiting import answered, until
from wards import MODEL, Answer, Asker, Ward, prefill, register, sure, write_ward

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import Launch
from lmcache_cartridge.serve.processes import SMALL
from lmcache_cartridge.settings import Settings, from_mapping

CHUNK, POSITIONS = 64, 1024
CHUNKS = 0, 15
ARGS = ["--max-model-len", "2304", "--kv-cache-memory-bytes", str(12 << 20), "--max-num-seqs", "16"]


class Served(NamedTuple):
    asker: Asker
    model: CausalModel
    settings: Settings
    faults: Path
    """Says what `faulty` does wrong."""
    sound: dict[str, Ward]
    """`trained` has no document, `whole` has one, `prefill` is its own."""

    def forget(self) -> None:
        """Have LMCache ask for every chunk again."""
        clear_lmcache(self.asker.launch)

    def sampled(self) -> float:
        """Return how many tokens the engine has sampled so far."""
        return self.asker.metric("vllm:generation_tokens_total")


def _asking_each_time(launch: Launch) -> Launch:
    """Have LMCache's server ask for every chunk each time, not keep what it once had."""
    launch = faulty(launch)
    return launch._replace(lmcache=[word.replace("retain", "default") for word in launch.lmcache])


PLANNED = {
    "in-process": ((), {"change": faulty}),
    # Whole chunks must be whole blocks, which are of 128 tokens on CPU where nothing is said.
    "multiprocess": (("--block-size", "32"), {"mode": "multiprocess", "change": _asking_each_time}),
}


@pytest.fixture(scope="module", params=PLANNED)
def served(request, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    # Memory for two cartridges and a half. No canary, so that plain prompts meet the faults from the first on.
    settings = from_mapping(
        {"home": home, "cpu_bytes": 4 << 20, "admin": True, "on_miss": "document", "ready_timeout_s": 4.0,
         "canary": False}
    )  # fmt: skip
    model = CausalModel(MODEL)
    sound = {name: _ward(model, name) for name in ("trained", "whole", "prefill")}
    for name, ward in sound.items():
        _register(model, settings, name, ward)
    faults = home / "faults.json"
    environment = SMALL | {"LMCACHE_FAULTY_FILE": str(faults)}
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # its prefix cache can be reset
    options, more = PLANNED[request.param]
    given = {"environment": environment, "chunk_tokens": CHUNK, "on_load_failure": "fail"} | more
    with serving(settings, home / "log", MODEL, *ARGS, *options, **given) as asker:
        yield Served(asker, model, settings, faults, sound)


def _ward(model: CausalModel, seed: str) -> Ward:
    return write_ward(model, NAMES, seed, tokens=POSITIONS, positions=POSITIONS, facts=6)


def _register(model: CausalModel, settings: Settings, name: str, ward: Ward) -> None:
    """Register a ward as the kind its name begins with."""
    kind = "prefill" if name.startswith("prefill") else "trained"
    document = ward.ids if name.startswith("whole") else None
    register(model, settings, ward.ids, name=name, kind=kind, chunk_tokens=CHUNK, document_ids=document)


@pytest.fixture
def broken(served):
    """Switch faults of the backend on; all are off again afterwards, and the sound cartridges answer."""
    yield lambda **faults: served.faults.write_text(json.dumps(faults))
    served.faults.write_text("{}")
    _everybody_else_is_served(served)


def _everybody_else_is_served(served: Served) -> None:
    for name, ward in served.sound.items():
        reply = _ask(served, name, ward)
        assert reply.text.strip() == ward.facts[0].value
        assert reply.cached_tokens == POSITIONS
        assert reply.used == f"{name}@1;positions={POSITIONS}"


_salts = iter(range(1 << 20))


def _ask(served: Served, name: str, ward: Ward, **extra: Any) -> Answer:
    """Ask for a fact past vLLM's own prefix cache, and LMCache's copy."""
    served.forget()
    return served.asker.complete(ask(ward.facts[0], 0), name, cache_salt=f"s{next(_salts)}", **extra)


def _stream(served: Served, name: str, ward: Ward) -> Answer:
    served.forget()
    return served.asker.stream(ask(ward.facts[0], 0), name, tokens=1, cache_salt=f"s{next(_salts)}")


def _refused(served: Served, name: str, ward: Ward, **extra: Any) -> tuple[int, httpx.Headers]:
    """Ask for what cannot be answered; return status and headers. No token may be sampled for it."""
    before = served.sampled()
    with pytest.raises(openai.APIStatusError) as caught:
        _ask(served, name, ward, **extra)
    assert caught.value.body["message"]
    assert str(served.settings.home) not in str(caught.value.body)
    assert served.sampled() == before, "a token was sampled for a request that ended in an error"
    return caught.value.status_code, caught.value.response.headers


def _refused_in_stream(served: Served, name: str, ward: Ward) -> str:
    before = served.sampled()
    with pytest.raises(openai.APIError) as caught:
        _stream(served, name, ward)
    assert served.sampled() == before
    return caught.value.message


in_process, multiprocess = (pytest.mark.parametrize("served", [mode], indirect=True) for mode in PLANNED)


@multiprocess
def test_a_document_is_computed_from_the_chunk_on_that_was_lost_after_the_lookup(served, broken):
    """First in this mode: once requests for it were refused, LMCache 0.5.6 may still hold a document's chunks, and does not ask for
    them again. LMCache folds what it got to a prefix before vLLM hears of it, so a document is computed from there on. It waits for the
    lost one for four seconds, so all are asked at once. That the first one is lost is seen below."""
    chunk = 15
    broken(drop=chunk)
    trained = served.sound["trained"]
    with ThreadPoolExecutor(2) as pool:
        refused = pool.submit(_refused, served, "trained", trained)
        assert "ask again" in pool.submit(_refused_in_stream, served, "trained", trained).result()
    status, headers = refused.result()
    assert (status, headers["retry-after"]) == (503, "1")
    asked = [(name, ask) for name in ("whole", "prefill") for ask in (_ask, _stream)]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda each: each[1](served, each[0], served.sound[each[0]]), asked))
    for (name, _), reply in zip(asked, replies, strict=True):
        assert reply.text.strip() == served.sound[name].facts[0].value
        document = name == "whole"
        assert reply.used == f"{name}@1;positions={POSITIONS}" + ";served=document" * document
        assert reply.cached_tokens == (0 if document else chunk * CHUNK)


@multiprocess
@pytest.mark.parametrize("chunk", [0, 15])
def test_nothing_is_saved_of_a_request_whose_trained_cartridge_was_lost(
    served,
    broken,
    chunk,
):
    """Its text is longer than the cartridge, and all of it is scheduled in the step in which vLLM ends it."""
    text = served.sound["prefill"].ids[1:]
    own = text + text[:100] + encode(ask(served.sound["trained"].facts[0], 0))
    given = {"prompt": own, "cartridges": "trained", "cache_salt": f"lost-{chunk}"}
    broken(drop=chunk)
    with pytest.raises(openai.APIStatusError):
        served.asker.complete(**given)
    broken()
    again = served.asker.complete(**given)
    assert again.cached_tokens == POSITIONS, "something was saved that was computed after nothing"
    saved = POSITIONS + len(own) // CHUNK * CHUNK

    def is_saved() -> bool:
        served.asker.http.post("/reset_prefix_cache").raise_for_status()
        return served.asker.complete(**given).cached_tokens == saved

    until(is_saved)  # the control: what is computed after it is saved


@pytest.mark.parametrize("chunk", [15, None])
def test_a_flipped_bit_or_no_payload_is_an_error_without_a_document_and_the_documents_answer_with_one(served, chunk):
    for kind in ("trained", "whole", "prefill"):
        name = f"{kind}-bit{chunk}"
        ward = _ward(served.model, name)
        _register(served.model, served.settings, name, ward)
        payload = served.settings.cartridges_dir / name / "1" / "payload.safetensors"
        if chunk is None:
            payload.unlink()
        else:
            where = reading.chunk_range(reading.load_manifest(payload.parent), chunk, range(2))
            flip_bit(payload, random.Random(name).randrange(where.start, where.end))
        if kind == "trained":
            for extra in ({}, {"cartridges_required": True}):
                assert _refused(served, name, ward, **extra)[0] == 422, "and again, now that it is quarantined"
            _refused_in_stream(served, name, ward)
            continue
        replies = [
            _ask(served, name, ward),
            _ask(served, name, ward, cartridges_required=True),
            _stream(served, name, ward),
        ]
        assert [reply.text.strip() for reply in replies] == [ward.facts[0].value] * 3
        assert replies[0].prompt_tokens == POSITIONS + len(encode(ask(ward.facts[0], 0)))
        used = f"{name}@1;positions={POSITIONS}" + ";served=document" * (kind == "whole")
        assert {reply.used for reply in replies} == {used}
        if kind == "whole" or chunk is None:
            assert {reply.cached_tokens for reply in replies} == {0}
    row = served.asker.http.get(f"/v1/cartridges/trained-bit{chunk}").json()
    assert chunk is None or (row["state"] == "quarantined" and "checksum" in row["reason"])
    assert str(served.settings.home) not in json.dumps(row)
    _everybody_else_is_served(served)


@in_process
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_chunk_lost_after_the_lookup_is_an_error_or_the_documents_answer(served, broken, chunk):
    for name in served.sound:  # all three do not fit into memory at once: this one must have its chunks
        _ask(served, name, served.sound[name])
        broken(drop=chunk)
        ward = served.sound[name]
        if name == "trained":
            status, headers = _refused(served, name, ward)
            assert (status, headers["retry-after"]) == (503, "1")
            assert "ask again" in _refused_in_stream(served, name, ward)
            broken(drop=7)  # counted from what vLLM has cached of the choice before it
            assert _refused(served, name, ward, n=3, temperature=0.01)[0] == 503, "one of several choices lost it"
        else:
            for reply in (_ask(served, name, ward), _stream(served, name, ward)):
                assert reply.text.strip() == ward.facts[0].value
                assert reply.used == f"{name}@1;positions={POSITIONS};served=document"
        broken()


@pytest.mark.parametrize(("stream", "is_named"), [(False, True), (True, False)])
def test_a_document_that_lost_a_chunk_is_computed_for_each_of_several_choices(served, broken, stream, is_named):
    ward = served.sound["prefill"]
    _ask(served, "prefill", ward)
    own = encode(ask(ward.facts[0], 0))
    prompt = {"prompt": own, "cartridges": ["prefill"]} if is_named else {"prompt": [*ward.ids, *own]}
    broken(drop=7)
    served.forget()
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0.01, "n": 3, "stream": stream} | prompt
    reply = served.asker.http.post("/v1/completions", json=body | {"cache_salt": f"s{next(_salts)}"})
    assert reply.status_code == 200, reply.text
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    texts = ["", "", ""]
    for event in map(json.loads, events if stream else [reply.text]):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert [text.strip() for text in texts] == [ward.facts[0].value] * 3


def test_a_cartridge_evicted_and_late_is_an_error_with_a_time_to_come_back(served, broken):
    _everybody_else_is_served(served)
    assert served.asker.http.post("/v1/cartridges/trained/evict").json()["chunks"] > 0
    broken(slow_s=6.0)
    status, headers = _refused(served, "trained", served.sound["trained"])
    assert (status, headers["retry-after"]) == (503, "5")
    assert served.asker.http.post("/v1/cartridges/whole/evict").status_code == 200
    reply = _ask(served, "whole", served.sound["whole"])
    assert reply.text.strip() == served.sound["whole"].facts[0].value
    assert reply.used.endswith(";served=document")
    broken()
    late = {"prompt": ask(served.sound["trained"].facts[0], 0), "cartridges": ["trained"], "max_tokens": 1}
    reply = answered(lambda: served.asker.post(**late))  # and it comes when it comes
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == POSITIONS


@in_process
def test_options_that_need_the_prompt_computed_are_for_prefill_cartridges_alone(served):
    for extra in (
        {"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}, {"tokens": 0, "echo": True},
        {"use_beam_search": True, "n": 2}, {"repetition_penalty": 1.2},
    ):  # fmt: skip
        for name in ("trained", "whole"):
            assert _refused(served, name, served.sound[name], **extra)[0] == 422
    ward = served.sound["prefill"]
    for extra in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"truncate_prompt_tokens": 6}):
        assert _ask(served, "prefill", ward, **extra).text.split()[-1] == ward.facts[0].value
    _everybody_else_is_served(served)


@in_process
def test_truncation_is_of_the_clients_text_and_a_prompt_that_is_only_the_cartridge_is_refused(served):
    ward = served.sound["trained"]
    padded = "Seen by the team this morning and stable. " * 5 + ask(ward.facts[0], 0)
    own = len(encode(ask(ward.facts[0], 0)))
    reply = served.asker.complete(padded, "trained", truncate_prompt_tokens=own + 1)  # <s> counts
    assert (reply.text.strip(), reply.prompt_tokens) == (ward.facts[0].value, POSITIONS + own)
    before = served.sampled()
    for name, prompt in itertools.product(served.sound, ("", "<s>", [0], [0, 0])):
        with pytest.raises(openai.APIStatusError) as caught:
            served.asker.complete(prompt, name)
        assert caught.value.status_code == 400
    assert served.sampled() == before
    _everybody_else_is_served(served)


def test_preempted_requests_go_on_from_the_cartridge(served):
    """Sixteen requests of 1,500 positions each, in room for five: the engine must put some off and take them up again.
    The cartridge ends inside a chunk.
    """
    positions = POSITIONS - 30
    ward, before = served.sound["trained"], served.asker.metric("vllm:num_preemptions_total")
    ids, name = ward.ids[:positions], f"trained-{positions}"
    register(served.model, served.settings, ids, name=name, kind="trained", chunk_tokens=CHUNK)
    facts = sure(served.model, prefill(served.model, ids), ward.facts)
    pairs = [(facts[i % len(facts)], i) for i in range(16)]

    def one(pair: Any) -> str:
        fact, number = pair
        reply = served.asker.complete(ask(fact, 0), name, tokens=400, cache_salt=f"preempted{number}", ignore_eos=True)
        assert reply.cached_tokens >= positions
        return reply.text

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(one, pairs))
    assert [text.split()[0] for text in texts] == [fact.value for fact, _ in pairs]
    assert served.asker.metric("vllm:num_preemptions_total") > before, "the control: nothing was preempted"
    Registry(served.settings.registry_path).remove(name)
    _everybody_else_is_served(served)


def test_what_vllm_forgot_of_a_cartridge_is_injected_behind_what_it_still_has(served):
    """vLLM takes a request's last blocks first. LMCache 0.5.7 looks up only what comes after those that are left."""
    text = served.asker.http.get("/metrics").text
    blocks, block = (int(re.search(rf'{name}="(\d+)"', text)[1]) for name in ("num_gpu_blocks", "block_size"))
    for name, ward in served.sound.items():
        question, salt = ask(ward.facts[0], 0), f"s{next(_salts)}"
        first = served.asker.complete(question, name, cache_salt=salt)
        others = (blocks - 1) * block - first.prompt_tokens // 2 // block * block  # one block is nobody's
        while others > 0:
            served.asker.complete([5] * min(others, 2048), cartridges=False, cache_salt=f"s{next(_salts)}")
            others -= 2048
        again = served.asker.complete(question, name, cache_salt=salt)
        assert 0 < again.had < POSITIONS, "the control: vLLM has a part of it"
        assert (again.text.strip(), again.had + again.injected) == (ward.facts[0].value, POSITIONS)
