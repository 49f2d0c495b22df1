"""Each benchmark's smallest form runs and writes what it says; its figures mean nothing here and are not looked at."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

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
    printed = capsys.readouterr().out
    result = report.read(tmp_path / f"{name}.json")
    assert result.benchmark == name and result.form == "smoke" and result.note == "a test"
    assert result.is_of_todays_code() and result.about() in printed


def test_short_cartridges_are_measured_by_questions_of_their_own(tmp_path):
    importlib.import_module("quality").main(["--smoke", "--out", str(tmp_path)])
    figures = report.read(tmp_path / "quality.json").figures
    shares = {one.case["way"]: one for one in figures if one.unit == "share" and one.case["sheet"] != "all"}
    assert list(shares) == ["compact 4x", "document", "nothing", "train 4x"]
    assert shares["nothing"].value < 0.3 < 0.9 < shares["document"].value and shares["document"].n > 20


def test_the_model_that_is_made_is_one_that_cartridges_can_be_made_for(tmp_path):
    """What `ttft` does before it starts its server, which takes too long for a smoke test."""
    ttft = importlib.import_module("ttft")
    from lmcache_cartridge.artifact.reading import verify
    from lmcache_cartridge.make.model import CausalModel
    from lmcache_cartridge.settings import from_mapping

    plan = ttft.Plan([256], [1], 1, False)
    model = ttft.make_model(tmp_path / "model", ttft.TINY)
    assert CausalModel(str(model)).tokenizer.decode([5, 1999]) == "w5w1999", "no answer of the server's is empty text"
    payloads = ttft.prepare(plan, ttft.TINY, model, from_mapping({"home": tmp_path / "home"}), tmp_path)
    assert list(verify(payloads["doc-256"].parent))[-1] == (1, 1), "finite, with right checksums"


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


def test_the_sizes_in_the_docs_are_those_computed_from_the_models():
    sizes = importlib.import_module("sizes")
    rows = sizes.rows()
    assert {row["model"]: row["p = 16,384"] for row in rows}["Qwen2.5-1.5B"] == "448 MiB", "28 * 2 * 2 * 128 * 2 * p"
    assert sizes.markdown(rows) in (BENCHMARKS.parent / "docs" / "operations.md").read_text()


def test_dropping_a_file_from_the_page_cache_is_proved(tmp_path):
    retrieval = importlib.import_module("retrieval")
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert retrieval.cached_share(path) == 1.0
    retrieval.drop([path])
    assert retrieval.cached_share(path) == 0.0


@pytest.mark.parametrize("name", ["cold_fetch", "models", "saving", "ttft"])
def test_what_no_test_runs_says_what_it_compares(name, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(name).main(["--help"])
    assert f"benchmarks/{name}.py" in capsys.readouterr().out


@pytest.mark.parametrize(("changes", "sound"), [
    ({}, True), ({"cartridge": 0.1}, False), ({"chain": 0.1}, False), ({"trained": float("nan")}, False), ({"other": 1e-4}, False),
    ({"cartridge": 0.1, "noise": 0.08}, True), ({"chain": None, "trained": None}, True),
    ({"noise": None, "note": "refused: it has no KV"}, True), ({"noise": None, "note": "not served: x"}, False),
])  # fmt: skip
def test_a_family_is_sound_at_the_noise_only_or_refused_with_a_reason(changes, sound):
    models = importlib.import_module("models")
    row = models.Row("Llama", "in-process", 5e-5, 4e-5, 3e-5, 2e-5, 15.0)
    assert row._replace(**changes).sound == sound


@pytest.mark.parametrize(("said", "sound"), [("UnsupportedEngine: it has no KV", True), (None, False)])
def test_a_family_that_is_not_served_is_sound_only_where_the_log_has_a_reason_of_ours(
    tmp_path, monkeypatch, said, sound
):
    models = importlib.import_module("models")

    def served(*words: str, **options: bool) -> None:
        raise RuntimeError("the server ended with 1")

    made = models.Made.__new__(models.Made)
    made.settings = SimpleNamespace(home=tmp_path)
    monkeypatch.setattr(made, "served", served)
    if said is not None:
        (tmp_path / "in-process.log").write_text(said)
    assert made.row("X", "in-process").sound == sound
