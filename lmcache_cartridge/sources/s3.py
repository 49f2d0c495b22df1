"""S3Source: artefacts in S3 buckets, read by ranged GETs in parallel, retried, given up where nothing comes."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, CancelledError, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, TypeVar

from ..artifact.bytesource import ByteRange, Seen, SmallFile
from ..artifact.location import parse
from ..errors import CartridgeError, SourceDenied, SourceError, SourceNotFound, SourceTimeout, TruncatedPayload
from ..library.workers import Workers
from .cores import use_all_cores
from .s3_client import make_client

T = TypeVar("T")
Came = Callable[[int], None]
"""Gets how many bytes came; raises where the read is to end."""

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_STEP_BYTES = 1 << 20
"""Most that is taken from a connection at once; between two steps a read notices that it was given up. Measured: 1.6 GB/s,
1.3 with a quarter of it, 1.4 with four times as much, from a server on the same machine."""
_LEAST_BYTES = 1 << 16
"""What must come within a timeout, so that a server that sends a byte now and then is waited for no longer than that."""
_LONGEST_BACKOFF_S = 5.0
_OTHERS = 64
"""Connections that are kept for requests beside the threads, and for threads in the place of those that are stalled."""
_STALLED_S = 15.0
"""What takes longer may hang: other threads read from other places meanwhile."""


class S3Source:
    """Objects of any S3 server. What reads is described by `ByteSource`.

    Credentials are found as every AWS tool finds them: environment, profile, role. At most `connections` requests for
    ranges run at once, on as many threads, however many callers wait, and the client keeps as many connections; other
    requests run in their caller's thread. Clients are made for the first call, which raises `SourceError` where boto3 is
    not installed.
    """

    def __init__(
        self,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        connections: int = 16,
        part_bytes: int = 8 << 20,
        timeout_s: float = 60.0,
        attempts: int = 8,
        backoff_s: float = 0.1,
    ) -> None:
        """A request may fail `attempts` times in a row; it waits `backoff_s`, twice that and so on, less a random part."""
        self._server, self._connections, self._part_bytes = (endpoint_url, region), connections, part_bytes
        self.timeout_s, self.attempts, self.backoff_s = timeout_s, attempts, backoff_s
        self._threads = Workers("s3", connections, begin=use_all_cores, stalled_s=_STALLED_S)
        self.relieve = self._threads.relieve
        self._lock, self.closed = threading.Lock(), threading.Event()
        self._clients: dict[str, Any] = {}

    def read_into(self, location: str, file: str, where: ByteRange, out: memoryview, seen: Seen | None = None) -> None:
        read, step = self._reading(location, file), self._part_bytes
        parts = [
            self._threads.submit(object(), partial(_fill, read, where.start + at, out[at : at + step]), (location,))
            for at in range(0, len(out), step)
        ]
        done, others = wait(parts, return_when=FIRST_EXCEPTION)
        read.given_up.set()
        wait([each for each in others if not each.cancel()])  # until then they write to `out`
        try:
            for each in done:
                each.result()
        except CancelledError:
            raise SourceError(f"{read.name}: the source was closed") from None
        if seen and parts:
            seen(out)

    def read(self, location: str, file: str, limit_bytes: int, *, known: str | None = None) -> SmallFile | None:
        read = self._reading(location, file)
        return read.retry(lambda came: _read_small(read, came, limit_bytes, known))

    def size(self, location: str, file: str) -> int:
        return self._head(location, file)["ContentLength"]

    def revision(self, location: str, file: str) -> str:
        return self._head(location, file)["ETag"]

    def _head(self, location: str, file: str) -> dict[str, Any]:
        read = self._reading(location, file)
        return read.retry(lambda _: read.client.head_object(**read.target))

    def upload(self, location: str, file: str, data: BinaryIO, progress: Callable[[int], None] | None = None) -> None:
        """Store an open file, a large one in parts. Blocks as long as it takes; `progress` gets bytes as they go."""
        with self._uploading(location, file) as (client, target):
            client.upload_fileobj(data, target["Bucket"], target["Key"], Callback=progress)

    def swap(self, location: str, file: str, data: bytes, known: str | None) -> str | None:
        """Replace a small object whose revision is `known`, None for one that is not there, and return its new revision.

        None where its revision is another, or another one is being stored at this moment; it is not replaced then.
        """
        from botocore.exceptions import ClientError

        with self._uploading(location, file) as (client, target):
            condition = {"IfMatch": known} if known else {"IfNoneMatch": "*"}
            try:
                return client.put_object(**target, Body=data, **condition)["ETag"]
            except ClientError as error:
                if _status_of(error) in (409, 412):
                    return None
                raise

    def delete(self, location: str, file: str) -> None:
        """Remove an object; no change if there is none."""
        with self._uploading(location, file) as (client, target):
            client.delete_object(**target)

    def close(self) -> None:
        with self._lock:
            self.closed.set()
            self._threads.close(0.0)
            while self._clients:
                self._clients.popitem()[1].close()

    def _reading(self, location: str, file: str) -> _Read:
        timeout_s = self.timeout_s
        # Retries of reads are ours, since botocore's end where a body begins; those of uploads are botocore's.
        client, target, name = self._client(
            "reads", location, file, max_pool_connections=self._connections + _OTHERS, connect_timeout=min(5.0, timeout_s),
            read_timeout=min(10.0, timeout_s), retries={"total_max_attempts": 1},
        )  # fmt: skip
        return _Read(name, client, target, self)

    @contextmanager
    def _uploading(self, location: str, file: str) -> Iterator[tuple[Any, dict[str, str]]]:
        """Yield a client, whose errors come out as ours, and what to tell it of a file."""
        retries = {"mode": "standard", "total_max_attempts": self.attempts}
        client, target, name = self._client("uploads", location, file, retries=retries)
        try:
            yield client, target
        except Exception as error:
            problem = _mapped(error, name)
            raise SourceError(f"{name}: {problem}") if isinstance(problem, _Transient) else problem from None

    def _client(self, purpose: str, location: str, file: str, **options: Any) -> tuple[Any, dict[str, str], str]:
        """Return the client for a purpose, made for its first call, a file's bucket and key, and its name in errors."""
        bucket, key = parse(location)
        with self._lock:
            if self.closed.is_set():
                raise SourceError(f"{location}/{file}: the source was closed")
            if purpose not in self._clients:
                self._clients[purpose] = make_client(*self._server, **options)
            client = self._clients[purpose]
        path = f"/{file}" if file else ""  # a location may be an object itself
        return client, {"Bucket": bucket, "Key": key + path}, f"{location}{path} at {client.meta.endpoint_url}"


def _fill(read: _Read, start: int, out: memoryview) -> None:
    """Fill `out` from `start` of an object, from there again where a connection broke."""
    size = len(out)

    def fill(came: Came) -> None:
        done, end = 0, start + size
        response = read.client.get_object(**read.target, Range=f"bytes={start}-{end - 1}")
        with response["Body"] as body:
            _check_range(response, start, end, read.name)
            while done < size and (data := body.read1(min(_STEP_BYTES, size - done))):
                came(len(data))
                out[done : done + len(data)] = data
                done += len(data)
        if done < size:
            raise _Transient("the answer ended early")

    read.retry(fill)


def _check_range(response: dict[str, Any], start: int, end: int, name: str) -> None:
    """Raise unless the answer is bytes `start` to `end`: `TruncatedPayload` where the object ends before."""
    status = response["ResponseMetadata"]["HTTPStatusCode"]
    match = _CONTENT_RANGE.fullmatch(response.get("ContentRange") or "")
    first, last, total = map(int, match.groups()) if match else (-1, -1, -1)
    if status != 206 or first != start or last != min(end, total) - 1:
        raise SourceError(
            f"{name}: asked for bytes {start} to {end}, the server answered {status} with other ones; it or a proxy "
            "before it does not support ranges"
        )
    if total < end:
        raise TruncatedPayload(f"{name} ends at byte {total}, {end - total} bytes early")


def _read_small(read: _Read, came: Came, limit_bytes: int, known: str | None) -> SmallFile | None:
    from botocore.exceptions import ClientError

    try:
        response = read.client.get_object(**read.target, **({"IfNoneMatch": known} if known else {}))
    except ClientError as error:
        if known and _status_of(error) == 304:
            return None
        raise
    data, length = bytearray(), response.get("ContentLength")
    with response["Body"] as body:
        most = limit_bytes + 1 if (length or 0) <= limit_bytes else 0
        while len(data) < most and (piece := body.read1(min(_STEP_BYTES, most - len(data)))):
            came(len(piece))
            data += piece
    if max(len(data), length or 0) > limit_bytes:
        raise SourceError(f"{read.name} has more than the {limit_bytes} bytes that it may have")
    if length is not None and len(data) != length:
        raise _Transient("the answer ended early")
    return SmallFile(bytes(data), response.get("ETag", ""))


class _Transient(SourceError):
    """A request failed in a way that may pass."""


class _Read:
    """One read: its deadline and its retries. It ends where too little comes within `timeout_s`, or once it is `given_up`."""

    def __init__(self, name: str, client: Any, target: dict[str, str], source: S3Source) -> None:
        self.name, self.client, self.target, self._source = name, client, target, source
        self.given_up = threading.Event()

    def retry(self, request: Callable[[Came], T]) -> T:
        """Return what `request` returns, repeating what may pass. Raises `SourceTimeout` at its deadline."""
        source, failures, came_bytes, since = self._source, 0, 0, time.monotonic()
        last: Exception | None = None

        def came(size_bytes: int) -> None:
            nonlocal came_bytes, since
            came_bytes += size_bytes
            if self.given_up.is_set() or source.closed.is_set():
                raise SourceError(f"{self.name}: the source was closed")
            if came_bytes >= _LEAST_BYTES:
                came_bytes, since = 0, time.monotonic()
            elif time.monotonic() > since + source.timeout_s:
                raise SourceTimeout(
                    f"{self.name} was not read: less than {_LEAST_BYTES >> 10} KiB came within s3_timeout_s, "
                    f"{source.timeout_s:g} s" + (f"; last: {last}" if last else "")
                )

        while True:
            came(0)
            try:
                return request(came)
            except Exception as error:
                last = _mapped(error, self.name)
                if not isinstance(last, _Transient):
                    raise last from None
            failures += 1
            if failures >= source.attempts:
                raise SourceError(f"{self.name}: {last}; tried {failures} times") from None
            longest_s = min(_LONGEST_BACKOFF_S, source.backoff_s * 2 ** (failures - 1))
            self.given_up.wait(longest_s * random.uniform(0.5, 1))


def _mapped(error: Exception, name: str) -> CartridgeError:
    """Return the error of ours for a foreign one, `_Transient` for one that may pass. It says no secret, as a foreign one may."""
    import http.client  # here, since every command would wait for it and what it imports

    import urllib3
    from botocore import exceptions as aws

    kind = type(error).__name__
    if isinstance(error, CartridgeError):
        return error
    if isinstance(error, aws.ClientError):
        return _answered(_status_of(error), error.response.get("Error", {}).get("Code", ""), name)
    closed = aws.ConnectionError | aws.ConnectionClosedError | aws.ReadTimeoutError | OSError
    cut = (
        aws.ResponseStreamingError | aws.IncompleteReadError | urllib3.exceptions.HTTPError | http.client.HTTPException
    )
    if isinstance(error, closed | cut) or kind == "ResponseParserError":
        return _Transient(f"the connection failed ({kind})")
    return SourceError(f"{name}: the request failed ({kind})")


def _answered(status: int, code: str, name: str) -> CartridgeError:
    """Return the error for an answer with this HTTP status and S3 error code."""
    code = code if re.fullmatch(r"[A-Za-z0-9.]{1,64}", code) else ""
    answer = f"the server answers {status} {code}".rstrip()
    if status == 404 and code != "NoSuchBucket":
        return SourceNotFound(f"{name}: {answer}; no such object")
    if status in (401, 403, 404):
        return SourceDenied(
            f"{name}: {answer}; these credentials may not use it, or it is not there and they may not list the bucket, or that is not there"
        )
    if status == 416:
        return TruncatedPayload(f"{name} ends before the bytes that were asked for")
    if status >= 500 or status in (408, 429) or code in ("RequestTimeout", "SlowDown"):
        return _Transient(answer)
    return SourceError(f"{name}: {answer}")


def _status_of(error: Any) -> int:
    """Return the HTTP status that a `ClientError` came with, 0 where there is none."""
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
