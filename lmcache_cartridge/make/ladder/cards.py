"""Cards: what `validate --gpu` tries beside the rest: servers by the layout of their KV and by attention backend, and copies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ...errors import UnsupportedEngine
from .ground import Ground, Unchecked, Wrong
from .others import elsewhere, own_of, short
from .own import Mode, OwnServer

TIER = "14"
_ORDER = "VLLM_KV_CACHE_LAYOUT"
_BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
_COPIES = ("slab", "blocks", "promotion", "int8")
"""Sections of the benchmark that are about bytes; the models' are the ladder's own."""
_BUDGET_S, _COPIES_S = 400, 600
"""Seconds after which the benchmark begins nothing more, and when it is given up."""
_SERVES = re.compile(r"serving \d+ cartridges .*, chunk \d+ tokens of \d+ bytes, (?:rank \d+ of \d+, )?(\S+)")
"""The line of `engine/backend.py` in-process, and that of `engine/l2.py` in multiprocess mode."""


class Setup(NamedTuple):
    """How a server is told to lay out its KV, or which attention to use."""

    name: str
    environment: Mapping[str, str]
    vllm_args: Sequence[str]
    needs: str | None = None
    """A package without which vLLM has no such attention."""


SETUPS = (
    Setup("K beside V, tokens before heads (LBNHC, NHD)", {_ORDER: "LBNHC"}, ()),
    Setup("K beside V, heads before tokens (LBHNC, HND)", {_ORDER: "LBHNC"}, ()),
    Setup("FLASH_ATTN", {}, ("--attention-backend", "FLASH_ATTN")),
    Setup("FLASHINFER", {}, ("--attention-backend", "FLASHINFER"), "flashinfer"),
    Setup("TRITON_ATTN", {}, ("--attention-backend", "TRITON_ATTN"), "triton"),
)
"""vLLM 0.32 takes LBNHC where nothing else is wanted; FlashInfer takes LBHNC on Blackwell. LMCache has no layout with heads
outermost (0.5.6)."""


def check() -> str:
    """Return the name of the first GPU. Raises `UnsupportedEngine` where torch finds none."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedEngine(
            f"--gpu: torch {torch.__version__} finds no GPU here; leave --gpu out, or run it where there is one (docs/gpu.md)"
        )
    return torch.cuda.get_device_name(0)


def rungs(modes: Sequence[Mode]) -> list[tuple[str, str, Callable[[Ground], str], int]]:
    """Return what makes the rungs of tier 14: see `climb.Rung`."""
    on_servers = [
        (TIER, f"{setup.name}, {mode}", partial(served, setup=setup, mode=mode), 2)
        for setup in SETUPS
        for mode in modes
    ]
    return [(TIER, "copies beside the card's own", copies, 1), *on_servers]


def started(own: OwnServer, setup: Setup, mode: Mode) -> OwnServer:
    """Return the server of a setup, not started yet, over the same registry."""
    return own.variant(mode=mode, vllm_args=setup.vllm_args, environment=setup.environment)


def served(ground: Ground, setup: Setup, mode: Mode) -> str:
    """Ask a server of a setup with the same cartridges: ten, crosswise, chains and trained."""
    own = own_of(ground)
    if setup.needs and find_spec(setup.needs) is None:
        raise Unchecked(f"{setup.needs} is not installed, without which vLLM has no {setup.name}")
    if taken := sorted(name for name, value in setup.environment.items() if os.environ.get(name, value) != value):
        raise Unchecked(f"{taken[0]} is set in the environment, which goes first; unset it")
    there = started(own, setup, mode)
    with elsewhere(ground, there) as on_it:
        found = short(on_it)
        return f"{layout_of(there.log)}; {found}"


def layout_of(log: Path) -> str:
    """Return what a server's log says of the layout in which chunks are given to it."""
    text = log.read_text(errors="replace") if log.exists() else ""
    said = _SERVES.findall(text)
    return f"chunks as {said[-1]}" if said else "its log names no layout"


def copies(ground: Ground) -> str:
    """Run `benchmarks/gpu.py`, as far as it is about bytes, and sum up what it says."""
    if not _BENCHMARK.exists():
        raise Unchecked("needs benchmarks/gpu.py, which a checkout has")
    if ground.own is not None:
        ground.own.stop()  # it has the card's memory
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, str(_BENCHMARK), "--device", "cuda", "--budget-s", str(_BUDGET_S), "--out", out]
        words += (word for name in _COPIES for word in ("--only", name))
        try:
            ran = subprocess.run(words, capture_output=True, text=True, timeout=_COPIES_S, check=False)
        except subprocess.SubprocessError as error:
            raise Wrong(f"{_BENCHMARK.name} did not end in {_COPIES_S} s: {type(error).__name__}") from error
        record = Path(out) / "gpu.json"
        if not record.exists():
            raise Wrong(f"it ended with {ran.returncode}: {ran.stderr.strip()[-300:]}")
        return summed([each["case"] | {"what": each["what"]} for each in json.loads(record.read_text())["figures"]])


def summed(rows: Sequence[Mapping[str, str]]) -> str:
    """Return what rows of the benchmark say. Raises `Wrong` where one is wrong or failed, `Unchecked` where none is equal."""
    bad = [row for row in rows if row["verdict"].startswith(("WRONG", "FAILED"))]
    if bad:
        raise Wrong("; ".join(f"{row['section']}: {row['what']}: {row['figure']} {row['verdict']}" for row in bad))
    ratios = [
        f"{row['what']} {row['figure'].partition(':')[0]} ({row['goal']}: {row['verdict']})"
        for row in rows
        if row["goal"].startswith("at least")
    ]
    left = [f"{row['section']} {row['verdict']}" for row in rows if row["verdict"].startswith("not checked")]
    if not (equal := sum(row["verdict"] == "equal" for row in rows)):
        raise Unchecked("; ".join(["nothing was compared", *left]))
    return "; ".join([f"{equal} comparisons equal", *ratios, *left])
