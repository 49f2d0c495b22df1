"""Known: rungs whose right answers the model itself gives, run by transformers: canary, chains, trained cartridges."""

from __future__ import annotations

from ...errors import CartridgeError
from ..server import Reply
from .ground import Ground, Judged, Unchecked, Wrong, summary, used_as
from .held import Held
from .likeness import apart
from .maker import Maker


def canary(ground: Ground) -> str:
    """Compare transformers' forward pass over the document with the answers from the cartridge: top-1 and logprobs."""
    one, found, dense = ground.held[0], [], 0.0
    for question in ground.some(one, 3):
        given, bound = ground.client.ask(question, [one.name]), ground.bound(one, question)
        used_as(one.name, given, whole=one.whole)
        expected = ground.dense(one, question)
        if ground.maker is not None:
            beside = apart(ground.maker.reply(None, [*one.ids, *question], expected), expected)
            dense = max(dense, beside.largest)
            if not beside.within(bound):
                raise Wrong(
                    f"the server's own dense answers are not transformers': logprobs differ by {beside.mean:.3g} on "
                    f"average, of which {bound:.2g} may be noise"
                )
            expected = ground.maker.reply(None, [*one.ids, *question], given)
        found.append(ground.like(one.name, given, expected, bound))
        likeliest = max(expected.top[0], key=lambda token: expected.top[0][token])
        if given.tokens[0] != likeliest and found[-1].apart.margin > bound:
            raise Wrong(f"after {one.name} the likeliest token is {given.tokens[0]}, not {likeliest}")
    with_what = "the server's dense prompt (no --model for transformers)"
    if ground.maker is not None:
        with_what = f"transformers, whose largest difference to the server's dense prompt is {dense:.2f}"
    return f"top-1 equal; {summary(found)}; against {with_what}"


def chains(ground: Ground) -> str:
    """Ask chains of two in both orders, and of three: each has the keys of later ones moved to their new positions."""
    maker = _maker(ground, "what follows a chain is known from the model alone")
    held = ground.held
    if len(held) < 3 or not maker.model.fingerprint.rope:
        return _refused(ground)
    orders = [(held[1], held[2]), (held[2], held[1]), (held[1], held[1])]
    found = []
    for order in orders:
        for question in [*ground.some(order[0], 2), *ground.some(order[1], 2)]:
            given = ground.client.ask(question, [one.name for one in order])
            found.append(_judged(ground, maker, order, question, given))
    apart_by = apart(
        ground.client.ask(question := ground.some(held[1], 1)[0], [held[1].name, held[2].name]),
        ground.client.ask(question, [held[2].name, held[1].name]),
    )
    return f"{summary(found)}; the two orders are {apart_by.mean:.2f} apart"


def _judged(ground: Ground, maker: Maker, order: tuple[Held, ...], question: tuple[int, ...], given: Reply) -> Judged:
    import torch

    from ...memory.rope import shift

    names = [one.name for one in order]
    if given.status != 200:
        raise Wrong(f"the chain {', '.join(names)} was answered {given.status}: {given.message[:160]}")
    if [each.name for each in given.used] != names:
        raise Wrong(f"the chain {', '.join(names)} was answered with {given.header!r}")
    parts: list[torch.Tensor] = []
    ids: list[int] = []
    for one in order:
        assert one.manifest is not None
        kv = maker.kv(one)
        shape = one.manifest.fingerprint
        parts.append(shift(kv, shape, len(ids)) if ids else kv)
        ids += one.ids
    whole = len(ids) // maker.chunk * maker.chunk
    if sum(each.injected for each in given.used) != whole:
        raise Wrong(f"of the chain {', '.join(names)} not {whole} positions were injected: {given.header}")
    kv = torch.cat(parts, dim=2)[:, :, :whole]
    behind = [*ids[whole:], *question]
    bound = ground.noise.bound(maker.rounding(kv, behind, given), maker.model.fingerprint.dtype)
    return ground.like(f"the chain {', '.join(names)}", given, maker.reply(kv, behind, given), bound)


def _refused(ground: Ground) -> str:
    one = ground.held[0]
    given = ground.client.ask(ground.some(one, 1)[0], [one.name, one.name])
    if given.status == 200:
        raise Unchecked(
            "chains are answered, and what they should answer is not known without three cartridges and RoPE"
        )
    if not 400 <= given.status < 500:
        raise Wrong(f"a chain of a model without RoPE was answered {given.status}: {given.message[:160]}")
    return f"this model's keys cannot be moved, and a chain is refused with {given.status}"


def trained(ground: Ground) -> str:
    """Ask a cartridge of identity tokens whose KV is a document's: it answers as the document does.

    The last question is one token, so that it alone is computed: on a GPU vLLM replays such a step as one CUDA graph.
    """
    maker = _maker(ground, "a trained cartridge of known answers is made with the model")
    one = next((each for each in ground.held if each.whole == len(each.ids)), None)
    if one is None:
        raise Unchecked("needs a cartridge of whole chunks")
    name, found = maker.trained(one), []
    for question in [*ground.some(one, 6), ground.some(one, 1)[0][:1]]:
        given = ground.client.ask(question, [name])
        if given.status != 200:
            raise Wrong(f"the trained cartridge {name} was answered {given.status}: {given.message[:160]}")
        used_as(name, given, whole=one.whole)
        if "served=document" in (given.header or ""):
            raise Wrong(f"{name} was answered from its document's text: {given.header}")
        found.append(ground.like(name, given, ground.dense(one, question), ground.bound(one, question)))
    return f"{summary(found)}; {one.whole} positions by identity tokens"


def _maker(ground: Ground, why: str) -> Maker:
    if ground.maker is None:
        raise Unchecked(f"needs --model: {why}")
    try:
        _ = ground.maker.model
    except CartridgeError as error:
        raise Unchecked(f"the model cannot be loaded here: {error}") from None
    return ground.maker
