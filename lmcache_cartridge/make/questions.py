"""Questions on a document to make a cartridge for and to measure it by: from a file, or written by self-study."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..artifact import files
from ..errors import CartridgeError
from .progress import Progress, silent

if TYPE_CHECKING:
    from .model import CausalModel
    from .server import Server

MOST_HELD_OUT = 256
"""Questions to choose by, and as many to measure by: 95% of as many are right within 3 points."""
SLICE_CHARACTERS = (400, 4000)
"""Shortest and longest part of a document that self-study shows its writer."""
INSTRUCTIONS = (
    "Ask one question about a single fact in the text above.",
    "Ask one question whose answer needs two facts of the text above.",
    "Ask for a short summary of one part of the text above, naming the part.",
    "Ask for the facts in one part of the text above as a list, naming the part.",
    "Ask one question that somebody who uses the text above for their work would have.",
)
RULES = "Write only the question, on one line. Name what it is about, since the reader will not see which part you saw."

Writer = Callable[[str, str, int], str]
"""Called with (text, instruction, seed); returns what a model wrote."""


class Question(NamedTuple):
    """A question and its answer, or None where the model with the document in context is to answer."""

    text: str
    answer: str | None = None


def distinct(questions: Iterable[Question]) -> list[Question]:
    """Return the questions without those whose text came before."""
    found: dict[str, Question] = {}
    for question in questions:
        found.setdefault(question.text, question)
    return list(found.values())


def read(path: Path) -> list[Question]:
    """Return the questions in a file of JSON lines `{"question": ..., "answer": ...}`; answers may lack, or be null.

    A file that is one JSON list of such objects is taken too. Raises `CartridgeError` naming the line that is wrong.
    """
    text = text_of(path)
    try:
        rows = json.loads(text) if text.lstrip().startswith("[") else None
        rows = rows if rows is not None else [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise CartridgeError(f"{path}: no JSON lines: {error}") from error
    for number, row in enumerate(rows, 1):
        sound = isinstance(row, dict) and isinstance(row.get("question"), str) and row["question"].strip()
        if not sound or not isinstance(row.get("answer"), str | None):
            raise CartridgeError(f'{path}: entry {number} is not {{"question": "...", "answer": "..."}}: {row!r:.100}')
    if not rows:
        raise CartridgeError(f"{path} has no questions")
    return distinct(Question(row["question"], row.get("answer")) for row in rows)


def save(questions: Sequence[Question], path: Path) -> None:
    """Write questions as `read` reads them, whole or not at all."""
    rows = (json.dumps({"question": q.text, "answer": q.answer}, ensure_ascii=False) + "\n" for q in questions)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, [row.encode() for row in rows])


class Split(NamedTuple):
    """Questions by what they may be used for."""

    fit: list[Question]
    """To make a cartridge for, or train it on."""
    validation: list[Question]
    """To choose by: a start, when to stop, which KV to keep."""
    test: list[Question]
    """Asked once, at the end."""


def split(questions: Sequence[Question], test: Sequence[Question] = ()) -> Split:
    """Return a tenth of the questions for each of validation and test, unless `test` is given; the rest is for the fit.

    One of each at least and `MOST_HELD_OUT` at most; the same ones for the same questions. What is in `test` is in no
    other part. Raises `CartridgeError` where no question is left for a part.
    """
    apart = {question.text for question in test}
    rest = [question for question in questions if question.text not in apart]
    size = min(MOST_HELD_OUT, max(1, len(rest) // 10))
    if len(rest) < 2 + (not test):
        raise CartridgeError(
            f"{len(rest)} questions are too few: one to make it for, one to choose by, and one to measure it by"
        )
    drawn = random.Random(0).sample(rest, size if test else 2 * size)
    held = {question.text for question in drawn}
    return Split([question for question in rest if question.text not in held], drawn[:size], list(test) or drawn[size:])


def self_study(write: Writer, document: str, count: int, seed: int, progress: Progress = silent) -> list[Question]:
    """Let a model write `count` questions about random slices of a document; the same slices for the same seed.

    A reply that is empty or was written before is asked for again, three times as many as are wanted in all; so there
    may be fewer. Raises `CartridgeError` if there is none.
    """
    found: dict[str, None] = {}
    for attempt in range(3 * count):
        draw = random.Random(f"self-study {seed} {attempt}")
        if text := first_line(write(cut(document, draw), draw.choice(INSTRUCTIONS), draw.getrandbits(31))):
            found[text] = None
        progress("self-study", len(found), count)
        if len(found) == count:
            break
    if not found:
        raise CartridgeError(f"the model wrote no question in {3 * count} attempts; give questions")
    return [Question(text) for text in found]


def cut(document: str, draw: random.Random) -> str:
    """Return a random slice of a document, from the start of a word to the end of one. Advances `draw`."""
    length = draw.randint(*SLICE_CHARACTERS)
    start = draw.randint(0, max(0, len(document) - length))
    end = min(len(document), start + length)
    while start and not document[start - 1].isspace():
        start -= 1
    while end < len(document) and not document[end].isspace():
        end += 1
    return document[start:end].strip()


def first_line(reply: str) -> str:
    """Return the question in what a model wrote: its first line of text, less a heading, a number and quotes."""
    line = next((line.strip() for line in reply.splitlines() if line.strip()), "")
    return re.sub(r"^(?:(?:question|q)\s*\d*\s*[:.)]|\d+[.)]|[-*])\s*", "", line, flags=re.IGNORECASE).strip(" \"'`")


def model_writer(model: CausalModel, form: str, tokens: int = 64) -> Writer:
    """Let a model write, sampling at temperature 0.7: the same for the same seed on the same machine."""
    import torch  # here, since questions are read without it

    def write(text: str, instruction: str, seed: int) -> str:
        prompt = f"{text}\n\n{instruction} {RULES}" if form == "chat" else f"{text}\n\n{instruction}\nQuestion:"
        ids = [*model.encode("", special=True), *model.question_ids(prompt, form)]
        rows = torch.tensor([ids], device=model.device)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            out = model.model.generate(
                rows, attention_mask=torch.ones_like(rows), do_sample=True, temperature=0.7, max_new_tokens=tokens,
                pad_token_id=next(iter(model.end_ids), 0),
            )  # fmt: skip
        return model.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)

    return write


def server_writer(server: Server) -> Writer:
    """Let a model behind an OpenAI-compatible server write. Raises `SourceError` as `Server.reply` does."""
    return lambda text, instruction, seed: server.reply(
        f"{text}\n\n{instruction} {RULES}", tokens=128, temperature=0.7, seed=seed
    )


def text_of(path: Path) -> str:
    """Return the text in a file. Raises `CartridgeError` for one that is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CartridgeError(f"{path} is no UTF-8 text: {error}") from error
