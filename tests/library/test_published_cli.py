"""A published library on the command line: published, named, promoted, checked, removed, and told to programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from making import flip_bit, make_artifact

from lmcache_cartridge.artifact.reading import PAYLOAD
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.library.registry import Registry


class Author:
    """A machine with cartridges of its own."""

    def __init__(self, path: Path, library: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.library, self._capsys = path, library, capsys

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("LMCACHE_CARTRIDGE_CACHE", str(self.path / "cache"))
            status = main([*argv, "--home", str(self.path)])
        return status, *self._capsys.readouterr()

    def json(self, *argv: str) -> Any:
        status, out, err = self(*argv, "--library", self.library, "--format", "json")
        assert (status, err) == (0, "")
        return json.loads(out)

    def make(self, name: str, version: int = 1, seed: int = 0) -> Path:
        root = self.path / "cartridges" / name / str(version)
        make_artifact(root, positions=32, layers=1, cartridge_id=name, version=version, seed=seed)
        assert self("import", str(root))[0] == 0
        return root


@pytest.fixture
def authors(tmp_path, capsys, library):
    return [Author(tmp_path / name, library, capsys) for name in ("one", "two")]


@pytest.fixture
def library(tmp_path):
    return str(tmp_path / "shared")


def test_what_the_page_shows(authors):
    one, two = authors
    one.make("handbook")
    told = one.json("publish", "handbook", "--label", "current")
    assert told == {
        "name": "handbook@1", "promoted": True, "digest": told["digest"], "label": "current",
        "location": f"{one.library}/cartridges/handbook/1/{told['digest'][:16]}",
    }  # fmt: skip
    one.make("handbook", 2, seed=1)
    assert one.json("publish", "handbook@2", "--no-promote")["promoted"] is False
    assert two("list")[1].startswith("no cartridges yet"), "the library is not the registry of a home"
    rows = two.json("list")
    assert [(row["id"], row["version"], row["current"], row["labels"]) for row in rows] == [
        ("handbook", 1, True, ["current"]), ("handbook", 2, False, [])
    ]  # fmt: skip
    assert two.json("label", "handbook", "handbook@2")["name"] == "handbook@2"
    assert two.json("label", "current", "handbook") == {"label": "current", "name": "handbook@2"}
    shown = one.json("show", "current")
    assert (shown["version"], shown["current"], shown["location"].rpartition("/")[0]) == (
        2, True, f"{one.library}/cartridges/handbook/2"
    )  # fmt: skip
    assert two.json("verify", "handbook@1", "handbook@2") == [
        {"name": f"handbook@{version}", "sound": True, "problem": None} for version in (1, 2)
    ]
    status, _, err = two("remove", "handbook@1", "--delete-files", "--library", two.library)
    assert status == 1 and "servers may still read the files" in err
    assert one.json("remove", "handbook@1")["files_deleted"] is False
    assert one.json("label", "current", "--remove") == {"label": "current", "name": None}
    assert [row["version"] for row in two.json("list")] == [2]
    assert [row.name for row in Registry(one.path / "registry.sqlite").all()] == ["handbook@1", "handbook@2"]


def test_machines_that_count_by_themselves_publish_one_after_the_other(authors, tmp_path):
    one, two = authors
    for seed, author in enumerate(authors):
        author.make("handbook", seed=seed)
    for _ in range(2):  # the second time is no change
        assert one.json("publish", "handbook", "--next-version")["name"] == "handbook@1"
        told = two.json("publish", "handbook", "--next-version", "--label", "current")
        assert (told["name"], told["label"]) == ("handbook@2", "current")
    assert two.json("verify", "handbook@1", "handbook@2")[1]["sound"]
    assert (json.loads((Path(told["location"]) / "manifest.json").read_text())["version"], len(one.json("list"))) == (
        2,
        2,
    )
    assert not (Path(told["location"]) / PAYLOAD).is_symlink()
    assert two("publish", "handbook", "--library", two.library)[2].count("other content") == 1


def test_a_cartridge_that_is_not_sound_is_not_published(authors, tmp_path):
    root = authors[0].make("handbook")
    flip_bit(root / PAYLOAD, (root / PAYLOAD).stat().st_size - 1)
    status, _, err = authors[0]("publish", "handbook", "--library", authors[0].library)
    assert status == 1 and "chunk 1" in err
    assert authors[1].json("list") == []
