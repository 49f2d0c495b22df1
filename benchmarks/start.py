"""How long it takes to be there: the import, the command line, and a server from its start to its first right answer.

    python benchmarks/start.py [--full] [--servers] [--mode multiprocess]

Each time is that of a fresh process, as a person waits for it. The registry that is listed has 100 cartridges. With
`--servers` vLLM alone and `serve` with a cartridge are started in turn, by the command a person types, and asked until they
answer: vLLM by the document's text in the prompt, ours by the cartridge, whose canary is asked before. Only right answers
count. The shipped model, so that what is compared is everything but the loading of weights, which both do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import report
from sizes import TINY

from lmcache_cartridge.cli.main import main as command
from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR, load_sheet
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.serve.launch import free_port, server_command
from lmcache_cartridge.settings import from_mapping

VLLM_ARGS = ["--max-model-len", "2304", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
ASK_AGAIN_S = 0.05
TIMEOUT_S = 600


def commands(home: Path, cartridges: int) -> dict[str, Any]:
    """Return what starts each command, a registry of so many cartridges made."""
    registry, chunk = Registry(from_mapping({"home": home}).registry_path), bytes(256 * TINY.token_bytes)
    for number in range(cartridges):
        ids = np.random.default_rng(number).integers(0, TINY.vocabulary, 256)
        report.write_artifact(home / f"c{number}", TINY.fingerprint(), ids, 256, chunk)
        registry.register(home / f"c{number}")
    program = str(Path(sys.executable).with_name("lmcache-cartridge"))
    words = {
        "python, nothing": [sys.executable, "-c", "pass"],
        "import lmcache_cartridge": [sys.executable, "-c", "import lmcache_cartridge"],
        "lmcache-cartridge --help": [program, "--help"],
        "lmcache-cartridge list": [program, "list", "--home", str(home)],
    }
    return {name: partial(_ended, command) for name, command in words.items()}


def _ended(words: Sequence[str]) -> float:
    return report.timed(lambda: subprocess.run(words, check=True, capture_output=True))


def servers(scratch: Path, mode: str) -> dict[str, Any]:
    """Return what starts vLLM alone and our server, a cartridge built, and asks each until it answers."""
    sheet, model, home = load_sheet("ward-a"), str(MODEL_DIR), f"{scratch}/served"
    question = sheet.questions[0]
    command(["build", "--home", home, "--model", model, "--id", "ward", "--chunk-size", "64", "--document",
             str(SHEETS_DIR / "ward-a.txt")])  # fmt: skip
    program = str(Path(sys.executable).with_name("lmcache-cartridge"))
    ours = [program, "serve", model, "--home", home, "--chunk-size", "64", "--mode", mode, *VLLM_ARGS]
    ours += ["--block-size", "32"] if mode == "multiprocess" else []
    plain, named = {"prompt": f"{sheet.text}\n{question.text}"}, {"prompt": question.text, "cartridges": ["ward"]}
    return {
        "vLLM alone": partial(_first, [*server_command(model), *VLLM_ARGS], plain, question.answer, scratch),
        f"serve, {mode}": partial(_first, ours, named, question.answer, scratch),
    }


def _first(program: Sequence[str], body: dict[str, Any], answer: str, scratch: Path) -> float:
    """Return the seconds from the start of a server to its first right answer, having stopped it again."""
    port = free_port()
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    with (scratch / "log").open("wb") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            [*program, "--host", "127.0.0.1", "--port", str(port)], env=environment, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                given = {"model": str(MODEL_DIR), "max_tokens": 4, "temperature": 0, **body}
                reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=given, timeout=TIMEOUT_S)
                if reply.status_code == 200:
                    took_s = time.perf_counter() - started
                    found = reply.json()["choices"][0]["text"].strip()
                    assert found.startswith(answer), f"{found!r} for {answer!r}"
                    return took_s
            if process.poll() is not None or time.perf_counter() - started > TIMEOUT_S:
                raise RuntimeError((scratch / "log").read_text(errors="replace")[-3000:])
            time.sleep(ASK_AGAIN_S)
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["artifact", "library", "engine", "memory", "serve", "cli"])
    bench.parser.add_argument("--servers", action="store_true", help="start servers too, some minutes")
    bench.parser.add_argument("--mode", default="in-process", choices=("in-process", "multiprocess"))
    options = bench.start(arguments)
    repeat = 2 if options.smoke else 31 if options.full else 11
    with tempfile.TemporaryDirectory(prefix="cartridge-start-") as scratch:
        samples = report.in_turns(commands(Path(scratch) / "home", 2 if options.smoke else 100), repeat)
        if options.servers:
            samples |= report.in_turns(servers(Path(scratch), options.mode), 1 if options.smoke else 3)
    bench.publish(
        [report.Figure.of(seconds, "until it is there", "s", command=name) for name, seconds in samples.items()]
    )


if __name__ == "__main__":
    main()
