"""What a cold cartridge costs: hot requests beside a slow fetch from S3, and many requests for one that is cold.

    python benchmarks/cold_fetch.py [--full]

A real vLLM server with the shipped model, a real S3 server behind a proxy that holds every answer of the cold cartridge back,
both from the tests. Phases alternate, so that a machine that slows down does so for both. Then, in each mode, 17 requests at
once for one cartridge that is in no memory, LMCache's copies gone too, every client with a `cache_salt` of its own.
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

import pytest
import report  # first: it makes the tests' helpers importable
from faulty_proxy import FaultyProxy, sound
from recall.ward import ask
from s3 import S3Server
from serving import serving
from wards import MODEL, Asker, Ward, patients, register, save, write_ward

from lmcache_cartridge.cli.main import main as command
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import from_mapping

CHUNK, POSITIONS, CLIENTS = 64, 1024, 2
AT_ONCE = 17
ARGS = ["--max-model-len", "2304", "--kv-cache-memory-bytes", str(64 << 20)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["artifact", "library", "sources", "memory", "engine", "serve"])
    options = bench.start(arguments)
    requests = 4000 if options.full else 20 if options.smoke else 400
    slow_s = 1.0 if options.smoke else 5.0
    figures = []
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as environment:
        for beside, found in measure(Path(scratch), environment, requests, slow_s).items():
            for made in (report.Figure.of, report.Figure.tail):
                figures.append(made(found, "hot request", "s", beside=beside))
    for mode in ("in-process", "multiprocess"):
        with tempfile.TemporaryDirectory() as scratch:
            figures += for_one(Path(scratch), mode, 40 if options.full else 1 if options.smoke else 10)
    bench.publish(figures)


def measure(scratch: Path, environment: pytest.MonkeyPatch, requests: int, slow_s: float) -> dict[str, list[float]]:
    """Return the seconds of hot requests with and without a cold fetch beside them."""
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
                ward = write_ward(model, patients(i, 2), name, tokens=POSITIONS, positions=POSITIONS)
                facts[name] = ward.facts
                kind = "trained" if name == "cold" else "prefill"
                save(model, scratch / name, ward.ids, name=name, kind=kind, chunk_tokens=CHUNK)
                for path in (scratch / name).iterdir():
                    server.client.upload_file(str(path), "bench", f"{name}/{path.name}")
                command(["import", f"s3://bench/{name}", "--home", str(scratch / "home")])
            settings = from_mapping(
                {"home": scratch / "home", "cpu_bytes": 64 << 20, "admin": True, "disk_bytes": 0, "ready_timeout_s": 60}
            )
            with serving(settings, scratch / "log", MODEL, *ARGS, chunk_tokens=CHUNK, on_load_failure="fail") as asker:
                return _phases(asker, proxy, slow, fetching, facts, requests)
    finally:
        server.kill()


def _phases(
    asker: Asker, proxy: FaultyProxy, slow: Any, fetching: threading.Event, facts: dict[str, Any], requests: int
) -> dict[str, list[float]]:
    def hot(number: int) -> float:
        fact = facts["hot"][number % len(facts["hot"])]
        started = time.perf_counter()
        asker.complete(ask(fact, 0), "hot", cache_salt=f"{random.getrandbits(64)}")
        return time.perf_counter() - started

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
    return times


def for_one(scratch: Path, mode: Any, rounds: int) -> list[report.Figure]:
    """Return what requests for one cold cartridge at once cost: bytes read, and who was computed after all."""
    model = CausalModel(MODEL)
    settings = from_mapping({"home": scratch / "home", "cpu_bytes": 64 << 20, "admin": True, "ready_timeout_s": 120})
    ward = write_ward(model, patients(0, 2), "ward", tokens=POSITIONS)
    manifest = register(model, settings, ward.ids[:POSITIONS], name="ward", chunk_tokens=CHUNK)
    size_bytes = manifest.payload_bytes - manifest.stored.data_offset_bytes
    args = ["--kv-cache-memory-bytes", str(256 << 20), *(["--block-size", "32"] if mode == "multiprocess" else [])]
    with (
        serving(settings, scratch / "log", MODEL, *ARGS, *args, chunk_tokens=CHUNK, mode=mode) as asker,
        ThreadPoolExecutor(AT_ONCE) as clients,
    ):
        asker.complete("Q", "ward")  # its canary
        read, alone, together, answers = [], [], [], []
        for _ in range(rounds):
            alone.append(_at_once(asker, clients, ward, 1)[0])
            before = _read_bytes(asker)
            took_s, found = _at_once(asker, clients, ward, AT_ONCE)
            read.append((_read_bytes(asker) - before) / size_bytes)
            together.append(took_s)
            answers += found
    n, about = len(answers), {"mode": mode, "requests for one": AT_ONCE}
    return [
        report.Figure.counted(max(read), "bytes read / its bytes, at most", "", len(read), **about),
        report.Figure.share(sum(a.cached_tokens == POSITIONS for a, _ in answers), n, "not computed", **about),
        report.Figure.share(sum(a.text.strip() == value for a, value in answers), n, "right", **about),
        report.Figure.of(together, "last answer", "s", **about),
        report.Figure.of(alone, "last answer", "s", **about | {"requests for one": 1}),
    ]


def _at_once(asker: Asker, clients: ThreadPoolExecutor, ward: Ward, count: int) -> tuple[float, list[Any]]:
    """Evict, ask, and return the seconds until the last answer, and each with the right one."""
    asker.http.post("/v1/cartridges/ward/evict").raise_for_status()
    round_ = random.getrandbits(64)

    def one(number: int) -> Any:
        fact = ward.facts[number % len(ward.facts)]
        return asker.complete(ask(fact, 0), "ward", cache_salt=f"{round_}-{number}"), fact.value

    started = time.perf_counter()
    answers = list(clients.map(one, range(count)))
    return time.perf_counter() - started, answers


def _read_bytes(asker: Asker) -> float:
    """Return how many bytes the workers have read from sources."""
    time.sleep(2.5)  # the server asks its workers once a second at most
    found = asker.metric('lmcache_cartridge_read_bytes_total{rank="0",tier="source"}')
    assert found, "no metric of bytes read from sources"
    return found


if __name__ == "__main__":
    main()
