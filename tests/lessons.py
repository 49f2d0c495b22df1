"""Helpers of the training tests: a short sheet, questions on it in wordings of its own to train and to ask with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from recall.ward import QUESTIONS, Document, write_document

from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.questions import Question, save
from lmcache_cartridge.make.train import lesson
from lmcache_cartridge.make.train.initial import prefilled
from lmcache_cartridge.make.train.lesson import Lesson

MODEL = str(MODEL_DIR)
TRAINED, UNSEEN = (QUESTIONS[0], QUESTIONS[2]), QUESTIONS[1]
"""Wordings to make cartridges for, and one that only asks."""


class School(NamedTuple):
    """A sheet of some 130 tokens and what to learn of it."""

    model: CausalModel
    """In float32."""
    document: Document
    ids: list[int]
    lesson: Lesson
    validation: list[int]
    unseen: Lesson
    """Every fact in a wording that is never trained on."""


def school() -> School:
    """Return a sheet with its lesson."""
    model = CausalModel(MODEL)
    model.model.float()
    document = write_document(random.Random("school"), 120)
    ids = model.encode(document.text, special=True)
    questions, kv = questions_on(document), prefilled(model, ids)
    made = lesson.prepare(model, ids, questions, kv, form="chat", top_k=0, answer_tokens=4)
    unseen = lesson.prepare(model, ids, questions_on(document, [UNSEEN]), kv, form="chat", top_k=0, answer_tokens=4)
    return School(model, document, ids, made, list(range(0, len(questions), 12)), unseen)


def questions_on(document: Document, wordings: Sequence[str] = TRAINED) -> list[Question]:
    """Return a question on every fact of a sheet in each wording, as a chat message."""
    return [Question(text.format(**fact._asdict()), fact.value) for fact in document.facts for text in wordings]


def write_questions(path: Path, document: Document) -> Path:
    """Write the questions on a sheet that cartridges are made for, as JSON lines."""
    save(questions_on(document), path)
    return path


def answered(model: CausalModel, kv: torch.Tensor, lesson: Lesson) -> float:
    """Return the share of a lesson's questions answered right after canonical KV."""
    examples = lesson.examples
    found = model.answers_after(kv.to(model.model.dtype), [example.prompt for example in examples], 4)
    return sum(got == e.answer[:-1] for got, e in zip(found, examples, strict=True)) / len(examples)


def tokens_of(model: CausalModel, kv: torch.Tensor, ids: Sequence[int]) -> list[int | None]:
    """Return which of `ids` each position of canonical KV was made from: layer 0 values depend on the token alone."""
    known = sorted(set(ids))
    values = torch.cat([next(model.prefill([token], 1))[1, 0] for token in known]).flatten(1)
    found = []
    for value in kv[1, 0].flatten(1):
        distance = (values - value).abs().amax(1)
        found.append(known[int(distance.argmin())] if distance.min() < 1e-4 else None)
    return found
