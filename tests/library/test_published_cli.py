"""A published library on the command line: published, named, promoted, checked, removed, and told to programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Cli
from making import make_artifact

from lmcache_cartridge.artifact.reading import MANIFEST, PAYLOAD


class Author(Cli):
    """Somebody with cartridges of their own who publishes to a library."""

    def __init__(self, home: Path, library: Path) -> None:
        super().__init__(home)
        self.library = library

    def told(self, *words: str) -> Any:
        return self.json(*words, "--library", self.library)

    def make(self, version: int = 1, seed: int = 0) -> None:
        root = self.home / "made" / str(version)
        make_artifact(root, positions=32, layers=1, cartridge_id="handbook", version=version, seed=seed)
        self.json("import", root)


@pytest.fixture
def authors(tmp_path):
    return [Author(tmp_path / name, tmp_path / "shared") for name in ("one", "two")]


def test_what_the_page_shows(authors):
    one, two = authors
    for version in (1, 2):
        one.make(version, seed=version)
    told = one.told("publish", "handbook@1", "--label", "current")
    location = f"{one.library}/cartridges/handbook/1/{told['digest'][:16]}"
    assert told.items() >= {"name": "handbook@1", "promoted": True, "label": "current", "location": location}.items()
    assert one.told("publish", "handbook@2", "--no-promote")["promoted"] is False
    assert two("list").out.startswith("no cartridges yet"), "the library is not the registry of a home"
    assert [(row["id"], row["version"], row["current"], row["labels"]) for row in two.told("list")] == [
        ("handbook", 1, True, ["current"]), ("handbook", 2, False, [])
    ]  # fmt: skip
    assert two.told("label", "handbook", "handbook@2")["name"] == "handbook@2"
    assert two.told("label", "current", "handbook") == {"label": "current", "name": "handbook@2"}
    refused = two.refused("remove", "handbook@1", "--delete-files", "--library", two.library)
    assert "servers may still read the files" in refused
    assert one.told("remove", "handbook@1")["files_deleted"] is False
    assert one.told("label", "current", "--remove") == {"label": "current", "name": None}
    assert [row["version"] for row in two.told("list")] == [2]
    assert len(one.json("list")) == 2


def test_machines_that_count_by_themselves_publish_one_after_the_other(authors):
    for seed, author in enumerate(authors):
        author.make(seed=seed)
    for _ in range(2):  # the second time is no change
        told = [author.told("publish", "handbook", "--next-version", "--label", "current") for author in authors]
        assert [each["name"] for each in told] == ["handbook@1", "handbook@2"]
    place = Path(told[1]["location"])
    assert json.loads((place / MANIFEST).read_text())["version"] == 2 == len(authors[0].told("list"))
    assert not (place / PAYLOAD).is_symlink()
    assert "other content" in authors[1].refused("publish", "handbook", "--library", authors[1].library)
