"""Known: checks whose right answers the model itself gives, run by transformers: canary, chains, trained cartridges."""

from __future__ import annotations

import pytest

from ..make.server import Reply
from ..make.trial.maker import Held, Maker
from .context import Context, Judged, Tell, by_model, rounding, summary, unchecked, used_as, wrong

tier = pytest.mark.tier


@tier("0.5", "canary: the model's own forward pass")
def test_canary(context: Context, tell: Tell) -> None:
    """Compare transformers' forward pass over the document with the answers from the cartridge: top-1 and logprobs."""
    one, found = context.held[0], []
    for question in context.some(one, 3):
        given, bound = context.client.ask(question, [one.name]), context.bound(one, question)
        used_as(one.name, given, whole=one.whole)
        expected = context.dense(one, question)
        if context.maker is not None:
            prompt = [*one.ids, *question]
            exact = by_model(context.maker, None, prompt, expected)
            context.like(one.name, expected, exact, bound, "in the prompt is not transformers'")
            expected = by_model(context.maker, None, prompt, given)
        found.append(context.like(one.name, given, expected, bound))
        likeliest = max(expected.top[0], key=lambda token: expected.top[0][token])
        if given.tokens[0] != likeliest and found[-1].apart.margin > bound:
            wrong(f"after {one.name} the likeliest token is {given.tokens[0]}, not {likeliest}")
    with_what = "transformers" if context.maker else "the server's dense prompt (no --model for transformers)"
    tell(f"top-1 equal; {summary(found)}; against {with_what}")


@tier("10", "chains")
def test_chains(context: Context, tell: Tell) -> None:
    """Ask chains of two in both orders, and of one twice: each has the keys of later ones moved to their new positions."""
    maker = context.needs_maker("what follows a chain is known from the model alone")
    held = context.held
    if len(held) < 3 or not maker.model.fingerprint.rope:
        tell(_refused(context))
        return
    found = []
    for order in ((held[1], held[2]), (held[2], held[1]), (held[1], held[1])):
        for question in [*context.some(order[0], 2), *context.some(order[1], 2)]:
            given = context.client.ask(question, [one.name for one in order])
            found.append(_judged(context, maker, order, question, given))
    tell(summary(found))


def _judged(context: Context, maker: Maker, order: tuple[Held, ...], question: tuple[int, ...], given: Reply) -> Judged:
    import torch

    from ..memory.rope import shift

    names = [one.name for one in order]
    called = f"the chain {', '.join(names)}"
    if given.status != 200:
        wrong(f"{called} was answered {given.status}: {given.message[:160]}")
    if [each.name for each in given.used] != names:
        wrong(f"{called} was answered with {given.header!r}")
    parts: list[torch.Tensor] = []
    ids: list[int] = []
    for one in order:
        kv = maker.kv(one)
        parts.append(shift(kv, maker.model.fingerprint, len(ids)) if ids else kv)
        ids += one.ids
    whole = len(ids) // maker.chunk * maker.chunk
    if sum(each.injected for each in given.used) != whole:
        wrong(f"of {called} not {whole} positions were injected: {given.header}")
    kv = torch.cat(parts, dim=2)[:, :, :whole]
    behind = [*ids[whole:], *question]
    bound = context.noise.bound(rounding(maker, kv, behind, given), maker.model.fingerprint.dtype)
    return context.like(called, given, by_model(maker, kv, behind, given), bound)


def _refused(context: Context) -> str:
    one = context.held[0]
    given = context.client.ask(context.some(one, 1)[0], [one.name, one.name])
    if given.status == 200:
        unchecked("chains are answered, and what they should answer is not known without three cartridges and RoPE")
    if not 400 <= given.status < 500:
        wrong(f"a chain of a model without RoPE was answered {given.status}: {given.message[:160]}")
    return f"this model's keys cannot be moved, and a chain is refused with {given.status}"


@tier("11", "a trained cartridge")
def test_trained(context: Context, tell: Tell) -> None:
    """Ask a cartridge of identity tokens whose KV is a document's: it answers as the document does.

    The last question is one token, so that it alone is computed: on a GPU vLLM replays such a step as one CUDA graph.
    """
    maker = context.needs_maker("a trained cartridge of known answers is made with the model")
    one = next((each for each in context.held if each.whole == len(each.ids)), None)
    if one is None:
        unchecked("needs a cartridge of whole chunks")
    name, found = maker.trained(one), []
    for question in [*context.some(one, 6), context.some(one, 1)[0][:1]]:
        given = context.client.ask(question, [name])
        used_as(name, given, whole=one.whole)
        if "served=document" in (given.header or ""):
            wrong(f"{name} was answered from its document's text: {given.header}")
        found.append(context.like(name, given, context.dense(one, question), context.bound(one, question)))
    tell(f"{summary(found)}; {one.whole} positions by identity tokens")
