"""`benchmarks/gpu.py` runs without a GPU, vLLM and LMCache, and says WRONG where anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a run in a process of its own found, and each with something wrong."""
    script, out = Path(__file__).parent / "gpu_offline.py", tmp_path_factory.mktemp("gpu")
    ran = subprocess.run(
        [sys.executable, str(script), str(out)], capture_output=True, text=True, timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [line for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
    assert ran.returncode == 0 and len(lines) == 1, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(lines[0].removeprefix("FOUND ")) | {"out": str(out), "printed": ran.stdout}


def test_every_section_runs_on_a_bare_machine_and_finds_nothing_wrong(found):
    sound = found["sound"]
    assert sound["status"] == 0 and not {"WRONG", "FAILED"} & set(sound["said"].split())
    units = {what: figure["unit"] for what, figure in sound["figures"].items()}
    compared = [what for what, unit in units.items() if unit == "wrong bytes" and sound["figures"][what]["n"] > 1]
    assert len(compared) == 5, "the device tier, two layouts from two tiers"
    assert len([unit for unit in units.values() if unit.endswith(("copy", "bytes"))]) > 6


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("promotion", "WRONG bytes in the device tier: 4 wrong bytes"),
        ("injection", "WRONG LBHNC: device tier to blocks, bytes"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_ends_with_status_1(found, wrong, told):
    """A byte of each chunk flipped on its way to the device or into the blocks."""
    assert found[wrong]["status"] == 1 and told in found[wrong]["said"], found[wrong]
