"""Scores: how well each server suits a prompt, as llm-d's scheduler reckons it, and the best of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MAX_WAITING = 128
"""Waiting requests from which on a server has no part for load; llm-d's threshold."""
TIER_WEIGHT = {"gpu": 1.0, "cpu": 0.75, "disk": 0.25}
"""What a token in a tier counts; of those further away by Dynamo's own weights (1.6.1, host and disk)."""


class Score(NamedTuple):
    """What one server scores."""

    total: float
    prefix: float
    """Its part for the share of the prompt that it has, weighted."""
    load: float
    """Its part for how few requests wait, weighted."""
    matched: Mapping[str, int]
    """Leading tokens of the prompt that it has, by tier."""
    share: float
    """Of the prompt that it has in any tier, from 0 to 1."""
    waiting: int


def score(
    matched: Mapping[str, int], tokens: int, waiting: int, *, prefix_weight: float = 2.0, load_weight: float = 1.0
) -> Score:
    """Return the score of a server that has `matched` leading tokens, by tier, of a prompt of `tokens` in whole blocks."""
    reached, worth = 0, 0.0
    for tier, weight in TIER_WEIGHT.items():
        if (end := matched.get(tier, 0)) > reached:
            worth, reached = worth + weight * (end - reached), end
    prefix = prefix_weight * (worth / tokens if tokens else 0.0)
    load = load_weight * 0.5 * (1 - min(waiting, MAX_WAITING) / MAX_WAITING)
    return Score(prefix + load, prefix, load, matched, reached / tokens if tokens else 0.0, waiting)


def best(scores: Mapping[str, Score], choose: random.Random) -> str:
    """Return a server of the highest score, any of them where several have it."""
    highest = max(one.total for one in scores.values())
    return choose.choice(_at(scores, highest))


def _at(scores: Mapping[str, Score], total: float) -> Sequence[str]:
    return [pod for pod, one in scores.items() if one.total == total]
