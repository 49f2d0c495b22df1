"""How long `import lmcache_cartridge` takes, and the command line to answer, each in a fresh process.

    python benchmarks/start.py [--full]

The registry that is listed has 100 cartridges. Each time is that of the whole process, as a person waits for it, beside that of
a Python that does nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import report
from mix import CHUNK, CHUNKS, SHAPE, make

from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.settings import from_mapping

CARTRIDGES = 100
GOALS_S = {"import lmcache_cartridge": 0.15, "lmcache-cartridge list": 0.4}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = report.parser(__doc__, "start").parse_args(arguments)
    repeat, machine = 2 if options.smoke else 31 if options.full else 11, report.hardware()
    with tempfile.TemporaryDirectory(prefix="cartridge-start-") as home:
        registry = Registry(from_mapping({"home": home}).registry_path)
        for number in range(2 if options.smoke else CARTRIDGES):
            ids = np.random.default_rng(number).integers(0, SHAPE.vocab_size, CHUNK * CHUNKS)
            make(Path(home) / f"c{number}", ids, registry)
        program = str(Path(sys.executable).with_name("lmcache-cartridge"))
        commands = {
            "python, nothing": [sys.executable, "-c", "pass"],
            "import lmcache_cartridge": [sys.executable, "-c", "import lmcache_cartridge"],
            "lmcache-cartridge --help": [program, "--help"],
            "lmcache-cartridge list": [program, "list", "--home", home],
        }
        runs = {name: partial(_run, command) for name, command in commands.items()}
        samples = report.in_turns(runs, repeat)
    spreads = {name: report.Spread.of(seconds) for name, seconds in samples.items()}
    rows = [{"what": name, "ms": spread.text(1e3)} for name, spread in spreads.items()]
    lines = [f"{name}: {spreads[name].median:.3f} s (at most {goal_s:g})" for name, goal_s in GOALS_S.items()]
    panel = report.Panel("until it is there", "", "s", {"median": [report.Point(*one) for one in spreads.items()]})
    report.publish("start", rows, options, machine, panels=[panel], details=samples, lines=lines)


def _run(command: Sequence[str]) -> float:
    return report.timed(lambda: subprocess.run(command, check=True, capture_output=True))


if __name__ == "__main__":
    main()
