"""Questions come from a file, a template or self-study, the same for the same input, and bad input says what is wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path

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
    from_template,
    model_writer,
    read,
    save,
    self_study,
)

DOCUMENT = "Patient Mora: blood AB+, ward 7.\nPatient Tel: ward 9.\n"
TEMPLATE = {
    "questions": ["{what} of {whom}?", "{whom} {what}?"],
    "fields": {"whom": r"Patient (\w+)", "what": ["blood", "ward"]},
}


def _write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# From a file.


def test_questions_are_read_from_json_lines_and_from_one_list(tmp_path: Path) -> None:
    rows = [{"question": "a?", "answer": "1"}, {"question": "b?"}, {"question": "c?", "answer": None, "more": 1}]
    expected = [Question("a?", "1"), Question("b?"), Question("c?")]
    assert read(_write(tmp_path / "lines", *rows)) == expected
    assert read(_write(tmp_path / "list", rows)) == expected


def test_a_question_that_stands_twice_is_read_once(tmp_path: Path) -> None:
    path = _write(tmp_path / "q", {"question": "a?", "answer": "1"}, {"question": "b?"}, {"question": "a?"})
    assert read(path) == [Question("a?", "1"), Question("b?")]


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    questions = [Question("é?", "ü"), Question('"\n"?')]
    save(questions, tmp_path / "below" / "q.jsonl")
    assert read(tmp_path / "below" / "q.jsonl") == questions
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["q.jsonl"]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"{", "no JSON lines"),
        (b"", "no questions"),
        (b"[]", "no questions"),
        (b'{"question": "a?"}\n{"question": ""}', "entry 2"),
        (b'{"question": "a?", "answer": 5}', "entry 1"),
        (b'{"ask": "a?"}', "entry 1"),
        (b"[1]", "entry 1"),
        (b"[" * 100_000, "no JSON lines"),
        (b"\xff", "UTF-8"),
    ],
)
def test_a_file_of_something_else_is_refused_and_named(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(CartridgeError, match=word) as caught:
        read(tmp_path / "bad.jsonl")
    assert "bad.jsonl" in str(caught.value)


# From a template.


def test_a_template_asks_every_question_of_every_combination(tmp_path: Path) -> None:
    made = from_template(_write(tmp_path / "t", TEMPLATE), DOCUMENT)
    assert [q.text for q in made] == [
        "blood of Mora?", "Mora blood?", "ward of Mora?", "Mora ward?",
        "blood of Tel?", "Tel blood?", "ward of Tel?", "Tel ward?",
    ]  # fmt: skip
    assert {q.answer for q in made} == {None}, "the model with the document answers"


def test_where_leaves_out_what_the_document_does_not_say(tmp_path: Path) -> None:
    template = TEMPLATE | {"questions": ["{what} of {whom}?"], "where": r"Patient {whom}:.*\b{what}\b"}
    made = from_template(_write(tmp_path / "t", template), DOCUMENT)
    assert [q.text for q in made] == ["blood of Mora?", "ward of Mora?", "ward of Tel?"]


def test_a_value_with_signs_of_regular_expressions_is_looked_for_as_it_is(tmp_path: Path) -> None:
    template = {"questions": ["who has {what}?"], "fields": {"what": ["AB+", "A."]}, "where": "blood {what}"}
    assert [q.text for q in from_template(_write(tmp_path / "t", template), DOCUMENT)] == ["who has AB+?"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fields": {"whom": "Patient (", "what": []}}, "no template"),
        ({"fields": {"whom": "Patient"}}, "no template"),
        ({"fields": {"whom": 5}}, "no template"),
        ({"fields": ["whom"]}, "no template"),
        ({"questions": []}, "makes no question"),
        ({"fields": {"whom": r"Person (\w+)", "what": ["ward"]}}, "makes no question"),
        ({"where": "nothing {whom}"}, "makes no question"),
        ({"fields": {"whom": ["x"] * 1000, "what": ["y"] * 1000}}, "more than 100000"),
    ],
)
def test_a_template_that_cannot_work_is_refused_and_named(tmp_path: Path, change: dict, word: str) -> None:
    with pytest.raises(CartridgeError, match=word) as caught:
        from_template(_write(tmp_path / "bad.json", TEMPLATE | change), DOCUMENT)
    assert "bad.json" in str(caught.value)


# Self-study.


def test_slices_lie_all_over_the_document_and_break_no_word() -> None:
    words = [f"w{i}" for i in range(5000)]
    document = " ".join(words)
    slices = [cut(document, random.Random(seed)) for seed in range(60)]
    for text in slices:
        assert set(text.split()) <= set(words)
        assert SLICE_CHARACTERS[0] <= len(text) <= SLICE_CHARACTERS[1] + 20
    starts = [document.index(text) / len(document) for text in slices]
    assert min(starts) < 0.2
    assert max(starts) > 0.7


def test_self_study_shows_its_writer_slices_and_keeps_what_it_asks() -> None:
    shown = []

    def write(text: str, instruction: str, seed: int) -> str:
        shown.append((text, instruction, seed))
        return f"\nQuestion: what of {len(shown)}?\nAnswer: nothing"

    document = "word " * 2000
    counted = []
    found = self_study(write, document, 5, seed=1, progress=lambda what, done, total: counted.append((done, total)))
    assert found == [Question(f"what of {i}?") for i in range(1, 6)]
    assert counted == [(i, 5) for i in range(1, 6)]
    assert all(text in document for text, _, _ in shown)
    assert len({seed for _, _, seed in shown}) == 5
    first, shown = shown, []
    self_study(write, document, 5, seed=1)
    assert shown == first, "another run asks for the same"


def test_self_study_asks_again_for_what_it_has_or_cannot_use_and_then_makes_do() -> None:
    replies = iter(["", "a?", "a?", "b?", "", "", "", "", ""])
    assert self_study(lambda *_: next(replies), "text", 3, 0) == [Question("a?"), Question("b?")]
    with pytest.raises(CartridgeError, match="no question in 6 attempts"):
        self_study(lambda *_: " \n", "text", 2, 0)


@pytest.mark.parametrize(
    ("reply", "question"),
    [
        ("What is it?", "What is it?"),
        ("\n\n  Question: What is it?\nAnswer: this", "What is it?"),
        ("1. What is it?", "What is it?"),
        ("Q3) What is it?", "What is it?"),
        ('"What is it?"', "What is it?"),
        ("- What is it?", "What is it?"),
        ("Quite a lot?", "Quite a lot?"),
        ("", ""),
        ("```", ""),
    ],
)
def test_the_question_is_found_in_what_was_written(reply: str, question: str) -> None:
    assert first_line(reply) == question


def test_the_model_itself_writes_the_same_for_the_same_seed(tmp_path: Path) -> None:
    # The shipped model ends at once whatever it is told to write; one of random weights at least writes words.
    torch.manual_seed(0)
    LlamaForCausalLM(config()).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    for form in ("chat", "text"):
        write = model_writer(CausalModel(str(tmp_path)), form, tokens=8)
        texts = [write("Patient Bader: blood AB+.", "Ask.", seed) for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]
        assert 4 <= len(texts[0].split()) <= 8, "only what is new"
