"""What LMCache's own saving costs with our adapter and connector in, beside LMCache as it is: all in one run.

    python benchmarks/saving.py [--full]

Three vLLM servers: two with an LMCache server each, one of them without anything of ours, and one with LMCache inside
vLLM. Every plain prompt is asked of all, in turns, twice: first it is computed and saved, then, with vLLM's prefix cache
reset, loaded. LMCache as it is does not run inside vLLM on CPU (0.5.6), so that the third has no rival of its own.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import report  # first: it makes the tests' helpers importable
from serving import serving
from wards import Asker

from lmcache_cartridge.serve.launch import Launch
from lmcache_cartridge.serve.processes import SMALL
from lmcache_cartridge.settings import from_mapping

TOKENS, L1_BYTES = 6144, 1 << 30
OURS, ALONE, INSIDE = "with cartridges", "LMCache alone", "with cartridges, in-process"
ENVIRONMENT = SMALL | {"VLLM_SERVER_DEV_MODE": "1"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["engine", "memory", "serve"])
    options = bench.start(arguments)
    prompts = 200 if options.full else 2 if options.smoke else 40
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        starts = {OURS: {}, ALONE: {"change": stock}, INSIDE: {"mode": "in-process"}}
        askers = {}
        for name, given in starts.items():
            log, given = Path(scratch) / f"{name}.log", {"mode": "multiprocess", "environment": ENVIRONMENT} | given
            asker = serving(from_mapping({"home": scratch}), log, l1_bytes=L1_BYTES, **given)
            askers[name] = stack.enter_context(asker)
        times_s = measure(askers, prompts)
    bench.publish(
        [
            report.Figure.of(seconds, "request", "s", doing=doing, server=name)
            for doing, found in times_s.items()
            for name, seconds in found.items()
        ]
    )


def stock(launch: Launch) -> Launch:
    """Return the same two servers with LMCache's own connector and no adapter."""
    lmcache = list(launch.lmcache or ())
    at = lmcache.index("--l2-adapter")
    del lmcache[at : at + 2]
    command = list(launch.command)
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    transfer["kv_connector"] = "LMCacheMPConnector"
    del transfer["kv_connector_module_path"], transfer["kv_connector_extra_config"]["cartridge.control"]
    command[command.index("--kv-transfer-config") + 1] = json.dumps(transfer)
    own = {key: value for key, value in launch.environment.items() if key != "LMCACHE_CONFIG_FILE"}
    return launch._replace(lmcache=lmcache, command=command, environment=own | {"VLLM_PLUGINS": ""})


def measure(askers: dict[str, Asker], prompts: int) -> dict[str, dict[str, list[float]]]:
    """Return the times in s of the first and the second request for each prompt, by server."""
    rng = random.Random(1)
    times: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in askers} for kind in ("save", "load")}
    for number in range(-2, prompts):  # the first two warm up
        ids = [rng.randrange(10, 640) for _ in range(TOKENS)]
        order = rng.sample(list(askers), len(askers))
        for kind in times:
            for name in order:
                elapsed_s, cached = ask(askers[name], ids, whole=kind == "load")
                assert cached == (TOKENS - 1 if kind == "load" else 0), (name, kind, cached)
                if number >= 0:
                    times[kind][name].append(elapsed_s)
    return times


def ask(asker: Asker, ids: list[int], *, whole: bool) -> tuple[float, int]:
    """Return how long a prompt took and how many of its tokens were cached; asks again until it was `whole`."""
    while True:
        asker.forget()
        start = time.perf_counter()
        answer = asker.complete(ids)
        elapsed_s = time.perf_counter() - start
        if not whole or answer.cached_tokens:
            return elapsed_s, answer.cached_tokens


if __name__ == "__main__":
    main()
