"""What a corpus costs beyond the prefill of its documents: `build` of many, and where its time goes.

    python benchmarks/corpus.py [--documents 1000] [--tokens 1024]

Each document is prefilled alone and then built, one right after the other, by the shipped model that is loaded once. Built
includes reading, the comparison with a plain forward pass, the canary that servers ask, checksums, fsync and registration.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import report
from recall.ward import write_document

PARTS = {"canary for servers": ("canary", "make"), "comparison with the document": ("prefill", "passed_canary")}
"""What is timed within, by the module and the name that it is called by."""


def timed(spent: Counter[str], part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also counts its seconds."""

    def run(*given: Any, **more: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*given, **more)
        finally:
            spent[part] += time.perf_counter() - started

    return run


def measure(count: int, tokens: int, home: Path) -> list[report.Figure]:
    """Build `count` documents and return what that took."""
    from lmcache_cartridge.cli.recall import MODEL_DIR
    from lmcache_cartridge.make import canary, prefill
    from lmcache_cartridge.make.batch import Batch, Recipe
    from lmcache_cartridge.make.corpus import Source
    from lmcache_cartridge.make.model import CausalModel
    from lmcache_cartridge.settings import Settings

    spent: Counter[str] = Counter()
    modules = {"canary": canary, "prefill": prefill}
    for part, (module, name) in PARTS.items():
        setattr(modules[module], name, timed(spent, part, getattr(modules[module], name)))
    model, batch = CausalModel(str(MODEL_DIR)), Batch(Recipe(model=str(MODEL_DIR)), Settings(home=home))
    texts = [write_document(random.Random(f"corpus {n}"), tokens).text for n in range(count + 1)]
    alone, built = [], []
    for number, text in enumerate(texts):
        ids = model.encode(text, special=True)
        alone.append(report.timed(lambda ids=ids: list(model.prefill(ids, 256))))
        started = time.perf_counter()
        row = batch.add(Source(f"document-{number}", f"document-{number}", text.encode()))
        built.append(time.perf_counter() - started)
        if row.problem is not None:
            raise RuntimeError(row.problem)
        if not number:
            alone.clear(), built.clear(), spent.clear()
        if number % 50 == 0:
            report.say(f"{number} of {count}")
    batch.close()
    parts = {"prefill": sum(alone), **spent}
    parts["files and registry"] = sum(built) - sum(parts.values())
    return [
        report.Figure.counted(sum(built) / sum(alone), "build over prefill", "ratio", count, tokens=tokens),
        report.Figure.of(built, "build", "s", tokens=tokens),
        report.Figure.of(alone, "prefill alone", "s", tokens=tokens),
        *(report.Figure.counted(seconds / count, part, "s", count, tokens=tokens) for part, seconds in parts.items()),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["make/batch.py", "make/prefill.py", "make/canary.py", "make/write.py"])
    bench.parser.add_argument("--documents", type=int, default=1000)
    bench.parser.add_argument("--tokens", type=int, default=1024)
    options = bench.start(arguments)
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        bench.publish(measure(2 if options.smoke else options.documents, options.tokens, Path(home)))


if __name__ == "__main__":
    main()
