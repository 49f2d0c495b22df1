"""The tables of settings and metrics in `docs/` are what the code has."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from lmcache_cartridge.settings import Settings

DOCS = Path(__file__).parents[1] / "docs"
GENERATE = runpy.run_path(str(DOCS / "generate.py"))
made = GENERATE["made"]


@pytest.mark.parametrize("page", GENERATE["PAGES"])
def test_a_page_is_as_the_code_has_it(page: str) -> None:
    assert made(page) == (DOCS / page).read_text(encoding="utf-8"), "stale; `make docs` writes it anew"


def test_a_new_setting_makes_the_page_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = dict(Settings.model_fields)
    removed = fields.pop("admin")
    monkeypatch.setattr(Settings, "__pydantic_fields__", fields)
    assert made("settings.md") != (DOCS / "settings.md").read_text(encoding="utf-8")
    fields["admin"] = removed
    assert made("settings.md") == (DOCS / "settings.md").read_text(encoding="utf-8")


def test_every_setting_has_a_docstring() -> None:
    assert set(GENERATE["docstrings"](Settings)) == set(Settings.model_fields)
