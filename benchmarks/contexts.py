"""What others wait for their first token while a server makes contexts, beside a server that computes the same texts as prompts.

    python benchmarks/contexts.py [--full]

One server in each mode. A client asks one request after another, in turns a plain prompt and one behind a context. Beside it
either nothing goes on, or a second client sends texts of 6,144 tokens one after another: as plain prompts, which any server
computes, or as contexts, each deleted once it is made. These three take turns.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import report  # first: it makes the tests' helpers importable
from serving import serving
from wards import Asker

from lmcache_cartridge.settings import from_mapping

TOKENS, ASKED, ROUTE = 6144, 256, "/v1/cartridges"
NOTHING, PROMPTS, CONTEXTS = "nothing", "prompts", "contexts"


def drawn(rng: random.Random, count: int) -> list[int]:
    """Return token ids that no prefix cache has."""
    return [rng.randrange(10, 640) for _ in range(count)]


def compute(asker: Asker, rng: random.Random) -> None:
    """Have a text computed as a prompt."""
    asker.complete(drawn(rng, TOKENS))


def make(asker: Asker, rng: random.Random) -> str:
    """Have a context made of a text, wait for it and return its id."""
    reply = asker.http.post(ROUTE, json={"token_ids": drawn(rng, TOKENS)}).raise_for_status().json()
    while reply["state"] == "making":
        time.sleep(0.02)
        reply = asker.state(reply["id"])
    if reply["state"] == "failed":
        raise RuntimeError(reply)
    return reply["id"]


def make_and_delete(asker: Asker, rng: random.Random) -> None:
    """Have a context made that nobody asks for."""
    asker.http.delete(f"{ROUTE}/{make(asker, rng)}").raise_for_status()


BESIDE: dict[str, Callable[[Asker, random.Random], None]] = {PROMPTS: compute, CONTEXTS: make_and_delete}


@contextmanager
def sending(url: str, what: str, seed: str) -> Iterator[None]:
    """Send texts until the block ends. Raises what sending raised."""
    over = threading.Event()

    def send() -> None:
        rng = random.Random(seed)
        with Asker(url) as asker:
            while not over.is_set():
                BESIDE[what](asker, rng)

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        try:
            yield
        finally:
            over.set()
        sent.result()


def measure(asker: Asker, rounds: int, asks: int) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each request, by what was asked and what went on beside it."""
    rng = random.Random(1)
    asked = {"plain": None, "behind a context": [make(asker, rng)]}
    waited: dict[tuple[str, str], list[float]] = {(way, what): [] for what in (NOTHING, *BESIDE) for way in asked}
    for turn in range(-1, rounds):  # the first warms up
        for what in rng.sample([NOTHING, *BESIDE], 3):
            with sending(asker.url, what, f"{what} {turn}") if what in BESIDE else nullcontext():
                for _ in range(asks):
                    for way, named in asked.items():
                        ids = drawn(rng, ASKED)
                        started = time.perf_counter()
                        answer = asker.complete(ids, named)
                        seconds = time.perf_counter() - started
                        assert (answer.cached_tokens >= TOKENS) == bool(named), (way, answer)
                        if turn >= 0:
                            waited[way, what].append(seconds)
    return waited


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["engine", "memory", "serve"])
    options = bench.start(arguments)
    rounds, asks = (20, 20) if options.full else (1, 2) if options.smoke else (5, 10)
    figures = []
    for mode in ("in-process", "multiprocess"):
        with tempfile.TemporaryDirectory() as scratch:
            settings = from_mapping({"home": scratch, "contexts": True})
            with serving(settings, Path(scratch) / "log", mode=mode, l1_bytes=256 << 20) as asker:
                for (way, what), found in measure(asker, rounds, asks).items():
                    case = {"mode": mode, "beside": what, "request": way}
                    figures.append(report.Figure.of(found, "first token", "s", **case))
    bench.publish(figures)


if __name__ == "__main__":
    main()
