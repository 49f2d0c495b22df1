"""What README and docs have of the code is as the code has it, and they are short."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from lmcache_cartridge.settings import Settings

DOCS = Path(__file__).parents[1] / "docs"
GENERATE = runpy.run_path(str(DOCS / "generate.py"))
made, PAGES = GENERATE["made"], GENERATE["PAGES"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_as_the_code_has_it(page: str) -> None:
    assert made(page) == PAGES[page].read_text(encoding="utf-8"), "stale; `make docs` writes it anew"


def test_each_part_that_the_code_makes_stands_on_one_page() -> None:
    parts = [part[2] for path in PAGES.values() for part in GENERATE["PART"].finditer(path.read_text(encoding="utf-8"))]
    assert sorted(parts) == sorted(GENERATE["PARTS"])


def test_a_new_setting_makes_the_page_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = dict(Settings.model_fields)
    removed = fields.pop("admin")
    monkeypatch.setattr(Settings, "__pydantic_fields__", fields)
    assert made("reference.md") != (DOCS / "reference.md").read_text(encoding="utf-8")
    fields["admin"] = removed
    assert made("reference.md") == (DOCS / "reference.md").read_text(encoding="utf-8")


def test_every_setting_has_a_docstring() -> None:
    assert set(GENERATE["docstrings"](Settings)) == set(Settings.model_fields)
