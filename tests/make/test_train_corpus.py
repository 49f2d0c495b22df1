"""A corpus that is trained by one command: each document as it is by itself, once, and what fails is told with its reason."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Cli
from lessons import MODEL, answered, questions_on
from recall.ward import QUESTIONS, Document, write_document
from routers import Reply, Request, Stub
from serving import stored_kv
from wards import patients

from lmcache_cartridge.artifact.reading import load_manifest
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.questions import read
from lmcache_cartridge.make.train import lesson
from lmcache_cartridge.make.train.initial import prefilled
from lmcache_cartridge.make.train.job import FILES
from lmcache_cartridge.make.train.trainer import CHECKPOINT
from lmcache_cartridge.settings import Settings
from lmcache_cartridge.sources.published import Library

STEPS = 12
SHEETS = {f"ward-{n}": write_document(random.Random(f"lesson {n}"), 120, patients(n, 3)) for n in range(3)}


class Corpus(Cli):
    """Sheets as text files in a directory, and the command on a home."""

    def __init__(self, directory: Path, writer: str) -> None:
        super().__init__(directory / "home")
        self.directory, self._writer = directory / "sheets", writer
        self.directory.mkdir()
        for name, document in SHEETS.items():
            (self.directory / f"{name}.txt").write_text(document.text)

    def words(self, *words: object) -> list[str]:
        """Return the command for the directory, or for what `words` begin with."""
        places = [] if words and Path(str(words[0])).exists() else [self.directory]
        given = ["train", *places, "--model", MODEL, "--chunk-size", 16, "--compress", "3x", "--self-study", 40,
                 "--writer-url", self._writer, "--steps", STEPS, "--set", "check_every=2", "--set", "answer_tokens=4",
                 "--accept", 0, *words]  # fmt: skip
        return [str(word) for word in given]

    def train(self, *words: object, status: int = 0) -> list[dict[str, Any]]:
        """Run the command and return what it tells programs."""
        return self.json(*self.words(*words), status=status)

    def digests(self) -> dict[str, str]:
        return {row.name: row.digest for row in Registry(Settings(home=self.home).registry_path).all()}


def _write(request: Request) -> Reply:
    """Ask for a fact in the part of a sheet that is shown, which no small model can do."""
    asked = json.loads(request.body)
    text, draw = asked["messages"][0]["content"], random.Random(asked["seed"])
    facts = [fact for document in SHEETS.values() for fact in document.facts if fact.patient in text]
    question = draw.choice(QUESTIONS).format(**draw.choice(facts)._asdict())
    return Reply(body={"choices": [{"text": question, "message": {"content": f"Question: {question}"}}]})


@pytest.fixture(scope="module")
def writer():
    with Stub("writer", _write) as stub:
        yield stub.url


@pytest.fixture
def corpus(tmp_path, writer):
    return Corpus(tmp_path, writer)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, writer):
    """The first two sheets, each trained by a command of its own."""
    found = Corpus(tmp_path_factory.mktemp("alone"), writer)
    for name in ("ward-0", "ward-1"):
        document = found.directory / f"{name}.txt"
        words = found.words()
        words[1:2] = ["--document", str(document), "--id", name]
        found.json(*words)
    return found


def _share(model: CausalModel, home: Path, name: str, of: Document, held_out: str) -> float:
    """Return the share of a sheet's held-out questions that are answered right behind a cartridge."""
    ids = model.encode(of.text, special=True)
    asked = read(home / "training" / held_out / "1" / FILES[-1])
    right = {question.text: question for question in questions_on(of, QUESTIONS)}
    made = lesson.prepare(
        model, ids, [right[each.text] for each in asked], prefilled(model, ids), form="chat", top_k=1, answer_tokens=4
    )
    return answered(model, stored_kv(home / "cartridges" / name / "1"), made)


def test_each_sheet_is_trained_as_it_is_alone_and_once(corpus, alone, monkeypatch):
    first = corpus.train()
    assert [(row["name"], row["made"]) for row in first] == [(f"{name}@1", True) for name in SHEETS]
    assert corpus.digests().items() > alone.digests().items()
    model = CausalModel(MODEL)
    shares = [_share(model, corpus.home, name, document, name) for name, document in SHEETS.items()]
    others = [_share(model, corpus.home, "ward-0", SHEETS[name], name) for name in ("ward-1", "ward-2")]
    assert sum(shares) > 2 and sum(others) < 1, (shares, others)
    for name, share in zip(SHEETS, shares, strict=True):
        training = load_manifest(corpus.home / "cartridges" / name / "1").provenance.training
        assert training.measured.cartridge == pytest.approx(share, abs=1e-3) and training.steps == STEPS
    assert not list(corpus.home.rglob(CHECKPOINT)), "what was to go on from is as large as the cartridge"
    with monkeypatch.context() as patch:
        patch.setattr(CausalModel, "prefill", None)  # nothing is computed
        assert corpus.train() == [row | {"made": False} for row in first]
        assert corpus.train(corpus.directory / "ward-1.txt") == [first[1] | {"made": False}]
    [again] = corpus.train(corpus.directory / "ward-0.txt", "--steps", 2)
    assert (again["name"], again["made"]) == ("ward-0@2", True), "another training"


def test_what_fails_is_told_and_what_is_published_is_not_trained_again(corpus, alone, tmp_path):
    for name in ("ward-1", "ward-2"):
        (corpus.directory / f"{name}.txt").unlink()
    (corpus.directory / "bytes.txt").write_bytes(b"\xff\xfe")
    (corpus.directory / "short.txt").write_text("Patient Mora.")
    library = tmp_path / "library"
    for made in (True, False):
        rows = corpus.train("--publish", library, status=1)
        reasons = {Path(row["document"]).name: row["problem"] for row in rows if row["problem"]}
        assert "no UTF-8" in reasons.pop("bytes.txt") and "cannot stand for a document" in reasons.pop("short.txt")
        assert not reasons and [(row["name"], row["made"]) for row in rows if row["name"]] == [("ward-0@1", made)]
        assert not list(corpus.home.glob("cartridges/*/*")) and not list(corpus.home.rglob(CHECKPOINT))
        settings = Settings(home=tmp_path / "reader", library=str(library))
        with Library(settings) as published:
            published.registry.follow()
            [row] = published.registry.all()
        assert row.digest == alone.digests()["ward-0@1"]
        corpus.home = tmp_path / "another"


def test_a_run_that_was_killed_goes_on_where_it_was(corpus, alone, monkeypatch):
    (corpus.directory / "ward-2.txt").unlink()
    reached = corpus.home / "training" / "ward-1" / "1" / CHECKPOINT
    corpus.killed(*corpus.words(), once=reached.exists)
    assert corpus.digests().keys() == {"ward-0@1"}
    step, steps = torch.optim.AdamW.step, []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *given: (steps.append(1), step(*given)))
    assert [row["made"] for row in corpus.train()] == [False, True]
    assert 0 < len(steps) < STEPS, "from the checkpoint"
    assert corpus.digests() == alone.digests()
    assert sorted(path.name for path in (corpus.home / "cartridges").glob("*/*")) == ["1", "1"]
