"""Changes: the life of a cartridge on a running server, a restart, and cartridges that are damaged: each hurts only itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from ..errors import CartridgeNotFound
from ..make.server import Reply
from ..make.trial.maker import Held
from .compare import compare_logprobs
from .context import Context, Tell, summary, unchecked, used_as, wrong

SEEN_S = 20.0
"""How long a server may take to follow a change, or to notice damage."""
_WHY = "they are made with it, and the server must follow the registry of --home"
tier = pytest.mark.tier


@tier("7", "register, new version, label, promote, remove")
def test_lifecycle(context: Context, tell: Tell) -> None:
    """Register, make a new version, label, promote and remove: each is followed without a restart."""
    maker = context.needs_maker(_WHY)
    registry, name, label = maker.registry, f"{maker.run}-life", f"{maker.run}-label"
    size = maker.chunk + maker.chunk // 8
    first = maker.prefill(name, size)
    question = first.questions[0]

    def means(name: str, one: Held) -> None:
        given = _until(lambda: context.client.ask(question, [name]), lambda r: [u.name for u in r.used] == [one.name])
        if [each.name for each in given.used] != [one.name]:
            wrong(f"{name} should mean {one.name} by now; it was answered {given.status} with {given.header!r}")
        used_as(one.name, given)
        context.like(name, given, context.dense(one, question), context.bound(one, question))

    def gone(name: str) -> None:
        given = _until(lambda: context.client.ask(question, [name]), lambda reply: reply.status == 404)
        if given.status != 404:
            wrong(f"{name} was removed, and a request for it is answered {given.status}")

    try:
        means(name, first)
        second = maker.prefill(name, size, version=2)
        apart = compare_logprobs(context.dense(first, question), context.dense(second, question)).mean
        if apart < 2 * context.bound(first, question):
            unchecked("the two versions answer alike, so that nothing tells them apart")
        means(name, second)
        means(first.name, first)
        registry.label(label, first.name)
        means(label, first)
        registry.label(label, second.name)
        means(label, second)
        registry.promote(first.name)
        means(name, first)
        registry.unlabel(label)
        registry.remove(second.name)
        gone(second.name)
        gone(label)
        means(name, first)
        registry.remove(first.name)
        gone(name)
    finally:
        with suppress(CartridgeNotFound):  # a cartridge with a label could not be removed
            registry.unlabel(label)
    tell(f"10 changes followed; the versions' answers are {apart:.2f} apart")


@tier("7b", "restart")
def test_restart(context: Context, tell: Tell) -> None:
    """Restart the server: it answers from the same cartridges."""
    if context.own is None:
        unchecked("a server is restarted only where `validate --model` started it")
    context.own.stop()
    seconds, one = context.own.start(), context.held[0]
    tell(f"{summary([context.ask(one, q) for q in context.some(one, 3)])}; up again after {seconds:.0f} s")


@tier("9", "corrupt bytes")
def test_corrupt(context: Context, tell: Tell) -> None:
    """Flip one bit of a cartridge's payload: its answers stay right or are refused, and it is quarantined."""
    maker = context.needs_maker(_WHY)
    one = maker.prefill(f"{maker.run}-corrupt", 2 * maker.chunk + 8, add=False)
    assert one.manifest is not None and one.root is not None
    maker.kv(one)  # read while it is sound
    stored = one.manifest.stored
    with (one.root / stored.file).open("r+b") as file:
        file.seek(stored.data_offset_bytes + one.manifest.data_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))
    maker.add(one.root)
    outcome, route = _never_wrong(context, one, "corrupt"), f"/v1/cartridges/{one.manifest.id}"
    state = _until(lambda: context.client.send("GET", route).json().get("state"), lambda it: it == "quarantined")
    if state != "quarantined":
        wrong(f"{one.name} is corrupt, and /v1/cartridges says it is {state!r}")
    tell(f"{outcome}; quarantined; others answer on")


@tier("9", "missing bytes")
def test_missing(context: Context, tell: Tell) -> None:
    """Take a registered cartridge's bytes away: its answers stay right or are refused, others answer on."""
    maker = context.needs_maker(_WHY)
    one = maker.prefill(f"{maker.run}-missing", 2 * maker.chunk + 9)
    assert one.manifest is not None and one.root is not None
    maker.kv(one)  # read while it is there
    (one.root / one.manifest.stored.file).unlink()
    tell(f"{_never_wrong(context, one, 'missing')}; others answer on")


def _never_wrong(context: Context, one: Held, what: str) -> str:
    """Ask for a broken cartridge, whose answers may be its document's or none, and for another; return what came."""
    outcomes = []
    for question in one.questions[:4]:
        given = context.client.ask(question, [one.name])
        if given.status == 200:
            apart = compare_logprobs(context.dense(one, question), given)
            if not apart.within(context.bound(one, question)):
                wrong(f"from the {what} cartridge {one.name} came an answer {apart.mean:.3g} from the right one")
        elif given.status not in (404, 409, 422, 503):
            wrong(f"a request with the {what} cartridge {one.name} was answered {given.status}: {given.message[:120]}")
        outcomes.append("the right answer" if given.status == 200 else f"{given.status}")
    context.alive(f"a {what} cartridge")
    context.ask(context.held[0], context.some(context.held[0], 1)[0])
    return " and ".join(f"{outcomes.count(each)} x {each}" for each in dict.fromkeys(outcomes))


def _until(ask: Callable[[], Reply], is_so: Callable[[Reply], bool]) -> Reply:
    """Return the first answer that is so, or the last one before `SEEN_S` are over."""
    until, given = time.monotonic() + SEEN_S, ask()
    while not is_so(given) and time.monotonic() < until:
        time.sleep(0.1)
        given = ask()
    return given
