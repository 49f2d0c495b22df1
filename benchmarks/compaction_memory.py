"""How much memory compaction takes over the model, in the shape of Qwen2.5-0.5B with random weights.

    python benchmarks/compaction_memory.py [--tokens 16384] [--compact 16] [--random-kv] [--note TEXT]

One process prefills a document of random tokens, reads it again and compacts it, as `build --compact` does, and tells by
step the most resident memory that it has had over what it had with the model loaded. Takes a quarter of an hour and more
for 16,384 tokens on one core. With `--random-kv` random numbers stand for the prefill, and 2,048 tokens are read again:
that leaves the memory of all later steps as it is, and saves much of the time.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import report
import torch
from sizes import SHAPES
from ttft import TINY, document_ids, make_model

from lmcache_cartridge.make.compact.job import make
from lmcache_cartridge.make.compact.wanted import Wanted
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.train.initial import prefilled

VOCABULARY = 4096
"""Smaller than Qwen's: its embedding is the model's memory, and no other."""


AGAIN = 2048
"""Tokens that are read again with `--random-kv`: as many as there are queries that count."""


def resident(which: str) -> int:
    """Return the resident bytes of this process now (`VmRSS`), or the most since it was last forgotten (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = report.parser(__doc__, "compaction_memory")
    parser.add_argument("--tokens", type=int, default=16_384, help="of the document (default 16,384)")
    parser.add_argument("--compact", type=int, default=16, help="tokens a position (default 16)")
    parser.add_argument("--random-kv", action="store_true", help="prefill nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    machine = report.hardware()
    shape = TINY if options.smoke else SHAPES["Qwen2.5-0.5B"]._replace(vocabulary=VOCABULARY)
    tokens, positions = (256, 32) if options.smoke else (options.tokens, options.tokens // options.compact)
    with tempfile.TemporaryDirectory() as scratch:
        model = CausalModel(str(make_model(Path(scratch) / "model", shape)))
        ids = document_ids(tokens, shape.vocabulary)
        prefilled(model, ids[:256])
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the most
        before, started = resident("VmRSS"), time.monotonic()
        row = {"tokens": tokens, "positions": positions, "model": f"{before / 2**30:.2f}"}

        def say(line: str) -> None:
            row[line.partition(":")[0].partition(",")[0]] = f"{(resident('VmHWM') - before) / 2**30:.2f}"
            report.say(f"{line}, after {time.monotonic() - started:.0f} s")

        def progress(name: str, done: int, total: int) -> None:
            if done % max(1, total // 12) == 0:
                report.say(f"{name} {done}/{total}, {(resident('VmHWM') - before) / 2**30:.2f} GiB over the model")

        if options.random_kv:
            kv = torch.randn(2, shape.layers, tokens, shape.kv_heads, shape.head_size)
            ids = ids[: max(AGAIN, positions) + 1]
        else:
            kv = prefilled(model, ids, progress)
            say(f"prefill: {time.monotonic() - started:.0f} s")
        make(model, kv, ids, Wanted(positions), say=say, progress=progress)
    report.publish(
        "compaction_memory",
        [row],
        options,
        machine,
        lines=[f"GiB: with the model, and by step the most over it; {time.monotonic() - started:.0f} s in all"],
    )


if __name__ == "__main__":
    main(sys.argv[1:])
