"""From the start of a server to its first right answer: `serve` with a cartridge, its canary included, beside vLLM alone.

    python benchmarks/first_answer.py [--full] [--repeat 3] [--mode multiprocess] [--out DIR]

Each server is started in turn, by the command a person types, and asked until it answers: vLLM alone with the document's
text in the prompt, ours by a cartridge of it, whose canary is asked before. Only right answers count. The shipped model, so
that what is compared is everything but the loading of weights, which both do.
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
import report

from lmcache_cartridge.cli.main import main as command
from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR, load_sheet
from lmcache_cartridge.serve.launch import free_port, server_command

VLLM_ARGS = ["--max-model-len", "2304", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
ASK_AGAIN_S = 0.05
TIMEOUT_S = 600


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = report.parser(__doc__, "first_answer")
    parser.add_argument("--repeat", type=int, help="starts of each server (3, --full 9, --smoke 1)")
    parser.add_argument("--mode", default="in-process", choices=("in-process", "multiprocess"))
    options = parser.parse_args(arguments)
    repeat, machine = options.repeat or (9 if options.full else 1 if options.smoke else 3), report.hardware()
    sheet = load_sheet("ward-a")
    question, model = sheet.questions[0], str(MODEL_DIR)
    with tempfile.TemporaryDirectory(prefix="cartridge-first-") as scratch:
        home = f"{scratch}/home"
        command(["build", "--home", home, "--model", model, "--id", "ward", "--chunk-size", "64", "--document",
                 str(SHEETS_DIR / "ward-a.txt")])  # fmt: skip
        program = str(Path(sys.executable).with_name("lmcache-cartridge"))
        ours = [program, "serve", model, "--home", home, "--chunk-size", "64", "--mode", options.mode, *VLLM_ARGS]
        if options.mode == "multiprocess":
            ours += ["--block-size", "32"]
        plain = {"prompt": f"{sheet.text}\n{question.text}"}
        named = {"prompt": question.text, "cartridges": ["ward"]}
        runs = {
            "vLLM alone": partial(_first, [*server_command(model), *VLLM_ARGS], plain, question.answer, Path(scratch)),
            "serve": partial(_first, ours, named, question.answer, Path(scratch)),
        }
        samples = report.in_turns(runs, repeat)
    spreads = {name: report.Spread.of(seconds) for name, seconds in samples.items()}
    rows = [{"what": name, "s": spread.text()} for name, spread in spreads.items()]
    share = spreads["serve"].median / spreads["vLLM alone"].median
    lines = [f"first right answer, {options.mode}, serve / vLLM alone: {share:.2f} (at most 1.10)"]
    panel = report.Panel("first right answer", "", "s", {"median": [report.Point(*one) for one in spreads.items()]})
    report.publish("first_answer", rows, options, machine, panels=[panel], details=samples, lines=lines)


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


if __name__ == "__main__":
    main()
