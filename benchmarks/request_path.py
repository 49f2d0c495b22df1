"""What the request path adds to a request in the API server, at p = 16,384: resolving names, prepending ids, salting.

    python benchmarks/request_path.py [--full] [--positions 16384]

One artefact with that many token ids is made and registered in a scratch directory; its KV is tiny, since the API server
never reads KV. Each step is timed by itself, beside what the same server does with every prompt anyway: turning as many
token ids into the engine's message.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import report

from lmcache_cartridge.artifact.fingerprint import Fingerprint
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.serve.request import Router
from lmcache_cartridge.serve.resolve import Resolver
from lmcache_cartridge.settings import from_mapping

SHAPE = Fingerprint("Llama", 1, 1, 8, "bfloat16", 128_000, None, "00" * 32)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = report.parser(__doc__, "request_path")
    parser.add_argument("--positions", type=int, default=16_384)
    options = parser.parse_args(arguments)
    repeat, machine = 20 if options.smoke else 1000 if options.full else 200, report.hardware()
    with tempfile.TemporaryDirectory() as scratch:
        ids = np.random.default_rng(0).integers(0, SHAPE.vocab_size, options.positions)
        report.write_artifact(Path(scratch) / "doc", SHAPE, ids, 256, bytes(256 * SHAPE.token_bytes))
        settings = from_mapping({"home": scratch})
        Registry(settings.registry_path).register(Path(scratch) / "doc")
        router, resolver = Router(settings), Resolver(settings)
        body = {"cartridges": ["doc"]}
        references = router.choose(body, None, "model", None)
        selection = resolver.resolve(references)
        own, encoder = list(range(40)), msgspec.msgpack.Encoder()
        steps = {
            "choose (event loop)": lambda: router.choose(body, None, "model", None),
            "resolve, first time (thread)": lambda: Resolver(settings).resolve(references),
            "resolve, again (thread)": lambda: resolver.resolve(references),
            "salt and prepend (event loop)": lambda: (selection.salt("client"), [*selection.token_ids, *own]),
            "for scale: encode the ids for the engine": lambda: encoder.encode([*selection.token_ids, *own]),
        }
        samples = report.in_turns({name: partial(report.timed, call) for name, call in steps.items()}, repeat)
    spreads = {name: report.Spread.of(seconds) for name, seconds in samples.items()}
    rows = [{"step": name, "ms": spread.text(1e3)} for name, spread in spreads.items()]
    panel = report.Panel("a step", "", "s", {"median": [report.Point(*one) for one in spreads.items()]})
    report.publish("request_path", rows, options, machine, panels=[panel], details=samples)


if __name__ == "__main__":
    main()
