"""Lesson: questions on a document as token ids, and what the model with the whole document predicts at each answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import save_file

from ...artifact import files
from ...errors import CartridgeError, UnsupportedModel
from ..model import CausalModel
from ..progress import Progress, silent
from ..questions import Question
from .packing import Example, answer_logits, pack_examples, passes, target_rows

BATCH = 16
"""Questions the teacher answers in one forward pass."""


class Lesson(NamedTuple):
    """Everything that training needs of a document. The teacher's part is None where nobody asked it."""

    examples: list[Example]
    log_probs: torch.Tensor | None
    """[rows, k], float32: the teacher's most likely tokens, for each answer token of each example in turn."""
    tokens: torch.Tensor | None
    """[rows, k]: the ids of those."""


def prepare(
    model: CausalModel,
    ids: list[int],
    questions: Sequence[Question],
    kv: torch.Tensor,
    *,
    form: str,
    top_k: int,
    answer_tokens: int,
    teach: bool = True,
    directory: Path | None = None,
    progress: Progress = silent,
) -> Lesson:
    """Return the lesson of `questions` on the document `ids`; `top_k` 0 keeps all of the teacher's predictions.

    `kv` is the document's, canonical. Answers that lack are the teacher's own, greedily, `answer_tokens` at most. With a `directory` a lesson is kept there and found again.
    """
    asked = (ids, list(map(tuple, questions)), form, top_k, answer_tokens, teach)
    key = blake3(msgspec.json.encode((model.fingerprint, str(model.model.dtype), *asked))).hexdigest()
    path = directory / f"{key}.safetensors" if directory else None
    if path and path.exists():
        return _load(path)
    prompts = [model.question_ids(question.text, form) for question in questions]
    kv = kv.to(model.model.dtype)
    answers = _answers(model, kv, questions, prompts, answer_tokens, progress)
    examples, row = [], 0
    for prompt, answer in zip(prompts, answers, strict=True):
        examples.append(Example(prompt, answer, row))
        row += len(answer)
    lesson = Lesson(examples, None, None)
    _check_context(model, len(ids) if teach else 0, questions, examples)
    _check_sight(model, len(ids), examples)
    if teach:
        vocabulary = model.fingerprint.vocab_size
        lesson = taught(model, kv, examples, min(top_k or vocabulary, vocabulary), progress)
    if path:
        _save(lesson, path)
    return lesson


def _answers(
    model: CausalModel,
    kv: torch.Tensor,
    questions: Sequence[Question],
    prompts: list[list[int]],
    tokens: int,
    progress: Progress,
) -> list[list[int]]:
    ending = model.end_ids[:1]
    answers = [[] if q.answer is None else [*model.encode(q.answer, special=False), *ending] for q in questions]
    open_ = [i for i, question in enumerate(questions) if question.answer is None]
    given = model.answers_after(kv, [prompts[i] for i in open_], tokens, partial(progress, "answers"))
    for i, answer in zip(open_, given, strict=True):
        answers[i] = [*answer, *(ending if len(answer) < tokens else [])]
    for question, answer in zip(questions, answers, strict=True):
        if not answer:
            raise CartridgeError(f"the question {question.text!r:.100} has an answer of no tokens")
    return answers


def _check_sight(model: CausalModel, document_tokens: int, examples: Sequence[Example]) -> None:
    """Raise `UnsupportedModel` for a model that does not see all of the document from the end of each example.

    The examples of a row are kept apart by one mask for all layers, which has no window and no distances.
    """
    name = model.fingerprint.architecture
    if model.has_alibi:
        raise UnsupportedModel(
            f"{name} weighs positions by distance (ALiBi) and cannot be trained here; `build` can be used"
        )
    longest = document_tokens + max(len(example.prompt) + len(example.answer) for example in examples)
    if model.sight is not None and longest > model.sight:
        raise UnsupportedModel(
            f"layers of {name} see {model.sight} positions, and the document with its longest question has {longest}: "
            "training would show them more than an engine does; `build` can be used, or a shorter document"
        )


def _check_context(
    model: CausalModel, document_tokens: int, questions: Sequence[Question], examples: Sequence[Example]
) -> None:
    """Raise `CartridgeError` for a question that, after the document, is too long for the model."""
    for question, example in zip(questions, examples, strict=True):
        tokens = document_tokens + len(example.prompt) + len(example.answer)
        if model.context_tokens and tokens > model.context_tokens:
            raise CartridgeError(
                f"the question {question.text!r:.100} and its answer make {tokens} tokens with the document; the "
                f"model's context is {model.context_tokens}"
            )


@torch.no_grad()
def taught(
    model: CausalModel, kv: torch.Tensor, examples: list[Example], k: int, progress: Progress = silent
) -> Lesson:
    """Return the lesson of examples with what the model predicts behind canonical `kv`: its `k` likeliest tokens each."""
    count = sum(len(example.answer) for example in examples)
    log_probs, tokens = torch.empty(count, k), torch.empty(count, k, dtype=torch.long)
    for start in range(0, len(examples), BATCH):
        for rows, part in passes(pack_examples(examples[start : start + BATCH], model.device), kv):
            logits = answer_logits(model.model, model.cache(kv, len(rows)), part)
            picked, at = logits.log_softmax(-1).topk(k), target_rows(part)
            log_probs[at], tokens[at] = picked.values.cpu(), picked.indices.cpu()
        progress("teacher", min(start + BATCH, len(examples)), len(examples))
    return Lesson(examples, log_probs, tokens)


def _save(lesson: Lesson, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    examples = json.dumps([[example.prompt, example.answer] for example in lesson.examples])
    tensors = {"none": torch.zeros(1)}
    if lesson.log_probs is not None and lesson.tokens is not None:
        tensors |= {"log_probs": lesson.log_probs, "tokens": lesson.tokens.int()}
    with files.replacing(path) as partial:
        save_file(tensors, partial, metadata={"examples": examples})


def _load(path: Path) -> Lesson:
    examples, row = [], 0
    with safe_open(path, framework="pt") as file:
        for prompt, answer in json.loads(file.metadata()["examples"]):
            examples.append(Example(prompt, answer, row))
            row += len(answer)
        if "tokens" not in file.keys():  # noqa: SIM118
            return Lesson(examples, None, None)
        return Lesson(examples, file.get_tensor("log_probs"), file.get_tensor("tokens").long())
