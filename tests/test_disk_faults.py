"""The disk tier keeps its promises when processes share it, die, run out of disk, or find its directory tampered with."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmcache_cartridge.sources import disk_cache as disk_module
from lmcache_cartridge.sources import disk_index
from lmcache_cartridge.sources.disk_cache import DiskStats, DiskTier, PieceKey
from lmcache_cartridge.sources.disk_index import locked
from lmcache_cartridge.sources.pieces import Partial, PieceFiles

SIZE = 4096
SPAWN = multiprocessing.get_context("spawn")


def _key(number: int) -> PieceKey:
    return PieceKey(f"{number % 5:064x}", number, 0, 2)


def _data(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def _write(tier: DiskTier, number: int, size: int = SIZE) -> None:
    tier.write(_key(number), memoryview(_data(number, size)))


def _read(tier: DiskTier, number: int, size: int = SIZE) -> bool:
    """Return whether it is a hit, having compared the bytes."""
    out = bytearray(size)
    if not tier.read_into(_key(number), memoryview(out)):
        return False
    assert out == _data(number, size), f"wrong bytes of piece {number}"
    return True


def _file(root: Path, number: int) -> Path:
    return root / _key(number).digest / f"{number}-0-2.bin"


def _held(root: Path, numbers: range = range(100)) -> list[int]:
    return [number for number in numbers if _file(root, number).exists()]


def _bytes_on_disk(root: Path) -> int:
    """Return the bytes of all pieces, finished or not."""
    total = 0
    for path in root.glob("*/*"):
        with suppress(FileNotFoundError):  # given up by its writer meanwhile
            total += path.lstat().st_size
    return total


def _filled(root: Path, count: int, budget: int = 10 * SIZE) -> DiskTier:
    tier = DiskTier(root, budget)
    for number in range(count):
        _write(tier, number)
    return tier


# Several processes.


def _hammer(root: Path, budget: int, seed: int, results: Connection) -> None:
    """Write, read and discard pieces of three sizes, as many steps as told; then send the counters."""
    tier, chance = DiskTier(root, budget), random.Random(seed)
    results.send("started")
    steps = results.recv()
    while steps != 0:
        steps -= 1
        number = chance.randrange(36)
        size = SIZE * (1 + number % 3)
        if not _read(tier, number, size):
            _write(tier, number, size)
        if chance.random() < 0.05:
            tier.discard(_key(chance.randrange(36)))
        if chance.random() < 0.01:
            tier.discard_cartridge(_key(chance.randrange(36)).digest)
    results.send(tier.stats())


@contextmanager
def _hammering(root: Path, budget: int, processes: int, steps: int) -> Iterator[list[Connection]]:
    """Let processes hammer, each for a number of steps, negative for ever; they are killed at the end."""
    ends, running = [], []
    try:
        for seed in range(processes):
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=_hammer, args=(root, budget, seed, theirs))
            process.start()
            ends.append(ours)
            running.append(process)
        for end in ends:
            assert end.poll(60)
            assert end.recv() == "started"
        for end in ends:
            end.send(steps)
        yield ends
    finally:
        for process in running:
            process.kill()
            process.join()


def test_several_processes_keep_one_budget_and_exact_counters(tmp_path: Path) -> None:
    root, budget, most = tmp_path / "cache", 24 * SIZE, 0  # the 36 pieces are 72
    with _hammering(root, budget, 3, 500) as ends:
        while not all(end.poll() for end in ends):
            with locked(root / "lock", 60):  # nothing is renamed while this counts
                most = max(most, _bytes_on_disk(root))
            time.sleep(0.001)
        stats = [end.recv() for end in ends]
    assert 20 * SIZE < most <= budget
    tier = DiskTier(root, budget)
    tier.check()
    assert all(one.hits > 50 and one.promoted > 50 and one.evicted > 20 for one in stats), stats
    assert sum(one.promoted - one.evicted - one.discarded for one in stats) == tier.stats().pieces
    assert list((root / "partial").iterdir()) == []


def test_a_directory_deleted_while_processes_use_it_is_used_again(tmp_path: Path) -> None:
    root, budget = tmp_path / "cache", 24 * SIZE
    with _hammering(root, budget, 2, 500) as ends:
        while not all(end.poll() for end in ends):
            time.sleep(0.2)
            shutil.rmtree(root, ignore_errors=True)
        assert all(end.recv().hits > 10 for end in ends)
    tier = DiskTier(root, budget)
    for number in range(36):
        _read(tier, number, SIZE * (1 + number % 3))
    tier.check()
    for number in range(24):
        _write(tier, number)
    assert tier.stats().pieces == 24


def test_processes_killed_at_any_moment_leave_a_directory_that_holds_its_budget(tmp_path: Path) -> None:
    root, budget, chance = tmp_path / "cache", 24 * SIZE, random.Random(0)
    for _ in range(6):
        with _hammering(root, budget, 2, -1):
            time.sleep(chance.random() / 3)
        assert _bytes_on_disk(root) <= budget
    tier = DiskTier(root, budget)
    for number in range(36):
        _read(tier, number, SIZE * (1 + number % 3))
    tier.check()
    assert _bytes_on_disk(root) == tier.stats().resident_bytes > 0
    for number in range(24):
        _write(tier, number)
    assert tier.stats().pieces == 24, "nothing is counted for ever"


def _write_half(root: Path, started: Connection) -> None:
    def half(descriptor: int, data: memoryview, offset: int) -> int:
        count = pwrite(descriptor, data[: len(data) // 2], offset)
        started.send("half")
        time.sleep(600)
        return count

    tier, pwrite = DiskTier(root, 3 * SIZE), os.pwrite
    os.pwrite = half
    _write(tier, 50)


def test_a_piece_that_another_process_writes_counts_while_it_lives_and_no_longer(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    ours, theirs = SPAWN.Pipe()
    writer = SPAWN.Process(target=_write_half, args=(root, theirs))
    writer.start()
    try:
        assert ours.poll(60)
        (partial,) = (root / "partial").iterdir()
        (root / "index.sqlite").unlink()
        tier = _filled(root, 3, budget=3 * SIZE)
        assert partial.exists()
        assert _held(root) == [1, 2]
        _write(tier, 3, 3 * SIZE)
        assert _held(root) == [1, 2], "there is no room for it, so nothing is evicted"
        tier.check()
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert partial.exists()
        _write(tier, 4)
    finally:
        writer.kill()
        writer.join()
    assert not partial.exists()
    assert _held(root) == [1, 2, 4]
    tier.check()


def test_opening_removes_what_a_dead_writer_left(tmp_path: Path) -> None:
    tier = _filled(tmp_path / "cache", 3)
    (tier.root / "partial" / "left").write_bytes(_data(7))
    DiskTier(tier.root, 10 * SIZE)
    assert list((tier.root / "partial").iterdir()) == []


def test_a_hit_of_one_tier_keeps_the_piece_from_eviction_by_another(tmp_path: Path) -> None:
    one = _filled(tmp_path / "cache", 3, budget=3 * SIZE)
    two = DiskTier(one.root, 3 * SIZE)
    assert _read(one, 0)
    _write(two, 3)
    assert _held(one.root) == [0, 2, 3]
    assert not _read(one, 1)
    assert (one.stats().evicted, two.stats().evicted) == (0, 1)
    assert one.stats()[-3:] == two.stats()[-3:] == (3 * SIZE, 3 * SIZE, 3)


def test_each_tier_enforces_its_own_budget_when_it_writes(tmp_path: Path) -> None:
    small = DiskTier(tmp_path / "cache", 2 * SIZE)
    big = _filled(small.root, 5, budget=5 * SIZE)
    assert big.stats().pieces == 5
    _write(small, 7)
    assert _held(small.root) == [4, 7]


def test_two_that_write_a_piece_at_once_count_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers, both = [DiskTier(tmp_path / "cache", 5 * SIZE) for _ in range(2)], threading.Barrier(2)

    def fill(files: PieceFiles, partial: Partial, data: memoryview) -> int:
        both.wait(60)
        return really_fill(files, partial, data)

    really_fill = PieceFiles.fill
    monkeypatch.setattr(PieceFiles, "fill", fill)
    threads = [threading.Thread(target=_write, args=(tier, 1)) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stats = [tier.stats() for tier in tiers]
    assert [one.promoted for one in stats] == [1, 1]
    assert [one.pieces for one in stats] == [1, 1]
    assert sum(one.discarded for one in stats) == 1
    assert _read(tiers[0], 1)
    tiers[0].check()


def test_while_another_process_holds_the_lock_pieces_are_read_and_none_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_module, "_LOCK_TIMEOUT_S", 0.05)
    tier = _filled(tmp_path / "cache", 2)
    with locked(tier.root / "lock", 1):
        _write(tier, 3)
        assert _read(tier, 0)
        assert not _read(tier, 3)
        tier.discard(_key(1))
        assert not _read(tier, 1), "what may be corrupt is removed whoever holds the lock"
        other = DiskTier(tier.root, 10 * SIZE)
        assert other.stats().pieces == 1
    assert "locked by another process" in caplog.text
    _write(tier, 3)
    assert _read(tier, 3)
    tier.check()


def test_a_lock_file_deleted_while_it_is_locked_is_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(descriptor: int) -> bool:
        monkeypatch.setattr(disk_index, "_lock", really_lock)
        path.unlink()
        return really_lock(descriptor)

    path, really_lock = tmp_path / "lock", disk_index._lock
    monkeypatch.setattr(disk_index, "_lock", lock)
    with locked(path, 1):
        assert path.exists()
        with pytest.raises(TimeoutError), locked(path, 0.01):
            pass


# The index.


def _cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def _scribble(path: Path, offset: int, count: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(random.Random(1).randbytes(count))


def _sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


def _stale_journal(path: Path) -> None:
    journal = path.with_name("index.sqlite-journal")
    with closing(sqlite3.connect(path)) as db:
        db.execute("DELETE FROM pieces")
        content = journal.read_bytes() if journal.exists() else b""
    journal.write_bytes(content)
    path.unlink()


_INCOMPLETE = ("DELETE FROM pieces WHERE chunk IN (2, 3)",)
DAMAGE: dict[str, Callable[[Path], None]] = {
    "lost": lambda path: path.unlink(),
    "empty": lambda path: _cut(path, 0),
    "cut within the first page": lambda path: _cut(path, 1000),
    "cut after the first page": lambda path: _cut(path, 4096),
    "cut after the second page": lambda path: _cut(path, 8192),
    "garbage": lambda path: path.write_bytes(os.urandom(20000)),
    "text": lambda path: path.write_text("no database"),
    "garbage in the header": lambda path: _scribble(path, 20, 60),
    "garbage in the pieces": lambda path: _scribble(path, 4096, 4096),
    "garbage after the first page": lambda path: _scribble(path, 4096, path.stat().st_size - 4096),
    "no tables": lambda path: _sql(path, "DROP TABLE pieces"),
    "no totals": lambda path: _sql(path, "DELETE FROM totals"),
    "another format": lambda path: _sql(path, *_INCOMPLETE, "PRAGMA user_version = 7"),
    "from before the last boot": lambda path: _sql(path, *_INCOMPLETE, "UPDATE totals SET boot = 'earlier'"),
    "a stale journal": _stale_journal,
}
SILENT: dict[str, Callable[[Path], None]] = {
    "too small totals": lambda path: _sql(path, "UPDATE totals SET bytes = bytes - 4096"),
    "too few counted": lambda path: _sql(path, "UPDATE totals SET pieces = pieces - 1"),
    "another key": lambda path: _sql(path, "UPDATE pieces SET digest = '../..' WHERE chunk = 0"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("reopen", [False, True])
def test_a_broken_index_is_made_anew(
    tmp_path: Path, damage: Callable[[Path], None], reopen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tier = _filled(tmp_path / "cache", 5, budget=5 * SIZE)
    damage(tier.root / "index.sqlite")
    if reopen:
        tier = DiskTier(tier.root, 5 * SIZE)
    assert _read(tier, 0)
    _write(tier, 5)
    assert _held(tier.root) == [0, 2, 3, 4, 5], "recency is that of the files"
    tier.check()
    assert caplog.text == ""


@pytest.mark.parametrize("damage", SILENT.values(), ids=SILENT.keys())
def test_an_index_that_is_wrong_is_made_anew_when_the_tier_is_opened_or_trips_over_it(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    root = _filled(tmp_path / "cache", 5, budget=5 * SIZE).root
    outside = tmp_path / "0-0-2.bin"
    outside.write_bytes(b"mine")
    damage(root / "index.sqlite")
    tier = DiskTier(root, 5 * SIZE)
    _write(tier, 5)
    assert _held(root) == [1, 2, 3, 4, 5]
    assert _bytes_on_disk(root) == 5 * SIZE
    tier.check()
    assert outside.exists()


def test_an_index_that_somebody_keeps_locked_is_replaced(tmp_path: Path) -> None:
    tier = _filled(tmp_path / "cache", 5, budget=5 * SIZE)
    with closing(sqlite3.connect(tier.root / "index.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        _write(tier, 5)
        assert _held(tier.root) == [1, 2, 3, 4, 5]
        tier.check()


def test_opening_reads_the_index_and_not_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _filled(tmp_path / "cache", 5).root
    monkeypatch.setattr(PieceFiles, "all", lambda files: pytest.fail("the directory is read"))
    assert DiskTier(root, 10 * SIZE).stats().pieces == 5


# Files, directories and links that are not ours.


def test_a_deleted_directory_is_made_again_and_counted_exactly(tmp_path: Path) -> None:
    tier = _filled(tmp_path / "cache", 5)
    shutil.rmtree(tier.root)
    assert not any(_read(tier, number) for number in range(5))
    assert tier.stats().pieces == 0
    _write(tier, 1)
    assert _read(tier, 1)
    assert stat.S_IMODE(tier.root.stat().st_mode) == 0o700
    shutil.rmtree(_file(tier.root, 1).parent)
    assert not _read(tier, 1)
    assert (tier.stats().pieces, tier.stats().resident_bytes) == (0, 0)
    tier.check()


def test_a_deleted_piece_that_is_never_asked_for_makes_room_without_an_eviction(tmp_path: Path) -> None:
    tier = _filled(tmp_path / "cache", 3, budget=3 * SIZE)
    _file(tier.root, 0).unlink()
    _write(tier, 3)
    assert _held(tier.root) == [1, 2, 3]
    assert (tier.stats().evicted, tier.stats().discarded) == (0, 1)
    tier.check()


def test_a_piece_that_was_copied_in_is_served_and_discarded(tmp_path: Path) -> None:
    tier = _filled(tmp_path / "cache", 6)
    _file(tier.root, 5).rename(_file(tier.root, 10))
    _file(tier.root, 10).write_bytes(_data(10))
    assert _read(tier, 10)
    tier.discard_cartridge(_key(10).digest)
    assert _held(tier.root) == [1, 2, 3, 4]
    tier.check()


def test_a_link_in_place_of_a_piece_is_not_followed(tmp_path: Path) -> None:
    tier, outside = _filled(tmp_path / "cache", 2), tmp_path / "outside"
    outside.write_bytes(_data(1))
    _file(tier.root, 1).unlink()
    _file(tier.root, 1).symlink_to(outside)
    assert not _read(tier, 1)
    _write(tier, 1)
    assert _read(tier, 1)
    assert not _file(tier.root, 1).is_symlink()
    assert outside.read_bytes() == _data(1)


@pytest.mark.parametrize("act", ["write", "discard", "discard_cartridge", "evict", "open"])
def test_a_link_in_place_of_a_cartridge_is_not_followed(tmp_path: Path, act: str) -> None:
    tier, outside = _filled(tmp_path / "cache", 2, budget=2 * SIZE), tmp_path / "outside"
    (tier.root / _key(0).digest).rename(outside)
    (tier.root / _key(0).digest).symlink_to(outside)
    assert not _read(tier, 0)
    before = sorted(outside.iterdir())
    if act == "write":
        _write(tier, 5)
    elif act == "discard":
        tier.discard(_key(0))
    elif act == "discard_cartridge":
        tier.discard_cartridge(_key(0).digest)
    elif act == "evict":
        for number in (1, 2, 3):
            _write(tier, number)
    else:
        (tier.root / "index.sqlite").unlink()
        assert DiskTier(tier.root, 1).stats().pieces == 0
    assert sorted(outside.iterdir()) == before


@pytest.mark.parametrize("name", ["lock", "index.sqlite", "partial"])
def test_a_link_in_place_of_our_own_files_is_not_followed(tmp_path: Path, name: str) -> None:
    root, outside = _filled(tmp_path / "cache", 2).root, tmp_path / "outside"
    (root / name).rename(outside)
    if name == "lock":
        outside.unlink()
    (root / name).symlink_to(outside)
    before = outside.read_bytes() if outside.is_file() else None
    tier = DiskTier(root, 10 * SIZE)
    _write(tier, 3)
    assert _read(tier, 1)
    if name == "index.sqlite":
        assert _read(tier, 3)
        assert outside.read_bytes() == before
    elif name == "partial":
        assert list(outside.iterdir()) == []
    else:
        assert not outside.exists()


@pytest.mark.parametrize("digest", ["../outside", "..", "", "partial", "AB" * 32, "ab" * 31, "ab" * 32 + "\n", "/tmp"])
def test_a_digest_that_is_none_leads_nowhere(tmp_path: Path, digest: str) -> None:
    tier, outside = _filled(tmp_path / "cache", 1), tmp_path / "outside"
    places = [outside, tmp_path, tier.root, tier.root / "partial"]
    outside.mkdir()
    for place in places:
        (place / "0-0-2.bin").write_bytes(_data(0))
    before = sorted(tier.root.iterdir())
    key = PieceKey(digest, 0, 0, 2)
    assert not tier.read_into(key, memoryview(bytearray(SIZE)))
    tier.write(key, memoryview(_data(1)))
    assert sorted(tier.root.iterdir()) == before
    assert tier.stats().promoted == 1
    (tier.root / "partial" / "0-0-2.bin").write_bytes(_data(0))
    tier.discard(key)
    tier.discard_cartridge(digest)
    assert all((place / "0-0-2.bin").read_bytes() == _data(0) for place in places[:3])


def test_a_file_in_place_of_a_cartridge_is_left_alone_and_nothing_is_counted(tmp_path: Path) -> None:
    tier = _filled(tmp_path / "cache", 1)
    file = tier.root / _key(1).digest
    file.write_text("mine")
    _write(tier, 1)
    assert not _read(tier, 1)
    assert (tier.stats().promoted, tier.stats().pieces) == (1, 1)
    tier.check()
    tier.discard(_key(1))
    assert file.read_text() == "mine"
    assert list((tier.root / "partial").iterdir()) == []


def test_a_pipe_in_place_of_a_piece_is_a_miss_and_holds_up_nobody(tmp_path: Path) -> None:
    tier = _filled(tmp_path / "cache", 2)
    _file(tier.root, 1).unlink()
    os.mkfifo(_file(tier.root, 1))
    assert not _read(tier, 1)


# Directories that cannot be written.


@contextmanager
def _mounted(place: Path, *arguments: str) -> Iterator[None]:
    if subprocess.run(["mount", *arguments, str(place)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    with _mounted(place, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        yield place


def _fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_full_disk_keeps_no_copy_and_counts_none_until_there_is_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = _filled(small_disk / "cache", 3, budget=1 << 30)
    _fill_up(small_disk / "others")
    for number in range(3, 6):
        _write(tier, number, 100_000)
    assert _held(tier.root) == [0, 1, 2]
    assert list((tier.root / "partial").iterdir()) == []
    assert [_read(tier, number) for number in range(4)] == [True, True, True, False]
    assert caplog.text.count("No space left") == 1
    (small_disk / "others").unlink()
    assert tier.stats().resident_bytes == 3 * SIZE
    _write(tier, 3)
    assert _held(tier.root) == [0, 1, 2, 3]
    tier.check()


def test_a_tier_opened_on_a_full_disk_works_once_there_is_room(small_disk: Path) -> None:
    _filled(small_disk / "cache", 3)
    shutil.rmtree(small_disk / "cache" / "partial")
    (small_disk / "cache" / "index.sqlite").unlink()
    _fill_up(small_disk / "others")
    tier = DiskTier(small_disk / "cache", 10 * SIZE)
    assert tier.stats().pieces == 3
    _write(tier, 3)
    assert _read(tier, 1)
    (small_disk / "others").unlink()
    _write(tier, 3)
    assert _held(tier.root) == [0, 1, 2, 3]
    tier.check()


def test_a_budget_above_the_disk_uses_what_the_disk_has(small_disk: Path) -> None:
    tier = DiskTier(small_disk / "cache", 1 << 30)
    for number in range(60):
        _write(tier, number, 50_000)
    assert 10 < tier.stats().pieces < 21
    assert list((tier.root / "partial").iterdir()) == []
    tier.check()


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a disk that cannot be filled where mounting is not allowed."""
    tier = _filled(tmp_path / "cache", 1, budget=1 << 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        _write(tier, 1, 60_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert _held(tier.root) == [0]
    assert _bytes_on_disk(tier.root) == SIZE == tier.stats().resident_bytes
    _write(tier, 1, 60_000)
    assert _read(tier, 1, 60_000)
    tier.check()


def _assert_read_only(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = sorted(root.rglob("*"))
    tier = DiskTier(root, 2 * SIZE)
    assert [_read(tier, number) for number in range(4)] == [True, True, True, False]
    for number in range(3, 6):
        _write(tier, number)
    tier.discard(_key(1))
    tier.discard_cartridge(_key(1).digest)
    assert _read(tier, 1)
    assert tier.stats()._replace(budget_bytes=0) == DiskStats(4, 1, 0, 0, 0, 4 * SIZE, 0, 3 * SIZE, 0, 3)
    assert sorted(root.rglob("*")) == before
    assert len(caplog.records) == 1, caplog.text
    assert str(root) in caplog.text


@pytest.mark.parametrize("index", [True, False])
def test_a_directory_on_a_read_only_disk_is_served(
    small_disk: Path, caplog: pytest.LogCaptureFixture, index: bool
) -> None:
    root = _filled(small_disk / "cache", 3).root
    if not index:
        for name in ("index.sqlite", "lock"):
            (root / name).unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    _assert_read_only(root, caplog)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("index", [True, False])
def test_a_directory_that_belongs_to_somebody_else_is_served(index: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = _filled(Path(place) / "cache", 3).root
        if not index:
            for name in ("index.sqlite", "lock"):
                (root / name).unlink()
        for path in (Path(place), root, *root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        ours, theirs = SPAWN.Pipe()
        child = SPAWN.Process(target=_read_as_nobody, args=(root, theirs))
        child.start()
        assert ours.poll(60)
        assert ours.recv() == "served"
        child.join()


def _read_as_nobody(root: Path, result: Connection) -> None:
    class Records(logging.Handler):
        text = ""

        def __init__(self) -> None:
            super().__init__()
            self.records: list[logging.LogRecord] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.records.append(record)
            self.text += record.getMessage()

    caplog = Records()
    logging.getLogger("lmcache_cartridge").addHandler(caplog)
    os.setuid(65534)
    try:
        _assert_read_only(root, caplog)
        result.send("served")
    except BaseException as error:
        result.send(repr(error))


def test_a_directory_that_cannot_be_made_is_a_tier_without_pieces(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    tier = DiskTier(tmp_path / "file" / "cache", 10 * SIZE)
    _write(tier, 1)
    assert not _read(tier, 1)
    tier.discard(_key(1))
    assert tier.stats().pieces == 0
    assert len(caplog.records) == 1
    assert os.strerror(errno.ENOTDIR) in caplog.text


class DiskMachine(RuleBasedStateMachine):
    """One tier against a list of pieces in order of use."""

    NUMBERS = st.integers(0, 11)

    @initialize(pieces=st.integers(1, 8))
    def open(self, pieces: int) -> None:
        self.place = Path(tempfile.mkdtemp())
        self.budget = pieces * SIZE
        self.tier = DiskTier(self.place / "cache", self.budget)
        self.held: dict[int, int] = {}
        self.hits = self.misses = self.read_bytes = 0

    def _size(self, number: int) -> int:
        return SIZE * (1 + number % 2)

    @rule(number=NUMBERS)
    def write(self, number: int) -> None:
        size = self._size(number)
        _write(self.tier, number, size)
        if size <= self.budget:
            self.held.pop(number, None)
            while sum(self.held.values()) + size > self.budget:
                del self.held[next(iter(self.held))]
            self.held[number] = size

    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        hit = _read(self.tier, number, self._size(number))
        assert hit == (number in self.held)
        if hit:
            self.held[number] = self.held.pop(number)
            self.read_bytes += self.held[number]
        self.hits += hit
        self.misses += not hit

    @rule(number=NUMBERS)
    def discard(self, number: int) -> None:
        self.tier.discard(_key(number))
        self.held.pop(number, None)

    @rule(number=NUMBERS)
    def discard_cartridge(self, number: int) -> None:
        self.tier.discard_cartridge(_key(number).digest)
        self.held = {n: size for n, size in self.held.items() if _key(n).digest != _key(number).digest}

    @rule(number=NUMBERS)
    def delete_a_file(self, number: int) -> None:
        _file(self.tier.root, number).unlink(missing_ok=True)
        self.held.pop(number, None)
        self.read(number)

    @rule()
    def delete_all(self) -> None:
        shutil.rmtree(self.tier.root)
        self.held.clear()

    @rule(damage=st.sampled_from(list(DAMAGE.values())), number=NUMBERS)
    def break_the_index_and_write(self, damage: Callable[[Path], None], number: int) -> None:
        damage(self.tier.root / "index.sqlite")  # there is one, for the invariant looked
        self.write(number)

    @rule(pieces=st.integers(1, 8))
    def reopen(self, pieces: int) -> None:
        self.budget = pieces * SIZE
        self.tier = DiskTier(self.tier.root, self.budget)
        while sum(self.held.values()) > self.budget:
            del self.held[next(iter(self.held))]
        self.hits = self.misses = self.read_bytes = 0

    @invariant()
    def holds(self) -> None:
        assert _held(self.tier.root, range(12)) == sorted(self.held)
        self.tier.check()
        stats = self.tier.stats()
        assert (stats.hits, stats.misses, stats.read_bytes) == (self.hits, self.misses, self.read_bytes)
        assert (stats.pieces, stats.resident_bytes) == (len(self.held), sum(self.held.values()))
        assert _bytes_on_disk(self.tier.root) == stats.resident_bytes <= self.budget == stats.budget_bytes

    def teardown(self) -> None:
        shutil.rmtree(self.place)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
