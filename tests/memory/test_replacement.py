"""What leaves memory first: nearly the best that can be had, of whole cartridges, and the tier really does it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from chunks import one_by_one
from invariants import check
from operations import operations
from waiting import until

from lmcache_cartridge.library.index import ChunkKey
from lmcache_cartridge.memory.tier import MemoryTier

SLOT, CHUNKS, REQUESTS = 64, 3, 6000


@pytest.fixture(scope="module")
def benchmark():
    path = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, path)
    yield importlib.import_module("replacement")
    sys.path.remove(path)


def _keys(digest: object, count: int = CHUNKS) -> list[ChunkKey]:
    return [ChunkKey(str(digest), chunk) for chunk in range(count)]


def _tier(slots: int) -> MemoryTier:
    return MemoryTier(SLOT, slots * SLOT, one_by_one(lambda key, out: None), threads=1)


def _ask(tier: MemoryTier, digest: object, count: int = CHUNKS) -> bool:
    """Return whether a cartridge is all there, and have it loaded, used and let go."""
    keys = _keys(digest, count)
    hit = tier.resident(keys) == count
    with tier.hold(keys) as claim:
        until(lambda: claim.poll().ready)
        assert tier.lease(keys, 30) == count, "a claimed one's lookup is no further use"
        assert all(map(tier.release, keys))
    return hit


@pytest.mark.parametrize(
    ("name", "least", "lru"),
    [("Zipf 0.6, 20 on 5", 0.73, 0.60), ("Zipf 1.4, 20 on 5", 0.92, 0.87), ("a third scans, 20 on 5", 0.83, 0.66),
     ("a loop, 20 on 5", 0.90, 0.01), ("Zipf 1.0, 100 on 10", 0.83, 0.68)],
)  # fmt: skip
def test_hits_are_near_the_clairvoyant_optimum_and_an_lru_s_are_not(benchmark, name, least, lru):
    """`least` and `lru` are shares of what Belady's optimum hits."""
    load = next(load for load in benchmark.loads(REQUESTS) if load.name == name)
    best = benchmark.optimum(load)
    assert benchmark.found(load, benchmark.Ours(load.room)) >= least * best
    assert benchmark.found(load, benchmark.Lru(load.room)) <= lru * best


@pytest.mark.parametrize("name", ["a third scans, 20 on 5", "others after 100"])
def test_the_tier_hits_exactly_as_often_as_the_simulation(benchmark, name):
    load = next(load for load in benchmark.loads(600) if load.name == name)
    simulated, tier = benchmark.Ours(CHUNKS * load.room), _tier(CHUNKS * load.room)
    for turn, number in enumerate(load.requests):
        assert _ask(tier, number) == simulated.ask(number, CHUNKS), f"request {turn}"
    check(tier)
    tier.close()


def test_a_cartridge_leaves_whole_before_another_loses_a_chunk():
    tier = _tier(12)
    for digest in "aabbcc":
        _ask(tier, digest, 4)
    _ask(tier, "d", 1)
    [torn] = [digest for digest in "abc" if tier.resident(_keys(digest, 4)) == 3]  # its end went
    for newcomer in "dddefg":  # others become favourites meanwhile: the rest of it stays what goes next
        _ask(tier, newcomer, 1)
    assert [tier.resident(_keys(digest, 4)) for digest in "abc"] == [4 * (digest != torn) for digest in "abc"]
    tier.close()


@pytest.mark.parametrize("whole", [False, True])
def test_a_miss_in_full_memory_costs_the_same_however_much_is_there(whole):
    costs = []
    for cartridges in (100, 3000):
        tier = _tier(cartridges)
        assert tier.lease([ChunkKey(str(number), 0) for number in range(cartridges)], 60) == cartridges
        for number in range(cartridges):
            assert tier.release(ChunkKey(str(number), 0))
        claims = [tier.hold(_keys(f"new{turn}", 1), whole=whole) for turn in range(40)]
        for claim in claims[:20]:
            until(lambda: claim.poll().ready)  # noqa: B023
            claim.close()
        costs.append(sum(operations(claim.poll) for claim in claims[20:]))
        assert tier.stats().evicted == 40
        for claim in claims:
            claim.close()
        tier.close()
    assert costs[1] < 2 * costs[0]
