"""Compaction: a quarter of a sheet's positions answers what the sheet does, without training, when its keys are re-rotated."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch
from commands import Cli
from lessons import MODEL, TRAINED, UNSEEN, write_questions
from msgspec import structs
from recall.ward import Document, Fact, write_document

from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.errors import ArtifactError, CanaryFailed, ModelMismatch, UnsupportedModel
from lmcache_cartridge.make.compact import closed, job, references
from lmcache_cartridge.make.compact.closed import attended, compacted, rerotated
from lmcache_cartridge.make.compact.groups import groups
from lmcache_cartridge.make.compact.job import compact, make
from lmcache_cartridge.make.compact.keys import fitted_keys
from lmcache_cartridge.make.compact.references import Layer, References, collect
from lmcache_cartridge.make.compact.wanted import Wanted, references_of, repeated
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import read_checked, read_kv
from lmcache_cartridge.make.questions import Question, split
from lmcache_cartridge.make.train import lesson, packing
from lmcache_cartridge.make.train.initial import FROZEN, RATE, prefilled
from lmcache_cartridge.make.train.packing import Example

P4, P16, P32 = 128, 32, 16
SINGLE = ("--dtype", "float32")
"""In bfloat16 a processor may take several times as long; one test has the model in its own dtype."""


class Sheet(NamedTuple):
    """A sheet of some 500 tokens, and what its questions ask of its KV."""

    model: CausalModel
    document: Document
    facts: tuple[Fact, ...]
    ids: list[int]
    kv: torch.Tensor
    questions: list[Question]
    asked: References

    def exact(self, kv: torch.Tensor) -> float:
        """Return the share of facts answered right after KV in bfloat16, in a wording that nothing was made with."""
        prompts = [self.model.question_ids(UNSEEN.format(**fact._asdict()), "chat") for fact in self.facts]
        wanted = [self.model.encode(fact.value, special=False) for fact in self.facts]
        found = self.model.answers_after(kv.bfloat16().float(), prompts, 3)
        return sum(got == right for got, right in zip(found, wanted, strict=True)) / len(wanted)


@pytest.fixture(scope="module")
def sheet():
    return _sheet("compact test", 480)


@pytest.fixture(scope="module")
def averaged(sheet):
    """Return KV of a sixteenth of the positions, and the same where something of the fit is left out."""
    fitted = compacted(sheet.kv, sheet.asked, P16)

    def made(name: str, instead: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(closed, name, instead)
            return fitted, compacted(sheet.kv, sheet.asked, P16)

    return made


def _sheet(seed: str, tokens: int) -> Sheet:
    model = CausalModel(MODEL)
    model.model.float()
    document = write_document(random.Random(seed), tokens)
    ids = model.encode(document.text, special=True)
    kv = prefilled(model, ids)
    questions = [Question(text.format(**fact._asdict()), fact.value) for fact in document.facts for text in TRAINED]
    asked = collect(model, kv, references_of(model, ids, Wanted(P4, questions)))
    return Sheet(model, document, document.facts, ids, kv, questions, asked)


def examples_of(sheet: Sheet) -> list[Example]:
    """Return the sheet's questions, numbered as a lesson's."""
    asked = references_of(sheet.model, sheet.ids, Wanted(P4, sheet.questions))
    firsts = itertools.accumulate((len(example.answer) for example in asked), initial=0)
    return [example._replace(first=first) for example, first in zip(asked, firsts, strict=False)]


@pytest.fixture(scope="module")
def four(sheet):
    """A quarter of the positions, keys as in the document."""
    return compacted(sheet.kv, sheet.asked, P4)


# What is asked.


def test_the_attention_over_the_document_and_the_question_is_the_model_s_own(sheet):
    for number, asked in enumerate(sheet.asked.layers):
        keys, values = sheet.kv[:, number].transpose(1, 2)
        error = (attended(asked, keys, values) - asked.wanted).norm() / asked.wanted.norm()
        assert error < 1e-4


def test_the_document_read_again_asks_for_every_token_once(sheet):
    examples = repeated(sheet.ids)
    assert sheet.ids[1:] == [token for example in examples for token in example.answer]
    found = collect(sheet.model, sheet.kv, examples)
    assert len(found.answers) == len(sheet.ids) - 1 and found.answers.all()


def test_of_too_many_tokens_those_that_predict_answers_are_kept(sheet, monkeypatch):
    examples = references_of(sheet.model, sheet.ids, Wanted(P16, sheet.questions))
    answers = sum(len(example.answer) for example in examples)
    monkeypatch.setattr(references, "MOST_QUERIES", answers + 7)
    found = collect(sheet.model, sheet.kv, examples)
    assert len(found.answers) == answers + 7
    assert int(found.answers.sum()) == answers
    assert {plane.shape[2] for layer in found.layers for plane in layer} == {answers + 7}


def test_an_answer_is_asked_for_and_its_end_is_not(sheet):
    questions = [Question("ward of Mora?", "7"), Question("blood of Mora?")]
    asked = references_of(sheet.model, sheet.ids, Wanted(P16, questions))
    assert references_of(sheet.model, sheet.ids, Wanted(P4, questions)) == [*asked, *repeated(sheet.ids)], "p has room"
    seven, end = sheet.model.encode("7", special=False), sheet.model.end_ids[:1]
    assert [example.answer for example in asked] == [seven, end], (
        "what is asked at the end of a question needs no answer"
    )


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
    long = long._replace(facts=long.facts[::3])
    right = long.exact(rerotated(long.model, kv, len(long.ids)))
    assert right >= 0.97
    assert long.exact(kv) <= right - 0.3


def test_values_by_least_squares_beat_the_mean_of_those_they_stand_for(sheet, averaged):
    fitted, mean = averaged("_fit", lambda head, keys, values, weights: values)
    assert _error(sheet, fitted) < _error(sheet, mean)


def _error(sheet: Sheet, kv: torch.Tensor) -> float:
    """Return how far the attention output of answer tokens is from the document's, relative, over all layers."""
    found = 0.0
    for number, asked in enumerate(sheet.asked.layers):
        part = Layer(*(plane[:, :, sheet.asked.answers] for plane in asked))
        keys, values = kv[:, number].transpose(1, 2)
        found += float((attended(part, keys, values) - part.wanted).norm() / part.wanted.norm())
    return found


def test_fitted_keys_beat_the_mean_of_those_they_stand_for(sheet, averaged):
    made = averaged("fitted_keys", lambda start, *rest: start)
    exact = [sheet.exact(rerotated(sheet.model, kv, len(sheet.ids))) for kv in made]
    assert exact[0] >= 0.85 and exact[0] >= exact[1] + 0.3, exact


def test_keys_that_give_the_wanted_shares_are_found():
    draw = torch.Generator().manual_seed(0)
    right, queries = torch.randn(6, 8, generator=draw), 2 * torch.randn(400, 8, generator=draw)
    own = torch.randn(400, generator=draw)
    shares = torch.cat([queries @ right.T, own[:, None]], dim=1).softmax(1)[:, :-1]
    start = right.clone()
    start[FROZEN:] = 0
    found = fitted_keys(start, queries, own, shares, torch.ones(400), 64)
    assert torch.equal(found[:FROZEN], right[:FROZEN])
    got = torch.cat([queries @ found.T, own[:, None]], dim=1).softmax(1)[:, :-1]
    assert (got - shares).abs().mean() < 0.02


def test_values_that_are_alike_are_one_group():
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 4, generator=draw)
    which = torch.randint(5, (60,), generator=draw)
    found = groups(centres[which] + 0.01 * torch.randn(60, 4, generator=draw), torch.ones(60), 5)
    assert len(set(zip(found.tolist(), which.tolist(), strict=True))) == 5
    # Where there is room each is alone; what nobody looks at gives way.
    assert sorted(groups(centres, torch.ones(5), 5).tolist()) == [0, 1, 2, 3, 4]
    weights = torch.tensor([1.0, 1.0, 1.0, 1e-6, 1e-6])
    assert len(set(groups(centres, weights, 3)[:3].tolist())) == 3


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
    assert made.about.queries == "repeat"
    assert sheet.exact(made.kv) >= 0.9
    found = made.about.measured
    assert (found.of, found.count, found.document) == ("tokens that it was made for", len(sheet.ids) - 1, 1.0)
    assert 0.8 <= found.kept <= 1.0 and found.nothing < found.cartridge
    assert said[-1].startswith("no questions were given, so how it answers is not known")


def test_refining_answers_more_where_it_is_kept(sheet):
    """At 32x, where what is fitted in closed form answers too little."""
    said: list[str] = []
    plain, refined = (
        compact(
            sheet.model, sheet.kv, sheet.ids, Wanted(P32, sheet.questions, refine=steps, accept=0.0), say=said.append
        )
        for steps in (0, 40)
    )
    exact = [sheet.exact(made.kv) for made in (plain, refined)]
    assert exact[0] >= 0.5 and exact[1] >= exact[0] + 0.15, exact
    assert [made.about.refine for made in (plain, refined)] == [0, 40]
    assert [line.partition(":")[0] for line in said if ": " in line and line.endswith(" s")] == [
        "reference queries", "keys and values", "comparison with the document", "reference queries", "keys and values",
        "validation", "refine, 40 steps a layer", "comparison with the document",
    ]  # fmt: skip


def test_refining_goes_by_questions_and_is_left_out_where_it_answers_less(sheet, monkeypatch):
    """Towards the document read again it answered 22 questions of 100 at 16x, and the gate said 99."""
    assert make(sheet.model, sheet.kv, sheet.ids, Wanted(P16, refine=40)).refine == 0
    monkeypatch.setattr(job, "refine", lambda model, kv, *rest, **more: torch.zeros_like(kv))
    parts = split(sheet.questions)
    made = make(sheet.model, sheet.kv, sheet.ids, Wanted(P32, parts.fit, refine=5), parts.validation)
    assert made.refine == 0 and bool(made.kv.any())


def test_the_gate_goes_by_questions_that_the_fit_has_not_seen(sheet):
    """It is made for half of the facts, and asked for the others."""
    half = [Question(TRAINED[0].format(**fact._asdict()), fact.value) for fact in sheet.facts[::2]]
    others = [Question(UNSEEN.format(**fact._asdict()), fact.value) for fact in sheet.facts[1::2]]
    made = compact(sheet.model, sheet.kv, sheet.ids, Wanted(P32, half, others, refine=0, accept=0.0))
    found = made.about.measured
    seen, unseen = (sheet._replace(facts=sheet.facts[first::2]).exact(made.kv) for first in (0, 1))
    assert unseen <= seen - 0.2, "the control"
    assert (found.of, found.count) == ("questions", len(others))
    assert found.cartridge == pytest.approx(unseen, abs=0.02) and found.interval[0] < unseen < found.interval[1]
    with pytest.raises(CanaryFailed, match=f"it answers {found.cartridge:.1%} of {len(others)} questions"):
        compact(sheet.model, sheet.kv, sheet.ids, Wanted(P32, half, others, refine=0))


@pytest.mark.parametrize("rows_bytes", [1, 5_000_000])
def test_the_teacher_holds_no_more_copies_of_the_document_than_its_bound(sheet, monkeypatch, rows_bytes):
    expected = lesson.taught(sheet.model, sheet.kv, examples_of(sheet), 4)
    held: list[int] = []
    cache = sheet.model.cache
    monkeypatch.setattr(packing, "ROWS_BYTES", rows_bytes)
    monkeypatch.setattr(sheet.model, "cache", lambda kv, rows: held.append(rows * kv.nbytes) or cache(kv, rows))
    found = lesson.taught(sheet.model, sheet.kv, examples_of(sheet), 4)
    assert max(held) <= max(rows_bytes, sheet.kv.nbytes), "one copy at least"
    assert torch.allclose(found.log_probs, expected.log_probs, atol=1e-3)


class Home(NamedTuple):
    """A home, and what says that the sheet is to be compacted in it."""

    cli: Cli
    document: tuple[object, ...]
    asked: tuple[object, ...]

    def read(self, name: str) -> tuple[Manifest, torch.Tensor]:
        manifest, root = self.cli.artefact(name)
        return manifest, read_kv(manifest, root).float()


@pytest.fixture
def home(sheet, tmp_path, cli):
    (tmp_path / "sheet.txt").write_text(sheet.document.text)
    questions = write_questions(tmp_path / "questions.jsonl", sheet.document)
    document = ("--model", MODEL, "--document", tmp_path / "sheet.txt", "--chunk-size")
    return Home(cli, document, ("--questions", questions))


def test_what_keeps_too_little_is_not_registered_unless_it_is_accepted(home):
    argv = ("build", *home.document, 16, "--id", "s", "--compact", "32x", "--refine", 0, *home.asked)
    said = home.cli.refused(*argv)
    assert "nothing is registered: it answers " in said and "--accept 0." in said
    assert not (home.cli.home / "cartridges" / "s").exists()
    assert home.cli.json("list") == []
    shown = home.cli.json(*argv, "--accept", 0.1)
    assert 0.1 <= shown["measured"]["kept"] < 0.8
    assert home.read("s")[0].provenance.compaction.measured.kept == shown["measured"]["kept"]


def test_a_model_in_its_own_dtype_refines_too(home):
    """Whether the steps answer more is another matter, which goes by how a processor rounds bfloat16."""
    how = ("--compact", "32x", "--refine", 3, "--accept", 0, *home.asked)
    ran = home.cli("build", *home.document, 16, "--id", "s", *how)
    assert ran.status == 0 and "validation questions refined" in ran.err
    assert home.read("s")[0].provenance.compaction.refine in (0, 3)


def test_build_compact_and_compact_of_what_was_built_are_the_same_but_for_rounding(sheet, home):
    cli, how = home.cli, (*home.asked, *SINGLE)
    cli.json("build", *home.document, 64, "--id", "whole", *SINGLE)
    shown = cli.json("build", *home.document, 64, "--id", "at-once", "--compact", "4x", *how)
    assert shown["positions"] == P4 and shown["measured"]["count"] == len(sheet.questions) // 10
    later = ("--id", "later", "--compact", P4, "--payload", "int8")
    cli.json("build", "--from", "whole", "--model", MODEL, *later, *how)
    for name, tool in (("at-once", "build"), ("later", "compact")):
        manifest, kv = home.read(name)
        about = manifest.provenance.compaction
        assert manifest.kind == "trained" and manifest.document is not None and manifest.canary is not None
        assert manifest.provenance.tool.endswith(f" {tool}") and about is not None and about.queries == "questions"
        assert (manifest.document.count, manifest.positions) == (len(sheet.ids), P4)
        assert sheet.exact(kv) >= 0.97, name
    assert home.read("later")[0].payload_bytes < 0.35 * home.read("at-once")[0].payload_bytes
    assert home.read("later")[0].provenance.origin is not None
    again = cli.refused("build", "--from", "later", "--model", MODEL, "--id", "t", "--compact", "8x")
    assert "only a prefill cartridge" in again


def test_that_start_is_refined_and_trained_at_a_rate_of_its_own(sheet, home):
    """At 32x, where what is fitted in closed form answers too little."""
    common = ("train", *home.document, 16, "--compress", P32, *home.asked, "--set", "init=compact", "--accept", 0,
              "--set", "answer_tokens=4", "--set", "patience=0", "--set", "check_every=20", "--set", "schedule=cosine",
              *SINGLE)  # fmt: skip
    closed = make(sheet.model, sheet.kv, sheet.ids, Wanted(P32, split(sheet.questions).fit)).kv
    home.cli.json(*common, "--id", "start", "--steps", 1, "--set", "rate=1e-6")
    home.cli.json(*common, "--id", "trained", "--steps", 40)
    rate = home.read("trained")[0].provenance.training.rate
    assert home.read("start")[0].provenance.training.init == "compact"
    assert rate == pytest.approx(RATE * float(sheet.kv[0].std()), rel=0.05)
    right = [sheet.exact(kv) for kv in (closed, home.read("start")[1], home.read("trained")[1])]
    assert right[0] <= right[1] < right[2], right


def test_kv_of_another_model_or_of_a_corrupt_cartridge_is_not_read(sheet, home):
    home.cli.json("build", *home.document, 64, "--id", "whole")
    _, root = home.cli.artefact("whole")
    manifest, kv = home.read("whole")
    assert torch.equal(read_checked(manifest, root, sheet.model).float(), kv), "the control"
    other = structs.replace(manifest, fingerprint=structs.replace(manifest.fingerprint, layers=4))
    with pytest.raises(ModelMismatch, match="whole@1 is not of .*layers: 4, not 3"):
        read_checked(other, root, sheet.model)
    payload = root / manifest.payload.file
    stored = bytearray(payload.read_bytes())
    stored[-9] ^= 1
    payload.chmod(0o644)
    payload.write_bytes(stored)
    with pytest.raises(ArtifactError):
        read_checked(manifest, root, sheet.model)
