"""Marks: what clients mark by `cache_control` becomes contexts, is read from them, and is counted as the engine counts. In both modes."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import posting
import pytest
from posting import CHUNK, WARDS, serving
from recall.ward import Fact
from waiting import until
from wards import MODEL, Asker, content
from watching import value

wards, served = posting.wards, posting.served

MARK = {"cache_control": {"type": "ephemeral"}}


class Counted(NamedTuple):
    """What came back: an answer and its bill."""

    text: str
    prompt: int
    read: int
    created: int
    used: str | None


def _asked(asker: Asker, path: str, stream: bool, body: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Return what comes of a request, a stream's events or one, and the cartridges that it used."""
    streaming = {"stream": True} if stream else {}
    reply = asker.http.post(path, json={"model": MODEL, "temperature": 0} | body | streaming)
    assert reply.status_code == 200, reply.text
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return events if stream else [reply.json()], reply.headers.get("x-cartridges")


def chat(asker: Asker, turns: list[dict[str, Any]], *, stream: bool = False, tokens: int = 1, **extra: Any) -> Counted:
    """Ask as OpenAI's clients do."""
    more = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"messages": turns, "max_tokens": tokens} | more | extra
    events, used = _asked(asker, "/v1/chat/completions", stream, body)
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join((choice.get("delta") or choice.get("message"))["content"] or "" for choice in choices)
    usage = events[-1]["usage"]
    details = usage["prompt_tokens_details"] or {}
    read, created = details.get("cached_tokens") or 0, details.get("created_cache_tokens") or 0
    return Counted(text, usage["prompt_tokens"], read, created, used)


def message(asker: Asker, turns: list[dict[str, Any]], *, stream: bool = False, **extra: Any) -> Counted:
    """Ask as Anthropic's clients do; a system turn is a field of its own."""
    system = {"system": turns[0]["content"]} if turns[0]["role"] == "system" else {}
    body = {"messages": turns[len(system) :], "max_tokens": 1} | system | extra
    events, used = _asked(asker, "/v1/messages", stream, body)
    blocks = [event["delta"] for event in events if event["type"] == "content_block_delta"] or events[0].get(
        "content", []
    )
    (usage,) = [event["usage"] for event in events if event["type"] in ("message", "message_delta")]
    read, created = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    text = "".join(block.get("text", "") for block in blocks)
    return Counted(text, usage["input_tokens"] + read + created, read, created, used)


ROUTES = (chat, message)


def turns(text: str, fact: Fact, mark: dict[str, Any] | None = MARK) -> list[dict[str, Any]]:
    """Return a conversation of a text and a question on it; the text is marked."""
    return [
        {"role": "system", "content": [{"type": "text", "text": text} | (mark or {})]},
        {"role": "user", "content": content(fact)},
    ]


@pytest.mark.parametrize("ask", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_marked_text_is_kept_and_read_by_the_next_request(served, ask, stream):
    ward, salt = served.wards["first"], {"cache_salt": f"{ask.__name__}-{stream}"}
    whole, before = len(ward.ids) // CHUNK * CHUNK, len(served.named(**salt))
    first = ask(served.asker, turns(ward.document.text, ward.facts[0]), stream=stream, **salt)
    assert (first.text.strip(), first.read, first.created) == (ward.facts[0].value, 0, whole)
    until(lambda: len(served.named(**salt)) > before)
    for fact in ward.facts[1:5]:
        found = ask(served.asker, turns(ward.document.text, fact), stream=stream, **salt)
        assert (found.text.strip(), found.created) == (fact.value, 0)
        assert found.read >= whole and f"positions={whole};" in found.used, found
    assert len(served.named(**salt)) == before + 1


def test_only_whoever_marked_a_text_reads_it(served):
    ward, whole = served.wards["third"], len(served.wards["third"].ids) // CHUNK * CHUNK
    facts = iter(ward.facts)
    for asker, salt in (
        (served.asker, {}), (served.other, {}), (served.asker, {"cache_salt": "mine"}), (served.other, {"cache_salt": "yours"}),
    ):  # fmt: skip
        before = served.named(asker, **salt)
        for is_read in (False, True):
            fact = next(facts)
            found = message(asker, turns(ward.document.text, fact), **salt)
            assert (found.text.strip(), found.used is not None) == (fact.value, is_read)
            assert found.read + found.created >= whole, "vLLM's own cache has no keys"
            until(lambda asker=asker, salt=salt, before=before: len(served.named(asker, **salt)) == len(before) + 1)
    other = chat(served.asker, turns(ward.document.text, ward.facts[0]), cache_salt="nobody's")
    assert (other.read, other.created, other.used) == (0, whole, None)


def test_a_conversation_reads_the_longest_beginning_that_is_there(served):
    """Of more than four marks the last four count, and each that is new becomes a context."""
    wards, salt = [served.wards[name] for name in WARDS], {"cache_salt": "growing"}
    ends = list(itertools.accumulate(len(ward.ids) - 1 for ward in wards))  # behind <s>
    whole = [(end + 1) // CHUNK * CHUNK for end in ends]
    fact, mine = wards[-1].facts[0], served.named()

    def asked(blocks: int, *marked: int, ask: Any = message) -> Counted:
        """Ask behind so many texts, of which some are marked, and the question as the last of all."""
        texts = [{"type": "text", "text": ward.document.text} for ward in wards[:blocks]]
        texts = [text | (MARK if i in marked else {}) for i, text in enumerate(texts)]
        question = {"type": "text", "text": content(fact)} | (MARK if blocks in marked else {})
        return ask(
            served.asker, [{"role": "system", "content": texts}, {"role": "user", "content": [question]}], **salt
        )

    def kept(*sizes: int) -> bool:
        rows = served.get(**salt).raise_for_status().json()["data"]
        return sorted(row["positions"] for row in rows if row["id"] not in mine) == sorted(sizes)

    found = asked(1, 0)
    assert (found.read, found.created) == (0, whole[0])
    until(lambda: kept(whole[0]))
    found = asked(2, 0, 1)
    assert (found.read, found.created) == (whole[0], whole[1] - whole[0])
    until(lambda: kept(*whole[:2]))
    found = asked(4, 3)
    assert (found.read, found.created) == (whole[1], whole[3] - whole[1]), "what was marked before is read"
    until(lambda: kept(*whole[:2], whole[3]))
    for name in served.named(**salt) - mine:
        served.delete(name, **salt)
    until(kept)
    found = asked(4, 0, 1, 2, 3, 4)
    assert (found.text.strip(), found.read + found.created) == (fact.value, whole[3]) and not found.used
    until(lambda: kept(*whole[1:]))


def test_no_request_is_refused_for_its_marks(served):
    ward, salt = served.wards["second"], {"cache_salt": "odd"}
    text, fact, mine = ward.document.text, ward.facts[0], served.named()
    for mark in (
        {"cache_control": None}, {"cache_control": "ephemeral"}, {"cache_control": {"type": "lasting"}},
        {"cache_control": {"type": "ephemeral", "ttl": "2h"}}, {"cache_control": {"type": "ephemeral", "ttl": ["5m"]}},
    ):  # fmt: skip
        for ask in ROUTES:
            found = ask(served.asker, turns(text, fact, mark), **salt)
            assert (found.text.strip(), found.created) == (fact.value, 0), mark
    short = chat(served.asker, [{"role": "user", "content": [{"type": "text", "text": content(fact)} | MARK]}], **salt)
    assert short.created == 0
    named = served.made(document=served.wards["third"].document.text, id="named", **salt)
    behind = chat(served.asker, turns("Patient", served.wards["third"].facts[0]), cartridges=["named"], **salt)
    assert behind.read >= named["tokens"] // CHUNK * CHUNK and "named@1" in behind.used and behind.created == 0
    apart = chat(served.asker, turns(text, fact), cartridges=False, **salt)
    assert (apart.text.strip(), apart.created) == (fact.value, 0)
    assert served.named(**salt) - mine == {"named"}, "marks beside names are not read"


def test_a_context_of_a_mark_lives_as_long_as_it_says_from_its_last_use_on(served):
    ward, salt, mine = served.wards["fourth"], {"cache_salt": "living"}, served.named()

    def left() -> list[float]:
        rows = served.get(**salt).raise_for_status().json()["data"]
        return [row["expires_at"] - time.time() for row in rows if row["id"] not in mine]

    for ttl, seconds in ((None, 300), ("1h", 3600), ("5m", 3600)):
        mark = {"cache_control": {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})}
        chat(served.asker, turns(ward.document.text, ward.facts[0], mark), **salt)
        until(lambda seconds=seconds: len(left()) == 1 and seconds - 240 < left()[0] <= seconds)


def test_bills_sum_up_to_what_the_engine_counts(served):
    """100 requests: with marks and without, by both routes, whole and as streams, of two keys, behind names, of texts that come again
    and of new ones."""
    named = served.made(document=served.wards["third"].document.text)
    dice, texts = random.Random(7), [served.wards[name].document.text for name in WARDS]
    asked = []
    for number in range(100):
        ward = served.wards[dice.choice(WARDS)]
        text = (
            ward.document.text
            if number % 10
            else ward.document.text.replace("Patient", f"{texts[number % 4][:40]} Patient", 1)
        )
        asked.append((dice.choice(ROUTES), dice.choice([served.asker, served.other]), dice.random() < 0.5, dice.random(), text,
                      dice.choice(ward.facts), {"cache_salt": dice.choice("ab")} if number % 3 else {}))  # fmt: skip

    def one(ask: Any, asker: Asker, stream: bool, kind: float, text: str, fact: Fact, salt: dict[str, str]) -> Counted:
        if kind < 0.2 and not salt and asker is served.asker:
            return chat(asker, turns("Patient", fact, None), stream=stream, cartridges=[named["id"]])
        return ask(asker, turns(text, fact, MARK if kind < 0.7 else None), stream=stream, **salt)

    tenants = [
        (asker, salt)
        for asker in (served.asker, served.other)
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    ]

    def kept() -> dict[str, dict[str, Any]]:
        return {row["id"]: row for asker, salt in tenants for row in served.get(asker=asker, **salt).json()["data"]}

    (had, cached), there, bills = _counted(served.asker), kept(), []
    for wave in (asked[:40], asked[40:]):
        with ThreadPoolExecutor(6) as pool:
            bills += pool.map(lambda each: one(*each), wave)
        # What vLLM's own cache had is read, not created, though a context is made of it too.
        created = Counter(bill.created + bill.read for bill in bills if bill.created)
        until(lambda: created <= Counter(row["positions"] for name, row in kept().items() if name not in there))  # noqa: B023
    prompt, read = sum(bill.prompt for bill in bills), sum(bill.read for bill in bills)
    until(lambda: _counted(served.asker) == (had + prompt, cached + read))
    assert created.total() >= 10 and sum(bill.read > 0 and bill.used is not None for bill in bills) >= 20


def _counted(asker: Asker) -> tuple[float, float]:
    """Return how many prompt tokens the engine had of clients, and how many of those it did not compute."""
    computed, cached = (
        asker.metric(f'lmcache_cartridge_own_tokens_total{{outcome="{how}') for how in ("computed", "cached")
    )
    hits = sum(asker.metric(f"vllm:{of}prefix_cache_hits_total") for of in ("", "external_"))
    return asker.metric("vllm:prompt_tokens_total") - computed - cached, hits - cached


def test_without_room_a_request_is_answered_and_nothing_is_made(tmp_path, wards):
    """By several API servers."""
    with serving(tmp_path, wards, "in-process", ("--api-server-count", "2"), contexts_count=1) as served:
        ward, other = wards["first"], wards["second"]
        found = message(served.asker, turns(ward.document.text, ward.facts[0]))
        assert (found.text.strip(), found.created) == (ward.facts[0].value, len(ward.ids) // CHUNK * CHUNK)
        until(lambda: len(served.named()) == 1)
        for fact in other.facts[:4]:
            found = message(served.asker, turns(other.document.text, fact))
            assert (found.text.strip(), found.created, found.used) == (fact.value, 0, None)
        for fact in ward.facts[:8]:
            found = message(served.asker, turns(ward.document.text, fact))
            assert (found.text.strip(), found.created, found.used is None) == (fact.value, 0, False)
        assert len(served.named()) == 1
        for _ in range(4):  # whichever of them is asked
            until(lambda: value(served.asker.http.get("/metrics").text, "served_cartridges", rank="0") == 1)
            told = served.asker.http.get("/metrics").text
            assert value(told, "requests_total", outcome="used") == 8 and "vllm:prompt_tokens_total" in told
