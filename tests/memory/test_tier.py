"""Chunks are in memory while somebody relies on them, once each, and never more than the budget."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from chunks import one_by_one
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from invariants import check
from waiting import Clock, run_threads, until

from lmcache_cartridge.errors import CorruptChunk
from lmcache_cartridge.library.index import ChunkKey
from lmcache_cartridge.memory.holds import Hold
from lmcache_cartridge.memory.loads import ChunkSource, Piece
from lmcache_cartridge.memory.tier import MemoryTier

SLOT = 64


class _Loads:
    """Fills chunks with bytes that tell them apart, counts loads, and fails or waits where told to."""

    def __init__(self) -> None:
        self.counts: Counter[ChunkKey] = Counter()
        self.broken: set[ChunkKey] = set()
        self.held: dict[ChunkKey, threading.Event] = {}

    def __call__(self, key: ChunkKey, out: torch.Tensor) -> None:
        self.counts[key] += 1
        out[: SLOT // 2] = _byte(key)
        if key in self.held:
            assert self.held[key].wait(20)
        if key in self.broken:
            raise CorruptChunk(f"{key} is broken")
        out[SLOT // 2 :] = _byte(key)


def _byte(key: ChunkKey) -> int:
    return (sum(map(ord, key.digest)) * 31 + key.chunk * 7) % 251


def _keys(digest: str, count: int) -> list[ChunkKey]:
    return [ChunkKey(digest, chunk) for chunk in range(count)]


def _intact(loan: Hold, key: ChunkKey) -> bool:
    return bool((loan.bytes == _byte(key)).all()) and loan.bytes.numel() == SLOT


def _quiet(tier: MemoryTier) -> None:
    """Wait until no load is in flight."""
    until(lambda: not tier.stats().loading)


@pytest.fixture
def loads():
    return _Loads()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_tier(loads, clock):
    """Return a function that opens a tier of so many slots, which is checked and closed at the end."""
    opened = []

    def make(slots: int, **arguments: object) -> MemoryTier:
        given = {"source": one_by_one(loads), "clock": clock, "lease_s": 100} | arguments
        tier = MemoryTier(SLOT, slots * SLOT, **given)
        opened.append(tier)
        return tier

    yield make
    for held in loads.held.values():
        held.set()
    for tier in opened:
        tier.close()
        check(tier)


def test_a_chunk_on_its_way_outlasts_the_deadline_and_is_neither_lent_nor_evicted(open_tier, loads):
    tier, keys = open_tier(2, clock=time.monotonic), _keys("a", 2)
    loads.held[keys[1]] = threading.Event()
    assert tier.lease(keys, 0.1) == 1, "what is there in time"
    assert (tier.stats().loading, tier.lend(keys[1:])) == (1, [])
    assert tier.release(keys[0]) and tier.evict("a") == 1
    assert tier.lease(_keys("b", 2), 0.05) == 1
    loads.held[keys[1]].set()
    _quiet(tier)
    assert tier.resident(keys[1:]) == loads.counts[keys[1]] == 1


def test_sixteen_that_want_a_cartridge_at_once_cause_one_load_a_chunk(open_tier, loads):
    tier, keys = open_tier(8, clock=time.monotonic), _keys("a", 5)
    loads.held[keys[0]] = threading.Event()
    threading.Timer(0.1, loads.held[keys[0]].set).start()
    run_threads(16, lambda _: tier.lease(keys, 10))
    assert loads.counts == dict.fromkeys(keys, 1)
    assert [sum(tier.release(key) for _ in range(17)) for key in keys] == [16] * 5


class _Machine(RuleBasedStateMachine):
    """Any sequence of calls, against the plainest account of who relies on what."""

    slots = 4

    def __init__(self) -> None:
        super().__init__()
        self.loads, self.clock = _Loads(), Clock()
        self.tier = MemoryTier(SLOT, self.slots * SLOT, one_by_one(self.loads), lease_s=100, clock=self.clock)
        self.leases: dict[ChunkKey, list[float]] = {}
        self.loans: list[tuple[ChunkKey, Hold]] = []
        self.holds: list[tuple[Hold, set[ChunkKey]]] = []

    def teardown(self) -> None:
        self.tier.close()

    def _live(self, key: ChunkKey) -> int:
        return sum(expiry > self.clock.now for expiry in self.leases.get(key, ()))

    def _relied_on(self) -> set[ChunkKey]:
        held = {key for _, keys in self.holds for key in keys}
        return {key for key in self.leases if self._live(key)} | {key for key, _ in self.loans} | held

    def _admitted(self, keys: list[ChunkKey], whole: bool) -> set[ChunkKey]:
        """Return which chunks a poll of a hold on `keys` will keep, those that cannot be loaded left out."""
        present = {key for key in keys if self.tier.resident([key])}
        free = self.slots - len(self._relied_on() | present)
        missing = [key for key in keys if key not in present]
        if whole and len(missing) > free:
            return set()
        return present | {key for key in missing[:free] if key not in self.loads.broken}

    @rule(digest=st.sampled_from("abc"), count=st.integers(1, 5), whole=st.booleans())
    def hold(self, digest: str, count: int, whole: bool) -> None:
        self.holds.append((self.tier.hold(_keys(digest, count), whole=whole), set()))
        self.poll(-1)

    @precondition(lambda self: self.holds)
    @rule(which=st.integers(0, 99))
    def poll(self, which: int) -> None:
        hold, kept = self.holds[which % len(self.holds)]
        self.clock.now += 6  # longer than any pause after a failure
        count = len(hold.keys)
        if len(kept) < count:
            kept |= self._admitted(list(hold.keys), hold.whole)
        hold.poll()
        _quiet(self.tier)
        state = hold.poll()
        assert state[:3] == (len(kept), len(kept), count)
        assert state.ready == (len(kept) == count)

    @precondition(lambda self: self.holds)
    @rule(which=st.integers(0, 99), times=st.integers(0, 2))
    def close_hold(self, which: int, times: int) -> None:
        hold, _ = self.holds.pop(which % len(self.holds))
        for _ in range(times):  # 0: nobody refers to it any more
            hold.close()

    @rule(digest=st.sampled_from("abc"), count=st.integers(1, 5), whole=st.booleans())
    def acquire(self, digest: str, count: int, whole: bool) -> None:
        keys = _keys(digest, count)
        admitted = self._admitted(keys, whole)
        expected = len(list(takewhile(admitted.__contains__, keys)))
        expected *= not whole or expected == count
        assert self.tier.lease(keys, 10, whole=whole) == expected
        for key in keys[:expected]:
            self.leases.setdefault(key, []).append(self.clock.now + 100)
        _quiet(self.tier)

    @rule(digest=st.sampled_from("abc"), chunk=st.integers(0, 4))
    def release(self, digest: str, chunk: int) -> None:
        key = ChunkKey(digest, chunk)
        live = [expiry for expiry in self.leases.get(key, ()) if expiry > self.clock.now]
        assert self.tier.release(key) is bool(live)
        self.leases[key] = live[1:]

    @rule(digest=st.sampled_from("abc"), chunk=st.integers(0, 4))
    def lend(self, digest: str, chunk: int) -> None:
        key = ChunkKey(digest, chunk)
        loans = self.tier.lend([key])
        assert len(loans) == self.tier.resident([key])
        self.loans += [(key, loan) for loan in loans]

    @precondition(lambda self: self.loans)
    @rule(which=st.integers(0, 99), times=st.integers(0, 2))
    def close_loan(self, which: int, times: int) -> None:
        key, loan = self.loans.pop(which % len(self.loans))
        assert _intact(loan, key)
        for _ in range(times):  # 0: nobody refers to it any more
            loan.close()

    @rule(digest=st.sampled_from("abc"))
    def evict(self, digest: str) -> None:
        idle = {k for k in _keys(digest, 5) if self.tier.resident([k])} - self._relied_on()
        assert self.tier.evict(digest) == len(idle)
        assert not any(self.tier.resident([key]) for key in idle)

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
        check(self.tier)
        stats = self.tier.stats()
        assert stats.resident_bytes <= stats.budget_bytes == self.slots * SLOT
        assert stats.leased == sum(map(self._live, self.leases))
        assert stats.lent == len(self.loans)
        assert stats.held == len(self._relied_on())

    @invariant()
    def what_is_relied_on_is_resident_and_intact(self) -> None:
        for key in self._relied_on():
            assert self.tier.resident([key]) == 1, key
        for key, loan in self.loans:
            assert _intact(loan, key), key


TestAnySequenceOfCallsKeepsTheBooksRight = _Machine.TestCase
TestAnySequenceOfCallsKeepsTheBooksRight.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, derandomize=True
)


@pytest.mark.parametrize("kind", ["hold", "loan"])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_hold_ends_while_its_tier_is_locked_by_another_thread_and_is_counted_before_anything_else(
    open_tier, kind, how
):
    """A garbage collection comes anywhere, and LMCache releases chunk by chunk: each would wait for whoever else retrieves."""
    tier, keys = open_tier(2), _keys("a", 2)
    assert tier.lease(keys, 5) == 2 and all(map(tier.release, keys))
    holds = [tier.hold(keys)] if kind == "hold" else tier.lend(keys)
    assert kind == "loan" or holds[0].poll().ready
    has_lock, go_on, waits = threading.Event(), threading.Event(), []
    clock, tier.clock = tier.clock, lambda: (has_lock.set(), waits.append(go_on.wait(20)), clock())[2]
    busy = threading.Thread(target=tier.lease, args=(keys, 5), daemon=True)
    busy.start()
    assert has_lock.wait(60), "it has the lock, and asks for the time"
    while holds:
        if how == "close":
            holds[-1].close()
        holds.pop()
    assert not waits, "it waited for it"
    go_on.set()
    busy.join(60)
    assert all(map(tier.release, keys))
    assert tier.lease(_keys("b", 2), 5) == 2, "their memory can be had"
    assert (tier.stats().lent, tier.stats().held) == (0, 2)


def test_a_reservation_that_is_closed_while_it_grows_holds_nothing(open_tier, monkeypatch):
    tier, keys = open_tier(4), _keys("a", 4)
    hold, keep = tier.hold(keys), tier._keep
    monkeypatch.setattr(tier, "_keep", lambda entries: (hold.close(), keep(entries)))
    hold.poll()
    _quiet(tier)
    assert tier.stats().held == 0
    assert tier.lease(_keys("b", 4), 5) == 4


class _Halves(ChunkSource):
    """Two chunks are made of each piece, in rooms of their own; `where` is what is added."""

    def __init__(self, loads: _Loads) -> None:
        self._loads, self.rooms = loads, []

    def pieces(self, key: ChunkKey) -> list[Piece]:
        return [Piece(ChunkKey(key.digest, key.chunk // 2), key.chunk % 2)]

    def read(self, at: ChunkKey, out: torch.Tensor | None) -> torch.Tensor:
        assert out is None
        self._loads(at, piece := torch.empty(SLOT))
        return piece

    def room(self, slot: torch.Tensor) -> torch.Tensor:
        room = torch.empty_like(slot)
        self.rooms.append(weakref.ref(room))
        return room

    def put(self, piece: Piece, data: torch.Tensor, out: torch.Tensor) -> None:
        out[:] = int(data[0]) + piece.where

    def finish(self, room: torch.Tensor, slot: torch.Tensor) -> None:
        slot.copy_(room)


def test_what_several_chunks_are_made_of_is_read_once_and_fails_them_all(open_tier, loads):
    source = _Halves(loads)
    tier, keys = open_tier(9, source=source), _keys("a", 6)
    loads.broken.add(ChunkKey("a", 1))
    assert tier.lease(keys, 10) == 2
    _quiet(tier)
    assert loads.counts == dict.fromkeys(keys[:3], 1)
    assert ([tier.resident([key]) for key in keys], tier.stats().failed) == ([1, 1, 0, 0, 1, 1], 2)
    loads.broken.clear()
    assert tier.lease(keys, 10) == 6, "their slots are free again"
    for key, loan in zip(keys, tier.lend(keys), strict=True):
        with loan:
            assert (loan.bytes == _byte(ChunkKey("a", key.chunk // 2)) + key.chunk % 2).all()
    del loan
    until(lambda: not any(room() is not None for room in source.rooms), timeout_s=10)  # or the tier has twice its bytes


def test_what_nobody_holds_any_more_and_no_thread_has_begun_with_gives_its_room_away(open_tier, loads):
    """A cartridge whose place hangs, claimed and let go, once took all of memory."""
    tier, hung = open_tier(4, threads=1, clock=time.monotonic), _keys("hung", 4)
    loads.held = {key: threading.Event() for key in hung}
    with tier.hold(hung) as hold:
        assert hold.poll().admitted == 4
        until(lambda: sum(loads.counts.values()) == 1)
        with tier.hold(_keys("b", 3), whole=True) as other:
            assert other.poll().admitted == 0, "they are held"
    with tier.hold(_keys("b", 4), whole=True) as other:
        assert other.poll().admitted == 0, "one is being written to"
    with tier.hold(_keys("b", 3), whole=True) as other:
        assert other.poll().admitted == 3
        for held in loads.held.values():
            held.set()
        until(lambda: other.poll().ready)
        assert _intact(tier.lend(_keys("b", 3))[2], ChunkKey("b", 2))
    assert sum(loads.counts[key] for key in hung) == 1


@pytest.mark.parametrize("place", ["pieces", "read", "put", "finish"])
def test_a_bug_in_loading_fails_its_chunks_and_hangs_nobody(open_tier, loads, place, caplog):
    def broken(*_: object) -> NoReturn:
        raise ZeroDivisionError("oops")

    source = _Halves(loads)
    setattr(source, place, broken)
    tier = open_tier(5, source=source)
    assert tier.lease(_keys("a", 5), 60) == 0
    _quiet(tier)
    assert tier.stats().failed == caplog.text.count("was not loaded") == 5
    assert "loading chunk 0 of a: ZeroDivisionError: oops" in caplog.text


_LOADS_BIG_TENSORS = """
import os, threading, torch
from lmcache_cartridge.library.index import ChunkKey
from chunks import one_by_one
from lmcache_cartridge.memory.tier import MemoryTier

size = 4 << 20
big = torch.zeros(size, dtype=torch.uint8)
threads = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(2)  # on however many cores: OMP_NUM_THREADS does not go beyond them
big.add_(1)  # large enough for torch to divide among its threads: the engine's team is there from now on
together = threading.Barrier(2)

def load(key, out):
    together.wait(30)
    out.copy_(big).add_(1)

before, tier = threads(), MemoryTier(size, 2 * size, one_by_one(load), threads=2)
assert tier.lease([ChunkKey("d", 0), ChunkKey("d", 1)], 30.0) == 2
print(threads() - before, torch.get_num_threads())
tier.close()
"""


def test_loading_starts_no_threads_that_the_engine_would_wait_for():
    """More OpenMP threads than cores, idle ones too, slow every operation of a CPU engine down."""
    told = subprocess.run(
        [sys.executable, "-c", _LOADS_BIG_TENSORS], capture_output=True, text=True, timeout=120, check=True,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert told.stdout.split() == ["2", "2"], "two that load, and the engine's team as it was"


class _Cuda:
    """Counts what is locked, and refuses where `code` is not 0."""

    def __init__(self, code: int) -> None:
        self.code, self.locked = code, dict[int, int]()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert address % 4096 == size_bytes % 4096 == flags == 0
        if not self.code:
            self.locked[address] = size_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_memory_is_locked_to_the_page_and_unlocked_when_the_last_view_of_it_has_gone(loads, monkeypatch):
    """PyTorch's allocator would lock a power of two of it."""
    cuda = _Cuda(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    tier = MemoryTier(SLOT, 300 * SLOT, one_by_one(loads), pin_memory=True)
    assert list(cuda.locked.values()) == [5 * 4096]
    (loan,) = tier.load(_keys("a", 1), 20)
    tier.close()
    view = loan.bytes[1:]
    assert view.data_ptr() == next(iter(cuda.locked)) + 1, "the first slot"
    del tier, loan
    gc.collect()
    assert cuda.locked
    del view
    until(lambda: gc.collect() >= 0 and not cuda.locked)


def test_memory_that_cannot_be_locked_is_used_all_the_same(open_tier, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Cuda(2))
    (loan,) = open_tier(4, pin_memory=True).load(_keys("a", 1), 20)
    assert _intact(loan, ChunkKey("a", 0))
    assert "cannot lock 4096 bytes" in caplog.text
