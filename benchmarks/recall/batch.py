"""One training batch: sheets, each followed by many questions, and what is to be learned where."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import Gaze
from .ward import ATTRIBUTES, BOS, EOS, NAMES, PAD, QUESTIONS, VOCABULARY, Document, ask, encode, write_document

_NAME_IDS = frozenset(VOCABULARY[name] for name in NAMES)
_ATTRIBUTE_IDS = frozenset(VOCABULARY[attribute] for attribute in ATTRIBUTES)
_VALUE_IDS = frozenset(VOCABULARY[value] for values in ATTRIBUTES.values() for value in values)
_QUESTION_TOKENS = 8
_HEADS = (0, 2)
"""The heads that are taught; one of each KV head."""


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor
    """[B, T], right-padded, T a multiple of 32."""
    value_at: Tensor
    """Flat positions after which a value follows, one per question."""
    values: Tensor
    end_at: Tensor
    """Flat positions of the values, after which `</s>` follows."""
    gaze: Gaze


@dataclass(slots=True)
class _Row:
    """One sheet and its questions, with what attention ought to do there.

    `bind`: (position, name, attribute) positions to bring together; `look`: (from, to) positions to copy.
    """

    tokens: list[int]
    asked: list[int]
    bind: list[tuple[int, int, int]]
    look: list[tuple[int, int]]


def draw_batch(rng: random.Random, document_tokens: int, batch_tokens: int, max_questions: int) -> Batch:
    """Draw sheets of 0.7 to 1.0 `document_tokens`, about `batch_tokens` with their questions.

    Advances `rng`.
    """
    questions = min(max_questions, document_tokens // 4)
    count = max(2, batch_tokens // (document_tokens + questions * _QUESTION_TOKENS))
    rows = []
    for _ in range(count):
        length = rng.randint(int(document_tokens * 0.7), document_tokens)
        rows.append(_draw_row(rng, write_document(rng, length), max_questions))
    width = -(-max(len(row.tokens) for row in rows) // 32) * 32
    tokens = torch.full((count, width), VOCABULARY[PAD])
    asked = []
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = torch.tensor(row.tokens)
        asked += [index * width + position for position in row.asked]
    value_at = torch.tensor(asked)
    return Batch(tokens, value_at, tokens.view(-1)[value_at + 1], value_at + 1, _gaze(rows))


def _draw_row(rng: random.Random, document: Document, max_questions: int) -> _Row:
    tokens = [VOCABULARY[BOS], *encode(document.text)]
    row = _Row(tokens, [], [], [])
    stated: dict[tuple[int, int], int] = {}
    name_at = attribute_at = 0
    for position, token in enumerate(tokens):
        if token in _NAME_IDS:
            name_at = position
        elif token in _ATTRIBUTE_IDS:
            attribute_at = position
        elif token in _VALUE_IDS:
            row.bind.append((position, name_at, attribute_at))
            stated[tokens[name_at], tokens[attribute_at]] = position
    for fact in rng.sample(document.facts, min(max_questions, len(document.facts))):
        name, attribute = VOCABULARY[fact.patient], VOCABULARY[fact.attribute]
        start = len(tokens)
        question = encode(ask(fact, rng.randrange(len(QUESTIONS))))
        last = start + len(question) - 1
        row.bind.append((last, start + question.index(name), start + question.index(attribute)))
        row.look.append((last, stated[name, attribute]))
        row.asked.append(last)
        tokens += [*question, VOCABULARY[fact.value], VOCABULARY[EOS]]
    return row


def _gaze(rows: list[_Row]) -> Gaze:
    """Return the aid: layer 0 binds values and questions to name and attribute, layer 1 finds the value."""
    bound, names, attributes = (_pad([[item[part] for item in row.bind] for row in rows]) for part in range(3))
    asked, answers = (_pad([[item[part] for item in row.look] for row in rows]) for part in range(2))
    first, second = _HEADS
    return Gaze(
        {
            0: [(first, bound, names), (second, bound, attributes)],
            1: [(head, asked, answers) for head in _HEADS],
        }
    )


def _pad(lists: list[list[int]]) -> Tensor:
    width = max(map(len, lists))
    return torch.tensor([[*items, *[-1] * (width - len(items))] for items in lists])
