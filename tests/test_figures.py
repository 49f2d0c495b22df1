"""Every figure of a measurement in README and docs is of a result file of today's code."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import report

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

import figures  # noqa: E402
import generate  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_NUMBER = r"(?<![\w.`-])\d[\d.,]*"
FIGURE = re.compile(
    rf"{_NUMBER}(?:\s?(?:to|and|or|-|/)\s?{_NUMBER[12:]})*\s?(?:%|ms\b|us\b|s\b|seconds?\b|[GM]B/s|tokens/s|times\b)"
    rf"|{_NUMBER} (?:to|instead of) \d+\.\d+|\|(?: \**[\d.,]+\** \|){{2,}}"
    rf"|{_NUMBER}e-\d"
)
"""A percentage, a time, a rate, a factor, a range of decimals, a small difference, or cells of a table that are numbers."""

ALLOWED = {
    "must keep 80%": "a default: --accept",
    "1.5 times its even share": "Envoy's setting in the configuration that the page shows",
    "costs its timeout, 0.25 s": "a setting of the picker",
    "makes it 15 s": "a setting: drain_s",
    "40 times the noise": "a bound in the code",
    "to 2%, every layer": "a bound in the code",
    "whole to 10%, in bfloat16": "a bound in the code",
    "95% interval": "a kind of interval",
}
"""What looks like a figure of a measurement and is none, and what it is."""


def typed(text: str) -> list[str]:
    """Return what is written by hand and looks like a figure of a measurement, with the words before it."""
    text = generate.PART.sub("", text)
    text = re.sub(r"`[^`\n]*`", "`code`", re.sub(r"```.*?```", "", text, flags=re.S))
    text = re.sub(r"(vLLM|LMCache) \d\S*( to \d\S*)?", "", text)  # versions
    text = " ".join(text.split())
    for phrase in ALLOWED:
        text = text.replace(phrase, "")
    return [text[max(0, found.start() - 60) : found.end()] for found in FIGURE.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_of_a_measurement_was_typed_by_hand(page):
    assert typed(page.read_text(encoding="utf-8")) == [], (
        "a benchmark's result file and `make docs`, or in ALLOWED with a reason"
    )


@pytest.mark.parametrize("hand", [
    "takes 0.52 s here", "0.94 to 1.04 of it", "answers 99.8% of them", "1.7 ms and", "| a | 0.5 | 20.8 |", "42 tokens/s", "2 to 3 GB/s",
    "1.28 times as long", "12 seconds", "| **93.2** | 4 |", "within 6e-6 nats", "88% in 12 s instead of 66 s",
])  # fmt: skip
def test_a_figure_typed_by_hand_is_seen(hand):
    assert typed(f"words {hand} words")
    assert typed(f"words <!-- made by docs/generate.py: saves -->\n{hand}\n<!-- end --> words") == []


class Results:
    """A result of ttft of a small package, to be changed, and what the pages say of it."""

    def __init__(self, directory: Path) -> None:
        self.code = directory / "code"
        self.code.mkdir()
        (self.code / "memory.py").write_text("x = 1\n")
        ways = {"dense": 3.0, "prefix": 0.5, "warm": 0.7}
        bench = report.Benchmark("benchmarks/ttft.py", "Time.", ["memory"])
        bench.start(["--out", str(directory / "results")])
        self.path = bench.publish(
            [
                report.Figure.of([s], "first token", "s", way=way, p=1024, c=c)
                for way, s in ways.items()
                for c in (1, 16)
            ]
        )
        self.record = json.loads(self.path.read_text())
        self.write(measures=["memory.py"], digest=report.digest(["memory.py"], self.code))

    def write(self, **changes: Any) -> None:
        self.record |= changes
        self.path.write_bytes(msgspec.json.encode(self.record))

    def read(self) -> figures.Results:
        is_todays = lambda result: result.digest == report.digest(result.measures, self.code)  # noqa: E731
        return figures.Results(self.path.parent, is_todays)

    def said(self) -> str:
        return figures.section(self.read(), "ttft")


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path)


def test_a_figure_of_other_code_is_left_out_and_the_command_stands_there(results):
    before = results.said()
    assert "| 1 | 3,000 | 500 | 700 |" in before and "To be measured again" not in before
    (results.code / "memory.py").write_text('"""Why."""\nx = 1  # because\n')
    assert results.said() == before
    (results.code / "memory.py").write_text("x = 2\n")
    assert results.said() == "To be measured again: `python benchmarks/ttft.py`."


def test_what_is_slower_than_its_peer_says_so_at_each_number_of_requests(results):
    assert results.said().splitlines() == [
        "First token, ms, p = 1,024:", "",
        "| c | dense | prefix | warm | warm / dense | warm / prefix |", "| --- | --- | --- | --- | --- | --- |",
        *(f"| {c} | 3,000 | 500 | 700 | 0.233 | 1.4, **slower** |" for c in (1, 16)),
    ]  # fmt: skip


def test_a_table_says_how_many_samples_and_what_they_are_of(results):
    some = [
        report.Figure.of([1.0, 2.0, 3.0], "time", "s", way="a", c=1),
        report.Figure.of([1.0], "time", "s", way="b", c=1),
        report.Figure.share(3, 4, "right", way="a"),
    ]
    assert figures.measured(some).splitlines() == [
        "| way | time, ms, c = 1 (n 1-3) | right, % (n 4) |",
        "| --- | --- | --- |",
        "| a | 2,000 (1,500-2,500) | 75 (30.1-95.4) |",
        "| b | 1,000 | |",
    ]
    assert results.record["commit"][:9] in figures.about(results.read().of("ttft"))


def test_a_result_of_the_smallest_form_is_in_no_page(results):
    results.write(form="smoke")
    assert results.read().of("ttft") == []
