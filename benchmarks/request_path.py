"""What the request path adds to a request in the API server, at p = 16,384: resolving names, prepending ids, salting.

    python benchmarks/request_path.py [--positions 16384] [--repeat 200] [--json FILE]

One artefact with that many token ids is made and registered in a scratch directory; its KV is tiny, since the API server
never reads KV. Each step is timed by itself, medians and spread over the repetitions, beside what the same server does
with every prompt anyway: turning as many token ids into the engine's message.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lmcache_cartridge.artifact.fingerprint import Fingerprint
from lmcache_cartridge.artifact.manifest import Provenance
from lmcache_cartridge.artifact.writing import ArtifactWriter
from lmcache_cartridge.cli.show import table
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.serve.request import Router
from lmcache_cartridge.serve.resolve import Resolver
from lmcache_cartridge.settings import from_mapping

SHAPE = Fingerprint("Llama", 1, 1, 8, "bfloat16", 128_000, None, "00" * 32)


def make(home: Path, positions: int) -> None:
    """Register one prefill cartridge called `doc`."""
    root = home / "doc"
    ids = np.random.default_rng(0).integers(0, SHAPE.vocab_size, positions)
    writer = ArtifactWriter(root, cartridge_id="doc", version=1, kind="prefill", fingerprint=SHAPE, token_ids=ids)
    with writer:
        for start in range(0, positions, 256):
            writer.write(bytes(min(256, positions - start) * SHAPE.token_bytes))
        writer.commit(Provenance(tool="benchmark", created="2026-01-01T00:00:00+00:00"))
    Registry(home / "registry.sqlite").register(root)


def timed(call: Callable[[], Any], repeat: int) -> dict[str, float]:
    """Return the median and the 5th and 95th percentile of `call`, in milliseconds."""
    samples = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        samples.append(1000 * (time.perf_counter() - start))
    cuts = statistics.quantiles(samples, n=20)
    return {"median_ms": round(statistics.median(samples), 3), "p5_ms": round(cuts[0], 3), "p95_ms": round(cuts[-1], 3)}


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, default=16_384)
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch), options.positions)
        settings = from_mapping({"home": scratch})
        router, resolver = Router(settings), Resolver(settings)
        body = {"cartridges": ["doc"]}
        references = router.choose(body, None, "model", None)
        selection = resolver.resolve(references)
        own = list(range(40))

        def first() -> None:
            Resolver(settings).resolve(references)

        encoder = msgspec.msgpack.Encoder()
        steps = {
            "choose (event loop)": lambda: router.choose(body, None, "model", None),
            "resolve, first time (thread)": first,
            "resolve, again (thread)": lambda: resolver.resolve(references),
            "salt and prepend (event loop)": lambda: (selection.salt("client"), [*selection.token_ids, *own]),
            "for scale: encode the ids for the engine": lambda: encoder.encode([*selection.token_ids, *own]),
        }
        rows = [{"step": step, **timed(call, options.repeat)} for step, call in steps.items()]
    print(
        f"p = {options.positions}, {platform.processor() or platform.machine()}, Python {platform.python_version()}\n"
    )
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
