"""`benchmarks/gpu.py` runs without a GPU, vLLM and LMCache, and says WRONG where anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SECTIONS = ["slab", "blocks", "int8", "prefill"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run in a process of its own found, and each with something wrong."""
    script, out = Path(__file__).parent / "gpu_offline.py", tmp_path_factory.mktemp("gpu")
    ran = subprocess.run(
        [sys.executable, str(script), str(out)], capture_output=True, text=True, timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [line for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
    assert ran.returncode == 0 and len(lines) == 1, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(lines[0].removeprefix("FOUND ")) | {"out": str(out), "printed": ran.stdout}


def _verdicts(found: dict[str, Any], section: str) -> list[str]:
    return [row["verdict"].partition(":")[0] for row in found["rows"] if row["section"] == section]


def test_every_section_runs_on_a_bare_machine_and_no_ratio_is_judged_without_a_gpu(found: dict[str, Any]) -> None:
    sound = found["sound"]
    assert sound["status"] == 0, sound["rows"]
    for section in SECTIONS:
        verdicts = _verdicts(sound, section)
        assert "equal" in verdicts and set(verdicts) <= {"equal", "-", "not checked"}, (section, sound["rows"])
    judged = [row for row in sound["rows"] if row["goal"].startswith("at least")]
    assert len(judged) == 4 and all("no GPU" in row["verdict"] for row in judged)
    assert "ratios mean nothing" in found["printed"]


@pytest.mark.parametrize(
    ("wrong", "sections"),
    [
        ("promotion", ["slab"]), ("injection", ["blocks"]), ("scale", ["int8"]), ("prefill", ["prefill"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_ends_with_status_1(found: dict[str, Any], wrong: str, sections: list[str]) -> None:
    """A byte flipped on its way to the device or into the blocks, a scale doubled, other KV."""
    assert found[wrong]["status"] == 1
    for section in sections:
        assert "WRONG" in _verdicts(found[wrong], section), found[wrong]["rows"]


def test_a_section_that_fails_takes_no_other_along(found: dict[str, Any]) -> None:
    crash = found["crash"]
    assert crash["status"] == 1
    (row,) = [row for row in crash["rows"] if row["section"] == "slab"]
    assert row["verdict"] == "FAILED: RuntimeError: no such kernel"
    assert "equal" in _verdicts(crash, "int8")


def test_what_there_is_no_time_for_is_not_checked_and_said_so(found: dict[str, Any]) -> None:
    (row,) = found["late"]["rows"]
    assert (
        found["late"]["status"] == 0 and row["verdict"].startswith("not checked: ") and "--budget-s" in row["verdict"]
    )


def test_packages_that_are_missing_are_named_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import gpu

    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name in ("blake3", "yaml") else name)
    assert gpu.main(["--smoke"]) == 2
    told = capsys.readouterr().err
    assert "needs blake3, PyYAML" in told and "--find-links wheels" in told and "PYTHONPATH" in told
