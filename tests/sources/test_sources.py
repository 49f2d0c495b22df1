"""One suite for every byte source: it fills the caller's buffer exactly, or says what failed, wherever the bytes lie."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest
from s3 import S3Server

from lmcache_cartridge.artifact.bytesource import ByteRange, SmallFile
from lmcache_cartridge.artifact.local import LocalSource
from lmcache_cartridge.errors import (
    MalformedLocation,
    SourceError,
    SourceNotFound,
    TruncatedPayload,
)
from lmcache_cartridge.sources.locks import locked
from lmcache_cartridge.sources.s3 import S3Source
from lmcache_cartridge.sources.sources import Sources

CONTENT = random.Random(1).randbytes(300_000)
SIZE = len(CONTENT)
PART = 1 << 16
"""Parts of the S3 source here, so that larger reads take several."""


class Place:
    """A directory with files in it, a source to read them with, and ways to change them that bypass it."""

    def __init__(self, root: Path) -> None:
        self.location, self.source = str(root), LocalSource()

    def put(self, file: str, data: bytes) -> None:
        (Path(self.location) / file).write_bytes(data)


class S3Place(Place):
    """The same on S3."""

    def __init__(self, server: S3Server, bucket: str) -> None:
        self.location, self._server, self._bucket = f"s3://{bucket}/some/artefact", server, bucket
        self.source = S3Source(endpoint_url=server.endpoint, part_bytes=PART)

    def put(self, file: str, data: bytes) -> None:
        self._server.client.put_object(Bucket=self._bucket, Key=f"some/artefact/{file}", Body=data)


@pytest.fixture(params=["local", "swift", "moto"])
def s3_kind(request):
    return request.param


@pytest.fixture
def place(s3_kind, request, tmp_path):
    if s3_kind == "local":
        place = Place(tmp_path)
    else:
        place = S3Place(request.getfixturevalue("s3_credentials"), request.getfixturevalue("bucket"))
    place.put("payload", CONTENT)
    yield place
    if s3_kind != "local":
        place.source.close()


def _read(place: Place, start: int, end: int, file: str = "payload") -> bytes:
    """Return what a read brings, having checked that the bytes on both sides of the buffer stay as they were."""
    buffer = bytearray(b"\xee" * (end - start + 2))
    place.source.read_into(place.location, file, ByteRange(start, end), memoryview(buffer)[1:-1])
    assert buffer[0] == buffer[-1] == 0xEE
    return bytes(buffer[1:-1])


def test_a_range_fills_the_buffer_and_nothing_beyond_it(place):
    for start, end in (
        (0, 1), (SIZE - 1, SIZE), (0, SIZE), (777, 9999), (PART - 1, PART + 1), (PART, 2 * PART), (1, SIZE - 1), (5, 5),
        (SIZE, SIZE),
    ):  # fmt: skip
        assert _read(place, start, end) == CONTENT[start:end]


def test_a_range_beyond_the_end_is_truncated(place):
    place.put("empty", b"")
    for file, start, length in (
        ("payload", SIZE - 9, 10), ("payload", SIZE, 10), ("payload", SIZE + 100, 10), ("payload", 5, 2 * SIZE), ("empty", 0, 1),
    ):  # fmt: skip
        with pytest.raises(TruncatedPayload, match=f"{file}.* ends "):
            _read(place, start, start + length, file)
    assert (place.source.size(place.location, "empty"), _read(place, 0, 0, "empty")) == (0, b"")
    assert place.source.read(place.location, "empty", 10).data == b""


CALLS = {"read_into": (ByteRange(0, 1), memoryview(bytearray(1))), "read": (100,), "size": ()}


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_file_is_not_found_and_named(place, call):
    for location in (place.location, f"{place.location}/nowhere"):
        with pytest.raises(SourceNotFound, match=f"{location}/missing"):
            getattr(place.source, call)(location, "missing", *CALLS[call])


def test_a_small_file_is_read_whole_up_to_its_limit(place):
    assert place.source.read(place.location, "payload", SIZE).data == CONTENT
    assert place.source.read(place.location, "payload", 1 << 40).data == CONTENT
    for limit in (0, 1, SIZE - 1):
        with pytest.raises(SourceError, match=f"payload.* more than the {limit} bytes"):
            place.source.read(place.location, "payload", limit)


def test_a_known_revision_is_not_read_again_until_the_file_changes(place):
    place.put("small", b"one")
    first = place.source.read(place.location, "small", 100)
    assert first.data == b"one"
    assert place.source.read(place.location, "small", 100, known=first.revision) is None
    assert place.source.read(place.location, "small", 100, known="another") == first
    time.sleep(0.02)  # a file system's clock may tick slowly
    place.put("small", b"two")
    second = place.source.read(place.location, "small", 100, known=first.revision)
    assert isinstance(second, SmallFile)
    assert second.data == b"two"
    assert second.revision != first.revision


@pytest.mark.parametrize("location", ["", "relative/path", "s3:/bucket/key", "S3://bucket/key", "file:///tmp", "/a\0b"])
def test_a_location_of_another_form_is_refused(location, tmp_path):
    with pytest.raises(MalformedLocation, match="neither an absolute path nor s3://"):
        Sources().size(location, "payload")


def test_a_lock_ends_with_its_block_though_a_child_still_has_its_file(tmp_path):
    with locked(tmp_path / "lock") as held:
        child = subprocess.Popen(["sleep", "60"], pass_fds=[held])
    try:
        with locked(tmp_path / "lock", 0):
            pass
    finally:
        child.kill()
        child.wait()
