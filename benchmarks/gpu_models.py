"""Sections of `gpu.py` about models: prefill, `compact` and `train` on the device, beside the CPU."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import report
import torch
from gpu_rows import EQUAL, WRONG, Place, Row, within
from recall.ward import QUESTIONS, write_document
from sizes import SHAPES

from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.make.compact.job import make
from lmcache_cartridge.make.compact.judge import held_out_errors
from lmcache_cartridge.make.compact.wanted import Wanted
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import rounded
from lmcache_cartridge.make.prefill import run_canary
from lmcache_cartridge.make.questions import Question
from lmcache_cartridge.make.train import lesson
from lmcache_cartridge.make.train.initial import initial_kv, prefilled
from lmcache_cartridge.make.train.trainer import Recipe, Trainer

RATE = 0.02
TRAINED, ASKED = (QUESTIONS[0], QUESTIONS[2]), QUESTIONS[1]
LEAST = 0.05
"""Share of the answers that may be others, and of a fit error: what is found is where rounding leads it."""


def prefill(place: Place) -> Iterator[Row]:
    """Compute a document's KV on the device and on the CPU, in float32 and in bfloat16."""
    from ttft import make_model

    name, tokens = str(MODEL_DIR), place.size(48, 1024, 4096)
    if place.form != "smoke":
        name = str(make_model(place.scratch / "model", SHAPES["Qwen2.5-0.5B"]._replace(vocabulary=8000)))
    ids = [5 + i * 7 % 400 for i in range(tokens)]
    kv, took = dict[str, torch.Tensor](), dict[str, float]()
    for here, where in (("cpu", "cpu"), ("device", str(place.device))):
        for dtype in ("float32", "bfloat16"):
            model = CausalModel(name, dtype=dtype, device=where)
            if here == "device":
                list(model.prefill(ids[:32], 32))  # the first call chooses kernels
                place.begin()
            started = time.perf_counter()
            kv[f"{here} {dtype}"] = torch.cat(list(model.prefill(ids, 256)), dim=2).float()
            took[f"{here} {dtype}"] = time.perf_counter() - started
            if here == "device" and dtype == "bfloat16":
                yield Row("prefill", f"memory for {tokens} tokens, bfloat16", place.memory(), "-", "-")
            if here == "device" and dtype == "float32":
                seen = run_canary(model, ids, kv[f"{here} {dtype}"], "what does it say?")
                yield Row(
                    "prefill", "first token behind the KV is that behind the document",
                    f"logits differ by {seen.max_abs_logit_difference:.2g}", "the same", EQUAL if seen.top1_equal else WRONG,
                )  # fmt: skip
            del model
    exact, noise = kv["cpu float32"], _apart(kv["cpu float32"], kv["cpu bfloat16"])
    there = "device"
    yield within("prefill", "float32 on the device, beside the CPU's", _apart(exact, kv[f"{there} float32"]), noise)
    yield within(
        "prefill", "bfloat16 on the device, beside the CPU's float32", _apart(exact, kv[f"{there} bfloat16"]), 2 * noise
    )
    for dtype in ("float32", "bfloat16"):
        ratio = took[f"cpu {dtype}"] / took[f"{there} {dtype}"]
        yield Row(
            "prefill", f"speed of {dtype}", f"{took[f'{there} {dtype}']:.2f} s, {ratio:.1f} times the CPU's speed", "-", "-",
            report.Spread(ratio, ratio, ratio, 1) if place.is_gpu else None,
        )  # fmt: skip


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference relative to the largest number of its layer and plane; NaN where one is."""
    most = one.abs().amax(dim=(2, 3, 4), keepdim=True)
    return float(((one - other).abs() / most).max())


class School(NamedTuple):
    """A sheet, what is known of it, and the model on one device."""

    model: CausalModel
    ids: list[int]
    kv: torch.Tensor
    questions: list[Question]
    prompts: list[list[int]]
    wanted: list[list[int]]
    lesson: Any
    held_out: range

    def right(self, kv: torch.Tensor) -> int:
        """Return how many facts are answered right behind KV as it is stored, in a wording that nothing was made with."""
        found = self.model.answers_after(rounded(kv, self.model.fingerprint).float(), self.prompts, 3)
        return sum(got[: len(wanted)] == wanted for got, wanted in zip(found, self.wanted, strict=True))


def _school(place: Place, where: str) -> School:
    model = CausalModel(str(MODEL_DIR), device=where)
    model.model.float()
    document = write_document(random.Random("gpu"), place.size(60, 480))
    ids, facts = model.encode(document.text, special=True), [fact._asdict() for fact in document.facts]
    questions = [Question(text.format(**fact), fact["value"]) for fact in facts for text in TRAINED]
    kv = prefilled(model, ids)
    made = lesson.prepare(model, ids, questions, form="chat", top_k=0, answer_tokens=4, kv=kv)
    prompts = [model.question_ids(ASKED.format(**fact), "chat") for fact in facts]
    wanted = [model.encode(fact["value"], special=False) for fact in facts]
    held_out = range(len(questions) - max(1, len(questions) // 10), len(questions))
    return School(model, ids, kv, questions, prompts, wanted, made, held_out)


def compact(place: Place) -> Iterator[Row]:
    """Compact a sheet on the device and on the CPU."""
    found = {}
    for here, where in (("cpu", "cpu"), ("device", str(place.device))):
        one = _school(place, where)
        place.begin()
        started = time.perf_counter()
        made = make(one.model, one.kv, one.ids, Wanted(len(one.ids) // 4, one.questions, "chat"))
        took = time.perf_counter() - started
        errors = held_out_errors(one.kv, made.asked, len(one.ids) // 4)
        found[here] = sum(errors) / len(errors), one.right(made.kv), took, place.memory(), len(one.wanted)
    (error, right, took, _, count), (there, answered, seconds, memory, _) = found["cpu"], found["device"]
    yield within("compact", "fit error, relative difference", abs(there - error) / error, LEAST)
    yield _answers("compact", answered, right, count)
    yield Row("compact", "seconds, memory", f"{seconds:.1f} s beside {took:.1f} s, {memory}", "-", "-")


def train(place: Place) -> Iterator[Row]:
    """Train a cartridge from the same seed on the device and on the CPU."""
    steps = place.size(2, 120, 600)
    recipe = Recipe(
        steps=steps, rate=RATE, schedule="cosine", patience=0, check_every=steps, warmup=min(10, steps // 2)
    )
    losses, found = dict[str, torch.Tensor](), {}
    for name, where, autocast in (
        ("cpu", "cpu", False), ("device", str(place.device), False), ("noise", "cpu", True),
        ("bfloat16", str(place.device), True),
    ):  # fmt: skip
        one = _school(place, where)
        kv = initial_kv("sci", one.model, one.ids, len(one.ids) // 4, 0)
        # A few steps tell noise; all tell answers.
        few = steps if name in ("cpu", "device") else min(steps, 10)
        place.begin()
        trainer = Trainer(one.model, kv, one.lesson, one.held_out, replace(recipe, autocast=autocast))
        trainer.train(None, lambda step, loss: None, few)
        losses[name] = torch.tensor([row["loss"] for row in trainer.rows if "loss" in row][:10])
        found[name] = one.right(trainer.kv()), trainer.seconds / few, place.memory(), len(one.wanted)

    def apart(name: str) -> float:
        return float(((losses[name] - losses["cpu"]).abs() / losses["cpu"]).max())

    noise = apart("noise")
    yield within(
        "train", f"losses of {len(losses['cpu'])} steps in float32, relative difference", apart("device"), noise
    )
    yield within("train", "the same in bfloat16", apart("bfloat16"), 4 * noise)
    yield _answers("train", found["device"][0], found["cpu"][0], found["cpu"][3])
    yield Row(
        "train", "a step, memory", f"{1e3 * found['device'][1]:.0f} ms, in bfloat16 {1e3 * found['bfloat16'][1]:.0f} ms, "
        f"beside {1e3 * found['cpu'][1]:.0f} ms; {found['device'][2]}", "-", "-",
    )  # fmt: skip


def _answers(section: str, there: int, here: int, count: int) -> Row:
    allowed = max(2, round(2 * LEAST * count))
    return within(
        section, "answers counted", abs(there - here), allowed, f"{there} of {count} right, {here} on the CPU"
    )
