"""The tables of settings, commands and metrics in `docs/` are what the code has."""

from __future__ import annotations

import re
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


_RUN = """`ttft.py`, default form, {date}: a machine.

| p | c | way | TTFT ms, p50 | tokens/s in all | decode tokens/s |
| --- | ---: | ---: | ---: | ---: | ---: |
{rows}

"""


def _ttft(date: str, *rows: tuple[int, int, str, float]) -> str:
    return _RUN.format(
        date=date, rows="\n".join(f"| {p} | {c} | {way} | {ms} | 9 (8-10) | 10 (9-11) |" for p, c, way, ms in rows)
    )


def test_a_published_row_has_ours_beside_it_of_one_run_or_says_what_measures_it() -> None:
    references = GENERATE["reference_tables"]
    warm = [(p, 1, "warm", 100.0) for p in references.PREFILL if p != 512]
    page = references.Page(
        GENERATE["_table"],
        _ttft("day 1", *warm, (256, 1, "dense", 300.0))
        + _ttft("day 2", (1024, 1, "dense", 7000.0), (2048, 1, "warm", 50.0), (2048, 1, "dense", 1000.0)),
        {},
    )
    rows = {row[0]: row for line in page.prefill().splitlines() if (row := line.strip("| ").split(" | "))[0]}
    assert rows["256"][4:] == ["300", "100", "**3.0**"]
    assert rows["2,048"][4:] == ["1,000", "50", "**20.0**"]
    assert rows["1,024"][4:] == rows["512"][4:] == ["not measured"] * 3, "dense of one run over warm of another"
    assert re.findall("ratios compare: (.*)", page.prefill()) == [
        f"default form, day {day}: a machine." for day in (1, 2)
    ]
    assert "--positions 512,1024,4096,8192,16384 --concurrency 1 --ways dense,warm`" in page.prefill()
    assert "**4,856**" not in page.sizes() and "4,295 MB" in page.sizes() and "| 4,856 | 4,295.0 |" in page.sizes()


def test_the_benchmarks_take_what_the_page_says_would_measure_a_row() -> None:
    page = (DOCS / "reference-tables.md").read_text(encoding="utf-8")
    options = (DOCS.parent / "benchmarks" / "ttft.py").read_text(encoding="utf-8")
    told = {option for command in re.findall("`python benchmarks/ttft.py ([^`]*)`", page) for option in command.split()}
    assert all(f'"{option}"' in options for option in told if option.startswith("--"))
