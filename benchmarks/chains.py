"""How well cartridges answer in a chain: compacted, trained alone, and trained among others (`train --beside`).

    python benchmarks/chains.py [--full] [--groups 2] [--home DIR]

Each group is three ward sheets that have no patient in common. Of each sheet cartridges are made by the command line, at
4x and 16x; every fact is asked in a wording that none was made with, by transformers, after the cartridge alone, after
chains of two and after chains of three, whose keys are rotated as the loader does. Those that are trained among others
have sheets around them that share patients with the other sheets of their group, and no facts. `--home` keeps the
cartridges, and a second run goes on from those that are there.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import report
import torch
from quality import ASKED, CHUNK, HELD_OUT, MODEL, TEMPLATE
from recall.ward import NAMES, Document, write_document
from transformers.utils.logging import disable_progress_bar

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.cli.main import main as command
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make import evaluate
from lmcache_cartridge.make.ask import ModelAsker
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import read_kv
from lmcache_cartridge.make.questions import Question, save
from lmcache_cartridge.memory.rope import shift
from lmcache_cartridge.settings import from_mapping

SHEETS = 3
BESIDE = 2
FACTORS = ("4x", "16x")
STEPS = {"4x": 150, "16x": 300}


class Plan(NamedTuple):
    """How much is done."""

    seed: str
    groups: int
    tokens: int
    strangers: int
    """Other sheets around each that is trained among others."""
    effort: float
    """Multiplies the steps."""
    limit: int | None
    """Facts that are asked of a sheet."""
    factors: Sequence[str] = FACTORS
    ways: Sequence[str] = ("compact", "trained alone", f"trained beside {BESIDE}")


class Sheet(NamedTuple):
    """One of a group's sheets."""

    name: str
    path: Path
    document: Document
    asked: list[Question]
    strangers: list[Path]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = report.parser(__doc__, "chains")
    parser.add_argument("--groups", type=int, help="of three sheets each (default 2, with --full 5)")
    parser.add_argument(
        "--seed", default="chains", help="of the sheets; settings were chosen on `chains dev` (%(default)s)"
    )
    parser.add_argument("--home", type=Path, help="keep everything here, and go on from what is there")
    parser.add_argument("--factor", action="append", choices=FACTORS, help="only this one; may be given twice")
    parser.add_argument("--way", action="append", help="only this way to make them; may be given often")
    options = parser.parse_args(arguments)
    plan = Plan(options.seed, options.groups or (5 if options.full else 2), 1024, 6, 1.0, None)
    if options.smoke:
        plan = plan._replace(groups=1, tokens=200, strangers=2, effort=0.01, limit=4, factors=("16x",))
    plan = plan._replace(factors=options.factor or plan.factors, ways=options.way or plan.ways)
    torch.set_num_threads(1)
    disable_progress_bar()
    machine = report.hardware()
    with tempfile.TemporaryDirectory(prefix="cartridge-chains-") as scratch:
        home = (options.home or Path(scratch)).absolute()
        found = run(plan, home)
    rows, lines = summary(plan, found)
    panels = [
        report.Panel(factor, "", "exact answers, %", {
            way: [report.Point(key, report.Spread.of([100 * share for share in found[factor, way][key]]))
                  for key in ("alone", "of 2", "of 3")]
            for way in plan.ways
        })
        for factor in plan.factors
    ]  # fmt: skip
    details = {" ".join(key): shares for key, shares in found.items()}
    report.publish("chains", rows, options, machine, panels=panels, details=details, lines=lines)


def run(plan: Plan, home: Path) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return the shares of right answers on each sheet, by factor and way: alone, and in chains."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    model = CausalModel(MODEL)
    for group in range(plan.groups):
        sheets = draw(plan, group, home / "sheets")
        for factor in plan.factors:
            for way in plan.ways:
                kvs = [make(plan, sheet, factor, way, home) for sheet in sheets]
                shares = found.setdefault((factor, way), {key: [] for key in ("alone", "of 2", "of 3", "seconds")})
                shares["seconds"] += [seconds for _, seconds in kvs]
                made = [kv for kv, _ in kvs]
                shares["alone"] += [ask(plan, model, [kv], sheet) for kv, sheet in zip(made, sheets, strict=True)]
                shares["of 2"] += [ask(plan, model, made[:2], sheet) for sheet in sheets[:2]]
                shares["of 3"] += [ask(plan, model, made, sheet) for sheet in sheets]
                last = {key: each[-2 if key == "of 2" else -3 :] for key, each in shares.items() if key != "seconds"}
                told = (f"{key} " + " ".join(f"{100 * share:.1f}" for share in each) for key, each in last.items())
                report.say(f"group {group}, {factor}, {way}: {'; '.join(told)}")
    return found


def draw(plan: Plan, group: int, directory: Path) -> list[Sheet]:
    """Write a group's sheets, what is asked, the template, and each sheet's strangers."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "template.json").write_text(json.dumps(TEMPLATE))
    sheets = []
    for number in range(SHEETS):
        name = f"{plan.seed} {group} {number}"
        document = write_document(random.Random(name), plan.tokens, NAMES[number::SHEETS])
        path = directory / f"{name.replace(' ', '-')}.txt"
        path.write_text(document.text)
        asked = [Question(ASKED[i % 2].format(**fact._asdict()), fact.value) for i, fact in enumerate(document.facts)]
        save([Question(HELD_OUT.format(**fact._asdict())) for fact in document.facts[::4]], path.with_suffix(".jsonl"))
        others = [patient for i, patient in enumerate(NAMES) if i % SHEETS != number]
        strangers = []
        for i in range(plan.strangers):
            strangers.append(path.with_suffix(f".stranger-{i}.txt"))
            strangers[-1].write_text(write_document(random.Random(f"{name} stranger {i}"), plan.tokens, others).text)
        sheets.append(Sheet(path.stem, path, document, asked, strangers))
    return sheets


def make(plan: Plan, sheet: Sheet, factor: str, way: str, home: Path) -> tuple[torch.Tensor, float]:
    """Return the KV of a sheet's cartridge, as it is served, and the seconds that its command took."""
    name = f"{sheet.name}-{factor}-{way}".replace(" ", "-")
    note = home / "notes" / f"{name}.json"
    if not note.exists():
        common = (
            "--home", str(home), "--model", MODEL, "--document", str(sheet.path), "--id", name, "--chunk-size",
            str(CHUNK), "--template", str(sheet.path.with_name("template.json")), "--accept", "0",
        )  # fmt: skip
        steps = max(2, int(plan.effort * STEPS[factor]))
        train = (
            "train", *common, "--compress", factor, "--held-out", str(sheet.path.with_suffix(".jsonl")), "--init", "compact",
            "--steps", str(steps), "--rate", "0.3", "--schedule", "cosine", "--warmup", str(min(20, steps // 2)),
            "--patience", "0", "--check-every", "50", "--top-k", "0", "--answer-tokens", "4",
        )  # fmt: skip
        beside = ("--beside", str(BESIDE), "--beside-documents", *map(str, sheet.strangers))
        argv = {
            "compact": ("build", *common, "--compact", factor),
            "refined": ("build", *common, "--compact", factor, "--refine", "100"),
            "trained alone": train,
        }
        started = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            if command([*argv.get(way, (*train, *beside)), "--format", "json"]):
                raise SystemExit(f"{name} could not be made")
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(time.monotonic() - started))
    root = Path(Registry(from_mapping({"home": home}).registry_path, read_only=True).find(name).location)
    return read_kv(reading.load_manifest(root), root), json.loads(note.read_text())


def ask(plan: Plan, model: CausalModel, kvs: Sequence[torch.Tensor], sheet: Sheet) -> float:
    """Return the share of a sheet's facts that are answered right after a chain."""
    chain, place = [], 0
    for kv in kvs:
        chain.append(shift(kv, model.fingerprint, place))
        place += kv.shape[2]
    asked = evaluate.pick(sheet.asked, plan.limit)
    asker = ModelAsker(model, [], torch.cat(chain, dim=2), "chat")
    answers = evaluate.ask_all(asker, asked, 4, ways=("cartridge",))["cartridge"]
    return sum(answer.exact for answer in answers) / len(answers)


def summary(
    plan: Plan, found: Mapping[tuple[str, str], Mapping[str, Sequence[float]]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the table, and how far each chain is from its cartridges alone."""
    rows, lines = [], []
    for (factor, way), shares in found.items():
        alone = list(shares["alone"])
        first_two = [share for i, share in enumerate(alone) if i % SHEETS < 2]
        drops = {"of 2": (first_two, shares["of 2"]), "of 3": (alone, shares["of 3"])}
        lost = {key: 100 * (sum(a) / len(a) - sum(b) / len(b)) for key, (a, b) in drops.items()}
        rows.append({
            "made": f"{factor}, {way}", "alone": f"{100 * sum(alone) / len(alone):.1f}%",
            **{key: f"{100 * sum(shares[key]) / len(shares[key]):.1f}%" for key in drops},
            **{f"worst sheet, {key}": f"{100 * min(shares[key]):.1f}%" for key in drops},
            "seconds": f"{sum(shares['seconds']) / len(shares['seconds']):.0f}",
        })  # fmt: skip
        lines.append(f"{factor}, {way}: a chain of two loses {lost['of 2']:.1f} points, of three {lost['of 3']:.1f}")
    return rows, lines


if __name__ == "__main__":
    main()
