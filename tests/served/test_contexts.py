"""Contexts: clients have a running server make cartridges of texts, and ask behind them by name. In both modes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import posting
import pytest
from cells import TP
from making import flip_bit
from posting import CHUNK, KEYS, NOISE, ROUTE, serving
from recall.ward import ask, encode
from serving import SERVER_ARGS, difference
from waiting import until
from wards import MODEL, Asker, content

from lmcache_cartridge.artifact.reading import load_manifest
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

wards = posting.wards

README = Path(__file__).parents[2] / "README.md"
LARGEST = (8192 - 20) // CHUNK * CHUNK
"""Tokens of the largest context: questions of the canary stand behind it."""


@pytest.fixture(scope="module", params=["in-process", "multiprocess"])
def served(request, tmp_path_factory, wards):
    with serving(tmp_path_factory.mktemp("home"), wards, request.param, contexts_count=36, admin=True) as found:
        yield found


@pytest.fixture
def first(served):
    """The context of the first ward, which most tests ask."""
    return served.made(document=served.wards["first"].document.text)


def test_a_text_is_sent_once_and_then_answers_as_if_it_stood_in_the_prompt(served, first):
    ward = served.wards["first"]
    assert first["tokens"] == len(ward.ids) and first["expires_at"] - first["created_at"] == pytest.approx(
        3600, abs=300
    )
    served.right(first["id"], ward)
    manifest = load_manifest(served.root(first["id"]))
    assert (manifest.digest, manifest.kind, manifest.positions) == (first["digest"], "prefill", len(ward.ids))
    assert len(manifest.canary.after) == 4
    for question in [encode(ask(fact, 0)) for fact in ward.facts[:4]]:
        found = served.asker.ask(question, first["id"])
        assert difference(found, served.asker.computed([*ward.ids, *question])) < NOISE


def test_what_the_readme_types_in_python_works(served, tmp_path):
    [code] = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    ward = served.wards["first"]
    (tmp_path / "handbook.txt").write_text(ward.document.text)
    for word, ours in (
        ("http://localhost:8000", str(served.asker.http.base_url)),
        ('"none"', repr(KEYS[0])),
        ("./llama", MODEL),
        ("How many days of leave?", content(ward.facts[0])),
    ):
        assert word in code
        code = code.replace(word, ours)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *said, cached = done.stdout.split()
    assert (" ".join(said), int(cached)) == (ward.facts[0].value, len(ward.ids) // CHUNK * CHUNK)


def test_the_same_text_again_is_the_same_context_and_costs_nothing(served, first):
    ward = served.wards["first"]
    before = len(served.named())
    for body in ({"document": ward.document.text}, {"token_ids": ward.ids}):
        again = served.post(ttl=7200, **body)
        assert (again.status_code, again.json()) == (200, first | {"expires_at": again.json()["expires_at"]})
        assert again.json()["expires_at"] > first["expires_at"] + 3000
    assert len(served.named()) == before


def test_a_context_has_the_id_and_labels_that_its_maker_gives_and_says_how_it_was_used(served):
    ward = served.wards["second"]
    made = served.made(document=ward.document.text, id="handbook", labels=["book", "latest"])
    for name in ("handbook", "handbook@1", "book", "latest"):
        served.right(name, ward, 2)
    changed = served.patch("handbook", labels=["book"], ttl=60)
    assert changed.status_code == 200 and changed.json()["expires_at"] < made["expires_at"] - 3000
    assert served.naming("latest") == 404
    until(lambda: served.get("handbook").json()["uses"] == 8)
    assert served.get("handbook").json()["last_used_at"] >= made["created_at"]
    root = served.root("handbook")
    assert served.delete("handbook") == 200
    for name in ("handbook", "book"):
        assert served.naming(name) == 404
    assert served.get("handbook").status_code == 404 and "handbook" not in served.named()
    assert not root.exists()
    assert "book" not in Registry(served.settings.registry_path, read_only=True).labels()


def test_whoever_made_a_context_alone_can_name_list_or_delete_it(served, first):
    """By key and by salt: for others it is as if there were none of the name."""
    ward, name = served.wards["third"], first["id"]
    mine = served.made(document=ward.document.text, cache_salt="mine", id="salted", labels=["of-mine"])
    assert mine["id"] == "salted"
    served.right("salted", ward, 4, cache_salt="mine")
    for asker, hidden, extra in (
        (served.other, name, {}), (served.other, f"{name}@1", {}), (served.asker, "salted", {}), (served.asker, "of-mine", {}),
        (served.asker, "salted", {"cache_salt": "yours"}), (served.other, "salted", {}),
    ):  # fmt: skip

        def refused(path: str, asker: Asker = asker, **body: Any) -> str:
            reply = asker.http.post(path, json=body)
            assert reply.status_code == 404, (path, reply.text)
            return reply.json()["error"]["message"]

        plain = {"model": MODEL, "prompt": "Q", "max_tokens": 1} | extra
        unknown = refused("/v1/completions", **plain, cartridges=["nobody-made-it"])
        said = refused("/v1/completions", **plain, cartridges=[hidden])
        assert said.replace(hidden, "nobody-made-it") == unknown
        refused("/v1/cartridges/tokens", **plain, cartridges=[hidden])
        refused(f"{ROUTE}/{hidden}/preload")
        assert served.get(hidden, asker, **extra).status_code == 404
        assert served.patch(hidden, asker, extra, ttl=1).status_code == 404
        assert served.delete(hidden, asker, **extra) == 404
        assert hidden.partition("@")[0] not in served.named(asker, **extra)
    assert {name, "salted"} <= served.named(cache_salt="mine")
    same = served.post(served.other, document=served.wards["first"].document.text).json()
    assert same["id"] != name, "another tenant's is made anew"
    assert served.delete("salted", cache_salt="mine") == 200
    assert served.delete(same["id"], served.other) in (200, 404)


def test_messages_are_kept_as_the_beginning_of_a_chat(served, first):
    ward = served.wards["first"]
    body = {"messages": [{"role": "system", "content": ward.document.text}]}
    made = served.made(**body, id="chat")
    assert made["digest"] != first["digest"], "requests go on with them otherwise"
    served.chats_right("chat", ward)
    asked = {"model": MODEL, "input": content(ward.facts[0]), "max_output_tokens": 1, "temperature": 0}
    said = served.asker.openai.responses.create(**asked, extra_body={"cartridges": ["chat"]})
    assert said.output_text.strip() == ward.facts[0].value
    manifest = load_manifest(served.root("chat"))
    assert [(each.role, each.content) for each in manifest.chat.messages] == [("system", ward.document.text[-200:])]
    assert served.post(**body).json()["id"] == "chat"
    turns = [{"role": "user", "content": content(ward.facts[0])}, {"role": "assistant", "content": ward.facts[0].value}]
    served.made(messages=[*body["messages"], *turns], id="turns", chat_template_kwargs={"tools": None})
    served.chats_right("turns", ward, 4)
    served.made(**body, id="in-turn", chat_template_kwargs={"in_turn": True})
    served.chats_right("in-turn", ward, 4)
    for name in ("chat", "turns", "in-turn"):
        assert served.delete(name) == 200


def test_a_prompt_that_begins_with_the_text_is_not_answered_from_it(served, first):
    ward = served.wards["first"]
    served.right(first["id"], ward, 2)
    fact = ward.facts[0]
    for _ in range(2):
        found = served.other.complete([*ward.ids, *encode(ask(fact, 0))], cache_salt=os.urandom(8).hex())
        assert (found.text.strip(), found.cached_tokens, found.used) == (fact.value, 0, None)


def test_a_request_in_flight_ends_as_it_began_when_the_time_of_its_context_is_over(served):
    ward = served.wards["fourth"]
    made = served.made(document=ward.document.text)
    question, long = ask(ward.facts[0], 0), {"tokens": 300, "ignore_eos": True}
    whole, root = served.asker.complete(question, made["id"], **long).text, served.root(made["id"])
    pieces: list[str] = []
    with served.asker.openai.completions.with_streaming_response.create(
        model=MODEL, prompt=question, max_tokens=300, temperature=0, stream=True,
        extra_body={"cartridges": [made["id"]], "ignore_eos": True},
    ) as raw:  # fmt: skip
        events = raw.parse()
        pieces.append(next(iter(events)).choices[0].text)
        assert served.patch(made["id"], ttl=0.1).status_code == 200
        until(lambda: served.get(made["id"]).status_code == 404)
        pieces += [event.choices[0].text for event in events if event.choices]
    assert "".join(pieces) == whole
    assert made["id"] not in served.named() and not root.exists()
    assert served.post(document=ward.document.text).json()["id"] != made["id"], "it is made anew"


def test_a_text_that_comes_again_just_when_its_time_is_over_or_it_is_deleted_is_made_anew(served):
    """By several at once: one makes it, for all."""
    ids = served.wards["fourth"].ids[: CHUNK + 50]
    made = served.made(token_ids=ids)
    with ThreadPoolExecutor(5) as pool:
        for is_deleted in (False, True):
            gone = pool.submit(served.delete, made["id"]) if is_deleted else served.patch(made["id"], ttl=0.001)
            told = list(pool.map(lambda _: served.post(token_ids=ids), range(4)))
            # Who found it and then not any more is to come again.
            assert {reply.status_code for reply in told} <= {200, 202, *[503] * is_deleted}, told[0].text
            assert not is_deleted or gone.result() == 200
            before, made = made, served.made(token_ids=ids)
            assert made["id"] != before["id"] and served.root(made["id"]).exists()
    assert served.delete(made["id"]) == 200


def test_a_text_whose_bytes_went_wrong_is_sound_once_it_is_made_again(served):
    ids, question = served.wards["second"].ids[: 2 * CHUNK], ask(served.wards["second"].facts[0], 0)
    made = served.made(token_ids=ids)
    assert served.asker.http.post(f"{ROUTE}/{made['id']}/evict").status_code == 200
    flip_bit(payload := served.root(made["id"]) / "payload.safetensors", payload.stat().st_size - 9)
    assert served.asker.complete(question, made["id"], cache_salt="wrong").cached_tokens == 0
    assert served.get(made["id"]).json()["state"] == "quarantined"
    assert served.delete(made["id"]) == 200
    again = served.made(token_ids=ids)
    assert again["digest"] == made["digest"]
    assert served.asker.complete(question, again["id"], cache_salt="sound").cached_tokens == len(ids)


def test_what_cannot_be_a_context_is_refused_with_the_reason(served, first):
    text = served.wards["fourth"].document.text[:400]
    before = served.places()
    for status, body, reason in (
        (400, {}, "give one of"), (400, {"document": text, "token_ids": [5]}, "give one of"),
        (400, {"document": " \n"}, "this has 0"), (400, {"token_ids": []}, "this has 0"),
        (400, {"token_ids": [5] * (LARGEST + 1)}, f"1 to {LARGEST} tokens"), (400, {"token_ids": [10**9]}, "each below"),
        (400, {"token_ids": [-1]}, "each below"), (400, {"token_ids": ["a"]}, ""), (400, {"document": text, "ttl": 0}, "ttl"),
        (400, {"document": text, "ttl": None}, "ttl"), (400, {"document": text, "ttl": 366 * 86400}, "2.592e+06 at most"),
        (400, {"document": text, "id": "../x"}, "cannot be a cartridge id"), (400, {"document": text, "id": ""}, "id"),
        (400, {"document": text, "name": "x"}, "name"), (400, {"messages": []}, ""),
        (400, {"messages": [{"role": role, "content": "x"} for role in ("user", "assistant") * 129]}, "256"),
        (400, {"messages": [{"role": "user"}]}, "content"),
        (409, {"document": text, "id": first["id"]}, "in use"), (400, {"document": text, "labels": "book"}, ""),
        (409, {"document": served.wards["first"].document.text, "id": "elsewhere"}, f"{first['id']} is in use, or has this"),
    ):  # fmt: skip
        reply = served.post(**body)
        assert reply.status_code == status and reason in reply.text, reply.text
    assert served.get("a" * 300).status_code == 404
    assert served.places() <= before and not served.settings.cartridges_dir.exists()


@pytest.mark.parametrize("served", ["in-process"], indirect=True)  # what makes them is the same in both
def test_hundreds_of_texts_at_once_are_made_in_turn_or_told_to_come_again(served, first):
    """Requests beside them are answered right meanwhile."""
    ward, base = served.wards["first"], served.wards["second"].ids
    over = threading.Event()

    def asks() -> int:
        count = 0
        while not count or not over.wait(0.2):  # others have the engine meanwhile
            served.right(first["id"], ward, 3)
            count += 1
        return count

    def posts(number: int) -> tuple[int, str]:
        ids = [base[0], *base[number % 700 + 1 : number % 700 + 30], 5 + number % 600, 7 + number // 600]
        try:
            reply = served.post(token_ids=ids)
        except httpx.TransportError:  # of connections that are idle for 5 s, which the server closes, one in use again
            reply = served.post(token_ids=ids)
        return reply.status_code, reply.headers.get("retry-after", "")

    with ThreadPoolExecutor(65) as pool:
        asking = pool.submit(asks)
        try:
            told = list(pool.map(posts, range(400)))
        finally:
            over.set()
        assert asking.result() > 0
    assert {status for status, _ in told} <= {200, 202, 503, 507}
    assert all(after for status, after in told if status == 503)
    assert sum(status in (200, 202) for status, _ in told) >= 1

    def end() -> None:
        for name in served.named() - {first["id"]}:
            served.delete(name)

    end()
    # They are made in turn, and those not made yet are in no list: behind this one none waits.
    until(lambda: served.post(token_ids=base[1:CHUNK]).status_code == 200)
    end()


def test_a_client_that_leaves_has_its_context_made_all_the_same_and_others_wait_for_it(served):
    ward = served.wards["third"]
    text = ward.document.text[: len(ward.document.text) // 4 * 3]
    fact = next(fact for fact in ward.facts if f"{fact.patient}: " in text[: len(text) // 2])
    with served.failing(capture_s=0.6):
        with pytest.raises(httpx.TimeoutException):
            served.asker.http.post(ROUTE, json={"document": text, "id": "left"}, timeout=0.5)
        until(lambda: served.get("left").status_code == 200)
        assert served.get("left").json()["state"] == "making" and "left" not in served.named()
        found = served.asker.complete(ask(fact, 0), "left")
        assert (found.text.strip(), found.cached_tokens >= 2 * CHUNK) == (fact.value, True)
    assert "left" in served.named()


def test_a_server_that_is_killed_lists_nothing_half_made_and_keeps_what_was_answered(tmp_path, wards):
    """In this mode there is more to kill."""
    with serving(tmp_path, wards, "multiprocess") as served, ThreadPoolExecutor(1) as pool:
        kept = served.made(document=wards["first"].document.text)
        with served.failing(capture_s=1.0):
            posted = pool.submit(served.post, document=wards["second"].document.text, id="half")
            until(lambda: served.get("half").status_code == 200 and served.get("half").json()["done"] >= CHUNK)
            served.kill()
            assert posted.exception() is not None and len(served.places()) == 2, "something was half made"
    with serving(tmp_path, wards, "multiprocess", ("--shutdown-timeout", "120"), contexts_count=2) as served:
        assert served.named() == {kept["id"]}
        served.right(kept["id"], wards["first"])
        until(lambda: served.get("half").status_code == 404)
        assert served.places() == {served.root(kept["id"])}
        made = served.made(document=wards["second"].document.text, id="half")
        served.right("half", wards["second"])
        full = served.post(document=wards["third"].document.text)
        assert full.status_code == 507 and kept["id"] in full.text and made["id"] in full.text
        assert served.delete("half") == 200
        served.fault.write_text(json.dumps({"capture_s": 1.5}))
        assert served.post(document=wards["third"].document.text, id="late").status_code == 202
        os.kill(served.pid, signal.SIGTERM)  # and it ends what it has begun
        until(lambda: "drained: 0 requests run still" in served.log.read_text())
    assert load_manifest(served.root("late")).positions == len(wards["third"].ids)


def test_kv_that_is_not_the_engines_is_found_counted_soon_gone_and_can_be_made(served):
    def counted() -> list[float]:
        total = 'lmcache_cartridge_contexts_total{outcome="'
        return [served.asker.metric(f"{total}{outcome}") for outcome in ("made", "failed", "refused")]

    before, names, ids = counted(), served.named(), served.wards["second"].ids[: 3 * CHUNK]
    with served.failing(captured="swapped"):
        reply = served.post(token_ids=ids, id="swapped")
        until(lambda: "set aside" in (reply if reply.status_code != 202 else served.get("swapped")).text)
    assert served.named() == names
    made = served.made(token_ids=served.wards["fourth"].ids[5 : CHUNK + 9])
    assert served.post(token_ids=[]).status_code == 400
    assert counted() == [count + 1 for count in before]
    registry = Registry(served.settings.registry_path, read_only=True)
    until(
        lambda: (
            served.asker.metric("lmcache_cartridge_context_bytes")
            == sum(row.bytes for row in registry.all())
            >= made["bytes"]
        )
    )
    until(lambda: served.get("swapped").status_code == 404)
    until(lambda: served.places() == {Path(row.location) for row in registry.all()})
    assert served.made(token_ids=ids)["tokens"] == len(ids)


@pytest.mark.parametrize("mode", ["in-process", "multiprocess"])
def test_two_ranks_hand_over_each_its_head(tmp_path, wards, mode):
    with serving(tmp_path, wards, mode, TP) as served:
        made = served.made(document=wards["first"].document.text)
        assert len(load_manifest(served.root(made["id"])).payload.checksums[0]) == 2
        served.right(made["id"], wards["first"])


def test_contexts_need_an_lmcache_that_saves(tmp_path):
    """`serve` refuses it before it starts anything (test_launch); here the YAML is one of a person's own."""
    launch = plan(MODEL, from_mapping({"home": tmp_path}), vllm_args=SERVER_ARGS)
    launch = launch._replace(yaml=launch.yaml.replace("contexts: false", "contexts: true"))
    with pytest.raises(UnsupportedEngine, match="LMCache has to save"), ServerProcess(launch, tmp_path / "log"):
        pass
