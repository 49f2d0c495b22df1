"""What was measured of the recall model, and how it is written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .ward import QUESTIONS

_SCORE_HEADINGS = ("sheets", "tokens", "questions", "weights", "with the sheet", "worst sheet")


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of right answers at one document length and precision, as means over the documents."""

    dtype: str
    min_tokens: int
    max_tokens: int
    """Lengths of the shortest and the longest document drawn, with `<s>`."""
    documents: int
    questions: int
    with_document: float
    worst_document: float
    by_template: tuple[float, ...]
    """In the order of `QUESTIONS`."""
    without_document: float


@dataclass(frozen=True, slots=True)
class Generation:
    """Answers by plain greedy `generate` in bfloat16."""

    questions: int
    right: int
    ended: int
    """Answers of one token and `</s>`, right or wrong."""


@dataclass(frozen=True, slots=True)
class Run:
    """One command and what it took."""

    command: str
    date: str
    hardware: str
    seed: int
    threads: int
    wall_s: int
    cpu_s: int


@dataclass(frozen=True, slots=True)
class Figures:
    scores: tuple[Score, ...]
    generation: Generation
    training: tuple[Run, ...]
    """The stages in order; a later one starts from the weights of the one before."""
    evaluation: Run

    def write(self, directory: Path) -> None:
        """Write `figures.json` and `FIGURES.md` into `directory`, over what is there."""
        (directory / "figures.json").write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        (directory / "FIGURES.md").write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """Return the page that `FIGURES.md` holds."""
        phrasings = [f"`{question.format(attribute='blood', patient='X')}`" for question in QUESTIONS]
        return "\n".join(
            [
                "# Figures of the recall model",
                "",
                "Share of facts answered right (the value, then `</s>`, each the first choice), on",
                "sheets that training never saw. Every fact of every sheet is asked in three phrasings.",
                "Chance is about 5%: the mean of one in 8, 32, 24, 32 and 24 values. `evaluate.py` wrote",
                "this page; `figures.json` holds the same. The commands are run in `benchmarks/`.",
                "",
                _row(*_SCORE_HEADINGS, *phrasings, "no sheet"),
                _row(*["---"] * (len(_SCORE_HEADINGS) + len(phrasings) + 1)),
                *map(_score_row, self.scores),
                "",
                f"Plain greedy `generate` in bfloat16, {self.generation.questions} questions: "
                f"{self.generation.right} right, {self.generation.ended} of one token and `</s>`.",
                "",
                _row("run", "date", "hardware", "seed", "threads", "wall", "CPU"),
                _row(*["---"] * 7),
                *(_run_row(f"training {stage}", run) for stage, run in enumerate(self.training, 1)),
                _run_row("evaluation", self.evaluation),
                "",
                "```",
                *(run.command for run in (*self.training, self.evaluation)),
                "```",
                "",
            ]
        )


def run_from(record: Mapping[str, object]) -> Run:
    """Return the `Run` in a training record, which holds more than a `Run` does."""
    return Run(**{name: record[name] for name in Run.__dataclass_fields__})  # type: ignore[arg-type]


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _score_row(score: Score) -> str:
    return _row(
        score.documents,
        f"{score.min_tokens:,} to {score.max_tokens:,}",
        f"{score.questions:,}",
        score.dtype,
        f"**{score.with_document:.2%}**",
        f"{score.worst_document:.2%}",
        *(f"{share:.2%}" for share in score.by_template),
        f"{score.without_document:.2%}",
    )


def _run_row(name: str, run: Run) -> str:
    return _row(name, run.date, run.hardware, run.seed, run.threads, f"{run.wall_s / 60:.1f} min", f"{run.cpu_s:,} s")
