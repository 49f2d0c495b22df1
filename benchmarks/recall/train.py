"""Train the recall model: `python -m recall.train --out DIR`, in `benchmarks/`.

Documents grow from 48 tokens to the full length as the answers come right; finding one fact among five is
learned in a minute, and then only has to be kept while the sheet grows.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch.optim import AdamW, Muon, Optimizer
from transformers import LlamaForCausalLM

from lmcache_cartridge.make.machine import machine

from .batch import Batch, draw_batch
from .model import logits_at, new_model
from .ward import build_tokenizer

RECORD = "training.json"
"""How a saved model was trained, beside its weights."""

_GROW_AT = 0.85
_GROW_BY = 1.25
_WARMUP_STEPS = 100
_DECAY_FROM = 0.6
_GAZE_UNTIL = 0.75
_END_WEIGHT = 0.05


START_TOKENS, MAX_TOKENS = 48, 1200
"""Document lengths to begin with and to grow to."""
BATCH_TOKENS, QUESTIONS_EACH = 8192, 48
MATRIX_RATE, VECTOR_RATE = 0.02, 0.003
"""Peak rates of Muon and AdamW."""
GAZE_WEIGHT = 0.5
"""Of the attention supervision; fades to 0."""


class Curriculum:
    """The document length: grows by a quarter whenever full-length documents are answered well enough."""

    def __init__(self) -> None:
        self.tokens = START_TOKENS
        self.accuracy = 0.0

    def record(self, accuracy: float) -> None:
        """Take in the share of right answers on one batch of full-length documents; may grow `tokens`."""
        self.accuracy = 0.9 * self.accuracy + 0.1 * accuracy
        if self.accuracy > _GROW_AT and self.tokens < MAX_TOKENS:
            self.tokens = min(MAX_TOKENS, int(self.tokens * _GROW_BY))
            self.accuracy = _GROW_AT - 0.15


def optimizers(model: LlamaForCausalLM) -> list[tuple[Optimizer, float]]:
    """Return each optimizer with its peak rate: Muon for the matrices, AdamW for embedding and norms."""
    matrices, others = [], []
    for name, weight in model.named_parameters():
        (matrices if weight.dim() == 2 and "embed" not in name else others).append(weight)
    muon = Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01, momentum=0.95, adjust_lr_fn="original")
    adam = AdamW(others, lr=VECTOR_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    return [(muon, MATRIX_RATE), (adam, VECTOR_RATE)]


def rate_factor(step: int, progress: float) -> float:
    """Return the share of the peak rate: linear warm-up, flat, then linear to 2%."""
    decay = 1.0 if progress < _DECAY_FROM else max(0.02, (1 - progress) / (1 - _DECAY_FROM))
    return min(1.0, (step + 1) / _WARMUP_STEPS) * decay


def loss_of(model: LlamaForCausalLM, batch: Batch, gaze_weight: float) -> tuple[torch.Tensor, float, float]:
    """Return the loss to descend, the share of values answered right, and the gaze loss (nats)."""
    at = torch.cat([batch.value_at, batch.end_at])
    with torch.autocast("cpu", torch.bfloat16):
        logits = logits_at(model, batch.tokens, at, batch.gaze)
    value_logits, end_logits = logits.chunk(2)
    gaze_loss = torch.stack(batch.gaze.losses).sum()
    end = torch.full_like(batch.values, model.config.eos_token_id)
    loss = F.cross_entropy(value_logits, batch.values) + _END_WEIGHT * F.cross_entropy(end_logits, end)
    accuracy = (value_logits.argmax(-1) == batch.values).float().mean().item()
    return loss + gaze_weight * gaze_loss, accuracy, gaze_loss.item()


def train(options: argparse.Namespace) -> None:
    """Train and save to `options.out`; prints progress. Repeatable up to the rounding of the processor's kernels."""
    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    model = new_model()
    parts = optimizers(model)
    curriculum = Curriculum()
    began = time.monotonic()
    for step in range(options.steps):
        progress = step / options.steps
        for optimizer, peak in parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate_factor(step, progress)
        # Shorter documents are mixed in so that growing does not unlearn them.
        full = rng.random() < 0.6
        length = curriculum.tokens if full else rng.randint(40, curriculum.tokens)
        batch = draw_batch(rng, length, BATCH_TOKENS, QUESTIONS_EACH)
        gaze_weight = GAZE_WEIGHT * max(0.0, 1 - progress / _GAZE_UNTIL)
        loss, accuracy, gaze_loss = loss_of(model, batch, gaze_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in parts:
            optimizer.step()
            optimizer.zero_grad()
        if full:
            curriculum.record(accuracy)
        if step % 25 == 0:
            print(
                f"step {step}/{options.steps} length {curriculum.tokens} right {accuracy:.3f} mean "
                f"{curriculum.accuracy:.3f} loss {loss.item():.3f} gaze {gaze_loss:.3f}",
                flush=True,
            )
    about = machine()
    record = {
        "command": "python -m recall.train " + " ".join(sys.argv[1:]),
        "date": date.today().isoformat(),
        "hardware": f"{about['cpu']}, {about['cores']} cores",
        "seed": options.seed,
        "threads": torch.get_num_threads(),
        "wall_s": round(time.monotonic() - began),
        "steps": options.steps,
        "document_tokens": curriculum.tokens,
        "versions": {"python": about["python"], **about["packages"]},
    }
    save(model, options, record)
    print(f"saved {options.out}")


def save(model: LlamaForCausalLM, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write the model as bfloat16 with tokenizer and record into `options.out`."""
    model.to(torch.bfloat16).save_pretrained(options.out)
    build_tokenizer().save_pretrained(options.out)
    (options.out / RECORD).write_text(json.dumps([record], indent=2) + "\n", encoding="utf-8")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recall.train", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory for the HF model; written over")
    add("--steps", type=int, default=1200)
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    train(parse())
