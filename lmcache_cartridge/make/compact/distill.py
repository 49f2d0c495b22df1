"""Distill: a short training of compact KV through the whole model, by the trainer that `train` uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..model import CausalModel
from ..progress import Progress, silent
from ..train import lesson
from ..train.lesson import Lesson
from ..train.packing import Example
from ..train.trainer import Recipe, Trainer
from .wanted import Wanted, form_of

RATE = 0.01
"""Peak learning rate, in standard deviations of the compact keys: 0.05 for the shipped model. Compact KV is near to where
it should be. At 16x, after `--refine 30`, 280 steps on the quality page's training wordings, two sheets of 278 and 219 facts:
0.05 answers 100.0% and 0.1 99.2%, 0.3 99.0% in wordings not trained on; without jitter 0.02, 0.05, 0.1 and 0.3 answer 97.3,
97.2, 97.6 and 97.7%."""
TOP_K = 32
HELD_OUT = 10
"""Every such example is looked at and not trained on."""
ANSWER_TOKENS = 32
LOOKS = 4


def distill(
    model: CausalModel,
    document: torch.Tensor,
    kv: torch.Tensor,
    ids: Sequence[int],
    examples: Sequence[Example],
    wanted: Wanted,
    *,
    progress: Progress = silent,
) -> torch.Tensor:
    """Return compact `kv` after `wanted.distill` steps towards the predictions behind the canonical KV `document`.

    Of `LOOKS` looks at held-out examples the best is kept, the start among them. Questions without an answer get the
    model's own. The model is left as it was.
    """
    taught = _lesson(model, document, ids, examples, wanted, progress)
    recipe = Recipe(
        steps=wanted.distill, rate=gentle_rate(kv), schedule="cosine", warmup=min(10, wanted.distill // 10), patience=0,
        check_every=max(1, wanted.distill // LOOKS),
    )  # fmt: skip
    trainer = Trainer(model, kv, taught, range(0, len(taught.examples), HELD_OUT), recipe)
    return trainer.run(on_step=lambda step, loss: progress("distill", step, wanted.distill)).kv


def gentle_rate(kv: torch.Tensor) -> float:
    """Return the peak learning rate for training from compact `kv`, two digits of it."""
    return float(f"{RATE * float(kv[0].std()):.2g}")


def _lesson(
    model: CausalModel,
    document: torch.Tensor,
    ids: Sequence[int],
    examples: Sequence[Example],
    wanted: Wanted,
    progress: Progress,
) -> Lesson:
    if wanted.questions:
        return lesson.prepare(
            model, list(ids), wanted.questions, form=form_of(model, wanted), top_k=TOP_K, answer_tokens=ANSWER_TOKENS,
            kv=document, progress=progress,
        )  # fmt: skip
    row, numbered = 0, []
    for example in examples:
        numbered.append(example._replace(first=row))
        row += len(example.answer)
    return lesson.taught(model, document.to(model.model.dtype), numbered, TOP_K, progress)
