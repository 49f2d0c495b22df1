"""Sweep: the learning rate found by short trainings from the same start, judged by the questions that are held out."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...artifact import files
from ...errors import TrainingDiverged
from .trainer import CHECKPOINT, OnStep, Trainer

SWEEP = "sweep.json"
STEPS = 25
"""Steps a rate is tried for; those of the rate that is found count as the first steps of the training."""
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
FIRST = 0.03
"""The rate that is tried first: about what large models want. Small ones want up to ten times as much."""


class Try(NamedTuple):
    """What became of one rate."""

    rate: float
    loss: float
    """Of the held-out questions after `STEPS`; infinite where training diverged."""
    seconds: float


def find_rate(
    trainer: Trainer, directory: Path, on_rate: Callable[[float], OnStep] = lambda rate: lambda step, loss: None
) -> list[Try]:
    """Find the learning rate of a trainer that has none, and set it; return what was tried.

    The training then goes on in `directory` from the last step of the best try, while its checkpoint lies there.
    `on_rate` is asked for what to call after each step at a rate. An interrupted sweep goes on with the rates that are
    left. Raises `TrainingDiverged` if no rate is any good.
    """
    path, trials = directory / SWEEP, directory / "sweep"
    found = [Try(*row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []

    def loss_at(rate: float) -> float:
        known = next((one for one in found if one.rate == rate), None)
        if known is None:
            known = _try(trainer, rate, trials / str(rate), on_rate(rate))
            found.append(known)
            files.replace(path, [json.dumps(found).encode()])
            best = min(found, key=lambda one: one.loss)
            for other in found:
                if other is not best:  # a checkpoint is four times the cartridge in float32
                    shutil.rmtree(trials / str(other.rate), ignore_errors=True)
        return known.loss

    rate = best_rate(loss_at)
    if loss_at(rate) == math.inf:
        raise TrainingDiverged(f"training diverges at every rate tried, {', '.join(f'{one.rate:g}' for one in found)}")
    best = trials / str(rate) / CHECKPOINT
    if best.exists() and not (directory / CHECKPOINT).exists():
        best.replace(directory / CHECKPOINT)
    shutil.rmtree(trials, ignore_errors=True)
    trainer.begin(rate)
    return found


def best_rate(loss_at: Callable[[float], float]) -> float:
    """Return the one of `RATES` with the lowest loss, asking for neighbours uphill and downhill of `FIRST` only."""
    best = RATES.index(FIRST)
    for way in (1, -1):
        start = best
        while 0 <= best + way < len(RATES) and loss_at(RATES[best]) > loss_at(RATES[best + way]):
            best += way
        if best != start:
            break
    return RATES[best]


def _try(trainer: Trainer, rate: float, directory: Path, on_step: OnStep) -> Try:
    shutil.rmtree(directory, ignore_errors=True)
    trainer.begin(rate)
    try:
        trainer.train(directory, on_step, min(STEPS, trainer.recipe.steps))
    except TrainingDiverged:
        return Try(rate, math.inf, trainer.seconds)
    loss = trainer.held_out_loss
    return Try(rate, loss if math.isfinite(loss) else math.inf, trainer.seconds)
