"""Plots of a training and of times, as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np


def losses(rows: Sequence[Mapping[str, float]], path: Path, title: str) -> None:
    """Draw the losses of a training over its steps; writes nothing where there are none."""
    if not rows:
        return
    axes = _axes(4)
    for key, style, label in (("loss", "-", "training"), ("validation_loss", "o-", "validation")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        axes.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1) if points else None
    axes.set(title=title, xlabel="step", ylabel="nats an answer token", yscale="log")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_png(axes))


def first_tokens(lines: Mapping[str, Sequence[tuple[float, float, float, float]]]) -> bytes:
    """Return a PNG with a line a name through points of p, a time in ms, the lowest and the highest; axes by powers."""
    axes = _axes(4.5)
    for name, points in lines.items():
        at, value, low, high = np.array(points).T
        axes.errorbar(at, value, np.stack([value - low, high - value]), marker="o", markersize=4, capsize=3, label=name)
    axes.set(title="Time to first token", xlabel="p, tokens of the document", ylabel="ms", yscale="log")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return _png(axes)


def memory(points: Sequence[tuple[float, float]]) -> bytes:
    """Return a PNG with a line through points of seconds and MiB, from 0 on."""
    axes = _axes(3.5)
    axes.plot(*zip(*points, strict=True), linewidth=1.4)
    axes.set(title="Memory of the server", xlabel="seconds", ylabel="MiB")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return _png(axes)


def _axes(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure((7, height), layout="constrained").add_subplot()


def _png(axes: Any) -> bytes:
    data = BytesIO()
    axes.figure.savefig(data, dpi=120, format="png")
    return data.getvalue()
