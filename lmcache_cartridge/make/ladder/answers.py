"""Answers: the rungs that need nothing but HTTP and a cartridge or three: tiers 0 to 5, and contamination."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from typing import Any

from ...errors import SourceError
from ..server import Reply
from .ground import Ground, Judged, Unchecked, Wrong, summary, used_as
from .held import Held
from .likeness import ROUNDING, TELLING, apart

CONTAMINATION, THREADS = 200, 16


def quiet(ground: Ground) -> str:
    """See that the server's answers to equal dense prompts are no further apart than rounding explains."""
    if max(ground.noise) > ROUNDING:
        raise Wrong(f"{ground.noise}; no rounding explains more than {ROUNDING:g}")
    return str(ground.noise)


def ten(ground: Ground) -> str:
    """Ask one cartridge ten times."""
    one = ground.held[0]
    return summary([ground.ask(one, question) for question in ground.some(one, 10)])


def chat(ground: Ground) -> str:
    """Ask ten questions through the chat API; the dense prompt is the tokens of the whole conversation."""
    one, found = ground.held[0], []
    bos = ground.client.tokenize(prompt="")[:1]
    for text in islice(cycle(one.texts), 10):
        message = [{"role": "user", "content": text}]
        try:
            own = ground.client.tokenize(messages=message, add_generation_prompt=True)
        except SourceError as error:
            raise Unchecked(f"the server renders no chat: {error}"[:200]) from None
        behind = own[1:] if own[:1] == bos else own  # the document has it
        found.append(ground.judge(one, behind, ground.client.chat(text, [one.name])))
    return summary(found)


def logprobs(ground: Ground) -> str:
    """Compare the logprobs of each token of longer answers."""
    one, tokens, found = ground.held[0], 16, []
    for question in ground.some(one, 4):
        expected = ground.client.computed([*one.ids, *question], tokens=tokens)
        found.append(ground.judge(one, question, ground.client.ask(question, [one.name], tokens=tokens), expected))
    return f"{summary(found)}; {sum(each.apart.positions for each in found)} tokens compared"


def sixteen(ground: Ground) -> str:
    """Ask one cartridge sixteen times from eight threads."""
    one = ground.held[0]
    tasks = [partial(ground.ask, one, question) for question in ground.some(one, 16)]
    return summary(ground.at_once(8, tasks))


def three(ground: Ground) -> str:
    """Ask three cartridges by turns, each by its name."""
    held = _several(ground, 3)
    turns = [(one, question) for one in held for question in ground.some(one, 4)]
    found = [ground.ask(one, question) for one, question in turns[::4] + turns[1::4] + turns[2::4] + turns[3::4]]
    return summary(found)


def cross(ground: Ground) -> str:
    """Ask one cartridge about another's document: the answers are those of its own dense prompt, not of the other's."""
    held, found, nearest = _several(ground, 2), [], float("inf")
    for one, other in zip(held, [*held[1:], held[0]], strict=True):
        for question in ground.some(other, 3):
            bound, others = ground.bound(one, question), ground.dense(other, question)
            if apart(ground.dense(one, question), others).mean < TELLING * bound:
                continue  # both documents answer alike, so this tells nothing
            given = ground.client.ask(question, [one.name])
            from_other = apart(others, given)
            if given.status == 200 and from_other.within(bound):
                raise Wrong(f"{one.name}, asked about the document of {other.name}, answers as {other.name} does")
            found.append(ground.judge(one, question, given))
            nearest = min(nearest, from_other.mean)
    if not found:
        raise Unchecked("no question has another answer after one document than after another")
    return f"{summary(found)}; from the other document's answer {nearest:.2f} at least"


def fifty(ground: Ground) -> str:
    """Ask fifty times in a row; the server is alive afterwards."""
    one = ground.held[0]
    found = [ground.ask(one, question) for question in ground.some(one, 50)]
    _alive(ground, "after fifty requests in a row")
    return f"{summary(found)}; alive"


def bad_input(ground: Ground) -> str:
    """Send what cannot be answered: each gets a clear 4xx, a short prompt an answer, and the server lives."""
    one, client = ground.held[0], ground.client
    question = list(ground.some(one, 1)[0])
    plain: dict[str, Any] = {"model": client.model, "prompt": question, "max_tokens": 1, "cartridges": [one.name]}
    refused: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
        "an empty prompt": (plain | {"prompt": ""}, (400,)),
        "an unknown name": (plain | {"cartridges": ["no-such-cartridge"]}, (404,)),
        "an unknown version": (plain | {"cartridges": [f"{one.name.partition('@')[0]}@999999"]}, (404,)),
        "a number for names": (plain | {"cartridges": 5}, (400, 422)),
        "an object without id": (plain | {"cartridges": [{}]}, (400, 422)),
        "a misspelt field": ({**plain, "cartridge": plain["cartridges"]} | {"cartridges": None}, (400,)),
        "too many cartridges": (plain | {"cartridges": [one.name] * 17}, (400, 422)),
        "a prompt too long": (
            plain | {"prompt": question * (1 + (client.max_model_len() or 1 << 17) // len(question))},
            (400,),
        ),
    }
    for what, (body, expected) in refused.items():
        reply = _status(ground, body)
        if reply.status not in expected:
            raise Wrong(
                f"{what} was answered {reply.status}, not {' or '.join(map(str, expected))}: {reply.message[:120]}"
            )
        if len(reply.message) < 10:
            raise Wrong(f"{what} was answered {reply.status} without a reason")
    for asked in (question[:1], question):
        ground.ask(one, asked)
    _alive(ground, "after bad input")
    return f"{len(refused)} refused with 4xx and a reason; a prompt of one token and the next one answered right"


def _status(ground: Ground, body: dict[str, Any]) -> Reply:
    response = ground.client.send("POST", "/v1/completions", json=body)
    return Reply(response.status_code, response.text)


def contamination(ground: Ground) -> str:
    """Ask three cartridges the same by 200 requests of 16 threads: each answer is nearest to its own dense one."""
    held = _several(ground, 3)
    shared = next(
        (q for one in held for q in ground.some(one, 6) if all(ground.tells(each, q) >= TELLING for each in held)), None
    )
    if shared is None:
        raise Unchecked("no question has three different answers after the three documents")
    right = {one.name: ground.dense(one, shared) for one in held}

    def ask(one: Held) -> tuple[Judged, bool]:
        given = ground.client.ask(shared, [one.name], salt=None)  # so that vLLM's own prefix cache has its say
        used_as(one.name, given)
        by_name = {name: apart(reply, given).mean for name, reply in right.items()}
        mixed = min(by_name, key=lambda name: by_name[name]) != one.name
        return Judged(apart(right[one.name], given), ground.bound(one, shared)), mixed

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(ask, islice(cycle(held), CONTAMINATION)))
    if mixed := sum(each for _, each in found):
        raise Wrong(
            f"contamination: {mixed} of {CONTAMINATION} answers are nearer to another cartridge's than to their own"
        )
    if wrong := sum(not each.apart.within(each.bound) for each, _ in found):
        raise Wrong(f"{wrong} of {CONTAMINATION} answers are not those of their dense prompts")
    return f"contamination 0 of {CONTAMINATION}; {summary([each for each, _ in found])}"


def _several(ground: Ground, count: int) -> list[Held]:
    if len(ground.held) < count:
        raise Unchecked(f"needs {count} cartridges, and {len(ground.held)} can be asked about")
    return ground.held[:count]


def _alive(ground: Ground, when: str) -> None:
    if not ground.client.healthy():
        raise Wrong(f"the server is not healthy {when}")
