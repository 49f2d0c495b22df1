"""Refine: keys and values of one layer after the other, by gradient steps towards the document's residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..model import CausalModel
from ..progress import Progress, silent
from ..train.initial import FROZEN
from ..train.packing import Example
from .closed import attended
from .references import Layer, References, attending, collect, layers_of

RATE = 0.15
"""Of Adam, in standard deviations of the layer's keys and of its values."""
BETAS = (0.9, 0.95)


def refine(
    model: CausalModel,
    kv: torch.Tensor,
    examples: Sequence[Example],
    wanted: References,
    *,
    steps: int,
    rate: float = RATE,
    progress: Progress = silent,
) -> torch.Tensor:
    """Return canonical compact `kv`, each layer's keys and values moved by `steps` steps of Adam.

    `wanted` is what `examples` got behind the document itself. From the lowest layer on, the residual stream after the
    layer, at the tokens that predict an answer, is brought near to the document's; the layers below are compact
    already, so that what they lack is made up for. No step passes through more than one layer.
    """
    kv, layers = kv.clone(), layers_of(model)
    for number in range(len(layers)):
        here = collect(model, kv.to(model.model.dtype), examples)
        kv[:, number] = _refined(model, kv[:, number], number, here, wanted, steps, rate, progress)
    return kv


def _refined(
    model: CausalModel,
    kv: torch.Tensor,
    number: int,
    here: References,
    wanted: References,
    steps: int,
    rate: float,
    progress: Progress,
) -> torch.Tensor:
    layer, answers = layers_of(model)[number], here.answers
    target = wanted.hidden[number + 1][answers]
    asked = Layer(*(plane[:, :, answers] for plane in here.layers[number]))
    hidden = here.hidden[number][answers][None].to(model.model.dtype)
    inputs = {name: _of_answers(value, answers) for name, value in here.inputs.items()}
    start = kv.transpose(1, 2).float().to(model.device)
    moved = torch.zeros_like(start[:, :, FROZEN:], requires_grad=True)
    size = start[:, :, FROZEN:].std(dim=(1, 2, 3), keepdim=True)
    optimizer = torch.optim.Adam([moved], lr=rate, betas=BETAS)

    def now() -> torch.Tensor:
        return torch.cat([start[:, :, :FROZEN], start[:, :, FROZEN:] + size * moved], dim=2)

    def attention(module: Any, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        keys, values = now()
        found = attended(asked, keys, values)
        return found.flatten(0, 1).transpose(0, 1)[None].to(query.dtype), None

    with torch.enable_grad(), attending(model, attention):
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 5) * (1 - step / steps)
            out = layer(hidden, **inputs)
            out = out[0] if isinstance(out, tuple) else out
            loss = (out[0].float() - target).square().sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress(f"refine layer {number + 1}", step + 1, steps)
    return now().detach().transpose(1, 2).to(kv)


def _of_answers(value: Any, answers: torch.Tensor) -> Any:
    if isinstance(value, tuple):
        return tuple(_of_answers(each, answers) for each in value)
    if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == len(answers):
        return value[:, answers]
    return value
