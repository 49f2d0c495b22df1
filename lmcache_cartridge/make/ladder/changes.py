"""Changes: the life of a cartridge on a running server, and a restart."""

from __future__ import annotations

import time
from contextlib import suppress

from ...errors import CartridgeNotFound
from ..server import Reply
from .ground import Ground, Unchecked, Wrong, summary, used_as
from .held import Held
from .likeness import apart
from .maker import Maker

_SEEN_S = 15.0
"""How long a server may take to follow: a registry's changes are seen at once, a library's with
the next look."""


def lifecycle(ground: Ground) -> str:
    """Register, make a new version, label, promote and remove: each is followed without a restart."""
    maker = makes(ground)
    try:
        return _lifecycle(ground, maker, f"{maker.run}-life", f"{maker.run}-label")
    finally:
        with suppress(CartridgeNotFound):  # a cartridge with a label could not be removed
            maker.shelf.registry.unlabel(f"{maker.run}-label")


def _lifecycle(ground: Ground, maker: Maker, cartridge_id: str, label: str) -> str:
    registry = maker.shelf.registry
    size = maker.chunk + maker.chunk // 8
    first = maker.prefill(cartridge_id, size)
    question = first.questions[0]
    _means(ground, cartridge_id, first, question)
    second = maker.prefill(cartridge_id, size, version=2)
    if (difference := apart(ground.dense(first, question), ground.dense(second, question)).mean) < 2 * ground.bound(
        first, question
    ):
        raise Unchecked("the two versions answer alike, so that nothing tells them apart")
    _means(ground, cartridge_id, second, question)
    _means(ground, first.name, first, question)
    registry.label(label, first.name)
    _means(ground, label, first, question)
    registry.label(label, second.name)
    _means(ground, label, second, question)
    registry.promote(first.name)
    _means(ground, cartridge_id, first, question)
    registry.unlabel(label)
    registry.remove(second.name)
    _gone(ground, second.name, question)
    _gone(ground, label, question)
    _means(ground, cartridge_id, first, question)
    registry.remove(first.name)
    _gone(ground, cartridge_id, question)
    return f"10 changes followed; the versions' answers are {difference:.2f} apart"


def restart(ground: Ground) -> str:
    """Restart the server: it answers from the same cartridges."""
    if ground.own is None:
        raise Unchecked("a server is restarted only where `validate --model` started it")
    ground.own.stop()
    seconds = ground.own.start()
    one = ground.held[0]
    return f"{summary([ground.ask(one, q) for q in ground.some(one, 3)])}; up again after {seconds:.0f} s"


def makes(ground: Ground) -> Maker:
    """Return what makes cartridges. Raises `Unchecked` where nothing does."""
    if ground.maker is None:
        raise Unchecked("needs --model, and the registry (--home) or --library that the server follows")
    return ground.maker


def _means(ground: Ground, name: str, one: Held, question: tuple[int, ...]) -> None:
    """Raise `Wrong` unless `name` comes to mean this version, with its answer."""
    expected, until = ground.dense(one, question), time.monotonic() + _SEEN_S
    given = ground.client.ask(question, [name])
    while [each.name for each in given.used] != [one.name] and time.monotonic() < until:
        time.sleep(0.1)
        given = ground.client.ask(question, [name])
    if [each.name for each in given.used] != [one.name]:
        raise Wrong(f"{name} should mean {one.name} by now; it was answered {given.status} with {given.header!r}")
    used_as(one.name, given)
    ground.like(name, given, expected, ground.bound(one, question))


def _gone(ground: Ground, name: str, question: tuple[int, ...]) -> None:
    until, given = time.monotonic() + _SEEN_S, Reply(200, "")
    while given.status != 404 and time.monotonic() < until:
        given = ground.client.ask(question, [name])
        time.sleep(0.05)
    if given.status != 404:
        raise Wrong(f"{name} was removed, and a request for it is answered {given.status}")
