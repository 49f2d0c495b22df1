"""What README and docs have of the code is as the code has it, and they are short."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from lmcache_cartridge.settings import Settings

DOCS = Path(__file__).parents[1] / "docs"
GENERATE = runpy.run_path(str(DOCS / "generate.py"))
made, PAGES = GENERATE["made"], GENERATE["PAGES"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_as_the_code_has_it(page):
    assert made(page) == PAGES[page].read_text(encoding="utf-8"), "stale; `make docs` writes it anew"


def test_the_picture_is_as_the_result_has_it():
    drawn, picture = GENERATE["pictured"](), GENERATE["PICTURE"]
    assert drawn == picture.read_text(encoding="utf-8"), "stale; `make docs` draws it anew"
    assert ("<circle" in drawn) == ("![First token](docs/saves.svg)" in README)


def test_every_setting_has_a_docstring():
    assert set(GENERATE["docstrings"](Settings)) == set(Settings.model_fields)


ROOT = DOCS.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_is_to_be_read_is_short():
    pages = {path.name: len(path.read_text(encoding="utf-8").split()) for path in DOCS.glob("*.md")}
    assert len(README.split()) <= 700 and len(README.splitlines()) <= 110
    assert len(pages) <= 11 and sum(pages.values()) + len(README.split()) <= 12_000, pages


def test_each_page_is_reached_from_the_readme():
    assert [path.name for path in DOCS.glob("*.md") if f"(docs/{path.name})" not in README] == []
