"""Time to first token of both modes side by side, on the shipped model and sheet: cartridge cold and warm, and computed.

    python benchmarks/modes.py [--questions 40] [--rounds 2] [--json FILE]

Both servers are started one after the other in every round, so that a machine that gets busier hits both. `cold` is a
cartridge that no memory holds, neither ours nor, with LMCache's own `retain` switched off, LMCache's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from lmcache_cartridge.demo import SERVER_ARGS, SHEET, _prepare, ask
from lmcache_cartridge.output import table
from lmcache_cartridge.recall import MODEL_DIR, load_sheet
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.process import ServerProcess
from lmcache_cartridge.settings import from_mapping

MODES = ("in-process", "multiprocess")
_NAMED = {"cartridges": [SHEET]}
_APART = {"kv_transfer_params": {"lmcache.tag.benchmark": "computed"}}


def measure(home: Path, mode: str, questions: int) -> dict[str, list[float]]:
    """Return times to first token in ms of one server of a mode, by what was asked."""
    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20, "admin": True})
    launch = plan(str(MODEL_DIR), settings, vllm_args=SERVER_ARGS, mode=mode)
    asked = [q.text for q in load_sheet(SHEET).questions[:questions]]
    document = load_sheet(SHEET).text + " "
    found: dict[str, list[float]] = {}
    with ServerProcess(launch, home / f"{mode}.log") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        for way, prefix, extra in (("warm", "", _NAMED), ("computed", document, _APART), ("no document", "", {})):
            ask(client, prefix + asked[0], extra)
            found[way] = [ask(client, prefix + question, extra).ttft_ms for question in asked]
    keep_nothing = launch.lmcache and [a.replace("retain", "default") for a in launch.lmcache]
    with ServerProcess(launch._replace(lmcache=keep_nothing), home / f"{mode}-cold.log") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        ask(client, asked[0], _NAMED)
        found["cold"] = []
        for question in asked:
            httpx.post(f"{server.url}/v1/cartridges/{SHEET}/evict").raise_for_status()
            found["cold"].append(ask(client, question, _NAMED).ttft_ms)
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    times: dict[str, dict[str, list[float]]] = {mode: {} for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="cartridge-modes-") as scratch:
        home = Path(scratch)
        _prepare(home)
        for _ in range(arguments.rounds):
            for mode in MODES:
                for way, found in measure(home, mode, arguments.questions).items():
                    times[mode].setdefault(way, []).extend(found)
    rows: list[dict[str, Any]] = [
        {
            "mode": mode,
            "asked with": way,
            "requests": len(found),
            "TTFT p50 (ms)": round(statistics.median(found), 1),
            "p95 (ms)": round(statistics.quantiles(found, n=20)[-1], 1),
        }
        for mode, ways in times.items()
        for way, found in ways.items()
    ]
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "times_ms": times}, indent=1))


if __name__ == "__main__":
    main()
