"""Faults of an S3 server cost time within bounds or are an error that says what; never wrong bytes, never a leak."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from faulty_proxy import (
    Link,
    another_range,
    cut,
    endless,
    range_ignored,
    reset,
    silence,
    sound,
    status,
    trickle,
    truncated,
)
from waiting import run_threads, until

from lmcache_cartridge.artifact.bytesource import ByteRange
from lmcache_cartridge.errors import (
    SourceError,
    SourceTimeout,
)
from lmcache_cartridge.sources.s3 import S3Source

CONTENT = random.Random(2).randbytes(1 << 20)
SIZE = len(CONTENT)
PART = 1 << 18
SOON_S = 20
"""What takes longer than this did not end at a deadline of one second."""


@pytest.fixture
def location(s3_credentials, bucket):
    s3_credentials.client.put_object(Bucket=bucket, Key="artefact/payload", Body=CONTENT)
    return f"s3://{bucket}/artefact"


@pytest.fixture
def opened(proxy):
    """Return a function that opens a source, which is closed at the end."""
    sources: list[S3Source] = []

    def open_source(**how: Any) -> S3Source:
        given = {"part_bytes": PART, "connections": 4, "backoff_s": 0.01} | how
        sources.append(S3Source(endpoint_url=proxy.endpoint, **given))
        return sources[-1]

    yield open_source
    for source in sources:
        source.close()


@pytest.fixture
def source(opened):
    return opened()


@pytest.fixture
def hasty(opened):
    """A source whose reads may take a second."""
    return opened(timeout_s=1)


def _read(source: S3Source, location: str, start: int = 0, end: int = SIZE) -> bytes:
    out = bytearray(end - start)
    source.read_into(location, "payload", ByteRange(start, end), memoryview(out))
    return bytes(out)


PASSING = {
    "503": status(503, "SlowDown"), "429": status(429, "TooManyRequests"), "reset": reset, "cut": cut(1000),
    "truncated": truncated(PART // 2), "empty": truncated(0), "cut late": cut(PART - 1),
}  # fmt: skip


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_fault_that_passes_is_not_noticed(proxy, source, location, fault):
    for read in (lambda: _read(source, location), lambda: source.read(location, "payload", SIZE).data):
        proxy.faults = [fault] * 3
        assert (read(), proxy.faults) == (CONTENT, [])


@pytest.mark.parametrize("fault", [status(500), reset, truncated(0)], ids=["500", "reset", "empty"])
def test_a_fault_that_lasts_is_an_error_after_some_tries(proxy, source, location, fault):
    proxy.always = fault
    for read in (lambda: _read(source, location, 0, PART), lambda: source.read(location, "payload", SIZE)):
        proxy.requests.clear()
        with pytest.raises(SourceError, match=rf"{location}/payload at {proxy.endpoint}: .*; tried 8 times") as caught:
            read()
        assert (type(caught.value), len(proxy.requests)) == (SourceError, 8)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("read_into", trickle(0.05)), ("read_into", silence), ("read_into", status(500)),
        ("read", trickle(0.05)), ("size", silence),
    ],
)  # fmt: skip
def test_a_read_ends_by_its_deadline_however_slow_the_server(proxy, opened, location, call, fault):
    source = opened(attempts=10**6, timeout_s=1)
    proxy.always = fault
    calls: dict[str, Callable[[], object]] = {
        "read_into": lambda: _read(source, location), "read": lambda: source.read(location, "payload", SIZE),
        "size": lambda: source.size(location, "payload"),
    }  # fmt: skip
    began, said = time.monotonic(), "payload at http.* not read: less than 64 KiB came within s3_timeout_s, 1 s"
    with pytest.raises(SourceTimeout, match=said):
        calls[call]()
    assert 0.9 < time.monotonic() - began < SOON_S


def test_reads_that_share_a_slow_link_take_as_long_as_it_needs(proxy, opened, location):
    source = opened(attempts=1, timeout_s=3)
    # All four take four seconds, and one may wait one of them for a part of another.
    proxy.always = Link(1 << 20)
    got: list[bytes] = []
    run_threads(4, lambda _: got.append(_read(source, location)), timeout_s=120)
    assert got == [CONTENT] * 4


def test_a_place_that_hangs_keeps_no_other_waiting(proxy, opened, location, s3_credentials, bucket, monkeypatch):
    monkeypatch.setattr("lmcache_cartridge.sources.s3._STALLED_S", 0.1)
    s3_credentials.client.put_object(Bucket=bucket, Key="other/payload", Body=CONTENT)
    source = opened(connections=1)
    proxy.always = lambda handler, answer: (silence if "artefact" in handler.path else sound)(handler, answer)
    hanging = threading.Thread(
        target=source.read_into, args=(location, "payload", ByteRange(0, 9), memoryview(bytearray(9)))
    )
    hanging.start()
    until(lambda: proxy.requests)
    time.sleep(0.2)
    assert _read(source, f"s3://{bucket}/other") == CONTENT and hanging.is_alive()
    proxy.always = None
    hanging.join(60)


def test_reads_that_run_and_that_wait_end_where_their_source_is_closed(proxy, opened, location):
    source, proxy.always = opened(connections=1, timeout_s=2), silence

    def read(_: int) -> None:
        with pytest.raises(SourceError, match="the source was closed"):
            _read(source, location)

    threading.Timer(0.5, source.close).start()
    run_threads(3, read, timeout_s=60)


def test_nothing_is_written_to_a_buffer_after_its_read_ended(proxy, hasty, location):
    proxy.always = trickle(0.02, 100)
    out = bytearray(SIZE)
    with pytest.raises(SourceTimeout):
        hasty.read_into(location, "payload", ByteRange(0, SIZE), memoryview(out))
    assert any(out), "some of it came"
    out[:] = bytes(SIZE)
    time.sleep(0.5)
    assert not any(out)


def _is_read(source: S3Source, location: str) -> bool:
    with suppress(SourceTimeout):
        return _read(source, location) == CONTENT
    return False


def test_a_source_recovers_once_the_server_does(proxy, hasty, location):
    for fault in (trickle(0.05), silence):
        proxy.always = fault
        with pytest.raises(SourceTimeout):
            _read(hasty, location)
        proxy.always = None
        until(lambda: _is_read(hasty, location))  # its threads find out at their next byte


def test_a_server_that_ignores_ranges_or_sends_others_is_found_out(proxy, source, location):
    proxy.always = range_ignored(CONTENT)
    for start, end in ((0, 10), (5, 10), (0, PART), (SIZE - 5, SIZE)):
        with pytest.raises(SourceError, match="does not support ranges"):
            _read(source, location, start, end)
    proxy.always = another_range
    with pytest.raises(SourceError, match="asked for bytes 5 to 10"):
        _read(source, location, 5, 10)
    until(lambda: proxy.open_now == 0)


def test_no_more_than_its_limit_is_read_of_a_small_file(proxy, source, location):
    proxy.always = endless
    with pytest.raises(SourceError, match="more than the 10 bytes"):
        source.read(location, "payload", 10)


def test_connections_and_threads_are_bounded_whatever_happens(proxy, source, location):
    run_threads(8, lambda _: _read(source, location), timeout_s=60)  # its threads begin with the first reads
    before = threading.active_count()
    for fault in (None, reset, truncated(10), status(500)):
        proxy.faults = [fault] * 20 if fault else []
        run_threads(8, lambda _: _read(source, location), timeout_s=60)
    assert proxy.open_most <= 4
    until(lambda: threading.active_count() <= before + 4)  # those of the proxy, one a connection
