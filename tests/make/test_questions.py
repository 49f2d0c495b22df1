"""Questions come from a file or self-study, the same for the same input, and bad input says what is wrong."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from recall.model import config
from recall.ward import build_tokenizer
from transformers import LlamaForCausalLM

from lmcache_cartridge.errors import CartridgeError
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.questions import (
    SLICE_CHARACTERS,
    Question,
    cut,
    first_line,
    model_writer,
    read,
    self_study,
    split,
)

# From a file.


def test_questions_are_read_once_from_json_lines_and_from_one_list(tmp_path):
    rows = [
        {"question": "a?", "answer": "1"},
        {"question": "b?"},
        {"question": "c?", "answer": None, "more": 1},
        {"question": "a?"},
    ]
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "list").write_text(json.dumps(rows))
    for name in ("lines", "list"):
        assert read(tmp_path / name) == [Question("a?", "1"), Question("b?"), Question("c?")]


@pytest.mark.parametrize("content, word", [
    (b"", "no questions"), (b'{"question": "a?"}\n{"question": ""}', "entry 2"), (b'{"question": "a?", "answer": 5}', "entry 1"),
    (b"[1]", "entry 1"), (b"[" * 100_000, "no JSON lines"), (b"\xff", "UTF-8"),
])  # fmt: skip
def test_a_file_of_something_else_is_refused_and_named(tmp_path, content, word):
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(CartridgeError, match=word) as caught:
        read(tmp_path / "bad.jsonl")
    assert "bad.jsonl" in str(caught.value)


# Parts.


@pytest.mark.parametrize("count, sizes", [(100, [80, 10, 10]), (3, [1, 1, 1]), (9000, [8488, 256, 256])])
def test_a_tenth_chooses_a_tenth_measures_and_none_is_in_two_parts(count, sizes):
    asked = [Question(f"{n}?") for n in range(count)]
    parts = split(asked)
    assert [len(part) for part in parts] == sizes and {*parts.fit, *parts.validation, *parts.test} == {*asked}
    assert split(asked) == parts, "the same ones for the same questions"


def test_questions_given_to_measure_by_are_in_no_other_part():
    asked = [Question(f"{n}?") for n in range(20)]
    parts = split(asked, [asked[3], Question("new?")])
    assert parts.test == [asked[3], Question("new?")]
    assert [len(part) for part in parts] == [18, 1, 2] and asked[3] not in parts.fit + parts.validation


def test_too_few_questions_for_the_parts_are_refused():
    asked = [Question("a?"), Question("b?")]
    for given in ((asked,), (asked[:1], asked[1:])):
        with pytest.raises(CartridgeError, match="questions are too few"):
            split(*given)


# Self-study.


def test_slices_lie_all_over_the_document_and_break_no_word():
    words = [f"w{i}" for i in range(5000)]
    document = " ".join(words)
    slices = [cut(document, random.Random(seed)) for seed in range(60)]
    for text in slices:
        assert set(text.split()) <= set(words)
        assert SLICE_CHARACTERS[0] <= len(text) <= SLICE_CHARACTERS[1] + 20
    starts = [document.index(text) / len(document) for text in slices]
    assert min(starts) < 0.2 < 0.7 < max(starts)


def test_self_study_shows_its_writer_slices_and_keeps_what_it_asks():
    document, shown = "word " * 2000, []

    def write(*given: Any) -> str:
        shown.append(given)
        return f"\nQuestion: what of {len(shown)}?\nAnswer: nothing"

    for first in (1, 6):
        found = self_study(write, document, 5, seed=1)
        assert found == [Question(f"what of {i}?") for i in range(first, first + 5)]
    assert all(text in document for text, _, _ in shown) and len({seed for _, _, seed in shown}) == 5
    assert shown[:5] == shown[5:], "another run asks for the same"


def test_self_study_asks_again_for_what_it_has_or_cannot_use_and_then_makes_do():
    replies = iter(["", "a?", "a?", "b?", "", "", "", "", ""])
    assert self_study(lambda *_: next(replies), "text", 3, 0) == [Question("a?"), Question("b?")]
    with pytest.raises(CartridgeError, match="no question in 6 attempts"):
        self_study(lambda *_: " \n", "text", 2, 0)


@pytest.mark.parametrize(
    "reply, question",
    [
        ("\n\n  Question: What is it?\nAnswer: this", "What is it?"),
        ("Q3) What is it?", "What is it?"),
        ('- "What is it?"', "What is it?"),
        ("Quite a lot?", "Quite a lot?"),
        ("```", ""),
    ],
)
def test_the_question_is_found_in_what_was_written(reply, question):
    assert first_line(reply) == question


def test_the_model_itself_writes_the_same_for_the_same_seed(tmp_path):
    # The shipped model ends at once whatever it is told to write; one of random weights at least writes words.
    torch.manual_seed(0)
    LlamaForCausalLM(config()).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    for form in ("chat", "text"):
        write = model_writer(CausalModel(str(tmp_path)), form, tokens=8)
        texts = [write("Patient Bader: blood AB+.", "Ask.", seed) for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]
        assert 4 <= len(texts[0].split()) <= 8, "only what is new"
