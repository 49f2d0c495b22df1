"""What compaction keeps of a sheet, without training: exact answers and seconds by method and size.

    python benchmarks/compaction.py [--sheets dev|clean] [--methods NAME ...] [--model DIR] [--device DEVICE] [--note TEXT]

Ward sheets that the shipped model never saw are compacted by each method and asked for every fact in a wording that nothing
was made with, in transformers, KV rounded to bfloat16 or stored in int8. Settings may be chosen on the sheets `dev`, never
on `clean`. Methods: `questions` (a template in two other wordings), `repeat` (the document read again), `refine` and
`distill` (steps after `questions`), and to compare with: `chosen` (each position is one of the document's, and nothing else
of it), `bias` and `pursuit` (the original, with a bias for each position).
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import report
import torch
from biased import biased, with_biases
from recall.ward import QUESTIONS, write_document
from sizes import markdown

from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.make.compact.closed import rerotated
from lmcache_cartridge.make.compact.job import make
from lmcache_cartridge.make.compact.judge import held_out_errors
from lmcache_cartridge.make.compact.references import References, collect
from lmcache_cartridge.make.compact.wanted import Wanted, references_of
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import as_served, rounded
from lmcache_cartridge.make.questions import Question
from lmcache_cartridge.make.train.initial import prefilled
from lmcache_cartridge.make.train.packing import Example
from lmcache_cartridge.make.train.retention import count, first_choices

TOKENS = 1024
GIVEN, ASKED = (QUESTIONS[0], QUESTIONS[2]), QUESTIONS[1]
"""Wordings that are given to compaction, and the one that is asked."""
SHEETS = {"dev": [f"compact dev {n}" for n in (0, 1, 24, 31)], "clean": [f"compact {n}" for n in range(200, 205)]}
REFINE, DISTILL = 30, 200
CHUNK = 32


@dataclass
class Sheet:
    """One document, its KV and its questions."""

    name: str
    model: CausalModel
    ids: list[int]
    kv: torch.Tensor
    questions: list[Question]
    asked: list[Example]
    tokens: int
    """As it was ordered; the sheet is a little longer."""
    seconds: float
    """Of the prefill."""

    def wanted(self, size: int) -> Wanted:
        """Return what compaction to so small a part is given."""
        return Wanted(self.tokens // size, self.questions, accept=0.0)

    def references(self) -> References:
        """Return what the given questions ask."""
        return collect(self.model, self.kv, references_of(self.model, self.ids, self.wanted(1)))

    def exact(self, kv: torch.Tensor, biases: torch.Tensor | None = None) -> float:
        """Return the share of facts whose value and end token are the model's first choices after `kv`."""
        with with_biases(self.model, biases):
            wanted = torch.tensor([token for example in self.asked for token in example.answer])
            return count(self.asked, (first_choices(self.model, kv, self.asked) == wanted).tolist()).exact


class Found(NamedTuple):
    """Compact KV as it would be served, and how long it took."""

    kv: torch.Tensor
    steps: dict[str, float]
    """Seconds by step, the prefill not among them."""
    biases: torch.Tensor | None = None


def draw(model: CausalModel, name: str, tokens: int = TOKENS) -> Sheet:
    """Write a sheet and prefill it."""
    document = write_document(random.Random(name), tokens)
    ids = model.encode(document.text, special=True)
    start = time.monotonic()
    kv = prefilled(model, ids)
    seconds = time.monotonic() - start
    given = [Question(text.format(**fact._asdict())) for fact in document.facts for text in GIVEN]
    asked, row = [], 0
    for fact in document.facts:
        answer = [*model.encode(fact.value, special=False), model.end_ids[0]]
        asked.append(Example(model.question_ids(ASKED.format(**fact._asdict()), "chat"), answer, row))
        row += len(answer)
    return Sheet(name, model, ids, kv, given, asked, tokens, seconds)


def package(sheet: Sheet, size: int, **how: Any) -> Found:
    """Make it as `build --compact` does."""
    steps: dict[str, float] = {}

    def say(line: str) -> None:
        name, _, seconds = line.partition(": ")
        steps[name.partition(",")[0]] = float(seconds.removesuffix(" s"))

    return Found(make(sheet.model, sheet.kv, sheet.ids, replace(sheet.wanted(size), **how), say=say).kv, steps)


def original(sheet: Sheet, size: int, pursuit: bool) -> Found:
    """Make it with biases, its keys rotated as ours are."""
    start = time.monotonic()
    kv, biases = biased(sheet.kv, sheet.references(), sheet.tokens // size, pursuit=pursuit)
    kv = rerotated(sheet.model, kv, len(sheet.ids))
    return Found(kv, {"all": time.monotonic() - start}, biases)


def chosen(sheet: Sheet, size: int) -> Found:
    """Keep positions of the document as they are: those that the queries attend to most, for each KV head alone."""
    start = time.monotonic()
    references = sheet.references()
    planes = []
    for number, asked in enumerate(references.layers):
        for h in range(sheet.kv.shape[3]):
            kv = sheet.kv[:, number, :, h].to(asked.queries)
            share = (asked.queries[h][:, references.answers].flatten(0, 1) @ kv[0].T).softmax(1).square().sum(0)
            share[0] = torch.inf
            planes.append(kv[:, share.topk(sheet.tokens // size).indices.sort().values])
    kv = torch.stack(planes, 1).unflatten(1, (sheet.kv.shape[1], sheet.kv.shape[3])).transpose(2, 3).cpu()
    return Found(rerotated(sheet.model, kv, len(sheet.ids)), {"all": time.monotonic() - start})


METHODS: dict[str, Callable[[Sheet, int], Found]] = {
    "questions": package,
    "repeat": lambda sheet, size: package(sheet, size, questions=[]),
    "refine": lambda sheet, size: package(sheet, size, refine=REFINE),
    "distill": lambda sheet, size: package(sheet, size, refine=REFINE, distill=DISTILL),
    "chosen": chosen,
    "bias": lambda sheet, size: original(sheet, size, pursuit=False),
    "pursuit": lambda sheet, size: original(sheet, size, pursuit=True),
}
SIZES = {"refine": (8, 16), "distill": (16,)}
"""Those that are of interest, of 4, 8 and 16."""


def measure(sheets: Sequence[Sheet], method: str, size: int) -> dict[str, Any]:
    """Return a row of the table."""
    shares, int8, steps, cpu = [], [], [], []
    for sheet in sheets:
        report.say(f"{sheet.name}: {method}, {size}x")
        start = time.process_time()
        found = METHODS[method](sheet, size)
        cpu.append(time.process_time() - start)
        kv = rounded(found.kv, sheet.model.fingerprint)
        shares.append(sheet.exact(kv, found.biases))
        if found.biases is None:
            int8.append(sheet.exact(as_served(kv, sheet.model.fingerprint, "int8", CHUNK)))
        steps.append(found.steps)
    return _row(f"{size}x, {method}", sheets, shares) | {
        "int8": _percent(statistics.mean(int8)) if int8 else "-",
        "CPU s": f"{statistics.median(cpu):.1f}",
        "seconds": ", ".join(f"{name} {statistics.median(each[name] for each in steps):.1f}" for name in steps[0]),
        "_exact": shares,
    }


def fit_errors(sheets: Sequence[Sheet], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return for each sheet and size the fit error of each layer on held-out answer tokens, and the exact answers."""
    found = []
    for sheet in sheets:
        references = sheet.references()
        for size in sizes:
            report.say(f"{sheet.name}: fit errors, {size}x")
            errors = held_out_errors(sheet.kv, references, sheet.tokens // size)
            exact = sheet.exact(rounded(package(sheet, size).kv, sheet.model.fingerprint))
            found.append({"sheet": sheet.name, "size": size, "errors": errors, "exact": exact})
    return found


def correlations(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each layer that knows how its fit error goes with the answers."""
    lines = []
    for layer in range(len(found[0]["errors"])):
        errors, exact = [each["errors"][layer] for each in found], [each["exact"] for each in found]
        if max(errors) - min(errors) > 1e-3 and len(set(exact)) > 1:
            pearson = statistics.correlation(errors, exact)
            ranked = statistics.correlation(_ranks(errors), _ranks(exact))
            lines.append(
                f"fit error of layer {layer} and exact answers, {len(found)} cartridges: correlation {pearson:.2f}, of "
                f"ranks {ranked:.2f}; errors from {min(errors):.3f} to {max(errors):.3f}"
            )
    return lines


def _ranks(values: list[float]) -> list[float]:
    """Return the rank of each value; equal ones share their mean rank."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw exact answers over the fit error of each layer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for layer in range(len(found[0]["errors"])):
        errors = [each["errors"][layer] for each in found]
        if max(errors) - min(errors) > 1e-3:
            axes.plot(errors, [100 * each["exact"] for each in found], "o", label=f"layer {layer}")
    axes.set(xlabel="relative error of held-out answer tokens' attention output", ylabel="exact answers (%)")
    axes.legend()
    figure.savefig(path, dpi=120, format="png")


def _row(name: str, sheets: Sequence[Sheet], shares: Sequence[float]) -> dict[str, Any]:
    each = {sheet.name.rpartition(" ")[2]: _percent(share) for sheet, share in zip(sheets, shares, strict=True)}
    return {"": name} | each | {"mean": _percent(statistics.mean(shares))}


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = report.parser(__doc__, "compaction")
    add = parser.add_argument
    add("--sheets", choices=SHEETS, default="clean", help="which sheets (default clean)")
    add("--methods", nargs="*", choices=METHODS, default=list(METHODS), help="which methods (default all)")
    add("--model", type=Path, default=MODEL_DIR, help="a recall model (default: the shipped one)")
    add("--device", default="cpu", help="where to compute (default cpu)")
    add("--fit", action="store_true", help="also how fit errors go with answers, at 4x, 8x, 16x and 32x")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    machine = report.hardware()
    model = CausalModel(str(options.model), device=options.device)
    model.model.float()
    names, tokens = (SHEETS["dev"][:1], 200) if options.smoke else (SHEETS[options.sheets], TOKENS)
    sheets = [draw(model, name, tokens) for name in names]
    facts = {"": "facts"} | {sheet.name.rpartition(" ")[2]: len(sheet.asked) for sheet in sheets}
    whole = [sheet.exact(rounded(sheet.kv, model.fingerprint)) for sheet in sheets]
    blank = {"mean": "", "int8": "", "CPU s": "", "seconds": ""}
    prefill = {
        "int8": "",
        "CPU s": "",
        "seconds": f"prefill {statistics.median(sheet.seconds for sheet in sheets):.1f}",
    }
    rows = [facts | blank, _row("document", sheets, whole) | prefill]
    cases = [(method, size) for method in options.methods for size in SIZES.get(method, (4, 8, 16))]
    for method, size in [(method, 16) for method in ("questions", "bias")] if options.smoke else cases:
        rows.append(measure(sheets, method, size))
    found = fit_errors(sheets, (16, 32) if options.smoke else (4, 8, 16, 32)) if options.fit or options.smoke else []
    lines = correlations(found) if found else []
    report.publish("compaction", rows, options, machine, details=found, lines=lines)
    if found:
        plot(found, options.out / "compaction.png")
    shown = [{key: str(value) for key, value in row.items() if not key.startswith("_")} for row in rows]
    page = "\n\n".join([markdown(shown), *lines])
    (options.out / "compaction.md").write_text(page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
