"""Each benchmark's smallest form runs and writes what it says; its figures mean nothing here and are not looked at."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import report

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def on_path():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("name", ["corpus", "replacement", "scale", "inject", "retrieval", "fleet", "chaos"])
def test_the_smallest_form_writes_a_result(name, tmp_path, capsys):
    importlib.import_module(name).main(["--smoke", "--out", str(tmp_path), "--note", "a test"])
    result = report.read(tmp_path / f"{name}.json")
    assert result.benchmark == name and result.form == "smoke" and result.note == "a test"
    assert result.is_of_todays_code() and result.figures[0].what in capsys.readouterr().out


def test_short_cartridges_are_measured_by_questions_of_their_own(tmp_path):
    importlib.import_module("quality").main(["--smoke", "--out", str(tmp_path)])
    figures = report.read(tmp_path / "quality.json").figures
    shares = {one.case["way"]: one for one in figures if one.unit == "share" and one.case["sheet"] != "all"}
    assert list(shares) == ["compact 4x", "document", "nothing", "train 4x"]
    assert shares["nothing"].value < 0.3 < 0.9 < shares["document"].value and shares["document"].n > 20


HITS = [
    ([0, 1, 2, 0, 1, 2], 2, {"LRU": 0, "optimum": 2}),
    ([0, 0, 0, 1, 2, 0], 2, {"LRU": 2, "optimum": 3}),
]


@pytest.mark.parametrize(("requests", "room", "expected"), HITS)
def test_the_policies_hit_as_often_as_by_hand(requests, room, expected):
    module = importlib.import_module("replacement")
    load = module.Load("by hand", requests, room)
    hits = {"LRU": module.found(load, module.Lru(room)), "optimum": module.optimum(load)}
    assert hits == expected


def test_dropping_a_file_from_the_page_cache_is_proved(tmp_path):
    retrieval = importlib.import_module("retrieval")
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert retrieval.cached_share(path) == 1.0
    retrieval.drop([path])
    assert retrieval.cached_share(path) == 0.0


@pytest.mark.parametrize(("changes", "sound"), [
    ({}, True), ({"cartridge": 0.1}, False), ({"chain": 0.1}, False), ({"trained": float("nan")}, False), ({"other": 1e-4}, False),
    ({"cartridge": 0.1, "noise": 0.08}, True), ({"chain": None, "trained": None}, True),
    ({"noise": None, "note": "refused: it has no KV"}, True), ({"noise": None, "note": "not served: x"}, False),
])  # fmt: skip
def test_a_family_is_sound_at_the_noise_only_or_refused_with_a_reason(changes, sound):
    models = importlib.import_module("models")
    row = models.Row("Llama", "in-process", 5e-5, 4e-5, 3e-5, 2e-5, 15.0)
    assert row._replace(**changes).sound == sound
