"""Figures: a row of statistics for each p, number of requests at once and way."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .run import Measured
from .ways import WAYS, Answer, Way


class Stats(NamedTuple):
    """Some figures, summed up."""

    number: int
    mean: float
    median: float
    p95: float
    """Between the two nearest, in proportion."""
    low: float
    high: float
    deviation: float
    """Of the sample; 0 where there is one figure."""

    @classmethod
    def of(cls, figures: Sequence[float]) -> Stats | None:
        """Sum up; None of none."""
        if not figures:
            return None
        ordered = sorted(figures)
        at = 0.95 * (len(ordered) - 1)
        below, above = ordered[int(at)], ordered[min(int(at) + 1, len(ordered) - 1)]
        deviation = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
        return cls(
            len(ordered), statistics.fmean(ordered), statistics.median(ordered), below + (at % 1) * (above - below),
            ordered[0], ordered[-1], deviation,
        )  # fmt: skip


class Row(NamedTuple):
    """One way at one p, by so many clients at once."""

    p: int
    c: int
    way: Way
    ttft_ms: Stats | None
    each: Stats | None
    """Tokens a second of one answer, from its request to its last token."""
    total: Stats | None
    """Tokens a second of all requests sent together, from the first one's start to the last one's end."""
    cached: float | None
    """Median of the prompt tokens that were not computed; None where the server does not tell."""
    prompt_tokens: float | None
    """Median."""
    requests: int
    """Whose times are in the figures."""
    errors: int
    not_so: int
    """Answers that were none of their way, whose times are in no figure."""
    remarks: tuple[str, ...]
    equal: tuple[int, int] | None
    """How many answers are those of the dense way to the same prompt, of how many compared; None where none is."""
    speedup: float | None
    """Median time to first token of the dense way over this one's."""

    @property
    def is_sound(self) -> bool:
        """Whether every request was answered as its way means."""
        return not self.errors and not self.not_so


def rows(measured: Measured, unlike: Mapping[int, bool], *, are_prompts_the_same: bool = True) -> list[Row]:
    """Return the rows. Cartridges' answers at a p that is `unlike` are not compared with the dense ones.

    No answer is compared unless all ways ask with the same prompts.
    """
    cells: dict[tuple[int, int, Way], list[Answer]] = {}
    for answer in measured.answers:
        cells.setdefault((answer.p, answer.c, answer.way), []).append(answer)
    order = sorted(cells, key=lambda cell: (cell[0], cell[1], WAYS.index(cell[2])))
    return [
        _row(cell, cells, are_prompts_the_same and (cell[2] == "prefix" or not unlike.get(cell[0], False)))
        for cell in order
    ]


def _row(cell: tuple[int, int, Way], cells: Mapping[tuple[int, int, Way], Sequence[Answer]], compares: bool) -> Row:
    p, c, way = cell
    found = cells[cell]
    good = [answer for answer in found if _is_good(answer)]
    ttft = Stats.of([1000 * _first(answer) for answer in good])
    dense = Stats.of([1000 * _first(answer) for answer in cells.get((p, c, "dense"), ()) if _is_good(answer)])
    reasons = dict.fromkeys(reason for answer in found if (reason := answer.error or answer.not_so))
    batches: dict[int, list[Answer]] = {}
    for answer in found:
        batches.setdefault(answer.turn, []).append(answer)
    cached = [answer.cached for answer in good if answer.cached is not None]
    told = [answer.prompt_tokens for answer in good if answer.prompt_tokens is not None]
    return Row(
        p, c, way, ttft,
        each=Stats.of([_rate([answer]) for answer in good]),
        total=Stats.of([_rate(batch) for batch in batches.values() if all(map(_is_good, batch))]),
        cached=statistics.median(cached) if cached else None,
        prompt_tokens=statistics.median(told) if told else None,
        requests=len(good),
        errors=sum(answer.error is not None for answer in found),
        not_so=sum(answer.error is None and answer.not_so is not None for answer in found),
        remarks=tuple(reasons),
        equal=_equal(good, cells.get((p, c, "dense"), ())) if compares and way != "dense" else None,
        speedup=dense.median / ttft.median if dense and ttft and way != "dense" else None,
    )  # fmt: skip


def _equal(found: Sequence[Answer], dense: Sequence[Answer]) -> tuple[int, int] | None:
    right = {answer.question: answer.text for answer in dense if _is_good(answer)}
    compared = [answer.text == right[answer.question] for answer in found if answer.question in right]
    return (sum(compared), len(compared)) if compared else None


def _is_good(answer: Answer) -> bool:
    return answer.error is None and answer.not_so is None


def _first(answer: Answer) -> float:
    assert answer.first_s is not None, "an answer without an error has a first token"
    return answer.first_s - answer.asked_s


def _rate(batch: Sequence[Answer]) -> float:
    end = max(answer.last_s or 0.0 for answer in batch)
    return sum(answer.tokens for answer in batch) / max(end - min(answer.asked_s for answer in batch), 1e-9)
