"""What a slow cold fetch from S3 costs requests for resident cartridges: their latency with and without it, in one run.

    python benchmarks/cold_fetch.py [--full] [--requests 400] [--slow-s 5] [--out DIR]

A real vLLM server, a real S3 server behind a proxy that holds every answer of the cold cartridge back, both from the
tests. Phases alternate, so that a machine that slows down does so for both.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report  # first: it makes the tests' helpers importable
from faulty_proxy import FaultyProxy, sound
from recall.ward import ask, write_document
from s3 import S3Server
from wards import MODEL, Asker, patients, save

from lmcache_cartridge.cli.main import main as command
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import from_mapping

CHUNK, POSITIONS, CLIENTS = 64, 1024, 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = report.parser(__doc__, "cold_fetch")
    parser.add_argument("--requests", type=int, help="hot requests of each kind (default 400; --full 4000)")
    parser.add_argument("--slow-s", type=float, help="how long a cold fetch takes (default 5)")
    options = parser.parse_args(arguments)
    requests = options.requests or (4000 if options.full else 20 if options.smoke else 400)
    slow_s = options.slow_s or (1.0 if options.smoke else 5.0)
    machine = report.hardware()
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as environment:
        times_ms, fetches = measure(Path(scratch), environment, requests, slow_s)
    rows = [
        {
            "beside it": beside, "requests": len(found), "p50 ms": round(float(np.quantile(found, 0.5)), 1),
            "p99 ms": round(float(np.quantile(found, 0.99)), 1),
        }
        for beside, found in times_ms.items()
    ]  # fmt: skip
    without, with_fetch = rows
    lines = [
        f"{column[:3]} with / without a cold fetch: {with_fetch[column] / without[column]:.3f} ({fetches} fetches of "
        f"{slow_s:g} s a read)" for column in ("p50 ms", "p99 ms")
    ]  # fmt: skip
    curves = {"resident cartridge": [report.Point(name, report.Spread.of(found)) for name, found in times_ms.items()]}
    panel = report.Panel("requests for a resident cartridge", "beside it", "ms", curves)
    report.publish("cold_fetch", rows, options, machine, panels=[panel], details=times_ms, lines=lines)


def measure(
    scratch: Path, environment: pytest.MonkeyPatch, requests: int, slow_s: float
) -> tuple[dict[str, list[float]], int]:
    """Return latencies of hot requests in ms with and without a cold fetch beside them, and how many fetches there were."""
    model, server = CausalModel(MODEL), S3Server(scratch / "swift")
    server.start()
    fetching = threading.Event()

    def slow(handler: Any, answer: Any) -> None:
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


def _phases(
    asker: Asker, proxy: FaultyProxy, slow: Any, fetching: threading.Event, facts: dict[str, Any], requests: int
) -> tuple[dict[str, list[float]], int]:
    def hot(number: int) -> float:
        fact = facts["hot"][number % len(facts["hot"])]
        started = time.perf_counter()
        asker.complete(ask(fact, 0), "hot", cache_salt=f"{random.getrandbits(64)}")
        return 1000 * (time.perf_counter() - started)

    times: dict[str, list[float]] = {"nothing": [], "a cold fetch": []}
    fetches = 0
    with ThreadPoolExecutor(CLIENTS) as clients, ThreadPoolExecutor(1) as other:
        list(clients.map(hot, range(40)))
        while len(times["a cold fetch"]) < requests:
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
            times["a cold fetch"] += batch
            proxy.always = None
            times["nothing"] += clients.map(hot, range(len(batch)))
    return times, fetches


if __name__ == "__main__":
    main()
