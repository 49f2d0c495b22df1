"""A figure is kept with what it was measured on and the code that it was measured of, and only so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import report


def _run(tmp_path: Path, *words: str) -> tuple[report.Result, str]:
    bench = report.Benchmark("benchmarks/none.py", "What none measures.\n\nMore.", ("memory",))
    bench.parser.add_argument("--p", type=int, default=1)
    bench.start([*words, "--out", str(tmp_path)])
    path = bench.publish(
        [
            report.Figure.of([0.3, 0.1, 0.2], "first token", "s", way="warm", p=1024),
            report.Figure.share(9, 10, "exact answers", document="ward"),
        ]
    )
    return report.read(path), path.name


def test_a_result_says_what_it_is_of_and_is_read_back_as_it_was(tmp_path):
    result, name = _run(tmp_path, "--p", "4", "--note", "beside nothing", "--name", "none-4")
    assert name == "none-4.json" and result.note == "beside nothing" and result.is_of_todays_code()
    assert result.command == "python benchmarks/none.py --p 4 --name none-4"
    assert len(result.commit) >= 40 and {"lmcache-cartridge", "lmcache", "torch"} <= result.versions.keys()
    first, exact = result.figures
    assert first.case == {"way": "warm", "p": 1024} and (first.value, first.n, first.unit) == (0.2, 3, "s")
    assert first.low == pytest.approx(0.15) and first.high == pytest.approx(0.25)
    assert exact.value == 0.9 and exact.n == 10 and exact.low < 0.6 < 0.98 < exact.high, "the interval of 9 in 10"


def test_the_smallest_form_leaves_the_projects_results_alone():
    bench = report.Benchmark("benchmarks/none.py", "None.", ("memory",))
    assert bench.start(["--smoke"]).out != report.RESULTS


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    directory = tmp_path_factory.mktemp("results")
    return json.loads((directory / _run(directory)[1]).read_text())


@pytest.mark.parametrize("change", [
    {"machine": None}, {"versions": {}}, {"commit": ""}, {"measures": []}, {"figures": []}, {"surprise": 1},
])  # fmt: skip
def test_a_result_that_does_not_say_what_it_is_of_is_refused(tmp_path, record, change):
    path = tmp_path / "none.json"
    path.write_text(json.dumps(record))
    report.read(path)
    path.write_text(json.dumps(record | change))
    with pytest.raises(report.NotAResult, match=path.name):
        report.read(path)


def test_a_digest_changes_with_code_and_with_nothing_else(tmp_path):
    room = tmp_path / "room"
    room.mkdir()
    file = room / "one.py"

    def of(text: str) -> str:
        file.write_text(text)
        return report.digest(["room"], tmp_path)

    plain = of("def f(x):\n    return 'a b', x\n")
    same = '"""About."""\n\n\ndef f(x):\n    """Do.\n\n    Twice."""\n    # how\n\n    return \'a b\', x  # why\n'
    assert of(same) == plain, "comments, docstrings and blank lines"
    assert of("def f(x):\n    return 'ab', x\n") != plain, "a blank in a text is code"
    assert of("def f(x):\n    return 'a b', y\n") != plain
    (room / "two.py").write_text("x = 1\n")
    assert of("def f(x):\n    return 'a b', x\n") != plain, "a new file"


def test_every_result_here_is_one():
    for path in report.RESULTS.glob("*.json"):
        assert report.read(path).benchmark
