"""Compare: how far two answers are apart, and how far the server's own rounding drives them apart.

Nothing here asks whether the model knew an answer: a model of random weights has right answers too, its own after the
dense prompt. Compared is what `artifact/canary.py` compares, the mean difference of the likeliest tokens' logprobs up
to the first token that differs. There two likeliest tokens must be nearly as likely.
"""

from __future__ import annotations

from typing import NamedTuple

from ..artifact.canary import FLOOR, NOISES, Expected, compare
from ..make.server import Reply

_TOP = 10
ASSUMED = {"plain": 0.15, "int8": 0.5}
"""The bound by encoding where no model is at hand to measure what other kernels' rounding makes: three times the least, as
on the shipped model KV made by transformers comes to 0.02 to 0.04 on average; twice what int8 was seen to make, 0.245."""
FLOORS = {"float32": 0.01}
"""The least bound of models whose logits are not rounded to 16 bits."""
ROUNDING = 1.0
"""The largest mean difference of a logprob, in nats, that may come of rounding."""
TELLING = 3.0
"""A question tells two documents apart whose dense answers differ by so many bounds."""


class Difference(NamedTuple):
    """Two answers, compared."""

    mean: float
    """Of the logprobs' differences."""
    positions: int
    margin: float
    """How much likelier the expected token was than the one given, where they first differ; 0 where they never do."""

    def within(self, bound: float) -> bool:
        """Whether rounding explains it."""
        return self.mean <= bound and self.margin <= 4 * bound


def compare_logprobs(expected: Reply, given: Reply) -> Difference:
    """Compare an answer with the one expected. An answer that is shorter is infinitely far."""
    best = [sorted(row.items(), key=lambda each: -each[1])[:_TOP] for row in expected.top]
    wanted = Expected(
        tuple(tuple(token for token, _ in row) for row in best), tuple(tuple(n for _, n in row) for row in best), 1.0
    )
    found = compare(wanted, given.tokens, given.top)
    margin = 0.0
    for row, token in zip(best[: found.positions], given.tokens, strict=False):
        if token != row[0][0]:
            margin = row[0][1] - dict(row).get(token, row[-1][1])
    return Difference(found.difference, found.positions, margin)


class Noise(NamedTuple):
    """How far the answers to equal dense prompts were apart: mean differences."""

    twice: float = 0.0
    """The same dense prompt, computed twice."""
    neighbours: float = 0.0
    """Computed beside others."""
    cached: float = 0.0
    """With the document from vLLM's own prefix cache."""

    def bound(self, rounding: float | None, dtype: str = "", encoding: str = "plain") -> float:
        """Return the largest mean difference that is taken for noise, of a model in `dtype`, a cartridge in `encoding`.

        `rounding` is what rounding each of the model's products at random does to this answer; None if it is not known.
        """
        least = ASSUMED[encoding] if rounding is None else FLOORS.get(dtype, FLOOR)
        return max(least, NOISES * max(*self, rounding or 0.0))

    def __str__(self) -> str:
        return (
            f"the same dense prompt computed twice differs by {self.twice:.3f} on average, beside others by "
            f"{self.neighbours:.3f}, with vLLM's prefix cache by {self.cached:.3f}"
        )
