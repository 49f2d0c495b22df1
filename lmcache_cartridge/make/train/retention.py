"""Retention: how much of what a document adds to a model's answers a trained cartridge keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..model import ROWS_BYTES, CausalModel
from .lesson import Lesson
from .packing import Example, answer_logits, pack_examples, rows_of

SHORT_TOKENS = 8
"""An answer of at most so many tokens is right or wrong; of a longer one, the share of its tokens that are right counts."""
ACCEPT = 0.8
"""Share of what the document adds that a cartridge must keep to be registered."""
LEAST_GAIN = 0.05
"""What the document must add, for a cartridge to be judged by it."""
BATCH = 32


class Answered(NamedTuple):
    """How questions were answered, each answer token being asked for after the right ones before it."""

    exact: float
    """Share of questions every answer token of which is the first choice."""
    right: float
    """The same, but that a long answer counts by the share of its tokens."""


class Retention(NamedTuple):
    """How the held-out questions are answered after nothing, after the document and after the cartridge."""

    nothing: Answered
    document: Answered
    cartridge: Answered

    @property
    def kept(self) -> float | None:
        """Share of what the document adds; None where that is next to nothing, so that nothing can be said."""
        gain = self.document.right - self.nothing.right
        return (self.cartridge.right - self.nothing.right) / gain if gain >= LEAST_GAIN else None


def count(examples: Sequence[Example], right: Iterable[bool]) -> Answered:
    """Return how examples were answered; `right` says of each answer token in turn whether it was the first choice."""
    tokens, exact, shares = iter(right), 0, 0.0
    for example in examples:
        found = [next(tokens) for _ in example.answer]
        exact += all(found)
        shares += all(found) if len(found) <= SHORT_TOKENS else sum(found) / len(found)
    return Answered(exact / len(examples), shares / len(examples))


def measure(
    model: CausalModel, start: torch.Tensor, lesson: Lesson, examples: Sequence[Example], cartridge: Answered
) -> Retention:
    """Compare the answers after a cartridge with those after the document and after nothing but its first position.

    `start` is canonical KV that begins with that position. Where no teacher was asked, the answers given are the
    document's.
    """
    document = Answered(1.0, 1.0)
    if lesson.tokens is not None:
        right = [bool(lesson.tokens[e.first + i, 0] == token) for e in examples for i, token in enumerate(e.answer)]
        document = count(examples, right)
    return Retention(_after(model, start[:, :, :1], examples), document, cartridge)


def _after(model: CausalModel, kv: torch.Tensor, examples: Sequence[Example]) -> Answered:
    wanted = torch.tensor([token for example in examples for token in example.answer])
    return count(examples, (first_choices(model, kv, examples) == wanted).tolist())


@torch.no_grad()
def first_choices(model: CausalModel, kv: torch.Tensor, examples: Sequence[Example]) -> torch.Tensor:
    """Return the model's first choice after canonical `kv` for each answer token of `examples` in turn, on the CPU.

    The right answer tokens before it are given.
    """
    kv, found = kv.to(model.model.dtype), []
    most = max(1, ROWS_BYTES // (kv.nbytes + 1))  # each row has a copy of the KV in every layer
    for at in range(0, len(examples), BATCH):
        packed = pack_examples(examples[at : at + BATCH], model.device)
        for rows in torch.arange(len(packed.rows)).split(most):
            part = rows_of(packed, rows)
            found.append(answer_logits(model.model, model.cache(kv, len(rows)), part).argmax(-1).cpu())
    return torch.cat(found)
