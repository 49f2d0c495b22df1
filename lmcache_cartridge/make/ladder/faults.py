"""Faults: a corrupt cartridge, and one whose bytes are gone. Each hurts only itself."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..server import Reply
from .changes import makes
from .ground import Ground, Unchecked, Wrong
from .held import Held
from .likeness import apart
from .maker import Maker

_NOTED_S = 20.0


def corrupt(ground: Ground) -> str:
    """Flip one bit of a cartridge's payload: its answers stay right or are refused, and it is set aside."""
    maker = _damages(ground)
    one = maker.prefill(f"{maker.run}-corrupt", 2 * maker.chunk + 8, add=False)
    assert one.manifest is not None and one.root is not None
    stored = one.manifest.stored
    with (one.root / stored.file).open("r+b") as file:
        file.seek(stored.data_offset_bytes + one.manifest.data_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))
    maker.add(one.root)
    outcome = _never_wrong(ground, one, "corrupt")
    until, state = time.monotonic() + _NOTED_S, ""
    while state != "quarantined" and time.monotonic() < until:
        state = ground.client.send("GET", f"/v1/cartridges/{one.manifest.id}").json().get("state", "")
        time.sleep(0.1)
    if state != "quarantined":
        raise Wrong(f"{one.name} is corrupt, and /v1/cartridges says it is {state!r}")
    ground.ask(ground.held[0], ground.some(ground.held[0], 1)[0])
    return f"{outcome}; quarantined; others answer on"


def missing(ground: Ground) -> str:
    """Take a registered cartridge's bytes away: its answers stay right or are refused, others answer on."""
    maker = _damages(ground)
    one = maker.prefill(f"{maker.run}-missing", 2 * maker.chunk + 9)
    assert one.manifest is not None and one.root is not None
    (one.root / one.manifest.stored.file).unlink()
    outcome = _never_wrong(ground, one, "missing")
    ground.ask(ground.held[0], ground.some(ground.held[0], 1)[0])
    return f"{outcome}; others answer on"


def _damages(ground: Ground) -> Maker:
    maker = makes(ground)
    if not maker.shelf.local:
        raise Unchecked("a published library takes sound artefacts only; faults need a server with a registry (--home)")
    return maker


def _never_wrong(ground: Ground, one: Held, what: str) -> str:
    """Ask for a broken cartridge. Raises `Wrong` for an answer that is not its document's; return what came."""
    outcomes = []
    for question in one.questions[:4]:
        given = ground.client.ask(question, [one.name])
        _right(ground, one, question, given, what)
        outcomes.append("the right answer" if given.status == 200 else f"{given.status}")
    if not ground.client.healthy():
        raise Wrong(f"the server is not healthy after a {what} cartridge")
    return " and ".join(f"{outcomes.count(each)} x {each}" for each in dict.fromkeys(outcomes))


def _right(ground: Ground, one: Held, question: Sequence[int], given: Reply, what: str) -> None:
    if given.status == 200:
        found = apart(ground.dense(one, question), given)
        if not found.within(ground.bound(one, question)):
            raise Wrong(f"from the {what} cartridge {one.name} came an answer {found.mean:.3g} from the right one")
    elif given.status not in (404, 409, 422, 503):
        raise Wrong(
            f"a request with the {what} cartridge {one.name} was answered {given.status}: {given.message[:120]}"
        )
