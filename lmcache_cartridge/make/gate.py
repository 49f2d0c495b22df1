"""The gate: what a cartridge keeps of what its document adds, told by questions that neither its making nor a choice has seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..artifact.manifest import Measured
from ..errors import CanaryFailed
from .ask import WAYS, ModelAsker
from .evaluate import ask_all, interval
from .model import CausalModel
from .progress import Progress, silent
from .questions import Question

ACCEPT = 0.8
"""Share of what the document adds that a cartridge must keep to be registered."""
LEAST_GAIN = 0.05
"""What the document must add, for a cartridge to be judged by it."""
QUESTIONS, TOKENS = "questions", "tokens that it was made for"


def measure(
    model: CausalModel,
    document: torch.Tensor,
    cartridge: torch.Tensor,
    questions: Sequence[Question],
    form: str,
    tokens: int,
    *,
    progress: Progress = silent,
) -> Measured:
    """Ask `questions` of the model, greedily, `tokens` at most, after nothing and after each of two canonical KVs.

    One without an answer is compared with what the model says after the document.
    """
    asker = ModelAsker(model, document, cartridge, form)
    answers = ask_all(asker, questions, tokens, progress=progress)
    nothing, whole, found = (sum(answer.right for answer in answers[way]) / len(questions) for way in WAYS)
    return measured(QUESTIONS, len(questions), nothing, whole, found)


def measured(of: str, count: int, nothing: float, document: float, cartridge: float) -> Measured:
    """Return shares of `count` with the interval of the cartridge's and what it keeps of what the document adds."""
    gain = document - nothing
    kept = round((cartridge - nothing) / gain, 4) if gain >= LEAST_GAIN else None
    low, high = interval(cartridge, count)
    return Measured(
        of, count, round(cartridge, 4), (round(low, 4), round(high, 4)), round(document, 4), round(nothing, 4), kept
    )


def verdict(found: Measured) -> str:
    """Return in a sentence what was measured, and on what."""
    low, high = found.interval
    shares = (
        f"{found.cartridge:.1%} of {found.count} {found.of} (95% interval {low:.0%} to {high:.0%}), the document "
        f"{found.document:.1%}, nothing {found.nothing:.1%}"
    )
    if found.of == TOKENS:
        shares = (
            f"no questions were given, so how it answers is not known; its first choice is the document's at {shares}"
        )
    else:
        shares = f"it answers {shares}, none of which it was made for or chosen by"
    if found.kept is None:
        return f"{shares}: the document adds next to nothing, so there is nothing to judge by"
    return f"{shares}: it keeps {max(0.0, found.kept):.0%} of what the document adds"


def check(found: Measured, accept: float, way_out: str) -> None:
    """Raise `CanaryFailed` for less than `accept`, with the figures, `way_out` and what to accept instead."""
    kept = max(0.0, found.kept or 0.0)
    if kept < accept:
        raise CanaryFailed(
            f"nothing is registered: {verdict(found)}, and must keep {accept:.0%}. {way_out}; or register it as it is: the "
            f"same command with --accept {math.floor(100 * kept) / 100:g}"
        )
