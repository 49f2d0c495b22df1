"""Training: the KV learns and nothing else does, an interrupted run goes on exactly, and what is stored is what PEFT feeds."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import Cli, Ran
from families import FAMILIES, make_model
from lessons import MODEL, School, answered, questions_on, school, tokens_of, write_questions
from recall.ward import Document, write_document

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.manifest import Provenance
from lmcache_cartridge.errors import CartridgeError, TrainingDiverged, UnsupportedModel
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make import gate
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import read_kv
from lmcache_cartridge.make.questions import Question, read, save
from lmcache_cartridge.make.train import lesson
from lmcache_cartridge.make.train.initial import (
    BLOCK_TOKENS,
    FROZEN,
    INITIALS,
    SAMPLE_TOKENS,
    initial_kv,
    prefilled,
)
from lmcache_cartridge.make.train.job import FILES
from lmcache_cartridge.make.train.packing import answer_logits, pack_examples
from lmcache_cartridge.make.train.trainer import (
    CHECKPOINT,
    LOSS,
    Recipe,
    Score,
    Trainer,
    divergence,
)

P = 32
RECIPE = Recipe(steps=80, batch=32, rate=0.3, warmup=5, check_every=20, jitter=5)
PROVENANCE = Provenance(tool="test", created="2026-01-01T00:00:00Z")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return school()


def _trainer(made: School, init: str = "sci", recipe: Recipe = RECIPE, **lesson: Any) -> Trainer:
    kv = initial_kv(init, made.model, made.ids, P, seed=0)
    return Trainer(made.model, kv, made.lesson._replace(**lesson), made.validation, recipe)


@pytest.fixture(scope="module")
def run(made):
    """A finished training from sampled chunks, the KV it started from, and the model's weights before it."""
    weights = {name: tensor.clone() for name, tensor in made.model.model.state_dict().items()}
    trainer = _trainer(made)
    start = trainer.kv()
    return trainer, trainer.run(), start, weights


# It learns.


def test_nothing_but_the_parameters_of_peft_is_trained_and_of_these_no_frozen_position(made, run):
    _, result, start, weights = run
    assert all(torch.equal(tensor, weights[name]) for name, tensor in made.model.model.state_dict().items())
    assert torch.equal(result.kv[:, :, :FROZEN], start[:, :, :FROZEN])
    assert ((result.kv - start).abs().amax(dim=(0, 1, 3, 4))[FROZEN:] > 0.01).all(), "every other one moves"


def test_it_answers_wordings_it_never_saw_and_its_start_did_not(made, run):
    _, result, start, _ = run
    random_kv = initial_kv("random", made.model, made.ids, P, 0)
    assert answered(made.model, random_kv, made.unseen) <= 0.2
    assert answered(made.model, start, made.unseen) <= 0.4
    assert answered(made.model, result.kv, made.unseen) >= 0.6
    assert answered(made.model, torch.zeros_like(start), made.unseen) <= 0.2, "nothing but the KV answers"


@pytest.mark.parametrize("change", [{"objective": "next-token"}, {"autocast": True}], ids=str)
def test_other_ways_to_train_learn_too(made, change):
    """Of few questions: in bfloat16 a CPU may take ten times as long."""
    few = made._replace(lesson=made.lesson._replace(examples=made.lesson.examples[:24]), validation=[0])
    nobody = {"log_probs": None, "tokens": None} if "objective" in change else {}
    recipe = replace(RECIPE, steps=40, check_every=60, batch=8, rate=0.8, **change)
    trainer = _trainer(few, recipe=recipe, **nobody)
    before = trainer.score(trainer.examples)
    assert trainer.run().kv.dtype == torch.float32
    assert trainer.score(trainer.examples).loss < 0.6 * before.loss


def test_a_loss_that_is_not_finite_ends_training_in_a_sentence(made):
    with pytest.raises(TrainingDiverged, match="loss of step 1 is not finite; try a lower rate"):
        _trainer(made, log_probs=made.lesson.log_probs * math.nan).run()


# It goes on, and it stops.


def test_a_checkpoint_that_is_a_program_is_not_run(made, tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.mkdir, (tmp_path / "ran",)

    torch.save({"recipe": Bomb()}, tmp_path / CHECKPOINT)
    with pytest.raises(CartridgeError, match="no checkpoint"):
        _trainer(made).run(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_the_best_kv_is_kept_and_the_rate_falls_from_it_and_not_from_the_last(made):
    harmful = replace(RECIPE, steps=20, check_every=1, patience=2, rate=50.0, warmup=0)
    trainer = _trainer(made, "first-k", harmful)
    start = trainer.kv()
    trainer.train(None, lambda step, loss: None, 2)
    assert not torch.equal(trainer.kv(), start), "such steps can only harm"
    trainer.recipe = replace(trainer.recipe, rate=1e-12)
    trainer.train(None, lambda step, loss: None, 3)
    assert torch.allclose(trainer.kv(), start, atol=1e-6)


# What is stored is what PEFT feeds.


def test_a_packed_question_is_answered_as_if_it_stood_alone_behind_its_gap(made):
    kv = initial_kv("sci", made.model, made.ids, P, 0)
    examples = made.lesson.examples[:40] + made.unseen.examples
    apart, alone = [number % 3 * 7 for number in range(len(examples))], []
    packed = pack_examples(examples, made.model.device, apart)
    assert 1 < len(packed.rows) < len(examples) / 10, "many in a row, and several rows"
    for example, gap in zip(examples, apart, strict=True):
        ids = torch.tensor([[*example.prompt, *example.answer[:-1]]])
        at = torch.arange(ids.shape[1])[None] + P + gap
        logits = made.model.model(ids, position_ids=at, past_key_values=made.model.cache(kv, 1)).logits
        alone.append(logits[0, -len(example.answer) :])
    found = answer_logits(made.model.model, made.model.cache(kv, len(packed.rows)), packed)
    assert torch.allclose(found, torch.cat(alone), atol=1e-3)


# Where it starts.


@pytest.mark.parametrize("init", INITIALS)
def test_every_start_has_the_documents_first_position_and_is_the_same_for_a_seed(made, init):
    kv, again, other = (initial_kv(init, made.model, made.ids, P, seed) for seed in (1, 1, 2))
    assert (kv.shape, kv.dtype) == ((2, 3, P, 2, 64), torch.float32)
    assert torch.equal(kv, again)
    assert torch.equal(kv, other) == (init == "first-k")
    assert torch.allclose(kv[:, :, :FROZEN], prefilled(made.model, made.ids)[:, :, :FROZEN], atol=1e-5)


def test_sci_is_a_prefill_of_chunks_from_all_over_the_document(made):
    ids = made.model.encode(write_document(random.Random(0), 1000).text, special=True)
    kv = initial_kv("sci", made.model, ids, 160, seed=2)
    drawn = tokens_of(made.model, kv, ids)
    assert torch.allclose(kv, prefilled(made.model, drawn), atol=1e-3), "at positions 0 to p - 1"
    chunks = [drawn[at : at + SAMPLE_TOKENS] for at in range(FROZEN, 160, SAMPLE_TOKENS)]
    starts = [i for chunk in chunks for i in range(len(ids)) if ids[i : i + len(chunk)] == chunk]
    assert len(starts) == 3 and starts[0] < 100 and starts[-1] > 800
    assert all(b - a >= SAMPLE_TOKENS for a, b in itertools.pairwise(starts)), "in the document's order"


# The teacher.


def _assert_taught(model: CausalModel, ids: list[int], found: lesson.Lesson) -> None:
    """Assert that the teacher's likeliest tokens of the first answers are the model's with the document."""
    for example in found.examples[:3]:
        rows = slice(example.first, example.first + len(example.answer))
        plain = model.logits([*ids, *example.prompt, *example.answer[:-1]], len(example.answer)).log_softmax(-1)
        taught, tokens = found.log_probs[rows], found.tokens[rows]
        assert torch.allclose(taught, plain.topk(tokens.shape[1]).values, atol=1e-3)
        assert torch.allclose(taught, plain.gather(1, tokens), atol=1e-3)


def test_of_a_long_document_no_more_than_a_block_is_computed_at_a_time(made, monkeypatch):
    ids = made.model.encode(write_document(random.Random(1), 3 * BLOCK_TOKENS).text, special=True)
    forward, lengths = made.model.model.model.forward, []
    monkeypatch.setattr(
        made.model.model.model,
        "forward",
        lambda *a, **k: (lengths.append(k["input_ids"].shape[1]), forward(*a, **k))[1],
    )
    kv = prefilled(made.model, ids)
    found = lesson.prepare(made.model, ids, [Question("ward of Mora?")], kv, form="chat", top_k=4, answer_tokens=2)
    assert max(lengths) <= BLOCK_TOKENS
    monkeypatch.undo()
    _assert_taught(made.model, ids, found)


def test_a_question_too_long_for_the_model_is_named(made):
    with pytest.raises(CartridgeError, match="'ward ward .*the model's context is 8192"):
        asked = [Question("ward " * 9000, "7")]
        lesson.prepare(made.model, made.ids, asked, torch.zeros(1), form="chat", top_k=4, answer_tokens=2)


@pytest.mark.parametrize("family, changes, why", [
    ("mistral", {"sliding_window": 512}, None),
    ("gemma3", {"sliding_window": 64}, "see 64 positions, and the document .* has 1"),
    ("llama4", {"attention_chunk_size": 64, "layer_types": ["chunked_attention", "full_attention"] * 2}, "see 64"),
    ("falcon alibi", {}, "ALiBi"),
])  # fmt: skip
def test_what_training_would_show_otherwise_than_engines_do_is_refused(tmp_path, family, changes, why):
    config = FAMILIES[family]()
    config.update(changes)
    model, ids = CausalModel(str(make_model(tmp_path / "model", config))), list(range(5, 105))
    with pytest.raises(UnsupportedModel, match=why) if why else nullcontext():
        kv = prefilled(model, ids)
        found = lesson.prepare(model, ids, [Question("ward?")], kv, form="text", top_k=4, answer_tokens=4)
        _assert_taught(model, ids, found)


@pytest.mark.parametrize("room, jitter", [(3, 3), (-9, 0)])
def test_no_question_is_put_behind_the_end_of_the_models_context(made, monkeypatch, room, jitter):
    longest = max(len(e.prompt) + len(e.answer) for e in made.lesson.examples)
    monkeypatch.setattr(made.model.model.config, "max_position_embeddings", P + longest + room)
    assert _trainer(made).jitter == jitter


def test_a_lesson_is_kept_and_found_again_and_another_one_is_not(made, tmp_path, monkeypatch):
    questions, kv = [Question("ward of Mora?", "7"), Question("blood of Mora?")], prefilled(made.model, made.ids)
    given = {"form": "chat", "answer_tokens": 2, "directory": tmp_path}
    first, other = (lesson.prepare(made.model, made.ids, questions, kv, top_k=k, **given) for k in (3, 4))
    assert other.tokens.shape[1] == 4
    monkeypatch.setattr(CausalModel, "cache", None)  # nothing is computed
    again = lesson.prepare(made.model, made.ids, questions, kv, top_k=3, **given)
    assert again.examples == first.examples
    assert torch.equal(again.log_probs, first.log_probs) and torch.equal(again.tokens, first.tokens)


@pytest.mark.parametrize("k", [1, 20, 50])
def test_the_divergence_is_that_of_kullback_and_leibler_with_all_unlikely_tokens_as_one(k):
    draw = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(2, 6, 50, generator=draw).mul(3).log_softmax(-1)
    order = teacher.argsort(descending=True)
    likely = [log_probs.gather(1, order) for log_probs in (teacher, student)]
    p, q = (torch.cat([each[:, :k], each[:, k:].logsumexp(1, keepdim=True)], 1) for each in likely)
    expected = torch.nan_to_num(p.exp() * (p - q)).sum(-1)
    assert torch.allclose(divergence(*(each[:, :k] for each in likely)), expected, atol=1e-3)


def test_a_student_that_is_sure_of_another_token_is_drawn_to_the_teachers():
    sure = torch.zeros(1, 10)
    sure[0, 3] = 200.0
    sure.requires_grad_()
    divergence(torch.tensor([[0.6, 0.3]]).log(), sure.log_softmax(-1)[:, :2]).sum().backward()
    assert sure.grad.isfinite().all() and sure.grad[0, 0] < 0


# The command.


class Train(Cli):
    """Trains on a short sheet for a moment, by the command."""

    def __init__(self, directory: Path, document: Document) -> None:
        super().__init__(directory / "home")
        (directory / "sheet.txt").write_text(document.text)
        self.given = ["train", "--model", MODEL, "--document", directory / "sheet.txt", "--id", "a", "--chunk-size", 16, "--compress", "4x",
                      "--questions", write_questions(directory / "asked.jsonl", document), "--set", "answer_tokens=4"]  # fmt: skip
        self.briefly = ["--set", "init=sci", "--steps", 6, "--set", "check_every=2", "--set", "rate=0.2", "--accept", 0]

    def __call__(self, *words: object) -> Ran:
        return super().__call__(*self.given, *self.briefly, *words)

    def files(self, name: str = "a") -> Path:
        return self.home / "training" / name / "1"


@pytest.fixture
def train(made, tmp_path):
    return Train(tmp_path, made.document)


def test_the_command_registers_a_trained_cartridge_that_carries_its_document(made, train, monkeypatch):
    """Also where a run before it ended between writing and registering."""
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "register", Mock(side_effect=OSError("disk full")))
        assert train().status == 1
    written = reading.load_manifest(train.home / "cartridges" / "a" / "1")
    result = train.json()
    manifest, root = train.artefact("a")
    assert manifest.digest == result["digest"] == written.digest and manifest.name == "a@1"
    assert (manifest.kind, manifest.positions, manifest.payload.chunk_tokens) == ("trained", P, 16)
    assert reading.load_document_ids(manifest, root).tolist() == made.ids
    training = manifest.provenance.training
    assert (training.init, training.steps, training.loss) == ("sci", 6, result["loss"])
    assert training.measured.cartridge == result["measured"]["cartridge"]
    assert json.loads(Path(result["losses"]).read_text().splitlines()[-1])["step"] == 6
    assert (train.files() / "loss.png").exists() and not (train.files() / CHECKPOINT).exists()


def test_what_is_stored_in_int8_is_what_is_measured(train, monkeypatch):
    measure, asked = gate.measure, []
    monkeypatch.setattr(gate, "measure", lambda *given, **more: (asked.append(given[2]), measure(*given, **more))[1])
    plain, small = train.json("--id", "plain"), train.json("--payload", "int8")
    assert small["loss"] == plain["loss"], "the training is the same"
    manifest, root = train.artefact("a")
    assert (manifest.kind, manifest.payload.encoding, small["bytes"]) == ("trained", "int8", manifest.payload_bytes)
    assert torch.equal(asked[-1], read_kv(manifest, root)) and not torch.equal(*asked)


def test_by_its_defaults_it_starts_from_a_compaction_ends_by_itself_and_keeps_what_the_document_adds(train):
    train.briefly = ["--set", "check_every=5", "--set", "batch=16"]
    ran = train()
    assert ran.status == 0, ran.err
    record = train.artefact("a")[0].provenance.training
    assert record.init == "compact" and "\nvalidation: " in ran.err, "refined where that is better"
    assert record.rate == pytest.approx(0.05, rel=0.3)
    assert record.steps < Recipe().steps
    assert f"ended after {record.steps} steps: validation questions got no better" in ran.err
    assert record.measured.kept >= 0.9
    assert f"it keeps {record.measured.kept:.0%} of what the document adds" in ran.err


@pytest.mark.parametrize(
    "scores, least, best_step, waited",
    [
        ([(1.0, 0.5), (1.0, 0.0020), (1.0, 0.0015), (1.0, 0.0012)], 0.0020, 3, 2),  # as good as nothing
        ([(0.5, 0.3), (0.6, 0.1), (0.4, 0.2)], 0.1, 1, 1),  # a few tokens at many nats do not outweigh the others
    ],
)
def test_the_best_is_what_misses_least(made, scores, least, best_step, waited):
    trainer, given = _trainer(made, recipe=replace(RECIPE, check_every=1)), iter(scores)
    trainer.score = lambda examples: Score(*next(given))
    trainer.train(None, lambda step, loss: None, len(scores) - 1)
    assert (trainer.least_missed, trainer.best_step, trainer.waited) == (least, best_step, waited)


def test_a_cartridge_that_answers_badly_is_not_registered_unless_that_is_accepted(train):
    said = train.refused("--accept", "0.8")
    assert "nothing is registered: it answers " in said and "must keep 80%" in said
    assert not (train.home / "cartridges").exists()
    losses = train.files() / LOSS
    written = losses.stat().st_mtime_ns
    accept = re.search(r"with --accept ([\d.]+)\n", said)[1]
    ran = train("--accept", accept)
    assert (ran.status, losses.stat().st_mtime_ns) == (0, written), "nothing is trained again"
    assert f"registered as --accept {float(accept):g} says: it answers " in ran.err
    assert train.artefact("a")[0].name == "a@1"


@pytest.mark.parametrize("nothing, document, cartridge, kept", [
    (0.05, 1.0, 0.29, 0.2526), (0.5, 0.9, 0.9, 1.0), (0.5, 0.9, 0.5, 0.0), (0.5, 0.54, 0.54, None),
])  # fmt: skip
def test_the_gate_judges_by_what_the_document_adds(nothing, document, cartridge, kept):
    """Where that is little the questions tell nothing."""
    assert gate.measured("questions", 50, nothing, document, cartridge).kept == (kept and pytest.approx(kept, abs=1e-4))


def test_a_long_answer_is_not_right_because_each_of_its_tokens_would_follow_the_right_ones(made):
    whole = prefilled(made.model, made.ids)
    texts = [f"ward of {fact.patient}?" for fact in made.document.facts[:3]]
    long = [Question(text, " ".join(["7"] * 12)) for text in texts]
    assert gate.measure(made.model, whole, whole, long, "chat", 20).cartridge < 0.2


def test_no_question_that_measures_it_has_any_part_in_the_cartridge(train, made, tmp_path):
    """The control: the same training with other answers to the questions that measure is the same cartridge."""
    test = questions_on(made.document, ["{attribute} {patient}?"])[:8]
    for name in ("right", "wrong"):
        save([q if name == "right" else q._replace(answer="none") for q in test], tmp_path / name)
        measured = train.json("--id", name, "--held-out", tmp_path / name, "--set", "rate=20")["measured"]
        chosen, choosing, asked = ({q.text for q in read(train.files(name) / file)} for file in FILES)
        assert len(asked) == measured["count"] == 8
        assert not (chosen & choosing or asked & (chosen | choosing))
    right, wrong = (train.artefact(name)[0].payload.checksums for name in ("right", "wrong"))
    assert right == wrong
    assert measured["document"] <= 0.2, "but they were asked"


def test_an_interrupted_command_goes_on_says_how_and_ends_as_if_it_had_not_been(train, monkeypatch):
    train.json("--id", "whole")
    step, steps = torch.optim.AdamW.step, itertools.count(1)

    def interrupted(*given: Any, **named: Any) -> None:
        step(*given, **named)
        if next(steps) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    assert train().status == 130
    assert not (train.home / "cartridges" / "a").exists()
    assert (train.files() / "loss.png").exists()
    said = train.refused("--set", "rate=0.1")
    assert "differs in recipe" in said and "--restart" in said
    ran = train()
    assert ran.status == 0 and "going on with the training" in ran.err
    assert next(steps) == 5 + 6 - 4 + 1, "from the checkpoint at 4"
    whole, cut = (((train.files(name) / LOSS).read_text(), train.artefact(name)[0].digest) for name in ("whole", "a"))
    assert whole == cut


def test_restart_forgets_a_run_and_what_lies_there_keeps_its_version(train):
    train.files().mkdir(parents=True)
    (train.files() / "run.json").write_text(json.dumps({"id": "a"}))
    for name in FILES:
        save([Question(name)], train.files() / name)
    train.refused()
    assert train.json("--restart")["name"] == "a@1"
    (train.home / "cartridges" / "a" / "2").mkdir()
    result = train.json("--no-promote")
    assert (result["name"], result["promoted"], train.artefact("a")[0].name) == ("a@3", False, "a@1")


@pytest.mark.parametrize("option, value, said", [
    ("--set", "batch=1.5", "batch=1.5 must be a whole number"),
    ("--set", "wings=2", "there is no such setting of a training; there are objective, top_k"),
    ("--writer-url", "http://localhost", "say how many"), ("--chunk-size", 256, "p = 256 positions cannot stand for a document of 135 tokens"),
])  # fmt: skip
def test_what_cannot_be_trained_is_one_line_and_leaves_nothing(train, option, value, said):
    told = train.refused(option, value)
    assert told.startswith("lmcache-cartridge: ") and told.count("\n") == 1 and said in told
    assert not (train.home / "training").exists() and not (train.home / "cartridges").exists()


def test_the_rate_warms_up_and_then_falls_or_stays(made, run):
    """On a plateau over as many steps as there were before it, at the latest over the second half."""
    rates = [row["rate"] for row in run[0].rows if "rate" in row]
    half = RECIPE.steps // 2
    assert rates[: RECIPE.warmup] == pytest.approx([RECIPE.rate * i / 6 for i in range(1, 6)])
    assert rates[RECIPE.warmup : half] == [RECIPE.rate] * (half - RECIPE.warmup)
    assert rates[half:] == pytest.approx([RECIPE.rate * i / half for i in range(half, 0, -1)])
    assert (run[1].steps, run[1].why) == (RECIPE.steps, "steps")
    recipe = Recipe(steps=100, warmup=9, rate=1.0, schedule="cosine")
    rates = [recipe.rate_at(step) for step in range(9, 100)]
    assert rates == sorted(rates, reverse=True) and (rates[0], rates[45]) == (1.0, pytest.approx(0.5, abs=0.02))
    assert rates[-1] < 0.01
    assert {replace(recipe, schedule="constant").rate_at(step) for step in range(9, 100)} == {1.0}


def test_random_is_noise_vocab_ordinary_words_and_first_k_the_head_of_the_document(made):
    noise, words, head = (initial_kv(init, made.model, made.ids, P, 0) for init in ("random", "vocab", "first-k"))
    assert float(noise[:, :, FROZEN:].std()) == pytest.approx(0.02, rel=0.05), "the paper's"
    drawn = tokens_of(made.model, words, range(640))
    assert set(drawn[1:]) <= set(made.model.ordinary_ids().tolist()) and len(set(drawn)) > 0.8 * P
    assert torch.allclose(words, prefilled(made.model, drawn), atol=1e-4), "at positions 0 to p - 1"
    assert torch.allclose(head, prefilled(made.model, made.ids)[:, :, :P], atol=1e-4)


def test_passes_that_are_accumulated_count_as_one_batch(made):
    recipe = replace(RECIPE, steps=5, jitter=0)
    whole, halves = (_trainer(made, recipe=r) for r in (recipe, replace(recipe, batch=16, accumulate=2)))
    whole.run(), halves.run()
    losses = [[row["loss"] for row in trainer.rows if "loss" in row] for trainer in (whole, halves)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
