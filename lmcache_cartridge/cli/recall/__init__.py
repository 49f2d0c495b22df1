"""A tiny Llama that recalls facts from a document in its context, and three documents for it to recall from.

No weights can be downloaded where this project is built and tested, and random weights cannot show that a
cartridge *answers*. This model (1.23 M parameters) was trained here, on synthetic ward fact sheets, to answer
`Q: blood of Tehor? A:` from the sheet before the question, and to know nothing without it. `benchmarks/recall/`
of the source tree has the training script.

Importing this package loads no torch and reads no file; `load_sheet` reads two small ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ...make.questions import Question

__all__ = ["MODEL_DIR", "SHEETS_DIR", "Sheet", "load_sheet"]

MODEL_DIR: Path = Path(__file__).parent / "model"
"""The shipped model and tokenizer, as `from_pretrained` of transformers and vLLM take them."""

SHEETS_DIR: Path = Path(__file__).parent / "sheets"


@dataclass(frozen=True, slots=True)
class Sheet:
    """A shipped document that the model has never seen, with questions that it answers."""

    name: str
    text: str
    """More than 1,024 tokens with `<s>`, which is four chunks of 256. Ends without a newline."""
    questions: tuple[Question, ...]
    """As they follow the sheet in a prompt: `Q: blood of Tehor? A:`. A chat message is the middle of it. An answer is one
    token, without surrounding spaces, after which the model ends."""


def load_sheet(name: str) -> Sheet:
    """Read the shipped sheet `ward-a`, `ward-b` or `ward-c`. No two share a patient."""
    text = (SHEETS_DIR / f"{name}.txt").read_text(encoding="utf-8").removesuffix("\n")
    rows = json.loads((SHEETS_DIR / f"{name}.questions.json").read_text(encoding="utf-8"))
    return Sheet(name, text, tuple(Question(row["question"], row["answer"]) for row in rows))
