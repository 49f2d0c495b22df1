"""Rows of `gpu.py`, and where its sections run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import report
import torch

MET, MISSED, EQUAL, WRONG = "met", "NOT MET", "equal", "WRONG"
UNCHECKED, FAILED = "not checked", "FAILED"


class Row(NamedTuple):
    """One figure, and what it says."""

    section: str
    what: str
    figure: str
    goal: str
    verdict: str
    """One of the words above, with a reason behind it."""
    ratio: report.Figure | None = None
    """Ours over what it is measured beside; larger is better."""


@dataclass
class Place:
    """Where the sections run, and how much of everything."""

    device: torch.device
    form: str
    """`smoke`, `default` or `full`."""
    scratch: Path
    ends_at: float

    @property
    def is_gpu(self) -> bool:
        """Whether figures mean anything."""
        return self.device.type != "cpu"

    @property
    def left_s(self) -> float:
        """Seconds that are left of the budget."""
        return self.ends_at - time.monotonic()

    @property
    def repeat(self) -> int:
        """Samples of each contender."""
        return {"smoke": 1, "default": 7, "full": 21}[self.form]

    def size(self, smoke: int, default: int, full: int | None = None) -> int:
        """Return the size of something in this form."""
        return {"smoke": smoke, "default": default, "full": full or 2 * default}[self.form]

    def sync(self) -> None:
        """Wait for everything under way on the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def timed(self, call: Callable[[], Any]) -> float:
        """Return the seconds that `call` takes, and what it starts on the device."""
        self.sync()
        return report.timed(lambda: (call(), self.sync()))

    def begin(self) -> None:
        """Count the device's memory from here on."""
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def memory(self) -> str:
        """Return the most memory that was taken since `begin`."""
        return f"{torch.cuda.max_memory_allocated(self.device) / 2**20:.0f} MiB" if self.is_gpu else "not on a GPU"

    def pinned(self, data: torch.Tensor) -> torch.Tensor:
        """Return data in page-locked memory, where there is a device to copy it to."""
        return data.pin_memory() if self.is_gpu else data

    def ratio(
        self, section: str, what: str, samples: dict[str, list[float]], size_bytes: int, goal: float | None
    ) -> Row:
        """Return the row of `ours` beside another contender, by the seconds that both took for `size_bytes`."""
        ours, (other, beside) = samples.pop("ours"), samples.popitem()
        ratio = report.Figure.of([b / a for a, b in zip(ours, beside, strict=True)], what, f"of {other}")
        rates = [f"{size_bytes / statistics.median(times) / 1e9:.3g} GB/s" for times in (ours, beside)]
        verdict = MET if goal is not None and ratio.value >= goal else MISSED
        if goal is None:
            verdict = "-"
        elif not self.is_gpu or self.form == "smoke":
            verdict = f"{UNCHECKED}: {'a smoke run' if self.is_gpu else 'no GPU'}, a ratio says nothing"
        wanted = "-" if goal is None else f"at least {goal}"
        return Row(section, what, f"{ratio.value:.3g} of {other}: {rates[0]} beside {rates[1]}", wanted, verdict, ratio)


def same(section: str, what: str, found: torch.Tensor, expected: torch.Tensor) -> Row:
    """Return the row of a comparison of bytes, wherever they are."""
    a, b = (each.contiguous().view(torch.uint8).cpu() for each in (found, expected))
    wrong = int((a != b).sum()) if a.shape == b.shape else max(a.numel(), b.numel())
    return Row(section, what, f"{wrong} of {b.numel()} bytes differ", "0", WRONG if wrong else EQUAL)


def within(section: str, what: str, found: float, bound: float, figure: str = "") -> Row:
    """Return the row of a difference that noise must explain; one that is no number is wrong."""
    text = figure or f"{found:.3g}"
    return Row(section, what, text, f"at most {bound:.3g}", EQUAL if found <= bound else WRONG)
