"""What a corpus costs beyond the prefill of its documents: `build` of many, and where its time goes.

    python benchmarks/corpus.py [--documents 1000] [--large 4] [--tokens 1024]

Each document is prefilled alone and then built, one right after the other, by a model that is loaded once: the shipped one, and
one with random weights in the shape of Qwen2.5-0.5B. Built includes reading, the comparison with the document, the canary that
servers ask, checksums, fsync and registration. The first document counts in none of it.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import report
from recall.ward import write_document
from sizes import SHAPES, TINY
from ttft import make_model


@contextmanager
def timed(seconds: list[float], module: Any, name: str) -> Iterator[None]:
    """Have a function of a module note its seconds meanwhile, of each call."""
    call = getattr(module, name)

    def run(*given: Any, **more: Any) -> Any:
        started = time.perf_counter()
        found = call(*given, **more)
        seconds.append(time.perf_counter() - started)
        return found

    with patch.object(module, name, run):
        yield


def measure(name: str, directory: Path, count: int, tokens: int, home: Path) -> list[report.Figure]:
    """Build `count` documents by the model in `directory`, which is called `name`, and return what that took."""
    from lmcache_cartridge.make import canary, prefill
    from lmcache_cartridge.make.batch import Batch, Recipe
    from lmcache_cartridge.make.corpus import Source
    from lmcache_cartridge.make.model import CausalModel
    from lmcache_cartridge.settings import Settings

    model, batch = CausalModel(str(directory)), Batch(Recipe(model=str(directory)), Settings(home=home))
    texts = [write_document(random.Random(f"corpus {n}"), tokens).text for n in range(count + 1)]
    alone, built, asked, compared = [], [], [], []
    for number, text in enumerate(texts):
        ids = model.encode(text, special=True)
        alone.append(report.timed(lambda ids=ids: list(model.prefill(ids, 256))))
        started = time.perf_counter()
        with timed(asked, canary, "make"), timed(compared, prefill, "passed_canary"):
            row = batch.add(Source(f"document-{number}", f"document-{number}", text.encode()))
        built.append(time.perf_counter() - started)
        if row.problem is not None:
            raise RuntimeError(row.problem)
        if number % 50 == 0:
            report.say(f"{number} of {count}")
    batch.close()
    times = {"build": built, "prefill alone": alone, "comparison": compared, "canary": asked}
    ratio = sum(built[1:]) / sum(alone[1:])
    return [
        report.Figure.counted(ratio, "build over prefill", "ratio", count, model=name, tokens=tokens),
        *(report.Figure.of(each[1:], what, "s", model=name, tokens=tokens) for what, each in times.items()),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["make/batch.py", "make/prefill.py", "make/canary.py", "make/write.py"])
    bench.parser.add_argument("--documents", type=int, default=1000)
    bench.parser.add_argument("--large", type=int, default=4, help="documents by the model with a real one's shape")
    bench.parser.add_argument("--tokens", type=int, default=1024)
    options = bench.start(arguments)
    import torch

    torch.set_num_threads(1)
    from lmcache_cartridge.cli.recall import MODEL_DIR

    shape = TINY if options.smoke else SHAPES["Qwen2.5-0.5B"]
    documents, large = (2, 1) if options.smoke else (options.documents, options.large)
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        figures = measure("shipped", MODEL_DIR, documents, options.tokens, home / "shipped")
        made = make_model(home / "model", shape)
        for file in MODEL_DIR.glob("*token*"):  # its own knows no text
            shutil.copy(file, made)
        bench.publish([*figures, *measure(shape.name, made, large, options.tokens, home / "large")])


if __name__ == "__main__":
    main()
