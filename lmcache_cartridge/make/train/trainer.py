"""Train a cartridge: PEFT's CARTRIDGE parameters learn to answer as the model with the whole document in context does."""

from __future__ import annotations

import json
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from peft import CartridgeConfig, get_peft_model

from ...artifact import files
from ...errors import CartridgeError, TrainingDiverged
from ..foreign.peft import from_peft, to_peft
from ..model import CausalModel
from .initial import FROZEN
from .lesson import Lesson
from .packing import Example, Packed, answer_ids, answer_logits, pack_examples, target_rows

CHECKPOINT = "checkpoint.pt"
LOSS = "loss.jsonl"
BETAS = (0.9, 0.95)
"""AdamW's. A question moves few positions, so that a longer memory of squared gradients slows them all."""
BETTER, GAIN = 0.99, 0.001
"""A look at the validation questions counts as better if they miss less than this share of the least before, and so much less.
Of looks that are no better than each other the last one's KV is the best: it was trained longer, and answers wordings that
nobody looked at better (at 16x on one sheet 97.8% after 280 steps, 93.8% after the 84 that the first such look had)."""

OnStep = Callable[[int, float], None]
"""Called after every step with (steps done, its loss)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. The same recipe on the same lesson and machine gives the same losses."""

    objective: Literal["distill", "next-token"] = "distill"
    steps: int = 4000
    """At most; training ends before when the validation questions get no better."""
    batch: int = 32
    """Questions in one forward pass."""
    accumulate: int = 1
    """Forward passes a step."""
    rate: float | None = None
    """Peak learning rate of AdamW; None where it goes by the start, as `usual_rate` says."""
    schedule: Literal["plateau", "cosine", "constant"] = "plateau"
    """`plateau` stays at the peak while the validation questions get better, and for half of the steps at most; then the
    rate falls to 0 in as many steps as were done."""
    warmup: int = 10
    """Steps over which the rate grows to its peak."""
    check_every: int = 25
    """Steps between two looks at the validation questions, and between two checkpoints."""
    patience: int = 8
    """Looks without a better validation loss after which the rate falls, or training ends; 0 trains all steps."""
    jitter: int = 32
    """Positions that half of the questions may stand behind the cartridge in training, drawn anew every time; fewer
    where the model's context ends."""
    autocast: bool = False
    """Whether to compute in bfloat16 where torch holds it for safe."""
    seed: int = 0

    def rate_at(self, step: int, fall: int | None = None) -> float:
        """Return the learning rate of step `step`, from 0 on; with `plateau` it falls from step `fall` on."""
        if self.rate is None:
            raise ValueError("the recipe has no rate; `usual_rate` gives one")
        rate = self.rate * min(1.0, (step + 1) / (self.warmup + 1))
        if self.schedule == "plateau":
            return rate if fall is None else rate * (self.end(fall) - step) / (self.end(fall) - fall)
        if self.schedule == "constant" or step < self.warmup:
            return rate
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return rate * 0.5 * (1 + math.cos(math.pi * done))

    def end(self, fall: int | None) -> int:
        """Return the last step of a training whose rate falls from step `fall` on, as far as is known yet."""
        return self.steps if fall is None else min(self.steps, 2 * fall)


class Score(NamedTuple):
    """How questions were answered."""

    loss: float
    """Nats an answer token."""
    missed: float
    """The mean over answer tokens of 1 - e^-loss, from 0 to 1: what decides which KV is the best. For small losses it is
    the loss. A token of which the teacher was sure and wrong costs ten nats and more: 3 of 138 outweighed all others."""


class Result(NamedTuple):
    """A finished training."""

    kv: torch.Tensor
    """Canonical `[2, L, p, H, D]` of the best look at the validation questions, float32."""
    step: int
    """Steps done when it was found."""
    steps: int
    """Steps done in all."""
    loss: float
    """Of the last step."""
    seconds: float
    why: Literal["validation", "steps"]
    """Why it ended: the validation questions got no better, or the steps were done."""


class Trainer:
    """Trains one cartridge, a step at a time."""

    def __init__(
        self,
        model: CausalModel,
        kv: torch.Tensor,
        lesson: Lesson,
        validation: Sequence[int],
        recipe: Recipe,
    ) -> None:
        """Start from canonical `kv`. `validation` are indices of the examples to choose by and never to train on."""
        if recipe.objective == "distill" and lesson.tokens is None:
            raise CartridgeError("the objective distill needs the teacher's predictions; prepare the lesson with them")
        self.model, self.recipe = model, recipe
        self.lesson = lesson
        apart = set(validation)
        self.validation = [lesson.examples[i] for i in validation]
        self.examples = [example for i, example in enumerate(lesson.examples) if i not in apart]
        if not self.examples or not self.validation:
            raise CartridgeError("training needs a question to train on and another one to choose by")
        longest = max(len(example.prompt) + len(example.answer) for example in lesson.examples)
        room = (model.context_tokens or sys.maxsize) - kv.shape[2] - longest
        self.jitter = max(0, min(recipe.jitter, room))
        self.peft = wrap(model, kv)
        self.parameters = [p for p in self.peft.parameters() if p.requires_grad]
        self._round, self._shuffled = -1, list[int]()
        self.optimizer = torch.optim.AdamW(self.parameters, lr=recipe.rate or 0.0, betas=BETAS, weight_decay=0.0)
        self.step, self.seconds, self.waited = 0, 0.0, 0
        self.fall: int | None = None
        self.loss = math.inf
        self.least_missed, self.best_step, self.best = math.inf, 0, self.kv()
        self.rows: list[dict[str, float]] = []

    def kv(self) -> torch.Tensor:
        """Return a copy of the KV as it stands, canonical, float32, on the CPU."""
        weight = self.peft.prompt_encoder[self.peft.active_adapter].weight.detach().float().cpu()
        return from_peft(weight, self.model.fingerprint.layers, self.model.fingerprint.kv_heads).clone()

    def run(self, directory: Path | None = None, on_step: OnStep = lambda step, loss: None) -> Result:
        """Train until the steps are done or patience is at its end, and return the best KV.

        With a `directory`, its checkpoint is gone on from and new ones are written, and every loss goes to `LOSS`.
        """
        self.train(directory, on_step, self.recipe.steps)
        why: Literal["validation", "steps"] = "steps" if self.step == self.recipe.steps else "validation"
        return Result(self.best, self.best_step, self.step, self.loss, self.seconds, why)

    def train(self, directory: Path | None, on_step: OnStep, until: int) -> None:
        """Train as `run` does, but `until` so many steps are done."""
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._load(directory)
        if not self.rows:
            self._look()
        while self.step < until and not self._ended():
            start = time.monotonic()
            self._take_step()
            looks = self.step % self.recipe.check_every == 0 or self._ended() or self.step == until
            if looks:
                self._look()
            self.seconds += time.monotonic() - start
            if looks and directory is not None:
                self._save(directory)
            on_step(self.step, self.loss)

    @torch.no_grad()
    def score(self, examples: Sequence[Example]) -> Score:
        """Return how examples are answered with the KV as it stands."""
        loss, missed, count = 0.0, 0.0, 0
        for start in range(0, len(examples), self.recipe.batch):
            packed = pack_examples(examples[start : start + self.recipe.batch], self.model.device)
            losses = self._losses(self._logits(packed), packed)
            loss, missed = loss + float(losses.sum()), missed - float(torch.expm1(-losses).sum())
            count += len(losses)
        return Score(loss / count, missed / count)

    def _take_step(self) -> None:
        if self.fall is None and self.recipe.schedule == "plateau" and self._falls():
            self.fall = self.step
            self._put(self.best)
        rate = self.recipe.rate_at(self.step, self.fall)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batches = [self.batch(self.step * self.recipe.accumulate + i) for i in range(self.recipe.accumulate)]
        count, total = sum(len(e.answer) for batch in batches for e in batch), 0.0
        self.optimizer.zero_grad()
        for i, batch in enumerate(batches):
            apart = gaps(self._draw(f"gaps {self.step} {i}"), len(batch), self.jitter)
            packed = pack_examples(batch, self.model.device, apart)
            loss = self._losses(self._logits(packed), packed).sum() / count
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise TrainingDiverged(f"the loss of step {self.step + 1} is not finite; try a lower rate")
        self.optimizer.step()
        self.step, self.loss = self.step + 1, total
        self.rows.append({"step": self.step, "loss": total, "rate": rate})

    def batch(self, number: int) -> list[Example]:
        """Return forward pass `number`: the examples in a new order in every round, so that no state is needed."""
        size = min(self.recipe.batch, len(self.examples))
        first = number * size
        picked = []
        for index in range(first, first + size):
            round_, place = divmod(index, len(self.examples))
            picked.append(self.examples[self._order(round_)[place]])
        return picked

    def _order(self, round_: int) -> list[int]:
        if self._round != round_:
            self._round, self._shuffled = round_, list(range(len(self.examples)))
            self._draw(f"round {round_}").shuffle(self._shuffled)
        return self._shuffled

    def _draw(self, what: str) -> random.Random:
        return random.Random(f"{self.recipe.seed} {what}")

    def _logits(self, packed: Packed) -> torch.Tensor:
        """Return float32 logits [answer tokens, vocabulary] after the cartridge, as PEFT gives it, and each question."""
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.recipe.autocast):
            return answer_logits(self.model.model, self.peft.get_prompt(len(packed.rows)), packed)

    def _losses(self, logits: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Return the loss of each answer token, nats."""
        log_probs = logits.log_softmax(-1)
        if self.recipe.objective == "next-token":
            return -log_probs.gather(1, answer_ids(packed)[:, None])[:, 0]
        assert self.lesson.log_probs is not None and self.lesson.tokens is not None, "looked at when it began"
        at = target_rows(packed)
        teacher, tokens = self.lesson.log_probs[at].to(logits.device), self.lesson.tokens[at].to(logits.device)
        return divergence(teacher, log_probs.gather(1, tokens))

    def _look(self) -> None:
        score = self.score(self.validation)
        if score.missed < min(BETTER * self.least_missed, self.least_missed - GAIN):
            self.least_missed, self.waited = score.missed, 0
        else:
            self.waited += 1
        if score.missed <= self.least_missed + GAIN:
            self.best_step, self.best = self.step, self.kv()
        self.rows.append({"step": self.step, "validation_loss": score.loss})

    @property
    def validation_loss(self) -> float:
        """Of the validation questions when last looked at."""
        return next(row["validation_loss"] for row in reversed(self.rows) if "validation_loss" in row)

    def _ended(self) -> bool:
        ended = self.step >= self.recipe.end(self.fall)
        return ended or (self.recipe.schedule != "plateau" and self._out_of_patience())

    def _falls(self) -> bool:
        return self._out_of_patience() or 2 * self.step >= self.recipe.steps

    def _out_of_patience(self) -> bool:
        return 0 < self.recipe.patience <= self.waited

    def _put(self, kv: torch.Tensor) -> None:
        self.peft.prompt_encoder[self.peft.active_adapter].load_prompt_embeddings(to_peft(kv.float()))

    def _save(self, directory: Path) -> None:
        state = {
            "recipe": asdict(self.recipe),
            "parameters": [p.detach() for p in self.parameters],
            "optimizer": self.optimizer.state_dict(),
            "rows": self.rows,
            "best": (self.least_missed, self.best_step, self.best),
            "counters": (self.step, self.seconds, self.waited, self.fall, self.loss),
        }
        with files.replacing(directory / CHECKPOINT) as partial:
            torch.save(state, partial)
        files.replace(directory / LOSS, [f"{json.dumps(row)}\n".encode() for row in self.rows])

    def _load(self, directory: Path) -> None:
        path = directory / CHECKPOINT
        if not path.exists():
            return
        try:
            state: dict[str, Any] = torch.load(path, map_location=self.model.device, weights_only=True)
        except Exception as error:  # whatever torch's restricted unpickler stumbles over
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CartridgeError(f"{path} is no checkpoint; remove it to start anew: {reason}") from error
        if state["recipe"] != asdict(self.recipe):
            raise CartridgeError(f"{path} is of a training with another recipe; go on with that one, or remove it")
        with torch.no_grad():
            for parameter, saved in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.rows = state["rows"]
        self.least_missed, self.best_step, best = state["best"]
        self.best = best.cpu()
        self.step, self.seconds, self.waited, self.fall, self.loss = state["counters"]


def wrap(model: CausalModel, kv: torch.Tensor) -> Any:
    """Return PEFT's model with CARTRIDGE parameters set to canonical `kv`; nothing else of it can be trained."""
    config = CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=kv.shape[2], num_frozen_tokens=FROZEN)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are trying to modify a model with PEFT for a second time")
        peft: Any = get_peft_model(model.model, config)  # of a LoRA adapter, which goes on computing
    peft.eval()  # no dropout: the teacher had none
    expected = to_peft(kv).shape
    encoder = peft.prompt_encoder[peft.active_adapter]
    if encoder.weight.shape != expected:
        raise CartridgeError(
            f"PEFT has parameters of {tuple(encoder.weight.shape)} for {model.name}, whose KV is {tuple(expected)}: "
            "PEFT's CARTRIDGE does not know this architecture"
        )
    encoder.load_prompt_embeddings(to_peft(kv.float()))
    return peft


def gaps(draw: random.Random, count: int, jitter: int) -> list[int]:
    """Return how far behind the cartridge each question stands: half of them right behind it, as when served."""
    return [draw.randint(0, jitter) * draw.randint(0, 1) for _ in range(count)]


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence, nats, of log probabilities [n, k] of the teacher's likeliest tokens.

    All other tokens count as one, so it is 0 only where the student gives each of the k what the teacher does.
    """
    known = (teacher.exp() * (teacher - student)).sum(-1)
    rest, guess = (1 - p.exp().sum(-1) for p in (teacher, student))
    tiny = torch.finfo(torch.float32).eps
    return known + torch.where(rest > tiny, rest * (rest.clamp(min=tiny).log() - guess.clamp(min=tiny).log()), 0.0)
