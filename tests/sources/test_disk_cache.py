"""The disk cache holds its budget and never raises: shared by processes, killed, out of disk, tampered with."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from invariants import check
from waiting import run_threads

from lmcache_cartridge.sources import disk_cache
from lmcache_cartridge.sources.disk_cache import CopyKey, DiskCache

SIZE = 4096
FORK = multiprocessing.get_context("fork")


def _key(number: int) -> CopyKey:
    return CopyKey(f"{number % 20:064x}", number, 0, 2)


def _data(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def _write(cache: DiskCache, number: int, size: int = SIZE) -> None:
    cache.write(_key(number), memoryview(_data(number, size)))


def _read(cache: DiskCache, number: int, size: int = SIZE) -> bool:
    """Return whether it is a hit, having compared the bytes."""
    out = bytearray(size)
    if not cache.read_into(_key(number), memoryview(out)):
        return False
    assert out == _data(number, size), f"wrong bytes of copy {number}"
    return True


def _file(root: Path, number: int) -> Path:
    return root / _key(number).digest / f"{number}-0-2.bin"


def _held(root: Path) -> list[int]:
    """Return which copies lie on disk, without touching their recency."""
    return [number for number in range(100) if _file(root, number).exists()]


def _bytes_on_disk(root: Path) -> int:
    """Return the bytes of all copies, finished or not."""
    total = 0
    for directory in root.iterdir():
        with suppress(OSError):  # no directory, or discarded meanwhile
            for path in directory.iterdir():
                total += path.lstat().st_size
    return total


def _filled(root: Path, count: int, budget: int = 10 * SIZE) -> DiskCache:
    cache = DiskCache(root, budget)
    for number in range(count):
        _write(cache, number)
    return cache


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the directory as another process would."""
    with (root / "lock").open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# One cache.


# Several threads and processes.


def _hammer(root: Path, budget: int, seed: int, results: Connection) -> None:
    """Have two threads write, read and discard copies of three sizes, once told to; then send the counters."""
    cache = DiskCache(root, budget)
    results.recv()

    def work(number: int) -> None:
        chance = random.Random(2 * seed + number)
        for _ in range(250):
            number = chance.randrange(36)
            size = SIZE * (1 + number % 3)
            if not _read(cache, number, size):
                _write(cache, number, size)
            if chance.random() < 0.05:
                cache.discard(_key(chance.randrange(36)))
            if chance.random() < 0.01:
                cache.evict(_key(chance.randrange(36)).digest)
                DiskCache(root, budget)  # which counts the files, and what is written meanwhile

    run_threads(2, work)
    results.send(cache.stats())


def test_threads_of_several_processes_keep_one_budget_and_exact_counters(tmp_path):
    root, budget, most = tmp_path / "cache", 24 * SIZE, 0  # the 36 copies are 72
    watching, pipes = DiskCache(root, budget), [FORK.Pipe() for _ in range(3)]
    ends = [ours for ours, _ in pipes]
    processes = [FORK.Process(target=_hammer, args=(root, budget, seed, pipes[seed][1])) for seed in range(3)]
    try:
        for process in processes:
            process.start()
        for end in ends:
            end.send("go")
        while not all(end.poll() for end in ends):
            with _locked(root):  # nothing is renamed while this counts
                most = max(most, _bytes_on_disk(root))
            assert not any(process.exitcode for process in processes)
            time.sleep(0.001)
        stats = [end.recv() for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert 20 * SIZE < most <= budget
    assert all(one.hits > 50 and one.promoted > 50 and one.evicted > 20 for one in stats), stats
    assert not list(root.glob("*/.*"))
    watching.evict("")  # which looks
    assert (watching.stats().resident, watching.stats().resident_bytes) == (len(_held(root)), _bytes_on_disk(root))


@pytest.mark.parametrize(("moment", "after"), [("replace", False), ("replace", True), ("unlink", True)])
def test_what_a_killed_process_left_counts_and_goes_in_its_turn(tmp_path, moment, after):
    root = tmp_path / "cache"
    other = _filled(root, 3, 3 * SIZE)
    child = FORK.Process(target=_die_at, args=(root, moment, after))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    for number in range(10, 13):
        _write(other, number)
        check(other)
    assert _held(root) == [10, 11, 12]
    assert not list(root.glob("*/.*"))


def _die_at(root: Path, moment: str, after: bool) -> None:
    def die(*arguments: Any) -> Any:
        if after:
            really(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    cache = DiskCache(root, 3 * SIZE)
    really = getattr(Path, moment)
    setattr(Path, moment, die)
    _write(cache, 4)


def test_while_another_process_holds_the_lock_copies_are_read_and_none_are_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(disk_cache, "_LOCK_TIMEOUT_S", 0.05)
    cache = _filled(tmp_path / "cache", 2)
    with _locked(cache.root):
        _write(cache, 3)
        assert _read(cache, 0)
        assert not _read(cache, 3)
        cache.discard(_key(1))
        assert not _read(cache, 1), "what may be corrupt is removed whoever holds the lock"
        assert _read(DiskCache(cache.root, 10 * SIZE), 0)
    assert "another process has held it" in caplog.text
    _write(cache, 3)
    assert _read(cache, 3)


def test_files_of_others_are_left_alone(tmp_path):
    root = tmp_path / "cache"
    strangers = [root / "1-2-3.bin", root / "notes" / "1-2-3.bin", root / _key(0).digest / "a-b-c.bin"]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_data(0))
    cache = _filled(root, 3, SIZE)
    cache.evict(_key(0).digest)
    assert cache.stats().resident == 1
    assert all(path.exists() for path in strangers)


class DiskMachine(RuleBasedStateMachine):
    """One cache against a list of cartridges in order of use, with the numbers of their copies."""

    NUMBERS = st.sampled_from([0, 20, 40, 1, 21, 41, 2, 22, 3])  # of a cartridge each that has the same last digit

    @initialize(copies=st.integers(1, 4))
    def open(self, copies: int) -> None:
        self.place = Path(tempfile.mkdtemp())
        self.held: dict[str, set[int]] = {}
        self.reopen(copies)

    def _size(self, number: int) -> int:
        return SIZE * (1 + number % 2)

    def _bytes(self) -> int:
        return sum(self._size(number) for numbers in self.held.values() for number in numbers)

    def _shrink(self, to: int) -> None:
        while self._bytes() > to:
            oldest = next(iter(self.held))
            self._drop(max(self.held[oldest]))

    def _drop(self, number: int) -> bool:
        numbers = self.held.get(_key(number).digest, set())
        was_there = number in numbers
        numbers.discard(number)
        self.held = {digest: numbers for digest, numbers in self.held.items() if numbers}
        return was_there

    def _use(self, number: int) -> None:
        digest = _key(number).digest
        self.held[digest] = self.held.pop(digest, set()) | {number}

    @rule(number=NUMBERS)
    def write(self, number: int) -> None:
        size = self._size(number)
        _write(self.cache, number, size)
        if size <= self.budget:
            self._shrink(self.budget - size)  # for both, until the new one is whole
            self._use(number)

    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        is_there = number in self.held.get(_key(number).digest, ())
        assert _read(self.cache, number, self._size(number)) == is_there
        if is_there:
            self._use(number)

    @rule(number=NUMBERS)
    def discard(self, number: int) -> None:
        self.cache.discard(_key(number))
        self._drop(number)

    @rule(number=NUMBERS)
    def evict(self, number: int) -> None:
        digest = _key(number).digest
        assert self.cache.evict(digest) == len(self.held.pop(digest, ()))

    @rule()
    def delete_all(self) -> None:
        shutil.rmtree(self.cache.root, ignore_errors=True)
        self.held.clear()

    @rule(copies=st.integers(1, 4))
    def reopen(self, copies: int) -> None:
        self.budget = copies * SIZE
        self.cache = DiskCache(self.place / "cache", self.budget)
        self._shrink(self.budget)

    @invariant()
    def holds(self) -> None:
        self.cache.evict("")  # which looks
        assert _held(self.cache.root) == sorted(number for numbers in self.held.values() for number in numbers)
        assert _bytes_on_disk(self.cache.root) == self._bytes() <= self.budget
        there = {digest: len(numbers) for digest, numbers in self.held.items()}
        assert self.cache.chunks_by_digest() == there
        stats = self.cache.stats()
        assert stats[6:] == (sum(there.values()), self._bytes(), self.budget)

    def teardown(self) -> None:
        shutil.rmtree(self.place)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
