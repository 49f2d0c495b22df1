"""Evaluate a cartridge: the same questions without a prefix, after the document, and after the cartridge."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CartridgeError
from . import plot
from .ask import WAYS, Asker, Way
from .progress import Progress, silent
from .questions import Question
from .server import HIGHEST, Server

REPORT, PICTURE = "evaluation.json", "evaluation.png"


class Answer(NamedTuple):
    """What came back for one question."""

    question: str
    expected: str
    got: str
    score: int | None
    """The judge's, from 0 to 5; None without a judge, or where it gave none."""

    @property
    def exact(self) -> bool:
        """Whether the answer is the expected one, word for word."""
        return same(self.got, self.expected)


def same(got: str, expected: str) -> bool:
    """Return whether two answers are the same but for spaces, case, and one full stop at the end."""
    return _plain(got) == _plain(expected)


def pick(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """Return at most `limit` questions, evenly from all. Raises `CartridgeError` for one without an answer."""
    for question in questions:
        if question.answer is None:
            raise CartridgeError(f"the question {question.text!r:.100} has no answer to compare with")
    count = min(limit or len(questions), len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


def ask_all(
    asker: Asker,
    questions: Sequence[Question],
    tokens: int,
    *,
    ways: Sequence[Way] = WAYS,
    judge: Server | None = None,
    progress: Progress = silent,
) -> dict[Way, list[Answer]]:
    """Return the answers each way; with a judge, each is scored too. `questions` are those that `pick` lets pass."""
    found: dict[Way, list[Answer]] = {}
    for way in ways:
        replies = asker.ask(way, [question.text for question in questions], tokens, progress)
        found[way] = []
        for number, (question, got) in enumerate(zip(questions, replies, strict=True), 1):
            expected = question.answer or ""
            score = judge.score(question.text, expected, got) if judge else None
            found[way].append(Answer(question.text, expected, got, score))
            if judge:
                progress(f"judge {way}", number, len(questions))
    return found


def report(name: str, answers: Mapping[Way, Sequence[Answer]], judge: str | None) -> dict[str, Any]:
    """Return the result for programs: the shares, the judge's mean over what it scored, and how much it did not."""
    ways: dict[Way, dict[str, Any]] = {}
    for way, given in answers.items():
        scores = [answer.score for answer in given if answer.score is not None]
        ways[way] = {"exact": sum(answer.exact for answer in given) / len(given)}
        if judge:
            mean = statistics.mean(scores) if scores else None
            ways[way] |= {"judged": mean, "unjudged": len(given) - len(scores)}
    return {"name": name, "questions": len(next(iter(answers.values()))), "judge": judge, "ways": ways}


def rows(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the result as rows for people."""
    return [
        {"asked with": way, "exact answers": f"{round(found['exact'] * result['questions'])}/{result['questions']}",
         "share": f"{found['exact']:.1%}"}
        | ({f"judge, 0 to {HIGHEST}": "none" if found["judged"] is None else f"{found['judged']:.2f}",
            "not judged": str(found["unjudged"])} if result["judge"] else {})
        for way, found in result["ways"].items()
    ]  # fmt: skip


def write(result: Mapping[str, Any], answers: Mapping[Way, Sequence[Answer]], directory: Path) -> None:
    """Write `REPORT`, the result with every answer, and `PICTURE` into `directory`, over what is there."""
    directory.mkdir(parents=True, exist_ok=True)
    every = {way: [answer._asdict() | {"exact": answer.exact} for answer in given] for way, given in answers.items()}
    text = json.dumps({**result, "answers": every}, indent=2, ensure_ascii=False)
    (directory / REPORT).write_text(text + "\n", encoding="utf-8")
    plot.shares({way: found["exact"] for way, found in result["ways"].items()}, directory / PICTURE, result["name"])


def _plain(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").casefold()
