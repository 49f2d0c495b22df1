"""Answers: checks that need nothing but HTTP and a cartridge or three: tiers -1 to 5, and contamination."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from typing import Any

import pytest

from ..errors import SourceError
from ..make.trial.maker import Held
from .compare import ROUNDING, TELLING, compare_logprobs
from .context import Context, Judged, Tell, summary, unchecked, used_as, wrong

CONTAMINATION, THREADS = 200, 16
tier = pytest.mark.tier


@tier("-1", "versions, hashing, plugin and engine's names")
def test_static(context: Context, tell: Tell) -> None:
    """What `doctor` finds, and each name of vLLM and LMCache that is not promised, tried."""
    if context.static is None:
        unchecked("the server's machine may be another one; run `lmcache-cartridge doctor` there")
    tell(context.static())


@tier("noise", "equal dense prompts are answered alike")
def test_noise(context: Context, tell: Tell) -> None:
    """The server's answers to equal dense prompts are no further apart than rounding explains."""
    if max(context.noise) > ROUNDING:
        wrong(f"{context.noise}; no rounding explains more than {ROUNDING:g}")
    tell(str(context.noise))


@tier("0", "one cartridge, ten requests")
def test_ten(context: Context, tell: Tell) -> None:
    """Ask one cartridge ten times."""
    one = context.held[0]
    tell(summary([context.ask(one, question) for question in context.some(one, 10)]))


@tier("1", "ten questions through the chat API")
def test_chat(context: Context, tell: Tell) -> None:
    """Ask through the chat API; the dense prompt is the tokens of the whole conversation."""
    one, found = context.held[0], []
    bos = context.client.tokenize(prompt="")[:1]
    for text in islice(cycle(one.texts), 10):
        try:
            own = context.client.tokenize(messages=[{"role": "user", "content": text}], add_generation_prompt=True)
        except SourceError as error:
            unchecked(f"the server renders no chat: {error}"[:200])
        behind = own[1:] if own[:1] == bos else own  # the document has it
        found.append(context.judge(one, behind, context.client.chat(text, [one.name])))
    tell(summary(found))


@tier("1b", "logprobs of generated tokens")
def test_logprobs(context: Context, tell: Tell) -> None:
    """Compare the logprobs of each token of longer answers."""
    one, tokens, found = context.held[0], 16, []
    for question in context.some(one, 4):
        expected = context.client.computed([*one.ids, *question], tokens=tokens)
        found.append(context.judge(one, question, context.client.ask(question, [one.name], tokens=tokens), expected))
    tell(f"{summary(found)}; {sum(each.apart.positions for each in found)} tokens compared")


@tier("2", "16 requests from 8 threads")
def test_sixteen(context: Context, tell: Tell) -> None:
    """Ask one cartridge sixteen times from eight threads."""
    one = context.held[0]
    with ThreadPoolExecutor(8) as pool:
        tell(summary(list(pool.map(partial(context.ask, one), context.some(one, 16)))))


@tier("3", "three cartridges, by request")
def test_three(context: Context, tell: Tell) -> None:
    """Ask three cartridges by turns, each by its name."""
    turns = zip(*([(one, question) for question in context.some(one, 4)] for one in context.several(3)), strict=True)
    tell(summary([context.ask(one, question) for turn in turns for one, question in turn]))


@tier("3cross", "asked about another's document")
def test_cross(context: Context, tell: Tell) -> None:
    """Ask one cartridge about another's document: the answers are those of its own dense prompt, not of the other's."""
    found, nearest = [], float("inf")
    held = context.several(2)
    for one, other in zip(held, [*held[1:], held[0]], strict=True):
        for question in context.some(other, 3):
            bound, others = context.bound(one, question), context.dense(other, question)
            if compare_logprobs(context.dense(one, question), others).mean < TELLING * bound:
                continue  # both documents answer alike, so this tells nothing
            given = context.client.ask(question, [one.name])
            from_other = compare_logprobs(others, given)
            if given.status == 200 and from_other.within(bound):
                wrong(f"{one.name}, asked about the document of {other.name}, answers as {other.name} does")
            found.append(context.judge(one, question, given))
            nearest = min(nearest, from_other.mean)
    if not found:
        unchecked("no question has another answer after one document than after another")
    tell(f"{summary(found)}; from the other document's answer {nearest:.2f} at least")


@tier("4", "fifty in a row, alive")
def test_fifty(context: Context, tell: Tell) -> None:
    """Ask fifty times in a row; the server is alive afterwards."""
    one = context.held[0]
    found = [context.ask(one, question) for question in context.some(one, 50)]
    context.alive("fifty requests in a row")
    tell(f"{summary(found)}; alive")


@tier("5", "bad input")
def test_bad_input(context: Context, tell: Tell) -> None:
    """Send what cannot be answered: each gets a clear 4xx, a short prompt an answer, and the server lives."""
    one, client = context.held[0], context.client
    question = list(context.some(one, 1)[0])
    too_long = question * (1 + (client.max_model_len() or 1 << 17) // len(question))
    refused: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
        "an empty prompt": ({"prompt": ""}, (400,)),
        "an unknown name": ({"cartridges": ["no-such-cartridge"]}, (404,)),
        "an unknown version": ({"cartridges": [f"{one.name.partition('@')[0]}@999999"]}, (404,)),
        "a number for names": ({"cartridges": 5}, (400, 422)),
        "an object without id": ({"cartridges": [{}]}, (400, 422)),
        "a misspelt field": ({"cartridge": [one.name], "cartridges": None}, (400,)),
        "too many cartridges": ({"cartridges": [one.name] * 17}, (400, 422)),
        "a prompt too long": ({"prompt": too_long}, (400,)),
    }
    for what, (fields, expected) in refused.items():
        body = {"model": client.model, "prompt": question, "max_tokens": 1, "cartridges": [one.name], **fields}
        reply = client.send("POST", "/v1/completions", json=body)
        if reply.status_code not in expected:
            wanted = " or ".join(map(str, expected))
            wrong(f"{what} was answered {reply.status_code}, not {wanted}: {reply.text[:120]}")
        if len(reply.text) < 10:
            wrong(f"{what} was answered {reply.status_code} without a reason")
    for each in context.held:  # behind whole chunks an engine computes one token, by a graph of its own
        context.ask(each, question[:1])
    context.ask(one, question)
    context.alive("bad input")
    tell(f"{len(refused)} refused with 4xx and a reason; a prompt of one token and the next one answered right")


@tier("8", "200 requests by 16 threads, three cartridges")
def test_contamination(context: Context, tell: Tell) -> None:
    """Ask three cartridges the same by many threads: each answer is nearest to its own dense one."""
    held = context.several(3)
    asked = (question for one in held for question in context.some(one, 6))
    shared = next((q for q in asked if all(context.tells(each, q) >= TELLING for each in held)), None)
    if shared is None:
        unchecked("no question has three different answers after the three documents")
    right = {one.name: context.dense(one, shared) for one in held}

    def ask(one: Held) -> tuple[Judged, bool]:
        given = context.client.ask(shared, [one.name], salt=None)  # so that vLLM's own prefix cache has its say
        used_as(one.name, given)
        by_name = {name: compare_logprobs(reply, given) for name, reply in right.items()}
        mixed = min(by_name, key=lambda name: by_name[name].mean) != one.name
        return Judged(by_name[one.name], context.bound(one, shared)), mixed

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(ask, islice(cycle(held), CONTAMINATION)))
    if mixed := sum(each for _, each in found):
        wrong(f"contamination: {mixed} of {CONTAMINATION} answers are nearer to another cartridge's than to their own")
    if off := sum(not each.apart.within(each.bound) for each, _ in found):
        wrong(f"{off} of {CONTAMINATION} answers are not those of their dense prompts")
    tell(f"contamination 0 of {CONTAMINATION}; {summary([each for each, _ in found])}")
