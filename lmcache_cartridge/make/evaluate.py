"""Evaluate a cartridge: the same questions without a prefix, after the document, and after the cartridge."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .ask import WAYS, Asker, Way
from .progress import Progress, silent
from .questions import Question
from .server import HIGHEST, Server

REPORT = "evaluation.json"
SHORT_WORDS = 8
"""An answer of at most so many words is right or wrong."""


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

    @property
    def right(self) -> float:
        """1 for an exact answer, else 0; of one expected in more than `SHORT_WORDS`, the words in common (F1)."""
        got, expected = (Counter(_plain(text).split()) for text in (self.got, self.expected))
        if self.exact or expected.total() <= SHORT_WORDS:
            return float(self.exact)
        return 2 * (got & expected).total() / (got.total() + expected.total())


def same(got: str, expected: str) -> bool:
    """Return whether two answers are the same but for spaces, case, and one full stop at the end."""
    return _plain(got) == _plain(expected)


def interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95% interval of a share that was seen in `count` questions, by Wilson.

    Of values between 0 and 1 in place of right or wrong it is too wide, never too narrow.
    """
    z = 1.96
    middle, wide = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, (middle - wide) / (1 + z * z / count)), min(1.0, (middle + wide) / (1 + z * z / count))


def ask_all(
    asker: Asker,
    questions: Sequence[Question],
    tokens: int,
    *,
    judge: Server | None = None,
    progress: Progress = silent,
) -> dict[Way, list[Answer]]:
    """Return the answers each way; with a judge, each is scored too.

    One that has no answer is compared with what came after the document.
    """
    texts, found = [question.text for question in questions], dict[Way, list[Answer]]()
    replies = {way: asker.ask(way, texts, tokens, progress) for way in WAYS}
    for way in WAYS:
        found[way] = []
        for number, (question, got) in enumerate(zip(questions, replies[way], strict=True), 1):
            expected = replies["document"][number - 1] if question.answer is None else question.answer
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
        exact = sum(answer.exact for answer in given) / len(given)
        ways[way] = {"exact": exact, "interval": interval(exact, len(given))}
        if judge:
            mean = statistics.mean(scores) if scores else None
            ways[way] |= {"judged": mean, "unjudged": len(given) - len(scores)}
    return {"name": name, "questions": len(next(iter(answers.values()))), "judge": judge, "ways": ways}


def rows(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the result as rows for people."""
    return [
        {"asked with": way, "exact answers": f"{round(found['exact'] * result['questions'])}/{result['questions']}",
         "share": f"{found['exact']:.1%}", "95% interval": " to ".join(f"{end:.1%}" for end in found["interval"])}
        | ({f"judge, 0 to {HIGHEST}": "none" if found["judged"] is None else f"{found['judged']:.2f}",
            "not judged": str(found["unjudged"])} if result["judge"] else {})
        for way, found in result["ways"].items()
    ]  # fmt: skip


def write(result: Mapping[str, Any], answers: Mapping[Way, Sequence[Answer]], directory: Path) -> None:
    """Write `REPORT`, the result with every answer, into `directory`, over what is there."""
    directory.mkdir(parents=True, exist_ok=True)
    every = {way: [answer._asdict() | {"exact": answer.exact} for answer in given] for way, given in answers.items()}
    text = json.dumps({**result, "answers": every}, indent=2, ensure_ascii=False)
    (directory / REPORT).write_text(text + "\n", encoding="utf-8")


def _plain(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").casefold()
