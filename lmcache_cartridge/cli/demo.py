"""The demo: a document is prefilled once into a cartridge, then a real vLLM server answers from it."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..make.questions import Question
from .recall import MODEL_DIR, SHEETS_DIR, load_sheet
from .show import say, show, size, table

if TYPE_CHECKING:
    from ..make.server import Server

SHEET = "ward-a"
SERVER_ARGS = ["--max-model-len", "8192", "--kv-cache-memory-bytes", str(64 << 20)]
"""vLLM flags that start the tiny model fast: no compilation, a small KV cache."""


WARM_S = 30.0
"""How long the cartridge may take to be loaded and tried before it is asked all the same."""


class TimedAnswer(NamedTuple):
    """One answer and what it cost."""

    text: str
    ttft_ms: float
    computed_tokens: int
    """Prompt tokens that the engine computed: all less those it found cached."""


def run(home: Path | None) -> int:
    """Run the demo and print its table; 0 if the cartridge answered exactly as the document in the prompt does.

    Everything lies in `home`, or in a directory that is removed at the end. Stops the server it starts.
    """
    with tempfile.TemporaryDirectory(prefix="cartridge-demo-") as scratch:
        home = home or Path(scratch)
        _prepare(home)
        results = _ask_all_ways(home, Path(scratch), load_sheet(SHEET).questions)
    summary: dict[str, Any] = {"questions": len(load_sheet(SHEET).questions)}
    for way, answers in results.items():
        summary[way] = {
            "exact": sum(a.text == q.answer for a, q in zip(answers, load_sheet(SHEET).questions, strict=False)),
            "ttft_p50_ms": round(statistics.median(a.ttft_ms for a in answers), 1),
            "computed_tokens": round(statistics.median(a.computed_tokens for a in answers)),
        }
    same = [a.text for a in results["document"]] == [a.text for a in results["cartridge"]]
    show(summary, _readable(summary, same))
    if not same:
        print("lmcache-cartridge: the cartridge did not answer as the document does", file=sys.stderr)
    return 0 if same else 1


def _readable(summary: dict[str, Any], same: bool) -> str:
    rows = [
        {
            "asked with": way.replace("_", " "), "exact answers": f"{found['exact']}/{summary['questions']}",
            "time to first token, p50 (ms)": found["ttft_p50_ms"], "prompt tokens computed": found["computed_tokens"],
        }
        for way, found in summary.items() if way != "questions"
    ]  # fmt: skip
    verdict = "the cartridge answered word for word as the document in the prompt did" if same else "ANSWERS DIFFER"
    return f"\n{table(rows)}\n\n{verdict}"


def _prepare(home: Path) -> None:
    from ..artifact.reading import load_manifest
    from ..library.registry import Registry
    from ..make import prefill
    from ..make.model import CausalModel
    from ..settings import from_mapping

    settings = from_mapping({"home": home.absolute()})
    registry = Registry(settings.registry_path)
    version = registry.next_version(SHEET, settings.cartridges_dir)
    root = settings.cartridges_dir / SHEET / str(version)
    say(f"1/3 building the cartridge of {SHEET}.txt: one prefill, then the canary")
    canary = " " + load_sheet(SHEET).questions[0].text
    prefill.build(
        CausalModel(str(MODEL_DIR)), SHEETS_DIR / f"{SHEET}.txt", root,
        cartridge_id=SHEET, version=version, canary=canary,
    )  # fmt: skip
    registry.register(root)
    say(f"    p = {load_manifest(root).positions} positions, {size(load_manifest(root).payload_bytes)}")


def _ask_all_ways(home: Path, scratch: Path, questions: Sequence[Question]) -> dict[str, list[TimedAnswer]]:
    from ..make.server import Server
    from ..make.trial.own import eager
    from ..serve.launch import plan
    from ..serve.processes import ServerProcess
    from ..settings import from_mapping

    settings = from_mapping({"home": home.absolute(), "cpu_bytes": 64 << 20})
    launch = plan(str(MODEL_DIR), settings, vllm_args=[*SERVER_ARGS, *eager()])
    say("2/3 starting vLLM (tens of seconds)")
    with ServerProcess(launch, scratch / "server.log") as process, Server(process.url, timeout_s=120.0) as server:
        document = load_sheet(SHEET).text + " "
        computed = {"cartridges": False}
        ways = {"no_document": ("", {}), "document": (document, computed), "cartridge": (document, {})}
        say(f"3/3 asking {len(questions)} questions three ways")
        # The first request of each way warms it up. A prompt that only carries the document gets the cartridge from the
        # moment that the engine has answered the cartridge's own questions right.
        for prefix, extra in (ways["no_document"], ways["document"]):
            whole = ask(server, prefix + questions[0].text, extra).computed_tokens
        until = time.monotonic() + WARM_S
        while ask(server, document + questions[0].text, {}).computed_tokens >= whole and time.monotonic() < until:
            time.sleep(0.1)
        return {
            way: [ask(server, prefix + question.text, extra) for question in questions]
            for way, (prefix, extra) in ways.items()
        }


def ask(server: Server, prompt: str, extra: dict[str, Any]) -> TimedAnswer:
    """Ask greedily and stream the answer. A fresh `cache_salt` keeps vLLM's own prefix cache out of the comparison."""
    from ..make.server import cached_tokens

    body = {
        "model": server.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "cache_salt": uuid.uuid4().hex, **extra,
    }  # fmt: skip
    last: dict[str, Any] = {}
    start, first, text = time.perf_counter(), 0.0, ""
    for last in server.events("/v1/completions", body):
        first = first or time.perf_counter()
        text += "".join(choice["text"] for choice in last["choices"])
    return TimedAnswer(text.strip(), 1000 * (first - start), last["usage"]["prompt_tokens"] - cached_tokens(last))
