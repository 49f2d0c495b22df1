"""A quarantine is seen by every process until it is lifted, and noting one never raises."""

from __future__ import annotations

from pathlib import Path

import pytest
from making import run_threads

from lmcache_cartridge.quarantine import Quarantine

DIGEST = "ab" * 32


def test_a_reason_is_seen_through_every_instance(tmp_path: Path) -> None:
    writer, reader = Quarantine(tmp_path / "quarantine"), Quarantine(tmp_path / "quarantine")
    assert reader.reason(DIGEST) is None
    writer.put(DIGEST, "chunk 3 ≠ its checksum")
    assert reader.reason(DIGEST) == "chunk 3 ≠ its checksum"
    assert Quarantine(tmp_path / "quarantine").reason(DIGEST) == "chunk 3 ≠ its checksum"


def test_only_the_cartridge_that_was_put_is_quarantined(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    quarantine.put(DIGEST, "corrupt")
    assert quarantine.reason("cd" * 32) is None


def test_lifting_ends_a_quarantine_and_again_is_no_change(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    quarantine.put(DIGEST, "corrupt")
    quarantine.lift(DIGEST)
    assert quarantine.reason(DIGEST) is None
    quarantine.lift(DIGEST)
    assert list(tmp_path.iterdir()) == []


def test_asking_makes_no_directory(tmp_path: Path) -> None:
    assert Quarantine(tmp_path / "quarantine").reason(DIGEST) is None
    assert list(tmp_path.iterdir()) == []


def test_a_quarantine_is_private_to_its_user(tmp_path: Path) -> None:
    Quarantine(tmp_path / "quarantine").put(DIGEST, "corrupt")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"quarantine": 0o700, f"{DIGEST}.txt": 0o600}


def test_a_directory_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        quarantine = Quarantine(directory)
        quarantine.put(DIGEST, "corrupt")
        assert quarantine.reason(DIGEST) is None
    assert (tmp_path / "file").read_text() == "not a directory"


def test_a_reason_that_is_no_utf8_is_still_noted(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    quarantine.put(DIGEST, "/mnt/\udcff/payload is corrupt")
    assert "payload is corrupt" in quarantine.reason(DIGEST)


@pytest.mark.parametrize("count", [8])
def test_many_that_quarantine_at_once_leave_one_whole_reason(tmp_path: Path, count: int) -> None:
    reasons = [str(number) * 5000 for number in range(count)]
    run_threads(count, lambda number: Quarantine(tmp_path).put(DIGEST, reasons[number]))
    assert Quarantine(tmp_path).reason(DIGEST) in reasons
    assert [path.name for path in tmp_path.iterdir()] == [f"{DIGEST}.txt"]
