"""The disk tier stays within its budget, loses the least recently used first, and never raises."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from making import run_threads

from lmcache_cartridge.sources.disk_cache import DiskTier, PieceKey
from lmcache_cartridge.sources.disk_index import locked

SIZE = 1000


def _key(number: int) -> PieceKey:
    return PieceKey("ab" * 32 if number % 2 else "cd" * 32, number, 0, 2)


def _data(number: int, size: int = SIZE) -> bytes:
    return bytes([number % 251]) * size


def _read(tier: DiskTier, number: int, size: int = SIZE) -> bytes | None:
    out = bytearray(size)
    return bytes(out) if tier.read_into(_key(number), memoryview(out)) else None


def _held(tier: DiskTier, numbers: range) -> list[int]:
    """Return which pieces lie on disk, without touching their recency."""
    return [n for n in numbers if (tier.root / _key(n).digest / f"{n}-0-2.bin").exists()]


def _on_disk(root: Path) -> int:
    """Return the bytes of every piece under `root`, finished or not."""
    total = 0
    for path in root.glob("*/*"):
        with suppress(FileNotFoundError):  # a file may go while it is counted
            total += path.stat().st_size
    return total


def test_a_piece_that_was_written_is_read_back_exactly(tmp_path: Path) -> None:
    tier, data = DiskTier(tmp_path / "cache", 10 * SIZE), os.urandom(SIZE)
    tier.write(_key(1), memoryview(data))
    assert _read(tier, 1) == data
    assert tier.stats()._asdict() == {
        "hits": 1, "misses": 0, "promoted": 1, "evicted": 0, "discarded": 0, "read_bytes": SIZE, "written_bytes": SIZE,
        "resident_bytes": SIZE, "budget_bytes": 10 * SIZE, "pieces": 1,
    }  # fmt: skip


def test_a_piece_that_was_not_written_is_a_miss(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 10 * SIZE)
    tier.write(_key(1), memoryview(_data(1)))
    assert _read(tier, 2) is None
    assert _read(tier, 3) is None
    assert (tier.stats().hits, tier.stats().misses) == (0, 2)


def test_pieces_of_one_chunk_with_other_heads_are_kept_apart(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 10 * SIZE)
    keys = [PieceKey("ab" * 32, 0, first, last) for first, last in ((0, 1), (1, 2), (0, 2))]
    for number, key in enumerate(keys):
        tier.write(key, memoryview(_data(number)))
    for number, key in enumerate(keys):
        out = bytearray(SIZE)
        assert tier.read_into(key, memoryview(out))
        assert out == _data(number)


def test_a_piece_of_another_size_than_asked_for_is_a_miss(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 10 * SIZE)
    tier.write(_key(1), memoryview(_data(1)))
    assert _read(tier, 1, SIZE - 1) is None
    assert _read(tier, 1, SIZE + 1) is None


def test_the_least_recently_used_piece_goes_first(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 3 * SIZE)
    for number in range(3):
        tier.write(_key(number), memoryview(_data(number)))
    assert _read(tier, 0) == _data(0)
    tier.write(_key(3), memoryview(_data(3)))
    assert _held(tier, range(5)) == [0, 2, 3]
    tier.write(_key(4), memoryview(_data(4)))
    assert _held(tier, range(5)) == [0, 3, 4]
    assert tier.stats().evicted == 2
    assert tier.stats().resident_bytes == 3 * SIZE


def test_a_miss_does_not_count_as_use(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 2 * SIZE)
    for number in range(2):
        tier.write(_key(number), memoryview(_data(number)))
    assert _read(tier, 0, SIZE + 1) is None
    tier.write(_key(2), memoryview(_data(2)))
    assert _held(tier, range(3)) == [1, 2]


def test_a_big_piece_pushes_out_as_many_as_it_needs(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 4 * SIZE)
    for number in range(4):
        tier.write(_key(number), memoryview(_data(number)))
    tier.write(_key(9), memoryview(_data(9, 3 * SIZE)))
    assert _held(tier, range(10)) == [3, 9]


def test_a_piece_bigger_than_the_budget_is_not_kept_and_pushes_out_nothing(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 2 * SIZE)
    tier.write(_key(0), memoryview(_data(0)))
    tier.write(_key(1), memoryview(_data(1, 2 * SIZE + 1)))
    assert _held(tier, range(2)) == [0]


def test_writing_a_piece_again_does_not_count_it_twice(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 3 * SIZE)
    for _ in range(3):
        tier.write(_key(1), memoryview(_data(1)))
    assert tier.stats().resident_bytes == SIZE == _on_disk(tier.root)


def test_writing_a_piece_again_pushes_out_no_other(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 3 * SIZE)
    for number in (0, 1, 2, 1):
        tier.write(_key(number), memoryview(_data(number)))
    assert _held(tier, range(3)) == [0, 1, 2]
    assert (tier.stats().evicted, tier.stats().discarded) == (0, 1)


def test_a_discarded_piece_is_gone(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 3 * SIZE)
    tier.write(_key(1), memoryview(_data(1)))
    tier.discard(_key(1))
    assert _read(tier, 1) is None
    assert tier.stats().resident_bytes == 0 == _on_disk(tier.root)
    tier.discard(_key(1))


def test_pieces_survive_a_restart(tmp_path: Path) -> None:
    before = DiskTier(tmp_path / "cache", 10 * SIZE)
    for number in range(4):
        before.write(_key(number), memoryview(_data(number)))
    after = DiskTier(tmp_path / "cache", 10 * SIZE)
    assert after.stats().resident_bytes == 4 * SIZE
    assert [_read(after, number) for number in range(5)] == [*map(_data, range(4)), None]


def test_a_restart_with_a_smaller_budget_keeps_the_newest(tmp_path: Path) -> None:
    before = DiskTier(tmp_path / "cache", 10 * SIZE)
    for number in range(5):
        before.write(_key(number), memoryview(_data(number)))
        path = before.root / _key(number).digest / f"{number}-0-2.bin"
        os.utime(path, (1000 + number, 1000 + number))
    after = DiskTier(tmp_path / "cache", 2 * SIZE)
    assert _held(after, range(5)) == [3, 4]
    assert after.stats().resident_bytes == _on_disk(after.root) == 2 * SIZE


def test_a_leftover_of_a_killed_writer_is_removed(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 10 * SIZE)
    tier.write(_key(1), memoryview(_data(1)))
    leftover = tier.root / "partial" / "0123"
    leftover.write_bytes(_data(7))
    again = DiskTier(tmp_path / "cache", 10 * SIZE)
    assert not leftover.exists()
    assert _read(again, 1) == _data(1)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "notes"
    directory.mkdir(parents=True)
    strangers = [directory / name for name in ("x.bin", "1-2.bin", "1-2-3-4.bin", "a-b-c.bin", "readme.txt")]
    for path in strangers:
        path.write_bytes(_data(0))
    tier = DiskTier(tmp_path / "cache", 10)
    assert tier.stats().resident_bytes == 0
    assert all(path.exists() for path in strangers)


def test_a_directory_deleted_under_the_tier_is_only_a_miss(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 10 * SIZE)
    tier.write(_key(1), memoryview(_data(1)))
    shutil.rmtree(tier.root)
    assert _read(tier, 1) is None
    tier.write(_key(2), memoryview(_data(2)))
    tier.discard(_key(1))
    assert _read(tier, 1) is None


def test_a_directory_replaced_by_a_file_is_only_a_miss(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 2 * SIZE)
    for number in range(2):
        tier.write(_key(number), memoryview(_data(number)))
    shutil.rmtree(tier.root)
    tier.root.write_text("not a directory")
    assert _read(tier, 0) is None
    for number in range(5):
        tier.write(_key(number), memoryview(_data(number)))
    tier.discard(_key(1))
    assert tier.root.read_text() == "not a directory"
    assert tier.stats().resident_bytes <= 2 * SIZE


def test_a_file_deleted_under_the_tier_is_a_miss_and_can_be_written_again(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 2 * SIZE)
    tier.write(_key(1), memoryview(_data(1)))
    (tier.root / _key(1).digest / "1-0-2.bin").unlink()
    assert _read(tier, 1) is None
    tier.write(_key(1), memoryview(_data(1)))
    assert _read(tier, 1) == _data(1)


def test_a_file_cut_short_is_a_miss(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 2 * SIZE)
    tier.write(_key(1), memoryview(_data(1)))
    os.truncate(tier.root / _key(1).digest / "1-0-2.bin", SIZE - 1)
    assert _read(tier, 1) is None


def test_files_are_private_to_their_user(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 2 * SIZE)
    tier.write(_key(1), memoryview(_data(1)))
    entries = [tier.root, *tier.root.rglob("*")]
    assert len(entries) == 6, "the directory, its lock, its index, two directories and a piece"
    assert {path.stat().st_mode & 0o777 for path in entries if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in entries if path.is_file()} == {0o600}


@pytest.mark.parametrize("pieces", [1, 5])
def test_the_budget_holds_on_disk_under_eight_writers(tmp_path: Path, pieces: int) -> None:
    size = 200_000
    tier, stop, seen = DiskTier(tmp_path / "cache", pieces * size), threading.Event(), [0]
    end = time.monotonic() + 1

    def work(worker: int) -> None:
        if worker == 8:  # the witness
            while not stop.is_set():
                with locked(tier.root / "lock", 10):  # nothing is renamed while the witness counts
                    seen[0] = max(seen[0], _on_disk(tier.root))
                assert tier.stats().resident_bytes <= pieces * size
            return
        chance = random.Random(worker)
        try:
            while time.monotonic() < end:
                number = chance.randrange(12)
                tier.write(_key(number), memoryview(_data(number, size)))
                found = _read(tier, chance.randrange(12), size)
                assert found is None or len(set(found)) == 1
                if chance.random() < 0.1:
                    tier.discard(_key(chance.randrange(12)))
        finally:
            stop.set()

    run_threads(9, work)
    assert 0 < seen[0] <= pieces * size
    assert tier.stats().resident_bytes == _on_disk(tier.root)
    assert list((tier.root / "partial").iterdir()) == []
    tier.check()


def test_a_reader_never_sees_half_a_piece(tmp_path: Path) -> None:
    size = 500_000
    tier, end, found = DiskTier(tmp_path / "cache", size), time.monotonic() + 20, []

    def work(worker: int) -> None:
        while time.monotonic() < end and len(found) < 200:
            if worker < 2:
                tier.write(_key(worker), memoryview(_data(worker + 1, size)))
            else:
                data = _read(tier, worker % 2, size)
                if data is not None:
                    found.append(data == _data(worker % 2 + 1, size))

    run_threads(6, work)
    assert found
    assert all(found)


def test_discarding_a_cartridge_removes_its_pieces_and_no_others(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 10 * SIZE)
    for number in range(4):
        tier.write(_key(number), memoryview(_data(number)))
    tier.discard_cartridge(_key(1).digest)
    assert _held(tier, range(4)) == [0, 2]
    assert tier.stats().resident_bytes == 2 * SIZE
    assert _read(tier, 0) == _data(0)
