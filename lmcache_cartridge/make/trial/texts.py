"""Texts: documents of made-up facts, and questions on them. The same seed gives the same text."""

from __future__ import annotations

import random
from typing import NamedTuple

_SYLLABLES = "ba be bo da do fe fi ga ka ki lo lu ma mi na no pa pe ra ri sa so ta te va vo za zu".split()
_FACTS = {
    "code": lambda r: f"{r.randrange(100, 1000)}",
    "colour": lambda r: r.choice("red blue green white black yellow".split()),
    "weight": lambda r: f"{r.randrange(2, 99)} kg",
    "city": lambda r: r.choice("Oslo Lima Cairo Quito Delhi Seoul Paris Accra".split()),
    "day": lambda r: r.choice("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()),
    "owner": lambda r: _name(r),
}


class Text(NamedTuple):
    """A document and what may be asked about it."""

    text: str
    questions: tuple[str, ...]
    """On its first facts, so that they remain where the document is cut."""


def write(seed: str, words: int) -> Text:
    """Return a document of at least so many words."""
    source, lines, questions, count = random.Random(seed), [], [], 0
    while count < max(words, 100):
        name = _name(source)
        for fact in source.sample(sorted(_FACTS), 3):
            lines.append(f"The {fact} of {name} is {_FACTS[fact](source)}.")
            questions.append(f"What is the {fact} of {name}?")
            count += 6
    return Text(" ".join(lines), tuple(source.sample(questions[:16], 16)))


def _name(source: random.Random) -> str:
    return "".join(source.choices(_SYLLABLES, k=3)).capitalize()
