"""A corpus that is trained by one command: each document as it is by itself, once, and what fails is told with its reason."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Cli
from lessons import MODEL
from recall.ward import QUESTIONS, write_document
from routers import Reply, Request, Stub
from wards import patients

from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.train.trainer import CHECKPOINT
from lmcache_cartridge.settings import Settings

STEPS = 12
SHEETS = {f"ward-{n}": write_document(random.Random(f"lesson {n}"), 120, patients(n, 3)) for n in range(3)}


class Corpus(Cli):
    """Sheets as text files in a directory, and the command on a home."""

    def __init__(self, directory: Path, writer: str) -> None:
        super().__init__(directory / "home")
        self.directory = directory / "sheets"
        self.directory.mkdir()
        for name, document in SHEETS.items():
            (self.directory / f"{name}.txt").write_text(document.text)
        self.how = ["--model", MODEL, "--chunk-size", 16, "--compress", "3x", "--self-study", 40, "--writer-url", writer,
                    "--steps", STEPS, "--set", "check_every=2", "--set", "answer_tokens=4", "--accept", 0]  # fmt: skip

    def train(self, *words: object, status: int = 0) -> list[dict[str, Any]]:
        """Run the command for the directory, and return what it tells programs."""
        return self.json("train", self.directory, *self.how, *words, status=status)

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
    """The digests of the first two sheets, each trained by a command of its own."""
    found = Corpus(tmp_path_factory.mktemp("alone"), writer)
    for name in ("ward-0", "ward-1"):
        found.json("train", "--document", found.directory / f"{name}.txt", "--id", name, *found.how)
    return found.digests()


def test_each_sheet_is_trained_as_it_is_alone_and_once(corpus, alone, monkeypatch):
    first = corpus.train()
    assert [(row["name"], row["made"]) for row in first] == [(f"{name}@1", True) for name in SHEETS]
    assert corpus.digests().items() > alone.items()
    assert not list(corpus.home.rglob(CHECKPOINT)), "what was to go on from is as large as the cartridge"
    with monkeypatch.context() as patch:
        patch.setattr(CausalModel, "prefill", None)  # nothing is computed
        assert corpus.train() == [row | {"made": False} for row in first]
    corpus.directory /= "ward-0.txt"
    assert [(row["name"], row["made"]) for row in corpus.train("--steps", 2)] == [("ward-0@2", True)]


def test_a_run_that_was_killed_goes_on_where_it_was(corpus, alone, monkeypatch):
    (corpus.directory / "ward-2.txt").unlink()
    reached = corpus.home / "training" / "ward-1" / "1" / CHECKPOINT
    corpus.killed("train", corpus.directory, *corpus.how, once=reached.exists)
    assert corpus.digests().keys() == {"ward-0@1"}
    step, steps = torch.optim.AdamW.step, []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *given: (steps.append(1), step(*given)))
    assert [row["made"] for row in corpus.train()] == [False, True]
    assert 0 < len(steps) < STEPS, "from the checkpoint"
    assert corpus.digests() == alone
    assert sorted(path.name for path in (corpus.home / "cartridges").glob("*/*")) == ["1", "1"]
