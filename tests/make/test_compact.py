"""Compaction: a quarter of a sheet's positions answers what the sheet does, without training, when its keys are re-rotated."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from lessons import MODEL, TRAINED, UNSEEN, answered, questions_on, write_questions
from making import flip_bit, make_artifact
from msgspec import structs
from recall.ward import Document, write_document

from lmcache_cartridge.artifact.reading import PAYLOAD
from lmcache_cartridge.errors import ArtifactError, CanaryFailed, ModelMismatch, UnsupportedModel
from lmcache_cartridge.make.compact import closed, job, references
from lmcache_cartridge.make.compact.closed import attended, compacted, rerotated
from lmcache_cartridge.make.compact.job import compact, make
from lmcache_cartridge.make.compact.references import Layer, References, collect
from lmcache_cartridge.make.compact.wanted import Wanted, references_of
from lmcache_cartridge.make.gate import ACCEPT
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import read_checked, read_kv
from lmcache_cartridge.make.questions import Question, split
from lmcache_cartridge.make.train import lesson, packing
from lmcache_cartridge.make.train.initial import prefilled

P4, P16, P32 = 128, 32, 16


class Sheet(NamedTuple):
    """A sheet of some 500 tokens, and what its questions ask of its KV."""

    model: CausalModel
    document: Document
    ids: list[int]
    kv: torch.Tensor
    questions: list[Question]
    asked: References

    def exact(self, kv: torch.Tensor) -> float:
        """Return the share of facts answered right after KV in bfloat16, in a wording that nothing was made with."""
        asked = questions_on(self.document, [UNSEEN])
        given = lesson.prepare(self.model, self.ids, asked, kv, form="chat", top_k=0, answer_tokens=4, teach=False)
        return answered(self.model, kv.bfloat16().float(), given)

    def every(self, step: int, first: int = 0) -> Sheet:
        """Return the sheet with some of its facts to ask for."""
        return self._replace(document=replace(self.document, facts=self.document.facts[first::step]))


@pytest.fixture(scope="module")
def sheet():
    return _sheet("compact test", 480)


def _sheet(seed: str, tokens: int) -> Sheet:
    model = CausalModel(MODEL)
    model.model.float()
    document = write_document(random.Random(seed), tokens)
    ids = model.encode(document.text, special=True)
    kv, questions = prefilled(model, ids), questions_on(document)
    asked = collect(model, kv, references_of(model, ids, Wanted(P4, questions)))
    return Sheet(model, document, ids, kv, questions, asked)


@pytest.fixture(scope="module")
def four(sheet):
    """A quarter of the positions, keys as in the document."""
    return compacted(sheet.kv, sheet.asked, P4)


# What is asked.


def test_of_too_many_tokens_those_that_predict_answers_are_kept(sheet, monkeypatch):
    examples = references_of(sheet.model, sheet.ids, Wanted(P16, sheet.questions))
    answers = sum(len(example.answer) for example in examples)
    monkeypatch.setattr(references, "MOST_QUERIES", answers + 7)
    found = collect(sheet.model, sheet.kv, examples)
    assert (len(found.answers), int(found.answers.sum())) == (answers + 7, answers)
    assert {plane.shape[2] for layer in found.layers for plane in layer} == {answers + 7}


def test_attention_that_is_no_plain_softmax_is_refused(sheet):
    with pytest.raises(UnsupportedModel, match="sliding_window"), references.listening(sheet.model, lambda *_: None):
        attention = references.AttentionInterface()[references.ATTENTION]
        attention(None, *[torch.zeros(1)] * 3, torch.zeros(1, 1, 1, 1), sliding_window=8)


# Keys and values in closed form.


def test_a_quarter_answers_within_a_point_without_a_gradient_step(sheet, four):
    document = sheet.exact(sheet.kv)
    assert document > 0.97
    assert torch.equal(four[0, :, 0], sheet.kv[0, :, 0]), "the first key stays"
    assert sheet.exact(rerotated(sheet.model, four, len(sheet.ids))) >= document - 0.01


def test_keys_left_where_they_were_answer_far_worse():
    """The control: the same KV, its keys nearer to the question than they were by n - p positions, which are 770 here."""
    long = _sheet("compact dev 0", 1024)
    kv = compacted(long.kv, long.asked, 256)
    long = long.every(3)
    right = long.exact(rerotated(long.model, kv, len(long.ids)))
    assert right >= 0.97
    assert long.exact(kv) <= right - 0.3


def test_values_solved_block_by_block_are_as_good(sheet, four, monkeypatch):
    monkeypatch.setattr(closed, "BLOCK_POSITIONS", 96)
    monkeypatch.setattr(closed, "BLOCK_QUERIES", 300)
    blocks = compacted(sheet.kv, sheet.asked, P4)
    assert torch.allclose(blocks[0, :, 0], four[0, :, 0])
    assert sheet.exact(rerotated(sheet.model, blocks, len(sheet.ids))) >= 0.97


# All of it.


def test_the_document_alone_is_enough_for_a_quarter_and_it_is_said_that_nothing_was_asked(sheet):
    said: list[str] = []
    made = compact(sheet.model, sheet.kv, sheet.ids, Wanted(P4), say=said.append)
    found = made.about.measured
    assert made.about.queries == "repeat" and sheet.exact(made.kv) >= 0.9
    assert (found.of, found.count, found.document) == ("tokens that it was made for", len(sheet.ids) - 1, 1.0)
    assert 0.8 <= found.kept <= 1.0 and found.nothing < found.cartridge
    assert said[-1].startswith("no questions were given, so how it answers is not known")


def test_refining_answers_more_where_it_is_kept(sheet):
    """At 32x, where what is fitted in closed form answers too little."""
    plain, refined = (
        compact(sheet.model, sheet.kv, sheet.ids, Wanted(P32, sheet.questions, refine=steps, accept=0.0))
        for steps in (0, 40)
    )
    exact = [sheet.exact(made.kv) for made in (plain, refined)]
    assert exact[0] >= 0.5 and exact[1] >= exact[0] + 0.15, exact
    assert (plain.about.refine, refined.about.refine) == (0, 40)


def test_refining_goes_by_questions_and_is_left_out_where_it_answers_less(sheet, monkeypatch):
    """Towards the document read again it answered 22 questions of 100 at 16x, and the gate said 99."""
    assert make(sheet.model, sheet.kv, sheet.ids, Wanted(P16, refine=40)).refine == 0
    monkeypatch.setattr(job, "refine", lambda model, kv, *rest, **more: torch.zeros_like(kv))
    parts = split(sheet.questions)
    made = make(sheet.model, sheet.kv, sheet.ids, Wanted(P32, parts.fit, refine=5), parts.validation)
    assert made.refine == 0 and bool(made.kv.any())


def test_the_gate_goes_by_questions_that_the_fit_has_not_seen(sheet):
    """It is made for half of the facts, and asked for the others."""
    half, others = sheet.every(2), sheet.every(2, 1)
    asked = questions_on(half.document, TRAINED[:1]), questions_on(others.document, [UNSEEN])
    wanted = Wanted(P32, *asked, refine=0, accept=0.0)
    made = compact(sheet.model, sheet.kv, sheet.ids, wanted)
    found, unseen = made.about.measured, others.exact(made.kv)
    assert unseen <= half.exact(made.kv) - 0.2, "the control"
    assert (found.of, found.count) == ("questions", len(others.document.facts))
    assert found.cartridge == pytest.approx(unseen, abs=0.02) and found.interval[0] < unseen < found.interval[1]
    with pytest.raises(CanaryFailed, match=f"it answers {found.cartridge:.1%} of {found.count} questions"):
        compact(sheet.model, sheet.kv, sheet.ids, replace(wanted, accept=ACCEPT))


@pytest.mark.parametrize("rows_bytes", [1, 5_000_000])
def test_the_teacher_holds_no_more_copies_of_the_document_than_its_bound(sheet, monkeypatch, rows_bytes):
    def taught() -> torch.Tensor:
        given = {"form": "chat", "top_k": 4, "answer_tokens": 2}
        return lesson.prepare(sheet.model, sheet.ids, sheet.questions, sheet.kv, **given).log_probs

    expected, held, cache = taught(), list[int](), sheet.model.cache
    monkeypatch.setattr(packing, "ROWS_BYTES", rows_bytes)
    monkeypatch.setattr(sheet.model, "cache", lambda kv, rows: held.append(rows * kv.nbytes) or cache(kv, rows))
    found = taught()
    assert max(held) <= max(rows_bytes, sheet.kv.nbytes), "one copy at least"
    assert torch.allclose(found, expected, atol=1e-3)


def test_what_was_built_is_compacted_later_and_only_that(sheet, tmp_path, cli):
    """What is compacted as it is built answers in served/test_matrix_shipped."""
    (tmp_path / "sheet.txt").write_text(sheet.document.text)
    asked = write_questions(tmp_path / "questions.jsonl", sheet.document)
    build = ("build", "--model", MODEL, "--dtype", "float32")
    whole = cli.json(*build, "--document", tmp_path / "sheet.txt", "--chunk-size", 64, "--id", "whole")
    shown = cli.json(*build, "--from", "whole", "--id", "later", "--compact", P4, "--payload", "int8", "--refine", 0,
                     "--questions", asked)  # fmt: skip
    assert shown["positions"] == P4 and shown["measured"]["count"] == len(sheet.questions) // 10
    manifest, root = cli.artefact("later")
    about = manifest.provenance
    assert (manifest.kind, manifest.positions, manifest.document.count) == ("trained", P4, len(sheet.ids))
    assert about.tool.endswith(" compact") and about.compaction.queries == "questions" and manifest.canary
    assert sheet.exact(read_kv(manifest, root).float()) >= 0.97 and about.origin is not None
    assert manifest.payload_bytes < 0.35 * P4 / len(sheet.ids) * whole["bytes"]
    again = cli.refused("build", "--from", "later", "--model", MODEL, "--id", "t", "--compact", "8x")
    assert "only a prefill cartridge" in again


def test_kv_of_another_model_or_of_a_corrupt_cartridge_is_not_read(sheet, tmp_path):
    made = make_artifact(tmp_path / "a", positions=16, fingerprint=sheet.model.fingerprint, token_ids=[7] * 16)
    other = structs.replace(made.manifest, fingerprint=structs.replace(made.manifest.fingerprint, layers=4))
    with pytest.raises(ModelMismatch, match="doc@1 is not of .*layers: 4, not 3"):
        read_checked(other, tmp_path / "a", sheet.model)
    flip_bit(tmp_path / "a" / PAYLOAD, made.manifest.payload.data_offset_bytes + 9)
    with pytest.raises(ArtifactError):
        read_checked(made.manifest, tmp_path / "a", sheet.model)


def _error(sheet: Sheet, kv: torch.Tensor) -> float:
    """Return how far the attention output of answer tokens is from the document's, relative, over all layers."""
    found = 0.0
    for number, asked in enumerate(sheet.asked.layers):
        part = Layer(*(plane[:, :, sheet.asked.answers] for plane in asked))
        keys, values = kv[:, number].transpose(1, 2)
        found += float((attended(part, keys, values) - part.wanted).norm() / part.wanted.norm())
    return found


@pytest.mark.parametrize("name, instead, times", [
    ("_fit", lambda head, keys, values, weights: values, 1.03), ("fitted_keys", lambda start, *rest: start, 2),
], ids=["values", "keys"])  # fmt: skip
def test_what_is_fitted_beats_the_mean_of_those_it_stands_for(sheet, four, monkeypatch, name, instead, times):
    monkeypatch.setattr(closed, name, instead)
    assert times * _error(sheet, four) < _error(sheet, compacted(sheet.kv, sheet.asked, P4))
