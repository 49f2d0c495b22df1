"""Which cartridge leaves memory first: published policies on loads of their own, beside the clairvoyant optimum.

    python benchmarks/replacement.py [--full]

Simulated, a request at a time, over whole cartridges; whatever is asked for is loaded, as a request must have it. `ours`
is `lmcache_cartridge/memory/replacement.py`; `tests/memory/test_replacement.py` holds that the tier does the same. Figures are the
share of chunks that were in memory when asked for. The optimum (Belady) knows every request to come; of cartridges of unequal
size it is an upper bound (PFOO-L: Berger, Beckmann, Harchol-Balter, "Practical bounds on optimal caching with variable object
sizes", 2018).
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import report

from lmcache_cartridge.memory.replacement import Replacement

SEED = 101
"""The half-life of ours was chosen on this one, of 5, 5.5, 6, 6.5, 7, 10 and more."""


class Load(NamedTuple):
    """Who asks for what: numbers of cartridges, and how many chunks fit in memory."""

    name: str
    requests: list[int]
    room: int
    sizes: dict[int, int] | None = None
    """Chunks of each; of one chunk all where there is none."""

    def size(self, number: int) -> int:
        """Return the chunks of a cartridge."""
        return self.sizes[number] if self.sizes else 1


def zipf(cartridges: int, exponent: float, count: int, seed: int) -> list[int]:
    """Return requests for the n-th cartridge in proportion to 1 / n ** exponent."""
    weights = [1 / rank**exponent for rank in range(1, cartridges + 1)]
    return random.Random(seed).choices(range(cartridges), weights, k=count)


def scanned(cartridges: int, count: int, seed: int) -> list[int]:
    """Return Zipf's requests with scans over all cartridges in between, which make up a third of them."""
    chance, drawn, asked = random.Random(seed), iter(zipf(cartridges, 1.0, count, seed + 1)), []
    while len(asked) < count:
        if chance.random() < 0.33 / cartridges / (1 - 0.33):
            asked += range(cartridges)
        asked.append(next(drawn))
    return asked[:count]


def changing(cartridges: int, count: int, seed: int, every: int) -> list[int]:
    """Return Zipf's requests with other favourites after each `every` requests."""
    chance, names = random.Random(seed), list(range(cartridges))
    asked = []
    for turn, number in enumerate(zipf(cartridges, 1.0, count, seed + 1)):
        if turn % every == 0:
            chance.shuffle(names)
        asked.append(names[number])
    return asked


def loads(count: int) -> list[Load]:
    """Return the loads, `count` requests each: those of the goal first, then those that must not become worse."""
    few, chance = {exponent: zipf(20, exponent, count, SEED) for exponent in (1.0, 0.6, 1.4)}, random.Random(SEED)
    sizes = {number: chance.choice([1, 2, 4, 8, 16]) for number in range(40)}
    return [
        *[Load(f"Zipf {exponent}, 20 on 5", asked, 5) for exponent, asked in few.items()],
        Load("a third scans, 20 on 5", scanned(20, count, SEED), 5),
        Load("a loop, 20 on 5", [turn % 20 for turn in range(count)], 5),
        Load("Zipf 1.0, 100 on 10", zipf(100, 1.0, count, SEED), 10),
        Load("a third scans, 100 on 10", scanned(100, count, SEED), 10),
        Load("unequal sizes, 40", zipf(40, 1.0, count, SEED), sum(sizes.values()) // 4, sizes),
        *[Load(f"others after {every}", changing(20, count, SEED, every), 5) for every in (50, 100, 200, 500, 2000)],
        Load("ever new ones", [turn // 40 + n for turn, n in enumerate(few[1.0])], 5),
    ]


# Policies: a memory of `room` chunks; `ask` returns whether a cartridge is there, which it is from now on.


class Lru:
    """The least recently used leaves."""

    def __init__(self, room: int) -> None:
        self.room, self.here = room, OrderedDict[int, int]()

    def ask(self, number: int, size: int) -> bool:
        hit = number in self.here
        self.here[number] = size
        self.here.move_to_end(number)
        while sum(self.here.values()) > self.room:
            self.here.popitem(last=False)
        return hit


class TinyLfu:
    """W-TinyLFU (Einziger et al., ACM TOS 2017) with a window of one cartridge: the one that leaves it takes the place of
    the main part's least recently used, if it was asked for more often. Counts are halved every so often.
    """

    def __init__(self, room: int, sample: int = 10) -> None:
        self.room, self.sample, self.turn = room, sample * room, 0
        self.main, self.uses = OrderedDict[int, int](), Counter[int]()
        self.window: tuple[int, int] | None = None

    def ask(self, number: int, size: int) -> bool:
        self.uses[number] += 1
        self.turn += 1
        if self.turn >= self.sample:
            self.turn //= 2
            self.uses = Counter({one: uses // 2 for one, uses in self.uses.items() if uses > 1})
        if number in self.main:
            self.main.move_to_end(number)
            return True
        if self.window is not None and self.window[0] == number:
            return True
        if self.window is not None:
            self.main[self.window[0]] = self.window[1]
        while sum(self.main.values()) + size > self.room:
            oldest = next(iter(self.main))
            newest = next(reversed(self.main)) if self.window is not None else oldest
            self.main.pop(newest if self.uses[newest] <= self.uses[oldest] else oldest)
            self.window = None
        self.window = number, size
        return False


class Ours:
    """`Replacement`, as the tier asks it."""

    def __init__(self, room: int) -> None:
        self.free, self.here, self.replacement = room, dict[str, int](), Replacement(room)

    def ask(self, number: int, size: int) -> bool:
        digest = str(number)
        hit = digest in self.here
        self.replacement.use(digest, size, is_here=hit)
        if not hit:
            if self.free < size:
                for leaving in self.replacement.leave():
                    self.free += self.here.pop(leaving)
                    self.replacement.gone(leaving)
                    if self.free >= size:
                        break
            self.here[digest] = size
            self.free -= size
            self.replacement.offer(digest)
        return hit


POLICIES: dict[str, type[Ours | Lru | TinyLfu]] = {
    "ours": Ours, "LRU": Lru, "W-TinyLFU": TinyLfu
}  # fmt: skip


def found(load: Load, policy: Ours | Lru | TinyLfu) -> int:
    """Return how many of the chunks that were asked for a policy had, of whole cartridges only."""
    return sum(load.size(number) * policy.ask(number, load.size(number)) for number in load.requests)


def belady(requests: Sequence[int], capacity: int) -> int:
    """Return the hits of evicting what is needed again last: the most that any policy can have."""
    upcoming, later = [0] * len(requests), {}
    for i in range(len(requests) - 1, -1, -1):
        upcoming[i] = later.get(requests[i], len(requests))
        later[requests[i]] = i
    cached: dict[int, int] = {}
    hits = 0
    for one, then in zip(requests, upcoming, strict=True):
        hits += one in cached
        if one not in cached and len(cached) == capacity:
            del cached[max(cached, key=cached.__getitem__)]
        cached[one] = then
    return hits


def optimum(load: Load) -> int:
    """Return the most chunks that can be found, by whoever knows every request."""
    if not load.sizes:
        return belady(load.requests, load.room)
    last: dict[int, int] = {}
    stays = []
    for turn, number in enumerate(load.requests):
        if number in last:
            stays.append((turn - last[number], load.size(number)))
        last[number] = turn
    left, chunks = load.room * len(load.requests), 0
    for turns, size in sorted(stays):
        left -= turns * size
        if left < 0:
            break
        chunks += size
    return chunks


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["memory/replacement.py"])
    options = bench.start(arguments)
    count = 300 if options.smoke else 100_000 if options.full else 20_000
    figures = []
    for load in loads(count):
        report.say(load.name)
        asked = sum(map(load.size, load.requests))
        hits = {"optimum": optimum(load)}
        hits |= {name: found(load, make(load.room)) for name, make in POLICIES.items()}
        figures += [report.Figure.share(one, asked, "hits", load=load.name, policy=name) for name, one in hits.items()]
    bench.publish(figures)


if __name__ == "__main__":
    main()
