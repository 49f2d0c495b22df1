"""Wanted: what to make of a document's KV, and what is asked behind the document to make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..gate import ACCEPT
from ..model import CausalModel
from ..questions import Question
from ..train.packing import Example

REFINE = 30
"""At 16x of two sheets 30, 60 and 100 steps answer 98.2, 97.8 and 98.2% in 5, 7 and 9 s of CPU."""
WINDOW = 64
"""Tokens of a document that are read again at a time."""
ROOM = 5
"""Where there are fewer tokens a position, a document is read again beside the questions: what they do not ask has room. Without it a sheet trained at 4x answered one attribute in no wording but those of the questions (84 of 100; 98 with
it). At 8x it costs up to 5 of 100 answers, at 16x up to 10 (twelve sheets of two models)."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to make of a document's KV."""

    positions: int
    questions: Sequence[Question] = ()
    """What to be good at, a part of which is kept apart to measure by."""
    held_out: Sequence[Question] = ()
    """What to measure by, in place of a part of `questions`."""
    form: str | None = None
    """`chat` or `text`; None is `chat` where the model has a template."""
    refine: int = REFINE
    """Gradient steps for each layer, where validation questions are answered no worse after them."""
    accept: float = ACCEPT
    """The least share of what the document adds to the model's first choices that must be kept; 0: any."""

    def has_room(self, tokens: int) -> bool:
        """Whether a document of so many tokens leaves p room for more than what is asked."""
        return self.positions * ROOM > tokens


def references_of(model: CausalModel, ids: Sequence[int], wanted: Wanted) -> list[Example]:
    """Return what is asked behind the document: the questions, and its own text again (repeat-prefill) where there are none
    or p has room for both.

    An answer's end is not asked for. It goes by the question and not by the document, and positions that answer it lack for
    facts: at 16x, a sheet of 223 facts is answered to 90% without it and to 53% with it.
    """
    form, end = form_of(model, wanted), model.end_ids[:1] or [0]
    found = []
    for question in wanted.questions:
        answer = [] if question.answer is None else model.encode(question.answer, special=False)
        found.append(Example(model.question_ids(question.text, form), answer or end, 0))
    return [*found, *repeated(ids)] if not found or wanted.has_room(len(ids)) else found


def repeated(ids: Sequence[int]) -> list[Example]:
    """Return a document read again in pieces of `WINDOW` tokens, each token being asked for the next one."""
    starts = range(0, len(ids) - 1, WINDOW)
    return [Example(list(ids[at : at + 1]), list(ids[at + 1 : at + WINDOW + 1]), at) for at in starts]


def form_of(model: CausalModel, wanted: Wanted) -> str:
    """Return how questions are asked."""
    return wanted.form or ("chat" if model.tokenizer.chat_template else "text")
