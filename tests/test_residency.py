"""Chunks are in memory while somebody relies on them, once each, and never more than the budget."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from waiting import run_threads, until

from lmcache_cartridge.errors import CorruptChunk, SourceError
from lmcache_cartridge.library.index import ChunkKey
from lmcache_cartridge.memory.hold import Hold
from lmcache_cartridge.memory.loads import STALLED_S
from lmcache_cartridge.memory.slab import Slab
from lmcache_cartridge.memory.tier import Loan, Residency

SLOT = 64


class _Loads:
    """Fills chunks with bytes that tell them apart, counts loads, and fails or waits where told to."""

    def __init__(self) -> None:
        self.counts: Counter[ChunkKey] = Counter()
        self.broken: set[ChunkKey] = set()
        self.held: dict[ChunkKey, threading.Event] = {}
        self.pause_s = 0.0

    def __call__(self, key: ChunkKey, out: torch.Tensor) -> None:
        self.counts[key] += 1
        out[: SLOT // 2] = _byte(key)
        if self.pause_s:
            time.sleep(self.pause_s)
        if key in self.held:
            assert self.held[key].wait(20)
        if key in self.broken:
            raise CorruptChunk(f"{key} is broken")
        out[SLOT // 2 :] = _byte(key)


class _Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _byte(key: ChunkKey) -> int:
    return (sum(map(ord, key.digest)) * 31 + key.chunk * 7) % 251


def _keys(digest: str, count: int) -> list[ChunkKey]:
    return [ChunkKey(digest, chunk) for chunk in range(count)]


def _intact(loan: Loan, key: ChunkKey) -> bool:
    return bool((loan.bytes == _byte(key)).all()) and loan.bytes.numel() == SLOT


def _quiet(residency: Residency) -> None:
    """Wait until no load is in flight."""
    deadline = time.monotonic() + 60
    while residency.stats().loading:
        assert time.monotonic() < deadline, "a load never ended"
        time.sleep(0.0005)


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.0005)


def _held(residency: Residency, keys: list[ChunkKey]) -> list[int]:
    return [key.chunk for key in keys if residency.resident([key])]


@pytest.fixture
def loads() -> _Loads:
    return _Loads()


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def open_residency(loads: _Loads, clock: _Clock) -> Callable[..., Residency]:
    """Return a function that opens a residency of so many slots, which is checked and closed at the end."""
    opened = []

    def make(slots: int, **arguments: object) -> Residency:
        residency = Residency(Slab(SLOT, slots * SLOT), loads, **({"clock": clock, "lease_s": 100} | arguments))
        opened.append(residency)
        return residency

    yield make
    for held in loads.held.values():
        held.set()
    for residency in opened:
        residency.close()
        residency.check()


def test_acquired_chunks_are_resident_leased_and_have_their_bytes(open_residency: Callable) -> None:
    residency, keys = open_residency(8), _keys("a", 4)
    assert residency.resident(keys) == 0
    assert residency.acquire(keys, 5) == 4
    assert residency.resident(keys) == 4
    for key in keys:
        with residency.lend(key) as loan:
            assert _intact(loan, key)
    stats = residency.stats()
    assert (stats.resident, stats.leased, stats.lent, stats.promoted, stats.misses, stats.hits) == (4, 4, 0, 4, 4, 0)
    assert (stats.resident_bytes, stats.budget_bytes) == (4 * SLOT, 8 * SLOT)


def test_a_chunk_that_is_resident_is_a_hit_and_not_loaded_again(open_residency: Callable, loads: _Loads) -> None:
    residency, keys = open_residency(8), _keys("a", 4)
    residency.acquire(keys, 5)
    assert residency.acquire(keys, 5) == 4
    assert set(loads.counts.values()) == {1}
    assert residency.stats().hits == 4


def test_a_chunk_that_is_not_resident_is_not_lent_or_released(open_residency: Callable) -> None:
    residency = open_residency(2)
    assert residency.lend(ChunkKey("a", 0)) is None
    assert residency.release(ChunkKey("a", 0)) is False
    assert residency.stats()[:8] == (0,) * 8


def test_asking_what_is_resident_changes_nothing(open_residency: Callable, loads: _Loads) -> None:
    residency, keys = open_residency(4), _keys("a", 4)
    residency.acquire(keys[:2], 5)
    before = residency.stats()
    assert residency.resident(keys) == 2
    assert residency.resident(keys[1:]) == 1
    assert residency.resident(keys[2:]) == 0
    assert residency.resident([]) == 0
    assert residency.stats() == before
    assert sum(loads.counts.values()) == 2


def test_two_loans_are_the_same_memory(open_residency: Callable) -> None:
    residency, (key,) = open_residency(2), _keys("a", 1)
    residency.acquire([key], 5)
    with residency.lend(key) as one, residency.lend(key) as other:
        assert one.bytes.data_ptr() == other.bytes.data_ptr()
    with residency.lend(key) as again:
        assert again.bytes.data_ptr() == one.bytes.data_ptr()


def test_lent_bytes_are_not_overwritten_however_much_else_is_wanted(open_residency: Callable) -> None:
    residency, key = open_residency(2), ChunkKey("a", 0)
    residency.acquire([key], 5)
    loan = residency.lend(key)
    residency.release(key)
    for chunk in range(10):
        assert residency.acquire([ChunkKey("b", chunk)], 5) == 1
        residency.release(ChunkKey("b", chunk))
        assert _intact(loan, key)
    assert residency.evict("a") == 0
    loan.close()
    assert residency.evict("a") == 1


def test_a_loan_keeps_its_chunk_after_its_lease_ran_out(open_residency: Callable, clock: _Clock) -> None:
    residency, key = open_residency(1), ChunkKey("a", 0)
    residency.acquire([key], 5)
    loan = residency.lend(key)
    clock.now += 1000
    assert residency.acquire([ChunkKey("b", 0)], 5) == 0
    assert _intact(loan, key)
    loan.close()
    assert residency.acquire([ChunkKey("b", 0)], 5) == 1


def test_closing_a_loan_twice_counts_once(open_residency: Callable) -> None:
    residency, (key,) = open_residency(1), _keys("a", 1)
    residency.acquire([key], 5)
    residency.release(key)
    one, other = residency.lend(key), residency.lend(key)
    one.close()
    one.close()
    residency.check()
    assert residency.stats().lent == 1
    assert residency.evict("a") == 0, "the other loan still counts"
    other.close()
    assert residency.evict("a") == 1


def test_a_loan_closed_by_sixteen_threads_at_once_counts_once(open_residency: Callable) -> None:
    residency, (key,) = open_residency(1), _keys("a", 1)
    residency.acquire([key], 5)
    keeper = residency.lend(key)
    for _ in range(50):
        loan = residency.lend(key)
        run_threads(16, lambda _, loan=loan: loan.close())
        residency.check()
    assert residency.stats().lent == 1
    keeper.close()
    assert residency.stats().lent == 0


def test_leased_chunks_are_not_evicted(open_residency: Callable) -> None:
    residency, keys = open_residency(3), _keys("a", 3)
    assert residency.acquire(keys, 5) == 3
    assert residency.acquire(_keys("b", 1), 5) == 0
    assert residency.evict("a") == 0
    assert residency.resident(keys) == 3
    assert residency.release(keys[2]) is True
    assert residency.acquire(_keys("b", 1), 5) == 1
    assert residency.resident(keys) == 2


def test_each_lease_must_be_released(open_residency: Callable) -> None:
    residency, (key,) = open_residency(1), _keys("a", 1)
    residency.acquire([key], 5)
    residency.acquire([key], 5)
    assert residency.release(key) is True
    assert residency.evict("a") == 0
    assert residency.release(key) is True
    assert residency.release(key) is False
    assert residency.evict("a") == 1


def test_a_lease_that_nobody_ends_runs_out(open_residency: Callable, clock: _Clock) -> None:
    residency = open_residency(1, lease_s=100)
    residency.acquire(_keys("a", 1), 5)
    clock.now += 99
    assert residency.acquire(_keys("b", 1), 5) == 0
    assert residency.stats().leased == 1
    clock.now += 1
    assert residency.stats().leased == 0
    assert residency.acquire(_keys("b", 1), 5) == 1


def test_a_younger_lease_outlives_an_older_one(open_residency: Callable, clock: _Clock) -> None:
    residency = open_residency(1, lease_s=100)
    residency.acquire(_keys("a", 1), 5)
    clock.now += 60
    residency.acquire(_keys("a", 1), 5)
    clock.now += 60
    assert residency.acquire(_keys("b", 1), 5) == 0
    clock.now += 40
    assert residency.acquire(_keys("b", 1), 5) == 1


def test_no_lease_is_left_beyond_the_run_that_was_returned(open_residency: Callable, loads: _Loads) -> None:
    residency, keys = open_residency(8), _keys("a", 4)
    residency.acquire(keys[2:], 5)
    for key in keys[2:]:
        residency.release(key)
    loads.broken.add(keys[1])
    assert residency.acquire(keys, 5) == 1
    _quiet(residency)
    assert [residency.release(key) for key in keys] == [True, False, False, False]


def test_no_lease_is_left_beyond_the_memory_there_is(open_residency: Callable) -> None:
    residency, keys = open_residency(3), _keys("a", 6)
    residency.acquire([keys[4]], 5)
    residency.release(keys[4])
    assert residency.acquire(keys, 5) == 2
    assert [residency.release(key) for key in keys] == [True, True, False, False, False, False]


def test_more_than_fits_gives_the_beginning(open_residency: Callable) -> None:
    residency = open_residency(3)
    assert residency.acquire(_keys("a", 5), 5) == 3
    assert residency.stats().resident == 3


def test_whole_gives_everything_or_nothing_and_leaves_everything_as_it_was(
    open_residency: Callable, loads: _Loads
) -> None:
    residency, keys = open_residency(4), _keys("a", 5)
    residency.acquire(_keys("b", 2), 5)
    for key in _keys("b", 2):
        residency.release(key)
    before = residency.stats()
    assert residency.acquire(keys, 5, whole=True) == 0
    after = residency.stats()
    assert after == before._replace(misses=before.misses + 1)
    assert sum(loads.counts.values()) == 2, "nothing was loaded"
    assert _held(residency, _keys("b", 2)) == [0, 1], "nothing was evicted"
    assert residency.acquire(keys[:4], 5, whole=True) == 4


def test_whole_is_refused_while_others_hold_the_memory(open_residency: Callable) -> None:
    residency, keys = open_residency(4), _keys("a", 3)
    residency.acquire(_keys("b", 2), 5)
    assert residency.acquire(keys, 5, whole=True) == 0
    assert residency.acquire(keys, 5) == 2, "a part would fit"
    assert [residency.release(key) for key in keys] == [True, True, False]
    residency.release(ChunkKey("b", 0))
    assert residency.acquire(keys, 5, whole=True) == 3


def test_whole_never_evicts_its_own_chunks(open_residency: Callable, loads: _Loads) -> None:
    residency, keys = open_residency(4), _keys("a", 4)
    residency.acquire(keys[2:], 5)
    residency.acquire(_keys("b", 2), 5)
    for key in [*keys[2:], *_keys("b", 2)]:
        residency.release(key)
    assert residency.acquire(keys, 5, whole=True) == 4
    assert all(loads.counts[key] == 1 for key in keys)


def test_whole_gives_nothing_when_one_chunk_cannot_be_loaded(open_residency: Callable, loads: _Loads) -> None:
    residency = open_residency(8)
    for chunk, digest in enumerate("abcd"):
        keys = _keys(digest, 4)
        loads.broken = {keys[chunk]}
        assert residency.acquire(keys, 5, whole=True) == 0
        _quiet(residency)
        assert not any(residency.release(key) for key in keys)
        loads.broken = set()
        assert residency.acquire(keys, 5, whole=True) == 4
        assert all(residency.release(key) for key in keys)


def test_a_deadline_returns_what_is_there_while_loading_goes_on(open_residency: Callable, loads: _Loads) -> None:
    residency, keys = open_residency(8, clock=time.monotonic), _keys("a", 3)
    loads.held[keys[1]] = threading.Event()
    before = time.monotonic()
    assert residency.acquire(keys, 0.1) == 1
    assert 0.09 < time.monotonic() - before < 20
    assert residency.stats().loading == 1
    assert residency.lend(keys[1]) is None, "a chunk on its way is not lent"
    loads.held[keys[1]].set()
    _quiet(residency)
    assert residency.acquire(keys, 0) == 3
    assert set(loads.counts.values()) == {1}


def test_whole_gives_nothing_at_the_deadline_and_everything_later(open_residency: Callable, loads: _Loads) -> None:
    residency, keys = open_residency(8, clock=time.monotonic), _keys("a", 3)
    loads.held[keys[2]] = threading.Event()
    assert residency.acquire(keys, 0.05, whole=True) == 0
    assert not any(residency.release(key) for key in keys)
    loads.held[keys[2]].set()
    assert residency.acquire(keys, 5, whole=True) == 3


def test_a_chunk_on_its_way_is_not_evicted(open_residency: Callable, loads: _Loads) -> None:
    residency, key = open_residency(1, clock=time.monotonic), ChunkKey("a", 0)
    loads.held[key] = threading.Event()
    assert residency.acquire([key], 0) == 0
    assert residency.evict("a") == 0
    assert residency.acquire(_keys("b", 1), 0.05) == 0
    loads.held[key].set()
    _quiet(residency)
    assert residency.resident([key]) == 1


def test_sixteen_that_want_a_cartridge_at_once_cause_one_load_a_chunk(open_residency: Callable, loads: _Loads) -> None:
    residency, keys = open_residency(8, clock=time.monotonic), _keys("a", 5)
    loads.pause_s = 0.02
    runs = []
    run_threads(16, lambda _: runs.append(residency.acquire(keys, 10)))
    assert runs == [5] * 16
    assert loads.counts == dict.fromkeys(keys, 1)
    assert [sum(residency.release(key) for _ in range(17)) for key in keys] == [16] * 5


def test_a_failing_load_frees_its_slot_and_may_succeed_later(open_residency: Callable, loads: _Loads) -> None:
    failures = []
    residency, (key,) = open_residency(1, on_failure=lambda key, error: failures.append((key, error))), _keys("a", 1)
    loads.broken.add(key)
    for attempt in range(1, 4):
        assert residency.acquire([key], 5) == 0
        _quiet(residency)
        residency.check()
        assert residency.stats().failed == len(failures) == attempt
    assert failures[0][0] == key
    assert isinstance(failures[0][1], CorruptChunk)
    assert residency.acquire(_keys("b", 1), 5) == 1, "the slot is free for others"
    residency.release(ChunkKey("b", 0))
    loads.broken.clear()
    assert residency.acquire([key], 5) == 1
    with residency.lend(key) as loan:
        assert _intact(loan, key)


def test_waiters_hear_of_a_failure_at_once_and_not_at_their_deadline(open_residency: Callable, loads: _Loads) -> None:
    residency, keys = open_residency(4, clock=time.monotonic), _keys("a", 3)
    loads.broken.add(keys[1])
    loads.pause_s = 0.02
    before, runs = time.monotonic(), []
    run_threads(8, lambda _: runs.append(residency.acquire(keys, 60)), timeout_s=120)
    assert runs == [1] * 8
    assert time.monotonic() - before < 30


def test_a_bug_in_the_loader_is_a_failure_like_any_other(clock: _Clock) -> None:
    failures = []

    def load(key: ChunkKey, out: torch.Tensor) -> None:
        raise ZeroDivisionError("oops")

    residency = Residency(Slab(SLOT, SLOT), load, on_failure=lambda _, error: failures.append(str(error)), clock=clock)
    assert residency.acquire(_keys("a", 1), 5) == 0
    _quiet(residency)
    residency.check()
    assert failures == ["loading chunk 0 of a: ZeroDivisionError: oops"]
    residency.close()


def test_a_bug_in_who_hears_of_failures_loses_no_slot_and_hangs_nobody(open_residency: Callable, loads: _Loads) -> None:
    def on_failure(key: ChunkKey, error: Exception) -> None:
        raise RuntimeError("the listener broke")

    residency, (key,) = open_residency(1, clock=time.monotonic, on_failure=on_failure), _keys("a", 1)
    loads.broken.add(key)
    before = time.monotonic()
    assert residency.acquire([key], 60) == 0
    assert time.monotonic() - before < 30
    _quiet(residency)
    loads.broken.clear()
    assert residency.acquire([key], 5) == 1


def test_the_end_of_the_oldest_cartridge_goes_first(open_residency: Callable) -> None:
    residency, old, new = open_residency(8), _keys("a", 4), _keys("b", 4)
    for keys in (old, new):
        residency.acquire(keys, 5)
        for key in keys:
            with residency.lend(key):
                residency.release(key)
    for count in range(1, 5):
        residency.acquire([ChunkKey("c", count)], 5)
        assert _held(residency, old) == list(range(4 - count))
        assert _held(residency, new) == [0, 1, 2, 3]
    residency.acquire([ChunkKey("c", 5)], 5)
    assert _held(residency, new) == [0, 1, 2]


def test_a_cartridge_that_was_asked_for_again_is_not_the_oldest_any_more(open_residency: Callable) -> None:
    residency, first, second = open_residency(6), _keys("a", 3), _keys("b", 3)
    for keys in (first, second, first):
        residency.acquire(keys, 5)
        for key in keys:
            residency.release(key)
    residency.acquire(_keys("c", 2), 5)
    assert _held(residency, first) == [0, 1, 2]
    assert _held(residency, second) == [0]


def test_evicting_a_cartridge_drops_its_idle_chunks_and_no_others(open_residency: Callable) -> None:
    residency = open_residency(8)
    for digest in "ab":
        residency.acquire(_keys(digest, 3), 5)
    for key in [*_keys("a", 2), *_keys("b", 3)]:
        residency.release(key)
    assert residency.evict("a") == 2
    assert _held(residency, _keys("a", 3)) == [2]
    assert _held(residency, _keys("b", 3)) == [0, 1, 2]
    assert residency.evict("nobody") == 0


def test_a_lease_that_ran_out_while_waiting_is_no_error(open_residency: Callable, loads: _Loads) -> None:
    residency, key = open_residency(1, clock=time.monotonic, lease_s=0.05), ChunkKey("a", 0)
    loads.held[key] = threading.Event()
    loads.broken.add(key)
    runs = []

    def work(number: int) -> None:
        if number == 0:
            runs.append(residency.acquire([key], 0.5))
        else:
            time.sleep(0.2)  # beyond the lease: a look for memory forgets it
            assert residency.acquire(_keys("b", 1), 0) == 0

    run_threads(2, work)
    assert runs == [0]


def test_a_late_release_by_somebody_else_is_no_error(open_residency: Callable, loads: _Loads) -> None:
    residency, keys = open_residency(2, clock=time.monotonic), _keys("a", 2)
    loads.held[keys[0]] = threading.Event()
    runs = []

    def work(number: int) -> None:
        if number == 0:
            runs.append(residency.acquire(keys, 2))
        else:
            _until(lambda: residency.release(keys[0]))

    run_threads(2, work)
    assert runs == [0]
    assert residency.release(keys[1]) is False


def test_after_closing_nothing_is_loaded_and_loans_stay_valid(open_residency: Callable, loads: _Loads) -> None:
    residency, keys = open_residency(4), _keys("a", 3)
    residency.acquire(keys[:1], 5)
    loan = residency.lend(keys[0])
    residency.close()
    assert residency.acquire(keys, 5) == 1
    assert residency.acquire(_keys("b", 2), 5, whole=True) == 0
    assert sum(loads.counts.values()) == 1
    assert _intact(loan, keys[0])
    loan.close()


def test_check_finds_broken_books(open_residency: Callable, loads: _Loads) -> None:
    residency = Residency(Slab(SLOT, 2 * SLOT), loads)
    residency.acquire(_keys("a", 1), 5)
    loan = residency.lend(ChunkKey("a", 0))
    loan._entry.loans = -1
    with pytest.raises(AssertionError, match="closed twice"):
        residency.check()
    loan._entry.loans = 0
    residency._slab.take()
    with pytest.raises(AssertionError, match="a slot is lost"):
        residency.check()
    residency._slab.give(1)
    residency._promoted += 1
    with pytest.raises(AssertionError, match="promoted - evicted"):
        residency.check()
    residency.close()


@pytest.mark.parametrize("slots", [5, 12])
def test_budget_and_books_hold_under_sixteen_threads_that_do_anything(slots: int) -> None:
    loads, fail = _Loads(), random.Random(0)

    def load(key: ChunkKey, out: torch.Tensor) -> None:
        loads.pause_s = fail.random() / 1000
        if fail.random() < 0.3:
            raise SourceError(f"{key} could not be read this time")
        loads(key, out)

    budget = slots * SLOT
    residency = Residency(Slab(SLOT, budget), load, threads=6, lease_s=0.02)
    end, closed, lent, held = time.monotonic() + 2, Counter(), Counter(), Counter()

    def tried() -> int:
        """Return how often the rarest of what threads do was done."""
        stats = residency.stats()
        return min(stats.hits, stats.promoted, stats.failed, stats.evicted, sum(lent.values()), sum(held.values()))

    def work(number: int) -> None:
        chance, loans, hold = random.Random(number), [], None
        while time.monotonic() < end or (tried() <= 20 and time.monotonic() < end + 60):
            keys = _keys(chance.choice("abcd"), chance.randint(1, 5))
            action = chance.random()
            if action < 0.5:
                whole = chance.random() < 0.3
                run = residency.acquire(keys, chance.choice([0, 0.001, 0.05]), whole=whole)
                assert run == len(keys) or (not whole and 0 <= run < len(keys)) or run == 0
                for key in keys[:run]:
                    loan = residency.lend(key)
                    if loan is not None:
                        assert _intact(loan, key)
                        loans.append((key, loan))
                        lent[number] += 1
                    if chance.random() < 0.98:
                        residency.release(key)
            elif action < 0.6:
                residency.release(chance.choice(keys))
            elif action < 0.7:
                residency.evict(chance.choice("abcd"))
            elif action < 0.8:
                assert 0 <= residency.resident(keys) <= len(keys)
            elif hold is None:
                hold = residency.hold(keys, whole=chance.random() < 0.5)
                held[number] += hold.poll().admitted > 0
            elif action < 0.9:
                state = hold.poll()
                assert 0 <= state.resident <= state.admitted <= state.chunks
                assert not state.ready or all(residency.resident([key]) for key in hold.keys)
            else:
                hold.close()
                hold = None
            while loans and (len(loans) > 2 or chance.random() < 0.8):
                key, loan = loans.pop(chance.randrange(len(loans)))
                assert _intact(loan, key), "lent bytes were overwritten"
                loan.close()
                if chance.random() < 0.2:
                    loan.close()
                closed[number] += 1
            time.sleep(chance.random() / 100)
            residency.check()
            stats = residency.stats()
            assert stats.resident_bytes + stats.loading * SLOT <= stats.budget_bytes == budget
        for _, loan in loans:
            loan.close()
        if hold is not None:
            hold.close()

    run_threads(16, work, timeout_s=120)
    _quiet(residency)
    residency.check()
    stats = residency.stats()
    assert (stats.lent, stats.held) == (0, 0)
    assert tried() > 20, "nothing much was tried"
    time.sleep(0.03)
    assert sum(residency.evict(digest) for digest in "abcd") == stats.resident
    assert residency.stats().resident == 0
    residency.close()


class _Machine(RuleBasedStateMachine):
    """Any sequence of calls, against the plainest account of who relies on what."""

    slots = 4

    def __init__(self) -> None:
        super().__init__()
        self.loads, self.clock = _Loads(), _Clock()
        self.residency = Residency(Slab(SLOT, self.slots * SLOT), self.loads, lease_s=100, clock=self.clock)
        self.leases: dict[ChunkKey, list[float]] = {}
        self.loans: list[tuple[ChunkKey, Loan]] = []
        self.holds: list[tuple[Hold, set[ChunkKey]]] = []

    def teardown(self) -> None:
        self.residency.close()

    def _live(self, key: ChunkKey) -> int:
        return sum(expiry > self.clock.now for expiry in self.leases.get(key, ()))

    def _relied_on(self) -> set[ChunkKey]:
        held = {key for _, keys in self.holds for key in keys}
        return {key for key in self.leases if self._live(key)} | {key for key, _ in self.loans} | held

    def _admitted(self, keys: list[ChunkKey], whole: bool) -> set[ChunkKey]:
        """Return which chunks a poll of a hold on `keys` will keep, those that cannot be loaded left out."""
        present = {key for key in keys if self.residency.resident([key])}
        free = self.slots - len(self._relied_on() | present)
        missing = [key for key in keys if key not in present]
        if whole and len(missing) > free:
            return set()
        return present | {key for key in missing[:free] if key not in self.loads.broken}

    @rule(digest=st.sampled_from("abc"), count=st.integers(1, 5), whole=st.booleans())
    def hold(self, digest: str, count: int, whole: bool) -> None:
        keys = _keys(digest, count)
        expected = self._admitted(keys, whole)
        hold = self.residency.hold(keys, whole=whole)
        hold.poll()
        _quiet(self.residency)
        state = hold.poll()
        assert state[:3] == (len(expected), len(expected), count)
        assert state.ready == (len(expected) == count)
        self.holds.append((hold, expected))

    @precondition(lambda self: self.holds)
    @rule(which=st.integers(0, 99))
    def poll_later(self, which: int) -> None:
        hold, kept = self.holds[which % len(self.holds)]
        self.clock.now += 6  # longer than any pause after a failure
        keys = list(hold.keys)
        expected = kept | self._admitted(keys, hold.whole) if len(kept) < len(keys) else kept
        hold.poll()
        _quiet(self.residency)
        assert hold.poll().resident == len(expected)
        kept |= expected

    @precondition(lambda self: self.holds)
    @rule(which=st.integers(0, 99), times=st.integers(1, 2))
    def close_hold(self, which: int, times: int) -> None:
        hold, _ = self.holds.pop(which % len(self.holds))
        for _ in range(times):
            hold.close()

    def _expected(self, keys: list[ChunkKey], whole: bool) -> int:
        present = {key for key in keys if self.residency.resident([key])}
        free = self.slots - len(self._relied_on() | present)
        if whole and len(keys) - len(present) > free:
            return 0
        for run, key in enumerate(keys):
            if key not in present:
                if not free or key in self.loads.broken:
                    return 0 if whole else run
                free -= 1
        return len(keys)

    @rule(digest=st.sampled_from("abc"), count=st.integers(1, 5), whole=st.booleans())
    def acquire(self, digest: str, count: int, whole: bool) -> None:
        keys = _keys(digest, count)
        expected = self._expected(keys, whole)
        assert self.residency.acquire(keys, 10, whole=whole) == expected
        for key in keys[:expected]:
            self.leases.setdefault(key, []).append(self.clock.now + 100)
        _quiet(self.residency)

    @rule(digest=st.sampled_from("abc"), chunk=st.integers(0, 4))
    def release(self, digest: str, chunk: int) -> None:
        key = ChunkKey(digest, chunk)
        leases = self.leases.get(key, [])
        if len(leases) != self._live(key):
            return  # one that ran out may or may not be forgotten already
        assert self.residency.release(key) is bool(leases)
        del leases[:1]

    @rule(digest=st.sampled_from("abc"), chunk=st.integers(0, 4))
    def lend(self, digest: str, chunk: int) -> None:
        key = ChunkKey(digest, chunk)
        loan = self.residency.lend(key)
        assert (loan is not None) == bool(self.residency.resident([key]))
        if loan is not None:
            self.loans.append((key, loan))

    @precondition(lambda self: self.loans)
    @rule(which=st.integers(0, 99), times=st.integers(1, 2))
    def close_loan(self, which: int, times: int) -> None:
        key, loan = self.loans.pop(which % len(self.loans))
        assert _intact(loan, key)
        for _ in range(times):
            loan.close()

    @rule(digest=st.sampled_from("abc"))
    def evict(self, digest: str) -> None:
        idle = {k for k in _keys(digest, 5) if self.residency.resident([k])} - self._relied_on()
        assert self.residency.evict(digest) == len(idle)

    @rule(seconds=st.sampled_from([1, 60, 150]))
    def pass_time(self, seconds: int) -> None:
        self.clock.now += seconds
        if seconds > 100:
            self.leases.clear()
            for digest in "abc":
                self.evict(digest)

    @rule(digest=st.sampled_from("abc"), chunk=st.integers(0, 4))
    def break_or_mend(self, digest: str, chunk: int) -> None:
        self.loads.broken ^= {ChunkKey(digest, chunk)}

    @invariant()
    def books_are_right(self) -> None:
        self.residency.check()
        stats = self.residency.stats()
        assert stats.resident_bytes <= stats.budget_bytes == self.slots * SLOT
        assert stats.leased == sum(bool(self._live(key)) for key in self.leases)
        assert stats.lent == len({key for key, _ in self.loans})
        assert stats.held == len({key for _, keys in self.holds for key in keys})

    @invariant()
    def what_is_relied_on_is_resident_and_intact(self) -> None:
        for key in self._relied_on():
            assert self.residency.resident([key]) == 1, key
        for key, loan in self.loans:
            assert _intact(loan, key), key


TestAnySequenceOfCallsKeepsTheBooksRight = _Machine.TestCase
TestAnySequenceOfCallsKeepsTheBooksRight.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, derandomize=True
)


def test_a_cartridge_and_a_chain_it_is_part_of_are_evicted_and_held_apart(open_residency: Callable) -> None:
    residency, keys = open_residency(4), [*_keys("a", 1), *_keys("a.b", 2), *_keys("b", 1)]
    assert residency.acquire(keys, 10) == 4
    assert all(residency.release(key) for key in keys)
    with residency.hold(_keys("a.b", 2)) as hold:
        assert hold.poll().ready
        assert [residency.evict(digest) for digest in ("a", "a.b", "b")] == [1, 0, 1]
    assert residency.evict("a.b") == 2
    assert residency.stats().resident == 0


def test_what_is_held_is_loaded_without_waiting_and_stays_until_it_is_let_go(
    open_residency: Callable, loads: _Loads
) -> None:
    residency, keys = open_residency(4), _keys("a", 3)
    loads.held = {key: threading.Event() for key in keys}
    with residency.hold(keys) as hold:
        assert residency.stats().loading == 0, "nothing before the first poll"
        assert hold.poll()[:3] == (0, 3, 3)
        loads.held[keys[0]].set()
        _until(lambda: hold.poll().resident == 1)
        assert not hold.poll().ready
        for event in loads.held.values():
            event.set()
        _until(lambda: hold.poll().ready)
        assert residency.acquire(_keys("b", 4), 10) == 1, "one slot is not held"
        assert residency.evict("a") == 0
        assert residency.stats().held == 3
    assert residency.stats().held == 0
    assert residency.evict("a") == 3
    assert loads.counts == dict.fromkeys([*keys, ChunkKey("b", 0)], 1)


def test_a_hold_of_everything_or_nothing_waits_for_room(open_residency: Callable, loads: _Loads) -> None:
    residency = open_residency(4)
    with residency.hold(_keys("a", 3)) as first, residency.hold(_keys("b", 2), whole=True) as second:
        _until(lambda: first.poll().ready)
        assert second.poll() == (0, 0, 2, None)
        assert residency.resident(_keys("b", 2)) == 0
        first.close()
        _until(lambda: second.poll().ready)


def test_a_hold_of_what_leads_takes_what_room_there_is(open_residency: Callable) -> None:
    residency = open_residency(4)
    with residency.hold(_keys("a", 3)) as first, residency.hold(_keys("b", 2)) as second:
        _until(lambda: first.poll().ready)
        _until(lambda: second.poll()[:3] == (1, 1, 2))
        first.close()
        _until(lambda: second.poll().ready)


def test_two_holds_share_chunks_which_stay_until_both_are_gone(open_residency: Callable, loads: _Loads) -> None:
    residency, keys = open_residency(4), _keys("a", 2)
    first, second = residency.hold(keys), residency.hold(keys)
    _until(lambda: first.poll().ready and second.poll().ready)
    first.close()
    first.close()
    assert residency.evict("a") == 0
    assert first.poll().ready, "a closed hold tells what was"
    second.close()
    assert residency.evict("a") == 2
    assert set(loads.counts.values()) == {1}


def test_a_hold_tries_what_failed_again_after_a_growing_pause(
    open_residency: Callable, loads: _Loads, clock: _Clock
) -> None:
    residency, keys = open_residency(4), _keys("a", 2)
    loads.broken = {keys[1]}
    with residency.hold(keys, whole=True) as hold:
        hold.poll()
        for tried, pause_s in enumerate((0.25, 0.5, 1.0), start=1):
            _until(lambda: not residency.stats().loading)
            assert "is broken" in hold.poll().problem
            clock.now += 0.99 * pause_s
            assert hold.poll()[:2] == (1, 1)
            assert loads.counts[keys[1]] == tried
            clock.now += 0.02 * pause_s
            assert hold.poll().admitted == 2
        loads.broken.clear()
        _until(lambda: not residency.stats().loading)
        clock.now += 10
        _until(lambda: hold.poll().ready)
        assert hold.poll().problem is None
        assert loads.counts == {keys[0]: 1, keys[1]: 4}


def test_what_a_hold_asked_for_counts_once_as_hit_or_miss(open_residency: Callable) -> None:
    residency, keys = open_residency(4), _keys("a", 3)
    residency.acquire(keys[:1], 10)
    with residency.hold(keys) as hold:
        _until(lambda: hold.poll().ready)
        assert residency.acquire(keys, 10) == 3
        assert residency.stats()[:2] == (1, 1 + 2)


def test_wanting_chunks_loads_them_and_ends_nobodys_lease(open_residency: Callable) -> None:
    residency, keys = open_residency(4), _keys("a", 2)
    assert residency.acquire(keys[:1], 10) == 1
    residency.want(keys)
    _quiet(residency)
    assert (residency.resident(keys), residency.stats().leased) == (2, 1)


def test_leasing_what_is_resident_leases_all_or_nothing_and_loads_nothing(
    open_residency: Callable, loads: _Loads
) -> None:
    residency, keys = open_residency(4), _keys("a", 3)
    residency.acquire(keys[:2], 10)
    assert not residency.lease_resident(keys)
    assert residency.lease_resident(keys[:2])
    assert [residency.release(key) for key in [*keys, *keys]] == [True, True, False] * 2
    assert sum(loads.counts.values()) == 2


def test_slow_chunks_keep_no_others_waiting(loads: _Loads) -> None:
    residency = Residency(
        Slab(SLOT, 8 * SLOT), loads, threads=1, slow_threads=1, is_slow=lambda key: key.digest == "slow"
    )
    loads.held = {key: threading.Event() for key in _keys("slow", 3)}
    with residency.hold(_keys("slow", 3)) as hold:
        hold.poll()
        assert residency.acquire(_keys("a", 3), 10) == 3
        for event in loads.held.values():
            event.set()
        _until(lambda: hold.poll().ready)
    residency.check()
    residency.close()


def test_a_lease_that_ran_out_is_not_the_one_that_is_released(open_residency: Callable, clock: _Clock) -> None:
    residency, (key,) = open_residency(1), _keys("a", 1)
    assert residency.acquire([key], 5) == 1
    clock.now += 60
    assert residency.acquire([key], 5) == 1
    clock.now += 60  # the first, of a request that never came, has run out; leases are 100 s long here
    assert residency.release(key), "the second request is done"
    assert residency.evict("a") == 1, "its lease went on without it"


def test_totals_cost_no_walk_over_the_chunks(open_residency: Callable, clock: _Clock) -> None:
    residency, keys = open_residency(8), _keys("a", 8)
    for _ in range(50):
        assert residency.acquire(keys, 5) == 8
        assert all(residency.release(key) for key in keys)
        assert residency.acquire(keys[:3], 5) == 3
        clock.now += 1
    with residency.hold(keys[:2]) as hold, residency.lend(keys[0]), residency.lend(keys[0]):
        hold.poll()
        residency._entries.values = None  # nothing iterates over it
        stats = residency.stats()
        assert (stats.resident, stats.leased, stats.held, stats.lent) == (8, 3, 2, 1)
    del residency._entries.values
    clock.now += 100
    stats = residency.stats()
    assert (stats.leased, stats.held, stats.lent) == (0, 0, 0)


def test_a_lookup_that_gives_up_ends_its_own_lease_and_no_other(
    open_residency: Callable, loads: _Loads, clock: _Clock
) -> None:
    residency, (key,) = open_residency(1), _keys("a", 1)
    loads.held = {key: threading.Event()}
    entries: list[int] = []

    def other(seconds: float) -> bool:
        """Stand in for the wait of the first lookup, in which another one comes a second later."""
        if not entries:
            entries.append(1)
            clock.now += 1
            residency.acquire([key], 0.0)
            residency._lease(residency._entries[key], clock.now + 100)  # of a third, who is told of it
        return False

    residency._changed.wait = other
    assert residency.acquire([key], 5) == 0
    assert list(residency._entries[key].leases) == [clock.now + 100], "the newest is not the first lookup's"


class _Together:
    """Loads chunks in a row together, up to `most`, and notes each call."""

    def __init__(self, loads: _Loads, most: int) -> None:
        self._loads, self._most = loads, most
        self.runs: list[list[int]] = []

    def run_of(self, key: ChunkKey) -> int:
        return self._most

    def __call__(self, key: ChunkKey, outs: list[torch.Tensor]) -> list[CorruptChunk | None]:
        keys = [key._replace(chunk=key.chunk + i) for i in range(len(outs))]
        self.runs.append([key.chunk for key in keys])
        outcomes: list[CorruptChunk | None] = []
        for one, out in zip(keys, outs, strict=True):
            try:
                self._loads(one, out)
                outcomes.append(None)
            except CorruptChunk as error:
                outcomes.append(error)
        return outcomes

    @property
    def arguments(self) -> dict[str, object]:
        return {"load_run": self, "run_of": self.run_of, "clock": time.monotonic}


def test_chunks_that_wait_in_a_row_are_loaded_together_up_to_a_limit(open_residency: Callable, loads: _Loads) -> None:
    together = _Together(loads, 3)
    residency, keys = open_residency(20, threads=1, **together.arguments), _keys("a", 8)
    assert residency.acquire([*keys, *_keys("b", 2)], 10) == 10
    assert together.runs == [[0, 1, 2], [3, 4, 5], [6, 7], [0, 1]]
    assert set(loads.counts.values()) == {1}
    for key in keys:
        with residency.lend(key) as loan:
            assert _intact(loan, key)
    stats = residency.stats()
    assert (stats.promoted, stats.loading, sum(stats.load_counts)) == (10, 0, 10)


@pytest.mark.parametrize("first", [0, 2, 4])
def test_chunks_in_a_row_stay_together_whichever_thread_comes_first(
    open_residency: Callable, loads: _Loads, first: int
) -> None:
    together, begun = _Together(loads, 5), threading.Event()

    def run_of(key: ChunkKey) -> int:
        assert key.chunk == first or begun.wait(60)
        return 5

    def load_run(key: ChunkKey, outs: list[torch.Tensor]) -> list[CorruptChunk | None]:
        begun.set()
        return together(key, outs)

    arguments = {"threads": 5, "load_run": load_run, "run_of": run_of, "clock": time.monotonic}
    residency, keys = open_residency(5, **arguments), _keys("a", 5)
    assert residency.acquire(keys, 60) == 5
    assert together.runs == [[0, 1, 2, 3, 4]]
    for key in keys:
        with residency.lend(key) as loan:
            assert _intact(loan, key)


def test_what_is_there_or_on_its_way_is_not_taken_along(open_residency: Callable, loads: _Loads) -> None:
    together = _Together(loads, 9)
    residency, keys = open_residency(20, threads=2, **together.arguments), _keys("a", 7)
    assert residency.acquire(keys[2:3], 10) == 1
    loads.held = {keys[5]: threading.Event()}
    residency.want(keys[5:6])
    _until(lambda: loads.counts[keys[5]] == 1)
    residency.want(keys)
    _until(lambda: residency.resident(keys) == 5)
    loads.held[keys[5]].set()
    assert residency.acquire(keys, 10) == 7
    assert together.runs == [[0, 1], [3, 4]]
    assert set(loads.counts.values()) == {1}


def test_of_chunks_loaded_together_a_bad_one_fails_alone(open_residency: Callable, loads: _Loads) -> None:
    together, failed = _Together(loads, 9), []
    residency, keys = open_residency(5, on_failure=lambda k, _: failed.append(k), **together.arguments), _keys("a", 5)
    loads.broken.add(keys[2])
    assert residency.acquire(keys, 10) == 2
    _quiet(residency)
    assert (_held(residency, keys), failed) == ([0, 1, 3, 4], [keys[2]])
    assert residency.stats().failed == 1
    loads.broken.clear()
    assert residency.acquire(keys, 10) == 5, "its slot is free again"


def test_a_bug_in_loading_together_fails_all_of_them_and_hangs_nobody(open_residency: Callable) -> None:
    def broken(key: ChunkKey, outs: list[torch.Tensor]) -> list[None]:
        raise ZeroDivisionError("oops")

    residency = open_residency(5, load_run=broken, run_of=lambda key: 5, clock=time.monotonic)
    assert residency.acquire(_keys("a", 5), 10) == 0
    _quiet(residency)
    assert residency.stats().failed == 5


def test_chunks_of_which_nobody_knows_how_many_belong_together_are_loaded_one_by_one(
    open_residency: Callable, loads: _Loads
) -> None:
    def broken(key: ChunkKey) -> int:
        raise ZeroDivisionError("oops")

    residency, keys = open_residency(5, run_of=broken, clock=time.monotonic), _keys("a", 5)
    assert residency.acquire(keys, 10) == 5
    assert set(loads.counts.values()) == {1}


_LOADS_BIG_TENSORS = """
import os, threading, torch
from lmcache_cartridge.keys import ChunkKey
from lmcache_cartridge.residency import Residency
from lmcache_cartridge.slab import Slab

size = 4 << 20
big = torch.zeros(size, dtype=torch.uint8)
threads = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(2)  # on however many cores: OMP_NUM_THREADS does not go beyond them
big.add_(1)  # large enough for torch to divide among its threads: the engine's team is there from now on
together = threading.Barrier(2)

def load(key, out):
    together.wait(30)
    out.copy_(big).add_(1)

before, residency = threads(), Residency(Slab(size, 2 * size), load, threads=2)
assert residency.acquire([ChunkKey("d", 0), ChunkKey("d", 1)], 30.0) == 2
print(threads() - before, torch.get_num_threads())
residency.close()
"""


def test_loading_starts_no_threads_that_the_engine_would_wait_for() -> None:
    """More OpenMP threads than cores, idle ones too, slow every operation of a CPU engine down."""
    told = subprocess.run(
        [sys.executable, "-c", _LOADS_BIG_TENSORS], capture_output=True, text=True, timeout=120, check=True
    )
    assert told.stdout.split() == ["2", "2"], "two that load, and the engine's team as it was"


def test_reads_that_hang_keep_no_other_cartridge_waiting_and_take_no_further_threads(
    open_residency: Callable, loads: _Loads, clock: _Clock
) -> None:
    residency, hung, others = open_residency(16, threads=2), _keys("hung", 6), _keys("b", 4)
    loads.held = {key: threading.Event() for key in hung}
    assert residency.acquire(hung, 0) == 0
    until(lambda: sum(loads.counts.values()) == 2)
    residency.relieve()
    assert residency.acquire(others, 0.3) == 0, "the control: every thread hangs, and not for long enough"
    clock.now += STALLED_S + 1
    for _ in range(3):
        residency.relieve()
    assert residency.acquire(others, 20) == 4
    assert sum(loads.counts[key] for key in hung) == 2, "another of them would hang too"
    for held in loads.held.values():
        held.set()
    assert residency.acquire(hung, 20) == 6
    assert set(loads.counts.values()) == {1}
