"""Canary: a question after a cartridge, the answer expected of an engine that has its KV, and whether it was given.

Engines round in other orders, so no two give the same logprobs. Compared is the *mean* difference of the logprobs of the
likeliest tokens at several positions: one number of many, so that one token, or a mixture of experts whose routing
turns over, does not decide. How much of it is noise depends on the model, from 0.005 to 0.4; so it is measured when the
cartridge is made, by rounding every matrix product at random, and the bound is in units of it.

Of 60 small models of ten families with random weights, float32 against bfloat16 came to 0.4 to 1.6 of the measured
noise; one chunk of eight in another layout to 5 to 100 of it, a head in the place of another to 17 to 200. With four
times the noise as bound `tests/make/test_canary.py` has no false alarm and no miss.

An engine whose KV cache is fp8 gives other answers, from the same prompt computed by itself too, and how far from these
depends on the question: on the shipped model 0.1 to 0.25 for words of the document, 1.9 for one of unknown words, where
it chose another token. So what fp8 does to each question is measured with the cartridge too, and counts as noise there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

NOISES = 4.0
"""The bound, in units of the measured noise."""
FLOOR = 0.05
"""The least bound: less than rounding the logits themselves to bfloat16 makes of a vocabulary of words."""
IN_FP8, UNMEASURED = 1.5, 40.0
"""How much of what fp8 was measured to do is taken for noise: a question's own KV, which is fp8 in the engine, was not in
the measure; and what is taken for the measure where there is none, in units of the noise: the most that was seen, 37."""
MAX_QUESTIONS, MAX_TOKENS = 4, 64
TokenId = Annotated[int, msgspec.Meta(ge=0)]
_Few = msgspec.Meta(min_length=1, max_length=MAX_TOKENS)


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The likeliest tokens at each position of an answer."""

    tokens: Annotated[tuple[Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1)], ...], _Few]
    """At each position, the likeliest first: that one is the answer's own."""
    logprobs: tuple[tuple[float, ...], ...]
    """Of each of them."""
    noise: Annotated[float, msgspec.Meta(gt=0, lt=100)]
    """Mean difference of these logprobs that rounding makes."""

    def __post_init__(self) -> None:
        if list(map(len, self.tokens)) != list(map(len, self.logprobs)):
            raise ValueError("its tokens and logprobs do not go together")

    @property
    def bound(self) -> float:
        """The largest mean difference that is taken for noise."""
        return max(FLOOR, NOISES * self.noise)


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One question, and the answer that is expected."""

    question: Annotated[tuple[TokenId, ...], _Few]
    """Token ids that follow the cartridge."""
    answer: Expected
    int8: float | None = None
    """Mean difference that int8 makes of plain KV; None where it was not measured."""
    fp8: float | None = None
    """Mean difference that an fp8 cache makes, up to the first token that it turns into another; None where it was not
    measured."""

    def expected(self, *, in_fp8: bool) -> Expected:
        """Return the answer expected of an engine with an fp8 cache, or without."""
        if not in_fp8:
            return self.answer
        more = UNMEASURED * self.answer.noise if self.fp8 is None else self.fp8
        return msgspec.structs.replace(self.answer, noise=self.answer.noise + IN_FP8 / NOISES * more)


class ServedCanary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a server asks of its engine before it answers from a cartridge."""

    after: Annotated[tuple[Asked, ...], msgspec.Meta(min_length=1, max_length=MAX_QUESTIONS)]
    """Asked after the cartridge."""
    sensitivity: float
    """How many bounds the answers move when one chunk is damaged: of the chunks tried, the one that shows least. Below
    1, damage of a single chunk may go unseen."""
    behind: Annotated[tuple[Asked, ...], msgspec.Meta(max_length=MAX_QUESTIONS)] = ()
    """Asked after the cartridge and, behind it, itself: only there its keys are rotated, as in every chain. Empty where
    the model's context has no room for that, or its keys cannot be moved."""
    behind_positions: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """How many leading positions of both stand before the questions of `behind`; None for all of them. Whole chunks:
    what does not fill one an engine computes, and having seen the first copy it has other KV than the second."""

    def token_ids(self) -> Iterator[int]:
        """Iterate over every token id of the questions and answers."""
        for each in (*self.after, *self.behind):
            for ids in (each.question, *each.answer.tokens):
                yield from ids


class Comparison(NamedTuple):
    """An engine's answer beside the one expected."""

    difference: float
    """Mean difference of the logprobs."""
    bound: float
    positions: int
    """How many positions were compared: up to the first at which the engine chose another token."""

    @property
    def passed(self) -> bool:
        """Whether the engine has the cartridge's KV."""
        return self.difference <= self.bound

    def __str__(self) -> str:
        verdict = "as it should" if self.passed else "not as its KV says"
        return (
            f"the engine answers {verdict}: the canary's logprobs differ by {self.difference:.3g} on average over "
            f"{self.positions} positions, of which {self.bound:.3g} may be noise"
        )


def compare(expected: Expected, given: Sequence[int], logprobs: Sequence[Mapping[int, float]]) -> Comparison:
    """Compare an engine's greedy answer, and the logprobs of its likeliest tokens at each position, with the expected.

    A token that the engine does not list is as unlikely as its least likely one, or more. After the first token that
    is not the expected one the two answer different questions, and nothing is compared. An answer that is shorter
    than it should be differs without end, and so does a logprob that is no number.
    """
    total, count, positions = 0.0, 0, 0
    for tokens, wanted, chosen, found in zip(expected.tokens, expected.logprobs, given, logprobs, strict=False):
        least = min(found.values(), default=float("-inf"))
        for token, logprob in zip(tokens, wanted, strict=True):
            apart = abs(found[token] - logprob) if token in found else max(0.0, logprob - least)
            total, count = total + apart, count + 1
        positions += 1
        if chosen != tokens[0]:
            break
    else:
        if positions < len(expected.tokens):
            total = float("inf")
    difference = total / count if count else float("inf")
    return Comparison(float("inf") if difference != difference else difference, expected.bound, positions)
