"""How well short cartridges answer: compacted and trained at their defaults, asked what nothing of their making has seen.

    python benchmarks/quality.py [--model DIR] [--ways WAY ...] [--pressed DIR] [--note TEXT]

Sheets that the model never saw are compacted to 4x, 8x and 16x, with questions in two wordings and without any, and trained
at 4x and 16x, all by the package's defaults; `--ways` names others. Then every fact is asked once in a third wording:
greedily, in transformers, the KV as it is stored. What the manifests record of that is the result. `--pressed` names files of
`press.py`, so that a way may be a press of kvpress: `SnapKVPress 4x`.
"""

from __future__ import annotations

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
from recall.ward import QUESTIONS, UNSEEN_SHEETS, write_document
from safetensors import safe_open
from transformers import DynamicCache

from lmcache_cartridge.artifact.manifest import Measured
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.make.cache import from_cache
from lmcache_cartridge.make.compact.job import ANSWER_TOKENS, build_compact
from lmcache_cartridge.make.compact.wanted import REFINE, Wanted, form_of
from lmcache_cartridge.make.gate import measure
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import read_kv
from lmcache_cartridge.make.questions import Question, save
from lmcache_cartridge.make.train.initial import COMPACT, positions_of, prefilled
from lmcache_cartridge.make.train.job import Task, train
from lmcache_cartridge.make.train.trainer import Recipe
from lmcache_cartridge.settings import from_mapping

CHUNK = 32
WAYS = [
    *(f"compact {n}x{asked}" for asked in ("", ", no questions") for n in (4, 8, 16)),
    "train 4x",
    "train 16x",
]
"""By defaults. `, not refined` behind a compaction, ` from sci` and other starts, and ` at 0.1`, a rate, behind a training
are other ways."""


class Sheet(NamedTuple):
    name: str
    text: str
    given: list[Question]
    asked: list[Question]


def sheets_of(smoke: bool) -> Iterator[Sheet]:
    """Yield sheets that the shipped model never saw, whole or for a smoke test."""
    for seed, tokens in UNSEEN_SHEETS.items():
        document = write_document(random.Random(seed), 200 if smoke else tokens)
        facts = [fact._asdict() for fact in document.facts]
        first, second, third = ([Question(text.format(**f), f["value"]) for f in facts] for text in QUESTIONS)
        yield Sheet(seed, document.text, [*first, *third], second)


def made(model: str, sheet: Sheet, way: str, place: Path, steps: int) -> tuple[Measured, float]:
    """Make a cartridge of a sheet; return what was measured, and seconds but for loading the model."""
    document = place / "sheet.txt"
    document.write_text(sheet.text, encoding="utf-8")
    given, asked = place / "given.jsonl", place / "asked.jsonl"
    save(sheet.given, given)
    save(sheet.asked, asked)
    factor, _, rest = way.partition(" ")[2].partition("x")
    compress, (what, _, other) = float(factor), rest.strip(", ").partition(" ")
    if way.startswith("train"):
        start = time.monotonic()
        about = train(
            Task(
                model=model, document=document, id="short", compress=compress, chunk_tokens=CHUNK, questions=given,
                held_out=asked, init=other if what == "from" else COMPACT,
                recipe=Recipe(steps=steps, rate=float(other) if what == "at" else None),
            ),
            from_mapping({"home": place}),
            accept=0.0,
        ).provenance.training  # fmt: skip
        return about.measured, time.monotonic() - start
    questions = () if what == "no" else sheet.given

    def wanted(tokens: int) -> Wanted:
        positions, refine = positions_of(tokens, CHUNK, compress=compress), 0 if what == "not" else REFINE
        return Wanted(positions, questions, sheet.asked, refine=refine, accept=0.0)

    manifest = build_compact(
        CausalModel(model), document, place / "short", wanted, cartridge_id="short", version=1, chunk_tokens=CHUNK
    )
    return manifest.provenance.compaction.measured, manifest.provenance.compaction.seconds


def of_press(model: CausalModel, sheet: Sheet, file: Path, place: Path) -> Measured:
    """Make a cartridge of what kvpress kept of a sheet; return what was measured."""
    with safe_open(file, "pt") as kept:
        tokens = int(kept.metadata()["document_tokens"])
        layers = [
            (kept.get_tensor(f"keys.{n}"), kept.get_tensor(f"values.{n}")) for n in range(model.fingerprint.layers)
        ]
    root = place / "short"
    manifest = from_cache(
        model, DynamicCache(layers), root, cartridge_id="short", version=1, next_position=tokens, chunk_tokens=CHUNK
    )
    whole = prefilled(model, model.encode(sheet.text, special=True))
    return measure(model, whole, read_kv(manifest, root), sheet.asked, form_of(model, Wanted(1)), ANSWER_TOKENS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["make/compact", "make/train", "make/gate.py", "make/questions.py"])
    add = bench.parser.add_argument
    add("--model", type=Path, default=MODEL_DIR, help="a recall model (default: the shipped one)")
    add("--ways", nargs="*", default=WAYS, help="what to make (default: all by defaults)")
    add("--pressed", type=Path, help="directory of caches that press.py wrote, for ways that are presses")
    options = bench.start(arguments)
    torch.set_num_threads(1)
    most, steps, ways = None, Recipe().steps, options.ways
    if options.smoke:
        most, steps, ways = 1, 2, ["compact 4x", "train 4x"]
    model = options.model.name
    figure = partial(report.Figure.share, what="exact answers", model=model)
    found: list[report.Figure] = []
    total: dict[str, list[tuple[int, int]]] = {}
    took: dict[str, list[float]] = {}
    for sheet in list(sheets_of(options.smoke))[:most]:
        for way in ways:
            with tempfile.TemporaryDirectory() as place:
                if "Press" in way:
                    file, seconds = options.pressed / f"{sheet.name} {way}.safetensors", None
                    measured = of_press(CausalModel(str(options.model)), sheet, file, Path(place))
                else:
                    measured, seconds = made(str(options.model), sheet, way, Path(place), steps)
            shares = {way: measured.cartridge}
            if way == ways[0]:
                shares |= {"document": measured.document, "nothing": measured.nothing}
            for name, share in shares.items():
                right = round(share * measured.count)
                total.setdefault(name, []).append((right, measured.count))
                found.append(figure(right, measured.count, way=name, sheet=sheet.name))
            if seconds is not None:
                took.setdefault(way, []).append(seconds)
            report.say(f"{sheet.name}, {way}: {measured.cartridge:.1%} of {measured.count}, {seconds or 0:.0f} s")
        pooled = [figure(*map(sum, zip(*parts, strict=True)), way=name, sheet="all") for name, parts in total.items()]
        pooled += [report.Figure.of(each, "making", "s", way=way, model=model) for way, each in took.items()]
        bench.publish(found + pooled)  # what ends early has its first sheets


if __name__ == "__main__":
    main(sys.argv[1:])
