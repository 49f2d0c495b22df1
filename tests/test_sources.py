"""A byte source fills the caller's buffer exactly, or says what failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_cartridge.artifact import ByteRange
from lmcache_cartridge.errors import SourceError, TruncatedPayload
from lmcache_cartridge.sources import LocalSource

CONTENT = bytes(range(256)) * 100


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "payload").write_bytes(CONTENT)
    return tmp_path


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, len(CONTENT)), (777, 9999), (len(CONTENT) - 1, len(CONTENT))])
def test_a_range_fills_the_buffer_and_nothing_beyond_it(root: Path, start: int, end: int) -> None:
    buffer = bytearray(b"\xee" * (end - start + 2))
    LocalSource().read_into(root, "payload", ByteRange(start, end), memoryview(buffer)[1:-1])
    assert buffer[1:-1] == CONTENT[start:end]
    assert buffer[0] == buffer[-1] == 0xEE


@pytest.mark.parametrize("start", [len(CONTENT) - 9, len(CONTENT), len(CONTENT) + 100])
def test_a_range_beyond_the_end_is_truncated(root: Path, start: int) -> None:
    with pytest.raises(TruncatedPayload, match=f"payload ends at byte {max(start, len(CONTENT))}"):
        LocalSource().read_into(root, "payload", ByteRange(start, start + 10), memoryview(bytearray(10)))


@pytest.mark.parametrize("name", ["missing", "directory", "payload/below"])
def test_a_file_that_cannot_be_read_is_a_source_error_with_its_cause(root: Path, name: str) -> None:
    (root / "directory").mkdir()
    with pytest.raises(SourceError, match=name) as caught:
        LocalSource().read_into(root, name, ByteRange(0, 1), memoryview(bytearray(1)))
    assert isinstance(caught.value.__cause__, OSError)


def test_reading_leaves_no_descriptor_open(root: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        LocalSource().read_into(root, "payload", ByteRange(0, 5), memoryview(bytearray(5)))
        with pytest.raises(TruncatedPayload):
            LocalSource().read_into(
                root, "payload", ByteRange(len(CONTENT), len(CONTENT) + 5), memoryview(bytearray(5))
            )
    assert len(list(Path("/proc/self/fd").iterdir())) == before
