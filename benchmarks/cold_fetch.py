"""What a slow cold fetch from S3 costs requests for resident cartridges: their latency with and without it, in one run.

    python benchmarks/cold_fetch.py [--requests 400] [--slow-s 5] [--out DIR]

A real vLLM server, a real S3 server behind a proxy that holds every answer of the cold cartridge back, both from the
tests. Phases alternate, so that a machine that slows down does so for both.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from faulty_proxy import FaultyProxy, sound
from s3 import S3Server
from wards import MODEL, Asker, patients, save

from lmcache_cartridge.cli import main as command
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.recall.ward import ask, write_document
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.process import SMALL, ServerProcess
from lmcache_cartridge.settings import from_mapping

CHUNK, POSITIONS, CLIENTS = 64, 1024, 2


def main() -> None:
    """Measure, print the table, and write it as JSON with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400, help="hot requests of each kind (default 400)")
    parser.add_argument("--slow-s", type=float, default=5.0, help="how long a cold fetch takes (default 5)")
    parser.add_argument("--out", type=Path, help="directory for cold_fetch.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as environment:
        result = measure(Path(scratch), environment, arguments.requests, arguments.slow_s)
    print(f"{'':24}{'p50 ms':>10}{'p99 ms':>10}{'requests':>10}")
    for name in ("without", "with a cold fetch"):
        row = result[name]
        print(f"{name:24}{row['p50_ms']:10.1f}{row['p99_ms']:10.1f}{row['requests']:10}")
    print(f"{'ratio':24}{result['p50_ratio']:10.3f}{result['p99_ratio']:10.3f}   over {result['fetches']} cold fetches")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "cold_fetch.json").write_text(json.dumps(result, indent=1))


def measure(scratch: Path, environment: pytest.MonkeyPatch, requests: int, slow_s: float) -> dict:
    """Return latencies of hot requests with and without a cold fetch beside them."""
    model, server = CausalModel(MODEL), S3Server(scratch / "swift")
    server.start()
    fetching = threading.Event()

    def slow(handler, answer) -> None:
        if "cold" in handler.path and handler.headers.get("Range"):
            fetching.set()
            time.sleep(slow_s)
        sound(handler, answer)

    try:
        with FaultyProxy(server.port) as proxy:
            for name, value in (server.environment | {"AWS_ENDPOINT_URL_S3": proxy.endpoint}).items():
                environment.setenv(name, value)
            server.client.create_bucket(Bucket="bench")
            facts = {}
            for i, name in enumerate(("hot", "cold")):
                document = write_document(random.Random(name), POSITIONS, patients(i, 2))
                facts[name] = document.facts
                ids = model.encode(document.text, special=True)[:POSITIONS]
                kind = "trained" if name == "cold" else "prefill"
                save(model, scratch / name, ids, name=name, kind=kind, chunk_tokens=CHUNK)
                for path in (scratch / name).iterdir():
                    server.client.upload_file(str(path), "bench", f"{name}/{path.name}")
                command(["register", f"s3://bench/{name}", "--home", str(scratch / "home")])
            settings = from_mapping(
                {"home": scratch / "home", "cpu_bytes": 64 << 20, "admin": True, "disk_bytes": 0, "ready_timeout_s": 60}
            )
            args = ["--max-model-len", "2304", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
            launch = plan(MODEL, settings, chunk_tokens=CHUNK, on_load_failure="fail", vllm_args=args)
            with ServerProcess(launch, scratch / "log", environment=SMALL) as vllm, Asker(vllm.url) as asker:
                return _phases(asker, proxy, slow, fetching, facts, requests)
    finally:
        server.kill()


def _phases(asker, proxy, slow, fetching, facts, requests: int) -> dict:
    def hot(number: int) -> float:
        fact = facts["hot"][number % len(facts["hot"])]
        started = time.perf_counter()
        asker.complete(ask(fact, 0), "hot", cache_salt=f"{random.getrandbits(64)}")
        return 1000 * (time.perf_counter() - started)

    times: dict[str, list[float]] = {"without": [], "with a cold fetch": []}
    fetches = 0
    with ThreadPoolExecutor(CLIENTS) as clients, ThreadPoolExecutor(1) as other:
        list(clients.map(hot, range(40)))
        while len(times["with a cold fetch"]) < requests:
            fetching.clear()
            asker.http.post("/v1/cartridges/cold/evict")
            proxy.always = slow
            cold = other.submit(asker.complete, ask(facts["cold"][0], 0), "cold", cache_salt=f"{fetches}")
            fetching.wait()
            batch = []
            while not cold.done():
                batch += clients.map(hot, range(2 * CLIENTS))
            cold.result()
            fetches += 1
            times["with a cold fetch"] += batch
            proxy.always = None
            times["without"] += clients.map(hot, range(len(batch)))
    result: dict = {name: _summary(found) for name, found in times.items()} | {"fetches": fetches}
    for quantile in ("p50", "p99"):
        values = [result[name][f"{quantile}_ms"] for name in ("with a cold fetch", "without")]
        result[f"{quantile}_ratio"] = values[0] / values[1]
    return result


def _summary(times_ms: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times_ms, n=100)
    return {"requests": len(times_ms), "p50_ms": cuts[49], "p99_ms": cuts[98]}


if __name__ == "__main__":
    main()
