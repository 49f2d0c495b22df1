"""A corpus by one command: each document is made or trained once, as it is by itself, and what fails is told with its reason."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from commands import Cli
from making import files_under
from recall.ward import write_document
from routers import Reply, Request, Stub
from wards import MODEL

from lmcache_cartridge.errors import ArtifactError
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.corpus import Source, find
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.train.trainer import CHECKPOINT
from lmcache_cartridge.settings import Settings

SHEETS = 5


class Corpus(Cli):
    """Sheets as text files in a directory, and the command on a home."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "home")
        self.directory = directory / "sheets"
        self.directory.mkdir()

    def write(self, *names: str, tokens: int = 300) -> None:
        for name in names:
            (self.directory / f"{name}.txt").write_text(write_document(random.Random(name), tokens).text)

    def build(self, *words: object, status: int = 0) -> list[dict[str, Any]]:
        """Run `build` on the directory, or on what `words` begin with, and return what it tells programs."""
        places = [] if words and not str(words[0]).startswith("--") else [self.directory]
        return self.json("build", *places, *words, "--model", MODEL, status=status)

    def outcome(self, *words: object) -> dict[str, bool]:
        """Return whether each cartridge was made."""
        return {row["name"]: row["made"] for row in self.build(*words)}


@pytest.fixture
def corpus(tmp_path):
    return Corpus(tmp_path)


# Which documents there are, and what they are called.


def test_ids_are_names_paths_below_a_directory_and_fields_of_lines(tmp_path):
    for name in ("a/one.txt", "a/sub dir/two.v2.md", "a/.git/config", "a/.hidden", "b/three.txt", "b/four.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    lines = [{"id": "five", "text": "x\ny"}, {"id": "six", "text": "z", "more": 1}]
    (tmp_path / "c.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    sources, _ = find([str(tmp_path / "a"), str(tmp_path / "b/*r*.txt"), str(tmp_path / "c.jsonl")])
    assert [(source.id, source.raw.decode()) for source in sources] == [
        ("one", "a/one.txt"), ("sub-dir-two.v2", "a/sub dir/two.v2.md"), ("four", "b/four.txt"), ("three", "b/three.txt"),
        ("five", "x\ny"), ("six", "z"),
    ]  # fmt: skip
    assert sources[-1].name == f"{tmp_path}/c.jsonl:3"


def test_two_documents_of_one_id_are_an_error_and_one_that_is_named_twice_is_none(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert find([str(tmp_path), str(tmp_path / "a.txt")])[0] == [Source("a", f"{tmp_path}/a.txt", b"x")]
    (tmp_path / "a.md").write_text("y")
    with pytest.raises(ArtifactError, match=r"a\.md and .*a\.txt would both be called a;"):
        find([str(tmp_path)])
    with pytest.raises(ArtifactError, match="no such file"):
        find([str(tmp_path / "b*.txt")])


# Made, and made once.


def test_what_is_there_of_the_same_document_is_not_made_again(corpus, monkeypatch):
    corpus.write("ward-0", "ward-1", "ward-2")
    first = corpus.build()
    with monkeypatch.context() as patch:
        patch.setattr(CausalModel, "prefill", None)  # nothing is computed
        before = files_under(corpus.home)
        assert corpus.build() == [row | {"made": False} for row in first]
        assert files_under(corpus.home) == before
    (corpus.directory / "ward-1.txt").write_text("Another text.")
    assert corpus.outcome() == {"ward-0@1": False, "ward-1@2": True, "ward-2@1": False}
    corpus.write("ward-1")
    assert corpus.outcome()["ward-1@1"] is False
    assert Registry(Settings(home=corpus.home).registry_path).find("ward-1").version == 1
    for options in (["--payload", "int8"], ["--chunk-size", 64], ["--canary", "And?"], ["--compact", "2x", "--accept", 0,
                    "--chunk-size", 64], ["--chat", "user"], ["--dtype", "float32"]):  # fmt: skip
        place = corpus.directory / "ward-2.txt"
        assert [corpus.build(place, *options)[0]["made"] for _ in range(2)] == [True, False], options


def test_what_fails_is_told_with_its_reason_and_the_others_are_registered(corpus):
    corpus.write("ward-0")
    corpus.write("long", tokens=9000)
    for name, raw in {
        "empty.txt": b" \n", "bytes.txt": b"\xff\xfe", "日本.txt": b"x",
        "lines.jsonl": b'{"id": "../up", "text": "x"}\n{"text": "x"}\nno',
    }.items():  # fmt: skip
        (corpus.directory / name).write_bytes(raw)
    rows = corpus.build(status=1)
    reasons = {Path(row["document"]).name: row["problem"] for row in rows if row["problem"]}
    for name, said in {
        "empty.txt": "is empty", "bytes.txt": "no UTF-8", "long.txt": "the model's context is", "日本.txt": "cannot be a cartridge id",
        "lines.jsonl:1": "cannot be a cartridge id", "lines.jsonl:2": "no JSON of",
        "lines.jsonl:3": "no JSON of",
    }.items():  # fmt: skip
        assert said in reasons.pop(name)
    assert reasons == {} and [row["name"] for row in rows if row["made"]] == ["ward-0@1"]
    assert [path.name for path in (corpus.home / "cartridges").iterdir()] == ["ward-0"]


def test_on_a_full_disk_nothing_is_left(corpus, monkeypatch):
    corpus.write("ward-1")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    assert "No space left" in corpus.build(status=1)[0]["problem"]
    assert not list((corpus.home / "cartridges" / "ward-1").iterdir())


def test_a_run_that_was_killed_goes_on_and_leaves_nothing_half_made(corpus):
    corpus.write(*(names := [f"ward-{n}" for n in range(SHEETS)]))
    registry, roots = Registry(Settings(home=corpus.home).registry_path), corpus.home / "cartridges"
    corpus.killed("build", corpus.directory, "--model", MODEL,
                  once=lambda: len(registry.all()) >= 2 and list(roots.glob("*/.*.partial")))  # fmt: skip
    before = {row.name for row in registry.all()}
    assert 2 <= len(before) < SHEETS
    assert corpus.outcome() == {f"{name}@1": f"{name}@1" not in before for name in names}
    assert sorted(path.name for path in roots.glob("*/*")) == ["1"] * SHEETS
    assert not list(roots.glob("*/.*"))


def test_a_corpus_is_published_in_place_of_being_registered_here(corpus, tmp_path):
    """What is in the library then is seen in `test_cluster`."""
    corpus.write("ward-0", "ward-1")
    for home, is_made in (("home", True), ("home", False), ("another", False)):
        corpus.home = tmp_path / home
        assert corpus.outcome("--publish", tmp_path / "library") == {"ward-0@1": is_made, "ward-1@1": is_made}
        assert not (corpus.home / "cartridges").exists()


# Trained.


@pytest.fixture(scope="module")
def training():
    """The options of a short training, whose questions a stub writes: on a word in the part of a sheet that it is shown."""

    def write(request: Request) -> Reply:
        asked = json.loads(request.body)
        word = random.Random(asked["seed"]).choice(asked["messages"][0]["content"].split())
        return Reply(body={"choices": [{"message": {"content": f"Question: what of {word}?"}}]})

    with Stub("writer", write) as stub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WRITER_API_KEY", "writer")
        yield ["--model", MODEL, "--chunk-size", 16, "--compress", "3x", "--self-study", 40, "--writer-url", stub.url,
               "--steps", 6, "--set", "check_every=2", "--set", "answer_tokens=4", "--accept", 0]  # fmt: skip
        assert {request.headers.get("authorization") for request in stub.requests} == {"Bearer writer"}


def test_each_sheet_is_trained_as_it_is_alone_and_once(corpus, training, monkeypatch):
    corpus.write(*(names := ("ward-0", "ward-1")))
    first = corpus.json("train", corpus.directory, *training)
    assert [(row["name"], row["made"]) for row in first] == [(f"{name}@1", True) for name in names]
    alone = corpus.json("train", "--document", corpus.directory / "ward-1.txt", "--id", "alone", *training)
    assert alone["digest"] == corpus.artefact("ward-1")[0].digest
    assert not list(corpus.home.rglob(CHECKPOINT)), "what was to go on from is as large as the cartridge"
    with monkeypatch.context() as patch:
        patch.setattr(CausalModel, "prefill", None)  # nothing is computed
        assert corpus.json("train", corpus.directory, *training) == [row | {"made": False} for row in first]
    again = corpus.json("train", corpus.directory / "ward-0.txt", *training, "--steps", 2)
    assert [(row["name"], row["made"]) for row in again] == [("ward-0@2", True)]


# What is refused.


@pytest.mark.parametrize(("command", "said"), [
    ("build . --id a", "need one document, not many"), ("build . --ray auto", "--ray needs --publish"),
    ("build . --publish relative", "absolute directory"), ("build --document a.txt --publish /x --id a", "need many documents"),
    ("train . --questions a.txt", "--questions, --held-out need one document, not many; of many --self-study has them written"),
    ("train .", "needs --self-study"), ("train --document a.txt --self-study 2", "train needs --id"),
])  # fmt: skip
def test_options_that_do_not_go_together_are_refused(tmp_path, cli, monkeypatch, command, said):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x")
    more = ["--compress", "4x"] if command.startswith("train") else []
    assert said in cli.refused(*command.split(), "--model", "nowhere", *more)
    assert not cli.home.exists()
