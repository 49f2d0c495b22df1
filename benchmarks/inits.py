"""How soon a training is good, by where it starts: exact answers over seconds for every `--init`.

    python benchmarks/inits.py [--full] [--sheets 1]

Each start is trained at 4x and 16x for a fifth of the steps with which the default start, `sci`, is trained beside them.
Every so many steps every fact is asked in wordings that none was trained on, by transformers. Seconds are those of making
the start and of the steps, not of the teacher's part, which is the same for all.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import report
import torch
from quality import ASKED, HELD_OUT, MODEL, RATE, TRAINED
from recall.ward import Document, write_document
from transformers.utils.logging import disable_progress_bar

from lmcache_cartridge.make import evaluate
from lmcache_cartridge.make.ask import ModelAsker
from lmcache_cartridge.make.compact.job import make
from lmcache_cartridge.make.compact.wanted import Wanted
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import rounded
from lmcache_cartridge.make.questions import Question
from lmcache_cartridge.make.train import lesson
from lmcache_cartridge.make.train.initial import INITIALS, initial_kv, prefilled, usual_rate
from lmcache_cartridge.make.train.trainer import Recipe, Trainer

DEFAULT, COMPACT = "sci", "compact"
SHORTER = 5
"""The goal for `compact`: the default start's final quality in this fraction of its steps."""


class Size(NamedTuple):
    """One length of cartridges."""

    name: str
    positions: int
    steps: int
    """Of the default start."""


class Point(NamedTuple):
    """A look at a training."""

    step: int
    seconds: float
    exact: float


SIZES = (Size("4x", 256, 1000), Size("16x", 64, 1400))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = report.parser(__doc__, "inits")
    parser.add_argument("--sheets", type=int, help="sheets to train on (default 1, with --full 5)")
    parser.add_argument("--seed", default="inits", help="of the sheets (%(default)s)")
    parser.add_argument("--size", choices=[size.name for size in SIZES], help="only this one")
    options = parser.parse_args(arguments)
    sizes, tokens = tuple(size for size in SIZES if options.size in (None, size.name)), 1024
    if options.smoke:
        sizes, tokens = (Size("4x", 32, 10),), 130
    torch.set_num_threads(1)
    disable_progress_bar()
    machine = report.hardware()
    model = CausalModel(MODEL)
    model.model.float()
    found: dict[tuple[str, str], list[list[Point]]] = {}
    for number in range(options.sheets or (5 if options.full else 1)):
        document = write_document(random.Random(f"{options.seed} {number}"), tokens)
        school = School(model, document)
        for size in sizes:
            short = size.steps // SHORTER
            for init, steps in [(COMPACT, short), (DEFAULT, size.steps), *((init, short) for init in INITIALS)]:
                points = list(school.train(size, init, steps))
                found.setdefault((size.name, f"{init}, {steps:,} steps"), []).append(points)
                report.say(f"sheet {number}, {size.name}, {init}, {steps} steps: " + ", ".join(
                    f"{100 * p.exact:.1f}% at {p.step} ({p.seconds:.0f} s)" for p in points))  # fmt: skip
    _publish(options, machine, found)


class School:
    """A sheet, and what is trained and asked of it."""

    def __init__(self, model: CausalModel, document: Document) -> None:
        self.model, self.ids = model, model.encode(document.text, special=True)
        facts = [fact._asdict() for fact in document.facts]
        self.trained = [Question(wording.format(**fact)) for fact in facts for wording in TRAINED]
        held_out = self.validation = [Question(HELD_OUT.format(**fact), fact["value"]) for fact in facts[::4]]
        self.asked = [Question(ASKED[i % 2].format(**fact), fact["value"]) for i, fact in enumerate(facts)]
        self.kv = prefilled(model, self.ids)
        self.lesson = lesson.prepare(
            model, self.ids, [*self.trained, *held_out], self.kv, form="chat", top_k=0, answer_tokens=4
        )

    def train(self, size: Size, init: str, steps: int) -> Iterator[Point]:
        """Yield looks at a training from a start."""
        started = time.monotonic()
        if init == COMPACT:
            wanted = Wanted(size.positions, self.trained, form="chat")
            kv = make(self.model, self.kv, self.ids, wanted, self.validation).kv
        else:
            kv = initial_kv(init, self.model, self.ids, size.positions, seed=0)
        made = time.monotonic() - started
        recipe = Recipe(
            steps=steps,
            rate=usual_rate(init, self.kv) if init == COMPACT else RATE,
            schedule="cosine",
            warmup=min(20, steps // 10),
            patience=0,
            check_every=max(1, steps // 10),
        )
        held_out = range(len(self.trained), len(self.lesson.examples))
        trainer = Trainer(self.model, kv, self.lesson, held_out, recipe)
        for step in [0, *(steps * part // 10 for part in (1, 2, 4, 7, 10))]:
            trainer.train(None, lambda step, loss: None, step)
            yield Point(step, made + trainer.seconds, self.exact(trainer.kv()))

    def exact(self, kv: torch.Tensor) -> float:
        """Return the share of facts that are answered right after `kv`, rounded as it is stored."""
        asker = ModelAsker(self.model, [], rounded(kv, self.model.fingerprint), "chat")
        answers = evaluate.ask_all(asker, self.asked, 4, ways=("cartridge",))["cartridge"]
        return sum(answer.exact for answer in answers) / len(answers)


def _publish(
    options: argparse.Namespace, machine: dict[str, Any], found: dict[tuple[str, str], list[list[Point]]]
) -> None:
    rows, lines, goals = [], [], {}
    for (size, name), runs in found.items():
        last = [points[-1] for points in runs]
        exact = sum(p.exact for p in last) / len(last)
        if name.startswith(DEFAULT):
            goals[size] = max(exact, goals.get(size, 0.0))
        rows.append({
            "size": size, "start": name, "at the start": f"{100 * sum(p[0].exact for p in runs) / len(runs):.1f}%",
            "exact": f"{100 * exact:.1f}%", "worst sheet": f"{100 * min(p.exact for p in last):.1f}%",
            "seconds": f"{sum(p.seconds for p in last) / len(last):.0f}",
        })  # fmt: skip
    for (size, name), runs in found.items():
        if name.startswith(COMPACT):
            goal = goals[size]
            reached = [next((point.step for point in points if point.exact >= goal), None) for points in runs]
            lines.append(
                f"{size}: {DEFAULT} ends at {100 * goals[size]:.1f}%; {COMPACT} has it after so many steps: "
                f"{', '.join('not' if step is None else str(step) for step in reached)}"
            )
    options.out.mkdir(parents=True, exist_ok=True)
    _draw(options.out / "inits.png", found)
    report.publish("inits", rows, options, machine, details={" ".join(k): v for k, v in found.items()}, lines=lines)


def _draw(path: Path, found: dict[tuple[str, str], list[list[Point]]]) -> None:
    """Draw the first sheet's curves, and the other sheets' thinner."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(size for size, _ in found))
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(1 + 6 * len(sizes), 5), squeeze=False)
    for axis, size in zip(axes[0], sizes, strict=True):
        for (of, name), runs in found.items():
            if of != size:
                continue
            color = None
            for number, points in enumerate(runs):
                (line,) = axis.plot(
                    [p.seconds for p in points], [100 * p.exact for p in points], "o-", markersize=3, color=color,
                    linewidth=0.6 if number else 1.6, label=None if number else name,
                )  # fmt: skip
                color = line.get_color()
        axis.set(title=size, xlabel="seconds, the start's own included", ylabel="exact answers (%)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
