"""Many cartridges, few slots: how often a request finds its cartridge in memory, beside what other policies would reach.

    python benchmarks/mix.py [--full]

Requests name one of 20 cartridges and more, drawn by Zipf's law (exponents 0.6, 1.0, 1.4), with scans over all of them in
between, or in a loop; memory has slots for some. Ours is measured through `CartridgeStore`: `claim`, poll until resident,
look up, lend, release, close, as a request does, on small artefacts. LRU, LFU and Belady's optimum, which knows the future
and cannot be beaten by any policy that must load what is asked for, are simulated on the same requests, over whole
cartridges. A hit is a request whose cartridge was all there when it came. Wait is the time from claim to resident.
"""

from __future__ import annotations

import heapq
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import report
from scale import chain

from lmcache_cartridge.artifact.fingerprint import Fingerprint
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.settings import from_mapping

CHUNK, CHUNKS = 256, 4
SHAPE = Fingerprint("benchmark", 4, 2, 64, "bfloat16", 128_000, None, "00" * 32)


class Mix(NamedTuple):
    """A load: which cartridges there are, how many fit, and who asks for what."""

    name: str
    cartridges: int
    capacity: int
    exponent: float
    scan: float
    """Share of requests that are part of a scan over all cartridges."""

    def requests(self, count: int) -> list[int]:
        """Return the numbers of the cartridges asked for, the same each time."""
        random = np.random.default_rng(5)
        weights = 1 / np.arange(1, self.cartridges + 1) ** self.exponent
        drawn = random.choice(self.cartridges, count, p=weights / weights.sum())
        if self.scan >= 1:
            return [i % self.cartridges for i in range(count)]
        asked: list[int] = []
        while len(asked) < count:
            if random.random() < self.scan / self.cartridges / (1 - self.scan):
                asked += range(self.cartridges)
            asked.append(int(drawn[len(asked) % count]))
        return asked[:count]


MIXES = [
    Mix("Zipf 1.0", 20, 5, 1.0, 0.0),
    Mix("Zipf 0.6", 20, 5, 0.6, 0.0),
    Mix("Zipf 1.4", 20, 5, 1.4, 0.0),
    Mix("Zipf 1.0, a third scans", 20, 5, 1.0, 0.33),
    Mix("loop", 20, 5, 0.0, 1.0),
    Mix("Zipf 1.0", 100, 10, 1.0, 0.0),
    Mix("Zipf 1.0, a third scans", 100, 10, 1.0, 0.33),
]


def lru(requests: Sequence[int], capacity: int) -> int:
    """Return the hits of evicting what was used least recently."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for one in requests:
        if one in cached:
            hits += 1
            cached.move_to_end(one)
            continue
        if len(cached) == capacity:
            cached.popitem(last=False)
        cached[one] = None
    return hits


def lfu(requests: Sequence[int], capacity: int) -> int:
    """Return the hits of evicting what was asked for least often since the start, the least recent of those."""
    cached: dict[int, int] = {}
    asked: Counter[int] = Counter()
    hits = 0
    for now, one in enumerate(requests):
        asked[one] += 1
        if one in cached:
            hits += 1
        elif len(cached) == capacity:
            del cached[min(cached, key=lambda other: (asked[other], cached[other]))]
        cached[one] = now
    return hits


def belady(requests: Sequence[int], capacity: int) -> int:
    """Return the hits of evicting what is needed again last: the most that any policy can have."""
    upcoming, later = [0] * len(requests), {}
    for i in range(len(requests) - 1, -1, -1):
        upcoming[i] = later.get(requests[i], len(requests))
        later[requests[i]] = i
    cached: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    hits = 0
    for i, one in enumerate(requests):
        if one in cached:
            hits += 1
        elif len(cached) == capacity:
            while True:
                when, victim = heapq.heappop(furthest)
                if cached.get(victim) == -when:
                    break
            del cached[victim]
        cached[one] = upcoming[i]
        heapq.heappush(furthest, (-upcoming[i], one))
    return hits


POLICIES: dict[str, Callable[[Sequence[int], int], int]] = {"LRU": lru, "LFU": lfu, "optimum": belady}


def ours(mix: Mix, requests: Sequence[int]) -> list[tuple[bool, float]]:
    """Return for each request whether the real store had its cartridge, and the seconds until it was resident."""
    from lmcache_cartridge.memory.described import Engine
    from lmcache_cartridge.memory.store import CartridgeStore

    with tempfile.TemporaryDirectory(prefix="cartridge-mix-") as scratch:
        home = Path(scratch)
        registry = Registry(home / "registry.sqlite")
        digests, prompts = [], []
        for number in range(mix.cartridges):
            ids = np.random.default_rng(number).integers(0, SHAPE.vocab_size, CHUNK * CHUNKS)
            digests.append(make(home / f"c{number}", ids, registry))
            prompts.append(list(chain(ids)))
        settings = from_mapping(
            {
                "home": home, "cpu_bytes": mix.capacity * CHUNKS * CHUNK * SHAPE.token_bytes, "disk_bytes": 0,
                "reload_s": 0,
            }
        )  # fmt: skip
        engine = Engine(SHAPE, CHUNK, 0, 1, "heads", lambda ids: list(chain(ids)), pin_memory=False, allow_trained=True)
        store = CartridgeStore(settings, engine)
        try:
            found = []
            for number in requests:
                started = time.perf_counter()
                claim = store.claim(digests[number], {})
                state = claim.poll()
                hit = state.ready
                while not state.ready:
                    time.sleep(0.0002)
                    state = claim.poll()
                found.append((hit, time.perf_counter() - started))
                assert store.lookup(prompts[number], digests[number]) == CHUNKS
                for loan in store.lend_run(prompts[number], digests[number]):
                    loan.close()
                for chunk_hash in prompts[number]:
                    store.release(chunk_hash, digests[number])
                claim.close()
            store.check()
        finally:
            store.close()
    return found


def make(root: Path, ids: np.ndarray, registry: Registry) -> str:
    """Write and register a small cartridge and return its digest."""
    report.write_artifact(root, SHAPE, ids, CHUNK, bytes(CHUNK * SHAPE.token_bytes))
    return registry.register(root).digest


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = report.parser(__doc__, "mix").parse_args(arguments)
    mixes = [Mix("Zipf 1.0", 4, 2, 1.0, 0.0)] if options.smoke else MIXES
    count = 30 if options.smoke else 20_000 if options.full else 2000
    machine, rows = report.hardware(), []
    curves: dict[str, list[report.Point]] = {}
    for mix in mixes:
        report.say(f"{mix.name}, {mix.cartridges} cartridges, {mix.capacity} fit")
        requests = mix.requests(count)
        found = ours(mix, requests)
        hits, waits = sum(hit for hit, _ in found), [wait_s for _, wait_s in found]
        missed = [wait_s for hit, wait_s in found if not hit] or [0.0]
        others = {name: policy(requests, mix.capacity) for name, policy in POLICIES.items()}
        best = others["optimum"]
        rows.append(
            {
                "load": mix.name,
                "cartridges": mix.cartridges,
                "fit": mix.capacity,
                "hits, ours": f"{hits / count:.1%}",
                **{name: f"{theirs / count:.1%}" for name, theirs in others.items()},
                "ours / optimum": round(hits / best, 2) if best else "-",
                "wait ms p50": round(1000 * float(np.quantile(waits, 0.5)), 3),
                "p95": round(1000 * float(np.quantile(waits, 0.95)), 3),
                "of a miss, p50": round(1000 * float(np.quantile(missed, 0.5)), 2),
            }
        )
        for name, theirs in {"ours": hits, **others}.items():
            share = max(100 * theirs / count, 0.01)
            label = f"{mix.name}\n{mix.cartridges} on {mix.capacity}"
            curves.setdefault(name, []).append(report.Point(label, report.Spread(share, share, share, 1)))
    panel = report.Panel("requests whose cartridge was in memory", "", "%", curves)
    lines = [
        f"{row['load']}, {row['cartridges']} on {row['fit']}: {row['ours / optimum']} of the clairvoyant optimum's hits"
        for row in rows
    ]
    report.publish("mix", rows, options, machine, panels=[panel], lines=lines)


if __name__ == "__main__":
    main()
