"""The learning rate is found by itself: short trainings from one start, and the best of them goes on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lessons import School, answered, school

from lmcache_cartridge.errors import TrainingDiverged
from lmcache_cartridge.make.train import sweep
from lmcache_cartridge.make.train.initial import initial_kv
from lmcache_cartridge.make.train.sweep import RATES, SWEEP, best_rate, find_rate
from lmcache_cartridge.make.train.trainer import CHECKPOINT, Recipe, Trainer

P = 32
RECIPE = Recipe(steps=60, batch=32, warmup=2, check_every=10, jitter=5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> School:
    return school(tmp_path_factory.mktemp("school"))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try each rate for fewer steps than the tool does, and three rates at most."""
    monkeypatch.setattr(sweep, "STEPS", 8)
    monkeypatch.setattr(sweep, "RATES", (1e-6, 0.03, 0.3, 3e37))


def _trainer(made: School, recipe: Recipe = RECIPE) -> Trainer:
    return Trainer(made.model, initial_kv("sci", made.model, made.ids, P, seed=0), made.lesson, made.held_out, recipe)


@pytest.mark.parametrize("rate", RATES)
def test_the_best_rate_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    monkeypatch.setattr(sweep, "RATES", RATES)
    asked = []

    def loss_at(tried: float) -> float:
        asked.append(tried)
        return abs(math.log(tried / rate))

    assert best_rate(loss_at) == rate
    far = abs(RATES.index(rate) - RATES.index(sweep.FIRST))
    assert len(set(asked)) <= far + 3, "nothing beyond the neighbours of the best is tried"


def test_a_rate_at_which_training_diverges_is_never_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "RATES", RATES)
    assert best_rate(lambda rate: rate if rate < 0.02 else math.inf) == RATES[0]


def test_the_rate_that_does_the_held_out_questions_most_good_is_found_and_gone_on_with(
    made: School, tmp_path: Path
) -> None:
    trainer = _trainer(made)
    seen: dict[float, int] = {}
    tries = find_rate(trainer, tmp_path, lambda rate: lambda step, loss: seen.update({rate: step}))
    assert trainer.recipe.rate == 0.3
    losses = {one.rate: one.loss for one in tries}
    assert losses[0.3] < losses[0.03] < losses[3e37] == math.inf, "that one diverges, and that is no error"
    assert (seen[0.03], seen[0.3]) == (8, 8)
    assert not (tmp_path / "sweep").exists()
    result = trainer.run(tmp_path)
    given = _trainer(made, replace(RECIPE, rate=0.3))
    given.train(None, lambda step, loss: None, 8)
    result_of_given = given.run()
    assert given.rows == trainer.rows, "the steps of the sweep are the first of the training"
    assert result.score == result_of_given.score
    assert answered(made.model, result.kv, made.unseen) >= 0.5


def test_where_every_rate_diverges_that_is_said(made: School, tmp_path: Path) -> None:
    trainer = _trainer(made)
    trainer.lesson = made.lesson._replace(log_probs=made.lesson.log_probs * math.nan)
    with pytest.raises(TrainingDiverged, match="at every rate tried, 0.03, 0.3, 1e-06"):
        find_rate(trainer, tmp_path)


def test_an_interrupted_sweep_goes_on_to_the_same_losses(made: School, tmp_path: Path) -> None:
    def sweep_and_train(directory: Path, interrupt_at: int | None = None) -> tuple[Trainer, int]:
        directory.mkdir(exist_ok=True)
        trainer, steps = _trainer(made), [0]

        def step(step: int, loss: float) -> None:
            steps[0] += 1
            if steps[0] == interrupt_at:
                raise KeyboardInterrupt

        find_rate(trainer, directory, lambda rate: step)
        trainer.train(directory, step, 12)
        return trainer, steps[0]

    def found(directory: Path) -> list[list[float]]:
        return [row[:2] for row in json.loads((directory / SWEEP).read_text())]

    whole, all_steps = sweep_and_train(tmp_path / "whole")
    for at in (3, 11):
        directory = tmp_path / str(at)
        with pytest.raises(KeyboardInterrupt):
            sweep_and_train(directory, at)
        again, steps = sweep_and_train(directory)
        assert again.recipe == whole.recipe
        assert again.rows == whole.rows
        assert steps < all_steps or at < 8, "rates that were tried are not tried again"
        assert found(directory) == found(tmp_path / "whole")


def test_a_sweep_that_ended_before_it_moved_its_checkpoint_finds_it(
    made: School, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = Path.replace

    def fail(self: Path, target: Any) -> Path:
        if self.name == CHECKPOINT:
            raise KeyboardInterrupt
        return replaced(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            find_rate(_trainer(made), tmp_path)
    trainer = _trainer(made)
    find_rate(trainer, tmp_path)
    trainer.train(tmp_path, lambda step, loss: None, 9)
    assert [row["step"] for row in trainer.rows if "loss" in row] == list(range(1, 10))


def test_a_rate_that_was_found_before_is_trained_at_again_though_its_checkpoint_is_gone(
    made: School, tmp_path: Path
) -> None:
    find_rate(_trainer(made), tmp_path)
    (tmp_path / CHECKPOINT).unlink()
    trainer = _trainer(made)
    find_rate(trainer, tmp_path)
    trainer.train(tmp_path, lambda step, loss: None, 1)
    assert (trainer.recipe.rate, trainer.step) == (0.3, 1)
