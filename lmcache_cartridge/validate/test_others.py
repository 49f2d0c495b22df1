"""Others: checks on servers started otherwise: more ranks, saving."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..errors import CartridgeError
from ..make.trial.own import OwnServer, reason
from . import test_answers as answers
from . import test_known as known
from .context import Context, Tell, summary, unchecked, used_as, wrong

_SAVED_BYTES = 512 << 20
_SAVED_S = 20.0
tier = pytest.mark.tier


@tier("6", "two ranks (TP = 2)", turn=2)
def test_tensor_parallel(context: Context, tell: Tell) -> None:
    """Ask a server of two ranks, each of which has half of the heads."""
    import torch

    own = _own(context)
    config = json.loads((Path(own.model) / "config.json").read_text())
    if int(config.get("num_attention_heads") or config.get("n_head") or 1) % 2:
        unchecked("the model's attention heads cannot be shared by two ranks")
    if torch.cuda.device_count() == 1:
        unchecked("two ranks need two GPUs, and there is one")
    with _elsewhere(context, own.variant(vllm_args=["--tensor-parallel-size", "2"])) as there:
        for check in (answers.test_ten, answers.test_cross, known.test_chains, known.test_trained):
            check(there, lambda found: tell(f"{check.__name__}: {found}"))  # noqa: B023 - called before the next turn


@tier("12", "saving on", turn=2)
def test_saving(context: Context, tell: Tell) -> None:
    """Let LMCache save what follows a cartridge: it comes back when vLLM forgot it, and other tenants get none."""
    with _elsewhere(context, _own(context).variant(l1_bytes=_SAVED_BYTES, saves=True)) as there:
        one, other = there.held[1], there.held[2]
        # Without the other's first token: a server drops a BOS there, which templates put before every prompt.
        behind, found = [*other.ids[1:], *there.some(other, 1)[0]], []
        expected, salt = there.client.computed([*one.ids, *behind]), uuid.uuid4().hex
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
            wrong(f"asked again, {saved.cached} tokens came from a cache, as before: nothing was saved")
        if stranger.cached > first.cached:
            wrong(f"another tenant (cache_salt) got {stranger.cached} tokens from a cache, {first.cached} of them his")
        kept = f"cached {first.cached} tokens, {saved.cached} when asked again, {stranger.cached} for another tenant"
        tell(f"{summary(found)}; {kept}")
        answers.test_cross(there, tell)


def _own(context: Context) -> OwnServer:
    if context.own is None:
        unchecked("needs a server that `validate --model` starts itself")
    return context.own


@contextmanager
def _elsewhere(context: Context, own: OwnServer) -> Iterator[Context]:
    """Lend the same cartridges on another server, with noise measured there; the first server is stopped for it."""
    _own(context).stop()
    try:
        own.start()
    except CartridgeError as error:
        wrong(f"the server does not start: {reason(str(error), own.log)}")
    try:
        with own.client() as client:
            there = Context(client, context.held, maker=context.maker, own=own)
            there.measure()
            yield there
    finally:
        own.stop()
