"""What many requests for one cold cartridge, all at once, cost: how often its bytes are read, and who is computed after all.

    python benchmarks/together.py [--full] [--requests 17] [--rounds 5] [--out DIR]

A real vLLM server in each mode, with the shipped model. Each round evicts the cartridge from all memory, LMCache's copies
too, and asks at once: every client with a `cache_salt` of its own, then none with any. Counts, so the machine need not be
quiet. The wall time beside that of one request alone is told too.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import report  # first: it makes the tests' helpers importable
from recall.ward import ask
from wards import MODEL, Asker, Ward, patients, register, write_ward

from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import from_mapping

CHUNK, POSITIONS = 64, 1024
MODES = ("in-process", "multiprocess")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = report.parser(__doc__, "together")
    parser.add_argument("--requests", type=int, default=17, help="requests at once (17)")
    parser.add_argument("--rounds", type=int, help="rounds of each kind (5, --full 20, --smoke 1)")
    parser.add_argument("--mode", choices=MODES, action="append", help="only this mode; repeatable")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (20 if options.full else 1 if options.smoke else 5)
    machine, rows = report.hardware(), []
    for mode in options.mode or MODES:
        with tempfile.TemporaryDirectory() as scratch:
            rows += measure(Path(scratch), mode, options.requests, rounds)
    lines = [
        f"{row['mode']}, {row['salts']}: at most {row['bytes read']} x the bytes (at most 1), {row['computed']} of "
        f"{row['requests']} computed (none), {row['right']} right" for row in rows
    ]  # fmt: skip
    report.publish("together", rows, options, machine, panels=[], details=rows, lines=lines)


def measure(scratch: Path, mode: Any, requests: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for requests of tenants of their own and one for those of nobody's."""
    model = CausalModel(MODEL)
    settings = from_mapping({"home": scratch / "home", "cpu_bytes": 64 << 20, "admin": True, "ready_timeout_s": 120})
    ward = write_ward(model, patients(0, 2), "ward", tokens=POSITIONS)
    manifest = register(model, settings, ward.ids[:POSITIONS], name="ward", chunk_tokens=CHUNK)
    size_bytes = manifest.payload_bytes - manifest.stored.data_offset_bytes
    args = ["--max-model-len", "2304", "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)]
    if mode == "multiprocess":
        args += ["--block-size", "32"]
    launch = plan(MODEL, settings, chunk_tokens=CHUNK, mode=mode, vllm_args=args)
    rows = []
    with (
        ServerProcess(launch, scratch / "log", environment=SMALL) as vllm,
        Asker(vllm.url) as asker,
        ThreadPoolExecutor(requests) as clients,
    ):
        asker.complete("Q", "ward")  # its canary
        for salts in ("a salt each", "no salt"):
            read, alone, together, computed, right = [], [], [], 0, 0
            for _ in range(rounds):
                alone.append(_at_once(asker, clients, ward, 1, salts)[0])
                before = _read_bytes(asker)
                took_s, answers = _at_once(asker, clients, ward, requests, salts)
                read.append((_read_bytes(asker) - before) / size_bytes)
                together.append(took_s)
                computed += sum(answer.cached_tokens < POSITIONS for answer, _ in answers)
                right += sum(answer.text.strip() == value for answer, value in answers)
            rows.append(
                {
                    "mode": mode, "salts": salts, "requests": rounds * requests, "bytes read": round(max(read), 3),
                    "computed": computed, "right": right, "ms": report.Spread.of(together).text(1e3),
                    "one alone, ms": report.Spread.of(alone).text(1e3),
                }
            )  # fmt: skip
    return rows


def _at_once(asker: Asker, clients: ThreadPoolExecutor, ward: Ward, count: int, salts: str) -> tuple[float, list[Any]]:
    """Evict, ask, and return the seconds until the last answer, and each with the right one."""
    asker.http.post("/v1/cartridges/ward/evict").raise_for_status()
    round_ = random.getrandbits(64)

    def one(number: int) -> Any:
        fact = ward.facts[number % len(ward.facts)]
        extra = {"cache_salt": f"{round_}-{number}"} if salts == "a salt each" else {}
        return asker.complete(ask(fact, 0), "ward", **extra), fact.value

    started = time.perf_counter()
    answers = list(clients.map(one, range(count)))
    return time.perf_counter() - started, answers


def _read_bytes(asker: Asker) -> float:
    """Return how many bytes the workers have read from sources."""
    time.sleep(2.5)  # the server asks its workers once a second at most
    pattern = r'^\S*read_bytes\S*\{[^}]*tier="source"[^}]*\} (\S+)$'
    found = re.findall(pattern, asker.http.get("/metrics").text, re.MULTILINE)
    assert found, "no metric of bytes read from sources"
    return sum(map(float, found))


if __name__ == "__main__":
    main()
