"""Others: rungs on servers started otherwise: another model, more ranks, another dtype or mode, saving."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import CartridgeError
from ..server import Server
from . import answers, known
from .ground import Ground, Unchecked, Wrong, summary, used_as
from .held import Held
from .maker import Maker, heads
from .own import Mode, OwnServer, reason

_SAVED_BYTES = 256 << 20
_SAVED_S = 20.0


def tensor_parallel(ground: Ground) -> str:
    """Ask a server of two ranks, each of which has half of the heads."""
    own = own_of(ground)
    if heads(Path(own.model)) % 2:
        raise Unchecked("the model's attention heads cannot be shared by two ranks")
    if _cards() == 1:
        raise Unchecked("two ranks need two GPUs, and there is one")
    with elsewhere(ground, own.variant(vllm_args=["--tensor-parallel-size", "2"])) as there:
        return short(there)


def bfloat16(ground: Ground, again: Callable[[], tuple[OwnServer, Maker, list[Held]]] | None) -> str:
    """Ask a server in bfloat16, with such cartridges; `again` makes both where the first one is in another dtype."""
    maker = ground.maker
    if maker is None:
        raise Unchecked("needs --model")
    if maker.model.fingerprint.dtype == "bfloat16":
        return f"the model is in bfloat16, as all rungs ran it; {answers.ten(ground)}"
    if again is None:
        raise Unchecked("needs a server that `validate --model` started")
    with _made(ground, again) as there:
        return f"{answers.ten(there)}; crosswise {answers.cross(there)}"


def mode(ground: Ground, other: Mode) -> str:
    """Ask the server in the other mode, with the same cartridges: ten, crosswise, chains and trained."""
    with elsewhere(ground, own_of(ground).variant(mode=other)) as there:
        return short(there)


def saving(ground: Ground, where: Mode) -> str:
    """Let LMCache save what follows a cartridge: it comes back when vLLM forgot it, and other tenants get none."""
    own = own_of(ground).variant(mode=where, l1_bytes=_SAVED_BYTES if where == "in-process" else 0, saves=True)
    with elsewhere(ground, own) as there:
        one, other = there.held[1], there.held[2]
        # Without the other's first token: a server drops a BOS there, which templates put before every prompt.
        behind, found = [*other.ids[1:], *there.some(other, 1)[0]], []
        expected = there.client.computed([*one.ids, *behind])
        salt = uuid.uuid4().hex
        first = there.client.ask(behind, [one.name], salt=salt)
        until, saved = time.monotonic() + _SAVED_S, first
        while saved.cached <= first.cached and time.monotonic() < until:
            there.client.send("POST", "/reset_prefix_cache")  # vLLM's own blocks; refused while it works
            saved = there.client.ask(behind, [one.name], salt=salt)
        stranger = there.client.ask(behind, [one.name])
        for given in (first, saved, stranger):
            used_as(one.name, given)
            found.append(there.like(one.name, given, expected, there.bound(one, behind)))
        if saved.cached <= first.cached:
            raise Wrong(f"asked again, {saved.cached} tokens came from a cache, as before: nothing was saved")
        if stranger.cached > first.cached:
            raise Wrong(
                f"another tenant (cache_salt) got {stranger.cached} tokens from a cache, {first.cached} of them his"
            )
        kept = f"cached {first.cached} tokens, {saved.cached} when asked again, {stranger.cached} for another tenant"
        return f"{summary(found)}; {kept}; crosswise {answers.cross(there)}"


def second_model(ground: Ground, make: Callable[[], tuple[OwnServer, Maker, list[Held]]] | None) -> str:
    """Start a server of another model family: it starts, and answers from cartridges of its own."""
    if make is None:
        raise Unchecked("needs a second --model")
    with _made(ground, make) as there:
        return f"{Path(own_of(there).model).name}: {answers.ten(there)}"


def own_of(ground: Ground) -> OwnServer:
    """Return the server that the ladder started. Raises `Unchecked` where it is somebody else's."""
    if ground.own is None:
        raise Unchecked("needs a server that `validate --model` starts itself")
    return ground.own


def _cards() -> int:
    """Return how many GPUs there are; 0 on a machine without."""
    import torch

    return torch.cuda.device_count()


def short(ground: Ground) -> str:
    """Run the telling rungs on another server with the same cartridges."""
    rows = [answers.ten(ground)]
    for name, rung in (("crosswise", answers.cross), ("chains", known.chains), ("trained", known.trained)):
        try:
            rows.append(f"{name} {rung(ground)}")
        except Unchecked as reason:
            rows.append(f"{name} NOT CHECKED: {reason}")
    return "; ".join(rows)


@contextmanager
def elsewhere(ground: Ground, own: OwnServer) -> Iterator[Ground]:
    """Lend the same cartridges on another server, with noise measured there; the first server is stopped for it."""
    with _made(ground, lambda: (own, ground.maker, ground.held)) as there:
        yield there


@contextmanager
def _made(ground: Ground, make: Callable[[], tuple[OwnServer, Maker | None, list[Held]]]) -> Iterator[Ground]:
    if ground.own is not None:
        ground.own.stop()
    own, maker, held = make()
    with _running(own) as client:
        there = Ground(client, held, maker=maker, own=own)
        there.measure()
        yield there


@contextmanager
def _running(own: OwnServer) -> Iterator[Server]:
    try:
        own.start()
    except CartridgeError as error:
        raise Wrong(f"the server does not start: {reason(str(error), own.log)}") from None
    try:
        with own.client() as client:
            yield client
    finally:
        own.stop()
