"""Plots of a training and of an evaluation, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def losses(rows: Sequence[Mapping[str, float]], path: Path, title: str) -> None:
    """Draw the losses of a training over its steps; writes nothing where there are none."""
    if not rows:
        return
    axes = _axes(7, 4)
    for key, style, label in (("loss", "-", "training"), ("held_out_loss", "o-", "held out")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        axes.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1) if points else None
    axes.set(title=title, xlabel="step", ylabel="nats an answer token", yscale="log")
    axes.legend()
    _save(axes, path)


def shares(values: Mapping[str, float], path: Path, title: str, errors: Mapping[str, float] | None = None) -> None:
    """Draw one bar a name for a share from 0 to 1, with the spread in `errors`."""
    axes = _axes(7, 0.8 + 0.35 * len(values))
    names = list(values)[::-1]
    spread = [errors.get(name, 0.0) for name in names] if errors else None
    bars = axes.barh(names, [100 * values[name] for name in names], color="#4c78a8",
                     xerr=[100 * s for s in spread] if spread else None)  # fmt: skip
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set(title=title, xlabel="exact answers (%)", xlim=(0, 112))
    _save(axes, path)


def _axes(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def _save(axes: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    axes.figure.savefig(path, dpi=120, format="png")
