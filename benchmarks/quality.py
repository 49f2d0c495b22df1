"""How well short cartridges answer: compacted and trained at their defaults, asked what nothing of their making has seen.

    python benchmarks/quality.py [--model DIR --sheets FILE] [--ways WAY ...] [--note TEXT]

Sheets that the model never saw are compacted to 4x, 8x and 16x, with questions in two wordings and without any, and trained
at 4x and 16x, all by the package's defaults. Then every fact is asked once in a third wording: greedily, in transformers,
the KV as it is stored. What the manifests record of that is the result. `--sheets` names a JSON list of
`{"name", "text", "questions"}`, the last a list of `[question, answer]` for each of three wordings, of which the second asks.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import report
import torch
from recall.ward import QUESTIONS, write_document

from lmcache_cartridge.artifact.manifest import Manifest, Measured
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.make.compact.job import build_compact
from lmcache_cartridge.make.compact.wanted import Wanted
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.questions import Question, save
from lmcache_cartridge.make.train.initial import COMPACT, positions_of
from lmcache_cartridge.make.train.job import Task, train
from lmcache_cartridge.make.train.trainer import Recipe
from lmcache_cartridge.settings import from_mapping

CHUNK = 32
SEEDS = [f"short {n}" for n in range(6)]
WAYS = {
    **{f"compact {n}x": n for n in (4, 8, 16)},
    **{f"compact {n}x, no questions": n for n in (4, 8, 16)},
    **{f"train {n}x": n for n in (4, 16)},
}
"""By how much each is shorter than its document."""
STARTS = {f"train {n}x from {init}": n for n in (4, 16) for init in ("sci", "first-k", "vocab", "random")}
"""The same from other starts than the default one, made where they are named."""


class Sheet(NamedTuple):
    name: str
    text: str
    given: list[Question]
    asked: list[Question]


def sheets_of(file: Path | None, tokens: int) -> Iterator[Sheet]:
    """Yield the sheets in a file, or those of the shipped model, of at least so many tokens."""
    if file is not None:
        for row in json.loads(file.read_text(encoding="utf-8")):
            first, second, third = ([Question(*pair) for pair in wording] for wording in row["questions"])
            yield Sheet(row["name"], row["text"], [*first, *third], second)
        return
    for seed in SEEDS:
        document = write_document(random.Random(seed), tokens)
        facts = [fact._asdict() for fact in document.facts]
        first, second, third = ([Question(text.format(**f), f["value"]) for f in facts] for text in QUESTIONS)
        yield Sheet(seed, document.text, [*first, *third], second)


def made(model: str, sheet: Sheet, way: str, place: Path, steps: int) -> tuple[Manifest, Measured, float]:
    """Make a cartridge of a sheet; return its manifest, what was measured, and seconds but for loading the model."""
    document = place / f"{sheet.name}.txt"
    document.write_text(sheet.text, encoding="utf-8")
    given, asked = place / "given.jsonl", place / "asked.jsonl"
    save(sheet.given, given)
    save(sheet.asked, asked)
    name = way.replace(" ", "-").replace(",", "")
    if way.startswith("train"):
        task = Task(
            model=model, document=document, id=name, compress=(WAYS | STARTS)[way], chunk_tokens=CHUNK, questions=given,
            held_out=asked, init=way.partition(" from ")[2] or COMPACT, recipe=Recipe(steps=steps),
        )  # fmt: skip
        start = time.monotonic()
        manifest = train(task, from_mapping({"home": place}), accept=0.0)
        about = manifest.provenance.training
        return manifest, about.measured, time.monotonic() - start
    questions = () if way.endswith("no questions") else sheet.given

    def wanted(tokens: int) -> Wanted:
        return Wanted(positions_of(tokens, CHUNK, compress=WAYS[way]), questions, sheet.asked, accept=0.0)

    manifest = build_compact(
        CausalModel(model), document, place / name, wanted, cartridge_id=name, version=1, chunk_tokens=CHUNK
    )
    return manifest, manifest.provenance.compaction.measured, manifest.provenance.compaction.seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["make/compact", "make/train", "make/gate.py", "make/questions.py"])
    add = bench.parser.add_argument
    add("--model", type=Path, default=MODEL_DIR, help="a recall model (default: the shipped one)")
    add("--sheets", type=Path, help="JSON file of sheets for it (default: six that the shipped one never saw)")
    add("--ways", nargs="*", choices=WAYS | STARTS, default=list(WAYS), help="what to make (default all)")
    options = bench.start(arguments)
    torch.set_num_threads(1)
    tokens, most, ways = (200, 1, ["compact 4x", "train 4x"]) if options.smoke else (1024, None, options.ways)
    figure = partial(report.Figure.share, what="exact answers")
    found: list[report.Figure] = []
    total: dict[str, list[tuple[int, int]]] = {}
    for sheet in list(sheets_of(options.sheets, tokens))[:most]:
        case = {"model": options.model.name, "sheet": sheet.name}
        for way in ways:
            with tempfile.TemporaryDirectory() as place:
                steps = 2 if options.smoke else Recipe().steps
                manifest, measured, seconds = made(str(options.model), sheet, way, Path(place), steps)
            count, shares = measured.count, {way: measured.cartridge}
            if way == ways[0]:
                shares |= {"document": measured.document, "nothing": measured.nothing}
            for name, share in shares.items():
                right = round(share * count)
                total.setdefault(name, []).append((right, count))
                found.append(figure(right, count, way=name, **case))
            found.append(report.Figure.of([seconds], "making", "s", way=way, p=manifest.positions, **case))
            report.say(f"{sheet.name}, {way}: {measured.cartridge:.1%} of {count}, {seconds:.0f} s")
    for name, parts in total.items():
        right, count = (sum(column) for column in zip(*parts, strict=True))
        found.append(figure(right, count, way=name, model=options.model.name, sheet="all"))
    bench.publish(found)


if __name__ == "__main__":
    main(sys.argv[1:])
