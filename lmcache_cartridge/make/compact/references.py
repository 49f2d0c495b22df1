"""Reference queries: what tokens that stand behind a document ask of its KV, layer by layer, and what they get."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...errors import UnsupportedModel
from ..model import CausalModel
from ..progress import Progress, silent
from ..train.packing import Example, Packed, answer_places, pack_examples, passes, prefix_mask

ATTENTION = "cartridge_references"
"""Name under which transformers is given the attention function that also tells what it was asked."""
_CHOSEN = "_attn_implementation"
"""Where transformers 5 keeps which attention a model uses; `set_attn_implementation` is public, what it sets is not."""
MOST_QUERIES = 2048
"""Tokens whose queries are kept: enough for 4,096 positions where two query heads share a KV head, and 1 GB in the
shape of Qwen2.5-0.5B."""
ENOUGH = 1024
"""Tokens that those which predict no answer make up at most: 2,048 take twice as long and answer no more (2 sheets)."""

Heard = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with (layer, query, key, value, mask, output) of one attention, the query scaled."""


class Layer(NamedTuple):
    """What the reference tokens ask of one layer, by KV head: `[H, G, T, D]`, G query heads to a KV head, float32.

    A token attends the document and the tokens of its own question before it, all in one softmax. What it gets of its
    own question stays as it is when the document's KV is replaced, so that part is kept apart.
    """

    queries: torch.Tensor
    """After RoPE, scaled."""
    wanted: torch.Tensor
    """Attention output, of document and question together."""
    own: torch.Tensor
    """Attention output of the question's own tokens alone."""
    own_mass: torch.Tensor
    """`[H, G, T]`: logarithm of the sum of exponentials over the question's own tokens."""


class References(NamedTuple):
    """The reference tokens behind a document, or behind what stands for it."""

    layers: list[Layer]
    hidden: list[torch.Tensor]
    """`[T, width]` float32: the residual stream before each layer, and after the last one."""
    inputs: dict[str, Any]
    """What else the model gives its layers for these tokens, as for one row of them."""
    answers: torch.Tensor
    """`[T]`, bool: the tokens that predict an answer; what the others get matters less."""


@torch.no_grad()
def collect(
    model: CausalModel, kv: torch.Tensor, examples: Sequence[Example], *, progress: Progress = silent
) -> References:
    """Return what the tokens of `examples`, each alone behind canonical `kv` of a document, ask of every layer.

    Of the tokens that predict an answer `MOST_QUERIES` are kept, evenly, and others until there are `ENOUGH`. Raises
    `UnsupportedModel` for attention that is no plain softmax over all positions.
    """
    shape, kv = model.fingerprint, kv.to(model.model.dtype)
    packed = pack_examples(examples, model.device)
    kept, answers = _kept(packed)
    found: list[list[Layer]] = [[] for _ in range(shape.layers)]
    hidden: list[list[torch.Tensor]] = [[] for _ in range(shape.layers + 1)]
    inputs: list[dict[str, Any]] = []
    for rows, part in passes(packed, kv):
        places = kept[rows].to(model.device)

        def hear(layer: int, *asked: torch.Tensor, places: torch.Tensor = places) -> None:
            found[layer].append(_layer(*asked, places=places, heads=shape.kv_heads, prefix=kv.shape[2]))

        def see(layer: int, stream: torch.Tensor, given: dict[str, Any], places: torch.Tensor = places) -> None:
            hidden[layer].append(stream[places].float())
            if layer == 0:
                inputs.append({name: _at(value, places) for name, value in given.items() if name not in _OURS})

        with listening(model, hear), watching(model, see):
            forward(model, model.cache(kv, len(rows)), part)
        progress("reference queries", int(rows[-1]) + 1, len(packed.rows))
    if not all(found):
        raise UnsupportedModel(f"{shape.architecture} does not tell its attention; its KV cannot be compacted")
    layers = [Layer(*(torch.cat(planes, dim=2) for planes in zip(*parts, strict=True))) for parts in found]
    streams = [torch.cat(parts) for parts in hidden]
    return References(layers, streams, _joined(inputs), answers[kept].to(model.device))


_OURS = ("hidden_states", "attention_mask", "past_key_values", "use_cache")
"""Inputs of a layer that are not given again to tokens of their own."""


@contextmanager
def watching(model: CausalModel, see: Callable[[int, torch.Tensor, dict[str, Any]], None]) -> Iterator[None]:
    """Have every layer tell its input and what else it was given, and the last one its output."""
    layers = layers_of(model)

    def before(layer: int) -> Callable[..., None]:
        def hook(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            see(layer, given[0] if given else named["hidden_states"], named)

        return hook

    def after(module: Any, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        see(len(layers), out[0] if isinstance(out, tuple) else out, named)

    handles = [each.register_forward_pre_hook(before(n), with_kwargs=True) for n, each in enumerate(layers)]
    handles.append(layers[-1].register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layers_of(model: CausalModel) -> torch.nn.ModuleList:
    """Return the decoder layers. Raises `UnsupportedModel` where the model has no one list of them."""
    lists = [m for m in model.model.modules() if isinstance(m, torch.nn.ModuleList)]
    found = [each for each in lists if len(each) == model.fingerprint.layers]
    if len(found) != 1:
        raise UnsupportedModel(
            f"{model.fingerprint.architecture} has no one list of its layers; it cannot be compacted"
        )
    return found[0]


def _at(value: Any, places: torch.Tensor) -> Any:
    """Return what belongs to some places `[R, T]` of a layer's input, as one row."""
    if isinstance(value, tuple):
        return tuple(_at(each, places) for each in value)
    if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == places.shape[1]:
        return value.expand(len(places), *value.shape[1:])[places][None]
    return value


def _joined(parts: list[Any]) -> Any:
    """Return the inputs of several batches as one row."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined([part[n] for part in parts]) for n in range(len(first)))
    return torch.cat(parts, dim=1) if isinstance(first, torch.Tensor) and first.ndim >= 2 else first


def forward(model: CausalModel, past: Any, packed: Packed) -> Any:
    """Run packed examples after the prefix in `past`, and return what transformers does; logits of one column only."""
    prefix = past.get_seq_length()
    return model.model(
        input_ids=packed.ids,
        position_ids=packed.offsets + prefix,
        attention_mask=prefix_mask(packed, prefix, model.model.dtype),
        past_key_values=past,
        use_cache=True,
        logits_to_keep=1,
    )


@contextmanager
def attending(model: CausalModel, attention: Callable[..., Any]) -> Iterator[None]:
    """Have the model attend by `attention`, called as transformers' `AttentionInterface` says."""
    AttentionInterface.register(ATTENTION, attention)
    before = getattr(model.model.config, _CHOSEN)
    model.model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.model.set_attn_implementation(before)


@contextmanager
def listening(model: CausalModel, heard: Heard) -> Iterator[None]:
    """Have every attention of the model tell what it was asked."""

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        refused = [name for name in ("softcap", "s_aux", "sliding_window") if options.get(name) is not None]
        if refused or not isinstance(mask, torch.Tensor) or mask.ndim != 4:
            raise UnsupportedModel(
                f"{model.fingerprint.architecture} attends with {', '.join(refused) or 'a mask of its own'}; only plain "
                "softmax attention over all positions can be compacted"
            )
        output, weights = sdpa_attention_forward(module, query, key, value, mask, **options)
        scaling = options.get("scaling") or 1 / math.sqrt(query.shape[-1])
        heard(module.layer_idx, query * scaling, key, value, mask, output)
        return output, weights

    with attending(model, attention):
        yield


def _layer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    output: torch.Tensor,
    *,
    places: torch.Tensor,
    heads: int,
    prefix: int,
) -> Layer:
    """Return the chosen tokens' part of one attention over `[R, heads, T, D]`, as `Layer` has it."""
    if key.shape[1] != heads:
        raise UnsupportedModel(f"{key.shape[1]} KV heads in attention where the fingerprint has {heads}")
    groups = query.shape[1] // heads
    by_head = query.float().unflatten(1, (heads, groups))
    keys, values = (plane[:, :, None, prefix:].float() for plane in (key, value))
    scores = by_head @ keys.transpose(-1, -2) + mask[:, None, :, :, prefix:].float()
    own = scores.softmax(-1) @ values
    wanted = output.float().transpose(1, 2).unflatten(1, (heads, groups))

    def pick(plane: torch.Tensor) -> torch.Tensor:
        return plane.movedim(3, 1)[places].movedim(0, 2).contiguous()

    return Layer(pick(by_head), pick(wanted), pick(own), pick(scores.logsumexp(-1)[..., None])[..., 0])


def _kept(packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens are kept and which predict an answer, both `[R, T]`, bool, on the CPU."""
    real, answers = (torch.zeros(packed.ids.shape, dtype=torch.bool) for _ in range(2))
    for r, examples in enumerate(packed.rows):
        real[r, : sum(len(e.prompt) + len(e.answer) - 1 for e in examples)] = True
    answers[answer_places(packed)] = True
    kept = torch.zeros_like(real)
    for which, most in ((answers, MOST_QUERIES), (real & ~answers, min(ENOUGH, MOST_QUERIES))):
        places = which.nonzero()
        room = min(max(0, most - int(kept.sum())), len(places))
        chosen = places[torch.linspace(0, len(places) - 1, room).long()]
        kept[chosen[:, 0], chosen[:, 1]] = True
    return kept, answers
