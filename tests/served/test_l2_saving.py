"""LMCache saves beside cartridges in multiprocess mode: what vLLM computed comes back right, and to its own tenant only.

And this mode as supervisors and operators meet it: it is not put to sleep, and its end is a failure to them.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count, repeat
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from processor import noise
from recall.ward import ask, encode
from serving import ask_lmcache, difference, serving
from waiting import until
from wards import MODEL, Answer, Asker, Ward, patients, register, write_ward

from lmcache_cartridge.artifact.reading import load_manifest, load_token_ids
from lmcache_cartridge.engine.salts import tag_salt
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.prefill import build
from lmcache_cartridge.serve.processes import SMALL
from lmcache_cartridge.settings import Settings, from_mapping

CHUNK = 256
NOISE = noise(0.25)
"""As in the matrix."""
SECRET = "no-one-may-see-this-9f3c"
KINDS = {"doc": "prefill", "other": "prefill", "trained": "trained"}
_salts = (f"tenant-{number}" for number in count())


class Served(NamedTuple):
    asker: Asker
    model: CausalModel
    settings: Settings
    wards: dict[str, Ward]
    """By cartridge; `plain`, `more` and `rest` are sheets without one."""

    def ask(self, ids: list[int], name: str | None = None, salt: str | None = None, **extra: Any) -> Answer:
        """Return the reply to a prompt of a tenant, which has none of its KV in vLLM's blocks."""
        self.asker.forget()
        return self.ask_now(ids, name, salt, **extra)

    def ask_now(self, ids: list[int], name: str | None = None, salt: str | None = None, **extra: Any) -> Answer:
        """Return the reply to a prompt of a tenant, with whatever vLLM has of it."""
        given = {"cache_salt": salt, "cartridges": name, "logprobs": 20} | extra
        return self.asker.complete(ids, **{key: value for key, value in given.items() if value is not None})

    def saved(self, cached: int, ids: list[int], *args: Any, **extra: Any) -> Answer:
        """Ask until so many tokens of the prompt come out of LMCache, which saves them after the answer."""
        replies: list[Answer] = []
        until(lambda: replies.append(self.ask(ids, *args, **extra)) or replies[-1].cached_tokens == cached)
        return replies[-1]


@contextmanager
def _serving(home: Path, wards: dict[str, Ward], model: CausalModel, **launch: Any) -> Iterator[Served]:
    """Serve the cartridges among some sheets by LMCache's server."""
    settings = from_mapping({"home": home, "admin": True})
    for name, kind in KINDS.items():
        if kind == "trained":
            register(model, settings, wards[name].ids, name=name, kind=kind)
        else:
            _build(model, settings, name, wards[name])
    # With the engine in a process of its own, as users have it.
    environment = SMALL | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    given = {"environment": environment, "mode": "multiprocess"} | launch
    with serving(settings, home / "server.log", **given) as asker:
        yield Served(asker, model, settings, wards)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home, model = tmp_path_factory.mktemp("home"), CausalModel(MODEL)
    positions = {"trained": CHUNK, "more": 1025}  # its `<s>` is left out after others
    names = [*KINDS, "plain", "more", "rest"]
    wards = {
        name: write_ward(model, patients(i, 6), name, positions=positions.get(name, 1024), facts=48)
        for i, name in enumerate(names)
    }
    place = json.dumps({"type": "fs", "base_path": str(home / "fs"), "secret_access_key": SECRET})
    with _serving(home, wards, model, l2_adapters=[place]) as served:
        for name in KINDS:  # the engine is tried with each, and from then on plain prompts are answered from it
            served.ask([5], name)
        yield served


def _build(model: CausalModel, settings: Settings, name: str, ward: Ward) -> None:
    """Register a document with its canary, without which it answers no plain prompt."""
    text, root = settings.home / f"{name}.txt", settings.cartridges_dir / name / "1"
    text.write_text(model.tokenizer.decode(ward.ids[1:]))
    manifest = build(model, text, root, cartridge_id=name, version=1, chunk_tokens=CHUNK)
    assert load_token_ids(manifest, root).tolist() == ward.ids
    Registry(settings.registry_path).register(root)


def _questions(ward: Ward, count: int = 8) -> list[tuple[list[int], str]]:
    return [([*encode(ask(fact, 0))], fact.value) for fact in ward.facts[:count]]


def test_requests_that_end_while_lmcache_loads_for_them_do_not_end_the_engine(served):
    """vLLM hears of their end within the step that loads for them, which a long prompt beside them makes long."""
    body = {"model": MODEL, "prompt": [7], "cartridges": ["doc"], "max_tokens": 1}

    def end(number: int) -> None:
        with suppress(httpx.TimeoutException):
            served.asker.http.post(
                "/v1/completions", json=body | {"cache_salt": f"ended {number}"}, timeout=0.05 * (number % 9 + 1)
            )

    with ThreadPoolExecutor(8) as pool:
        long = [pool.submit(served.ask_now, [5 + number] * 6000) for number in range(6)]
        list(pool.map(end, range(60)))
        assert [each.result().prompt_tokens for each in long] == [6000] * 6
    for question, answer in _questions(served.wards["doc"], 2):
        reply = served.ask(question, "doc", "ended 1")
        assert (reply.text.strip(), reply.cached_tokens) == (answer, 1024)


# Tenants.


@pytest.mark.parametrize("name", [None, *KINDS])
def test_what_one_tenant_had_computed_is_no_hit_for_another(served, name):
    ids, mine = served.wards["more"].ids[1:] + [5, 6], next(_salts)
    before = 0 if name is None else len(served.wards[name].ids)
    assert served.ask(ids, name, mine).cached_tokens == before
    saved = served.saved(before + 1024, ids, name, mine)
    others = next(_salts), None, f"{mine} ", mine.upper(), tag_salt(mine), "cartridge-client-x"
    for salt in others:
        reply = served.ask(ids, name, salt)
        assert reply.cached_tokens == before, salt
        assert difference(reply, saved) < NOISE
    tagged = served.ask(ids, name, mine, kv_transfer_params={"lmcache.tag.x": "y"}) if name is None else None
    assert tagged is None or tagged.cached_tokens == 0, "a request with a tag is kept apart from the others"
    assert served.ask(ids, name, mine).cached_tokens == before + 1024


@pytest.mark.parametrize("name", KINDS)
def test_lmcache_has_one_copy_of_a_named_cartridge_for_all_tenants(served, name):
    question, answer = _questions(served.wards[name], 1)[0]
    log = served.asker.server.log
    served.ask(question, name, next(_salts))
    for salt in (next(_salts), None, next(_salts)):
        reply = served.ask(question, name, salt)
        assert reply.text.strip() == answer
        found = re.findall(r"\((\d+) L1, (\d+) L2\)", log.read_text(errors="replace"))[-1]
        assert found == (str(reply.cached_tokens // CHUNK), "0"), (salt, found)


# LMCache's switches of one request, and its other places.


def test_lmcaches_other_places_store_and_load_and_get_no_cartridge(served):
    ids, salt, place = served.wards["rest"].ids[:768] + [9] * 30, next(_salts), served.settings.home / "fs"
    before = {*place.rglob("*.data")}
    computed = served.ask(ids, "trained", salt)
    served.saved(CHUNK + 768, ids, "trained", salt)
    named = tag_salt(load_manifest(served.settings.cartridges_dir / "trained" / "1").digest)
    until(lambda: len({*place.rglob(f"*@{named}.data")} - before) >= 3)
    ask_lmcache(served.asker.launch, "POST", "/cache/clear")
    again = served.ask(ids, "trained", salt)
    assert again.cached_tokens == CHUNK + 768
    assert difference(again, computed) < NOISE
    assert len({*place.rglob(f"*@{named}.data")} - before) == 3, "what was computed, and not the cartridge's own"
    log = served.asker.server.log.read_text(errors="replace")
    assert "Store task failed" not in log and SECRET not in log


# Little memory.


AGE, CROWDED_L1 = "lmcache_cartridge_status_age_seconds", 4 << 20
"""Ten chunks: two cartridges and a half."""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A server whose LMCache has memory for ten chunks, and claims of the largest cartridge take four."""
    model = CausalModel(MODEL)
    wards = {name: write_ward(model, patients(i, 6), name, positions=1024, facts=48) for i, name in enumerate(KINDS)}
    with _serving(tmp_path_factory.mktemp("home"), wards, model, l1_bytes=CROWDED_L1) as served:
        yield served


def test_chatter_costs_no_cartridge_its_room_and_no_request_an_error(crowded):
    """Each cartridge must find room that plain prompts take as fast as they can."""
    over, chatted = threading.Event(), []

    def chat(number: int) -> None:
        rng = random.Random(number)
        while not over.is_set():
            reply = crowded.ask_now([rng.randrange(10, 640) for _ in range(1100)], salt=next(_salts))
            chatted.append(reply.cached_tokens)

    with ThreadPoolExecutor(3) as pool:
        chats = [pool.submit(chat, number) for number in range(3)]
        until(lambda: len(chatted) > 6)
        try:
            for name in [*KINDS] * 2:
                question, answer = _questions(crowded.wards[name], 1)[0]
                reply = crowded.ask_now(question, name, next(_salts))
                assert (reply.cached_tokens, reply.text.strip()) == (1024, answer), name
        finally:
            over.set()
        for chat_over in chats:
            chat_over.result()
    assert set(chatted) == {0}


def test_a_cold_cartridge_is_loaded_once_for_seventeen_requests_and_computed_for_none_that_names_it(crowded):
    """Of one tenant, of plain prompts, and of four tenants. There is room for two copies in LMCache's memory."""
    question, answer = _questions(crowded.wards["other"], 1)[0]
    document = crowded.wards["other"].ids
    tenants = [next(_salts) for _ in range(4)]
    before = _loaded(crowded)
    for name, salts in (("other", ["s"] * 17), (None, ["t"] * 17), ("other", (tenants * 5)[:17])):
        assert crowded.asker.http.post("/v1/cartridges/other/evict").is_success
        if name is None:  # for a prompt that names none, nothing waits until it is in memory
            until(lambda: crowded.asker.http.post("/v1/cartridges/other/preload").status_code == 200)
        ask_lmcache(crowded.asker.launch, "POST", "/cache/clear")
        ids = question if name else document + question
        with ThreadPoolExecutor(17) as pool:
            replies = list(pool.map(crowded.ask_now, repeat(ids), repeat(name), salts))
        assert [r.text.strip() for r in replies] == [answer] * 17, (name, salts)
        assert {r.cached_tokens for r in replies} <= ({1024} if name else {0, 1024}), (name, salts)
        assert _loaded(crowded) == (before := before + 4), "four chunks, from disk into memory"


def _loaded(crowded: Served) -> float:
    """Return how many chunks the adapter has brought into its memory, by a count that is not older than this call."""
    for _ in range(2):  # the second is of numbers that were asked for after the first was read
        age = crowded.asker.metric(AGE)
        until(lambda: crowded.asker.metric(AGE) < age)  # noqa: B023
    return crowded.asker.metric('lmcache_cartridge_promoted_total{rank="0",tier="cpu"}')


# Supervisors.


def test_it_refuses_to_sleep_and_answers_on(crowded):
    """It would take requests, and answer none: nothing tells LMCache's server that the KV cache is gone."""
    question, answer = _questions(crowded.wards["doc"], 1)[0]
    for level in range(3):
        refused = crowded.asker.http.post("/sleep", params={"level": level})
        assert refused.status_code == 409 and "serve in-process" in refused.text
        reply = crowded.ask_now(question, "doc", next(_salts))
        assert (reply.cached_tokens, reply.text.strip()) == (1024, answer)
