"""Questions on a document to train and to evaluate with: from a file, from a template, or written by self-study."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..artifact import files
from ..errors import CartridgeError
from .progress import Progress, silent

if TYPE_CHECKING:
    from .model import CausalModel
    from .server import Server

MAX_TEMPLATE_QUESTIONS = 100_000
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


def from_template(path: Path, document: str) -> list[Question]:
    """Return the questions that the template in a JSON file makes of a document's text.

        {"questions": ["{attribute} of {patient}?"],
         "fields": {"patient": "Patient (\\\\w+)", "attribute": ["blood", "ward"]},
         "where": "Patient {patient}:.*{attribute}"}

    A field is a list of texts, or a regular expression whose first group is looked for all over the document. Every
    question is asked of every combination; with `where`, of those for which the document has a match of it. Raises
    `CartridgeError` for a file of another form, or a template that makes no question.
    """
    try:
        template = json.loads(text_of(path))
        fields = {name: _values(value, document) for name, value in template["fields"].items()}
        where, made = template.get("where"), []
        for values in itertools.product(*fields.values()):
            row = dict(zip(fields, values, strict=True))
            if where is None or re.search(_fill(where, row, re.escape), document):
                made += [Question(_fill(question, row, str)) for question in template["questions"]]
            if len(made) > MAX_TEMPLATE_QUESTIONS:
                raise CartridgeError(f"{path} makes more than {MAX_TEMPLATE_QUESTIONS} questions; use `where`")
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, re.error) as error:
        raise CartridgeError(
            f"{path}: no template of `questions` and `fields`: {type(error).__name__} {error}"
        ) from error
    if not made:
        raise CartridgeError(f"{path} makes no question of this document; its fields or `where` match nothing")
    return distinct(made)


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
        raise CartridgeError(f"the model wrote no question in {3 * count} attempts; give questions or a template")
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


def _values(value: Any, document: str) -> list[str]:
    if isinstance(value, str):
        return list(dict.fromkeys(match.group(1) for match in re.finditer(value, document) if match.group(1)))
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"a field is a list of texts or a regular expression, not {value!r}")
    return value


def _fill(text: str, row: Mapping[str, str], form: Callable[[str], str]) -> str:
    """Return `text` with `{name}` of each field replaced; other braces stay, for regular expressions have them."""
    for name, value in row.items():
        text = text.replace(f"{{{name}}}", form(value))
    return text
