"""Training in company: neighbours stand where a chain puts them, are asked too, and what is trained says so."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lessons import MODEL, School, school, write_template
from recall.ward import NAMES, write_document

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.errors import CartridgeError
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.train import job
from lmcache_cartridge.make.train.beside import EACH, Company, Neighbour
from lmcache_cartridge.make.train.initial import initial_kv, prefilled
from lmcache_cartridge.make.train.lesson import Lesson
from lmcache_cartridge.make.train.packing import answer_logits, pack_examples
from lmcache_cartridge.make.train.trainer import Recipe, Trainer, wrap
from lmcache_cartridge.memory.rope import shift_keys

P = 32
RECIPE = Recipe(steps=60, batch=32, rate=0.3, warmup=5, check_every=20, jitter=5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> School:
    return school(tmp_path_factory.mktemp("school"))


@pytest.fixture(scope="module")
def others(made: School, tmp_path_factory: pytest.TempPathFactory) -> list[Neighbour]:
    """Three other sheets of different lengths, whole, with questions on each."""
    schools = [school(tmp_path_factory.mktemp("other"), f"other {i}", 60 + 40 * i) for i in range(3)]
    return [Neighbour(prefilled(made.model, each.ids), each.lesson) for each in schools]


@pytest.mark.parametrize("sides", [(0, 0), (1, 0), (0, 1), (2, 1)])
def test_a_question_is_answered_in_company_as_behind_the_chain_that_is_served(
    made: School, others: list[Neighbour], sides: tuple[int, int]
) -> None:
    kv = initial_kv("sci", made.model, made.ids, P, 0)
    chosen, before = others[: sum(sides)], sides[0]
    packed = pack_examples(made.lesson.examples[:6], made.model.device)
    rows = len(packed.rows)
    chain, place = [], 0
    for each in [*(o.kv for o in chosen[:before]), kv, *(o.kv for o in chosen[before:])]:
        chain.append(torch.stack([shift_keys(each[0], made.model.fingerprint, place), each[1]]))
        place += each.shape[2]
    expected = answer_logits(made.model.model, made.model.cache(torch.cat(chain, dim=2), rows), packed)
    around = Company(made.model, others, 3).around(chosen, before, P, [])
    with torch.no_grad():
        past = around.surround(made.model, wrap(made.model, kv).get_prompt(rows), rows)
        found = answer_logits(made.model.model, past, packed, P + around.tokens_after)
    assert (found - expected).abs().max() < 2e-3
    if chosen:
        alone = answer_logits(made.model.model, made.model.cache(kv, rows), packed)
        assert (alone - expected).abs().max() > 0.05, "the control: neighbours are seen"


def test_who_stands_around_is_drawn_anew_and_asked_too(made: School, others: list[Neighbour]) -> None:
    company = Company(made.model, others, 2)
    joined = company.join(made.lesson)
    assert joined.examples == made.lesson.examples
    sizes = {other.kv.shape[2] for other in others}
    seen, asked = set(), set()
    for number in range(60):
        around = company.draw(random.Random(number), P)
        lengths = [0 if kv is None else kv.shape[2] for kv in (around.before, around.after)]
        seen.add(tuple(length > 0 for length in lengths))
        assert sum(lengths) <= company.tokens == sum(sorted(sizes)[1:])
        asked.add(len(around.asked))
        for example in around.asked:
            first = joined.tokens[example.first, 0]
            assert int(first) == example.answer[0], "the teacher's part of it is its own"
    assert seen == {(False, False), (True, False), (False, True), (True, True)}
    assert asked == {0, EACH, 2 * EACH}
    assert company.whole(P).asked == []


def test_what_was_trained_in_company_answers_better_in_company(made: School, others: list[Neighbour]) -> None:
    kv = initial_kv("sci", made.model, made.ids, P, 0)
    company = Company(made.model, others, 2)
    alone = Trainer(made.model, kv, made.lesson, made.held_out, RECIPE)
    alone.run()
    beside = Trainer(made.model, kv, made.lesson, made.held_out, RECIPE, company=company)
    result = beside.run()
    apart = Trainer(made.model, alone.kv(), made.lesson, made.held_out, RECIPE, company=company).score(alone.examples)
    together = beside.score(beside.examples)
    print(f"trained alone {apart}, in company {together}")
    assert together.loss < 0.8 * apart.loss
    assert result.score.answered.exact > 0


def test_company_that_leaves_no_place_for_questions_is_refused(
    made: School, others: list[Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = initial_kv("sci", made.model, made.ids, P, 0)
    monkeypatch.setattr(type(made.model), "context_tokens", property(lambda self: 160))
    with pytest.raises(CartridgeError, match="no place"):
        Trainer(made.model, kv, made.lesson, made.held_out, RECIPE, company=Company(made.model, others, 2))
    few = [Neighbour(others[0].kv[:, :, :8], Lesson([], None, None))]
    trainer = Trainer(
        made.model, kv, made.lesson, made.held_out, replace(RECIPE, steps=2), company=Company(made.model, few, 1)
    )
    assert trainer.run().steps == 2, "the control, with a neighbour that nothing is asked on"


def test_the_command_takes_cartridges_and_documents_and_notes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheets = [tmp_path / f"{i}.txt" for i in range(3)]
    for i, sheet in enumerate(sheets):
        sheet.write_text(write_document(random.Random(f"beside {i}"), 100, NAMES[i::3]).text)
    common = ("--home", str(tmp_path), "--model", MODEL, "--chunk-size", "16", "--format", "json")
    assert main(["build", *common, "--document", str(sheets[0]), "--id", "other"]) == 0
    train = (
        "train", *common, "--document", str(sheets[1]), "--id", "a", "--compress", "4x", "--steps", "4", "--rate", "0.2",
        "--template", str(write_template(tmp_path / "t.json")), "--accept", "0", "--answer-tokens", "4",
    )  # fmt: skip
    capsys.readouterr()
    given = ("--beside-of", "other", "--beside-documents", str(sheets[2]))
    assert main([*train, *given, "--beside", "3"]) == 1
    assert "--beside 3 needs as many others, and 2 are given" in capsys.readouterr().err
    assert main([*train, "--beside-of", "nobody"]) == 1
    assert "nobody" in capsys.readouterr().err
    for more, expected in ((given, 2), ((*given, "--beside", "1"), 1), ((), 0)):
        assert main([*train, *more]) == 0, capsys.readouterr().err
        result = json.loads(capsys.readouterr().out)
        entry = Registry(tmp_path / "registry.sqlite").find(result["name"])
        manifest = reading.load_manifest(Path(entry.location), entry.digest)
        assert result["beside"] == manifest.provenance.training.beside == manifest.company == expected


def test_the_low_rate_of_a_compaction_is_not_for_what_is_trained_among_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sought(*_: object) -> None:
        raise CartridgeError("a rate is sought")

    monkeypatch.setattr(job, "find_rate", sought)
    sheets = [tmp_path / f"{i}.txt" for i in range(2)]
    for i, sheet in enumerate(sheets):
        sheet.write_text(write_document(random.Random(f"beside {i}"), 100, NAMES[i::3]).text)
    train = (
        "train", "--home", str(tmp_path), "--model", MODEL, "--chunk-size", "16", "--document", str(sheets[1]), "--id", "a",
        "--compress", "4x", "--steps", "1", "--template", str(write_template(tmp_path / "t.json")), "--accept", "0",
        "--answer-tokens", "4", "--init", "compact", "--restart",
    )  # fmt: skip
    assert main([*train, "--beside-documents", str(sheets[0])]) == 1
    assert "a rate is sought" in capsys.readouterr().err
    assert main([*train]) == 0, "the control, alone"
    assert "since a compaction is near" in capsys.readouterr().err
