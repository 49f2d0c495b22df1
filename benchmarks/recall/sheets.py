"""Write the shipped sheets: `python -m recall.sheets`, in `benchmarks/`, was run once.

The draw is fixed by a seed that neither training nor evaluation uses, and looks at no model.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from lmcache_cartridge.cli.recall import SHEETS_DIR

from .ward import NAMES, QUESTIONS, Document, Fact, ask, write_document

SEED = "lmcache-cartridge shipped sheets"
SHEET_NAMES = ("ward-a", "ward-b", "ward-c")
MIN_TOKENS = 1_050
QUESTIONS_PER_SHEET = 15


def spread(rng: random.Random, facts: tuple[Fact, ...], count: int) -> list[Fact]:
    """Draw one fact from each of `count` equal stretches of the sheet, the attributes taken in turn.

    A stretch without the attribute whose turn it is gives one of another attribute.
    """
    attributes = sorted({fact.attribute for fact in facts})
    rng.shuffle(attributes)
    drawn = []
    for turn in range(count):
        stretch = facts[turn * len(facts) // count : (turn + 1) * len(facts) // count]
        wanted = [fact for fact in stretch if fact.attribute == attributes[turn % len(attributes)]]
        drawn.append(rng.choice(wanted or stretch))
    return drawn


def write_sheet(directory: Path, name: str, document: Document, rng: random.Random) -> None:
    """Write `name.txt` and `name.questions.json` into `directory`, over what is there. Advances `rng`."""
    facts = spread(rng, document.facts, QUESTIONS_PER_SHEET)
    rows = [{"question": ask(fact, turn % len(QUESTIONS)), "answer": fact.value} for turn, fact in enumerate(facts)]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.txt").write_text(document.text + "\n", encoding="utf-8")
    questions = json.dumps(rows, indent=2) + "\n"
    (directory / f"{name}.questions.json").write_text(questions, encoding="utf-8")


def main() -> None:
    rng = random.Random(SEED)
    names = rng.sample(NAMES, len(NAMES))
    for index, name in enumerate(SHEET_NAMES):
        # Every third name: no patient is on two sheets, so an answer also tells which sheet it came from.
        document = write_document(rng, MIN_TOKENS, names[index :: len(SHEET_NAMES)])
        write_sheet(SHEETS_DIR, name, document, rng)


if __name__ == "__main__":
    main()
