"""S3Source: artefacts in S3 buckets, read by ranged GETs in parallel, retried, given up where nothing comes."""

from __future__ import annotations

import math
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
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

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_STEP_BYTES = 1 << 20
"""Most that is taken from a connection at once; between two steps a read notices that it was given up. Measured: 1.6 GB/s,
1.3 with a quarter of it, 1.4 with four times as much, from a server on the same machine."""
_LEAST_BYTES = 1 << 16
"""What must come within a timeout, so that a server that sends a byte now and then is waited for no longer than that."""
_LONGEST_BACKOFF_S = 5.0


class S3Source:
    """Objects of any S3 server. What reads is described by `ByteSource`.

    Credentials are found as every AWS tool finds them: environment, profile, role. At most `connections` requests run
    at once, on as many threads, however many callers wait, and the client keeps as many connections, so that a request
    neither waits for one nor has to open it. A read that was given up leaves its threads at their next byte. Client and
    threads are made for the first call, which raises `SourceError` where boto3 is not installed.
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
        self.threads, self.came_bytes = Workers("s3", connections, begin=use_all_cores, stalled_s=math.inf), 0
        self.counting, self._lock, self._closed = threading.Lock(), threading.Lock(), False
        self._clients: dict[str, Any] = {}

    def read_into(self, location: str, file: str, where: ByteRange, out: memoryview, seen: Seen | None = None) -> None:
        if not len(out):
            return
        call, step = self._call(location, file), self._part_bytes
        call.run([partial(_fill, call, where.start + at, out[at : at + step]) for at in range(0, len(out), step)])
        if seen:
            seen(out)

    def read(self, location: str, file: str, limit_bytes: int, *, known: str | None = None) -> SmallFile | None:
        return self._ask(location, file, partial(_read_small, limit_bytes=limit_bytes, known=known))

    def size(self, location: str, file: str) -> int:
        return self._ask(location, file, _head)["ContentLength"]

    def revision(self, location: str, file: str) -> str:
        return self._ask(location, file, _head)["ETag"]

    def _ask(self, location: str, file: str, request: Callable[[_Call], T]) -> T:
        call = self._call(location, file)
        return call.run([lambda: call.retry(lambda: request(call))])[0]

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
            if not self._closed:
                self._closed = True
                self.threads.close(0.0)
                for client in self._clients.values():
                    client.close()

    def _call(self, location: str, file: str) -> _Call:
        timeout_s = self.timeout_s
        # Retries of reads are ours, since botocore's end where a body begins; those of uploads are botocore's.
        client, target, name = self._client(
            "reads", location, file, max_pool_connections=self._connections, connect_timeout=min(5.0, timeout_s),
            read_timeout=min(10.0, timeout_s), retries={"total_max_attempts": 1},
        )  # fmt: skip
        return _Call(name, client, target, self)

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
            if self._closed:
                raise SourceError(f"{location}/{file}: the source was closed")
            if purpose not in self._clients:
                self._clients[purpose] = make_client(*self._server, **options)
            client = self._clients[purpose]
        path = f"/{file}" if file else ""  # a location may be an object itself
        return client, {"Bucket": bucket, "Key": key + path}, f"{location}{path} at {client.meta.endpoint_url}"


def _head(call: _Call) -> dict[str, Any]:
    return call.client.head_object(**call.target)


def _fill(call: _Call, start: int, out: memoryview) -> None:
    """Fill `out` from `start` of an object, from there again where a connection broke."""
    size = len(out)

    def fill() -> None:
        done, end = 0, start + size
        response = call.client.get_object(**call.target, Range=f"bytes={start}-{end - 1}")
        with response["Body"] as body:
            _check_range(response, start, end, call.name)
            while done < size and (data := body.read1(min(_STEP_BYTES, size - done))):
                call.write(out[done : done + len(data)], data)
                done += len(data)
        if done < size:
            raise _Transient("the answer ended early")

    call.retry(fill)


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


def _read_small(call: _Call, limit_bytes: int, known: str | None) -> SmallFile | None:
    from botocore.exceptions import ClientError

    try:
        response = call.client.get_object(**call.target, **({"IfNoneMatch": known} if known else {}))
    except ClientError as error:
        if known and _status_of(error) == 304:
            return None
        raise
    data, length = bytearray(), response.get("ContentLength")
    with response["Body"] as body:
        most = limit_bytes + 1 if (length or 0) <= limit_bytes else 0
        while len(data) < most and (piece := body.read1(min(_STEP_BYTES, most - len(data)))):
            call.came(len(piece))
            data += piece
    if max(len(data), length or 0) > limit_bytes:
        raise SourceError(f"{call.name} has more than the {limit_bytes} bytes that it may have")
    if length is not None and len(data) != length:
        raise _Transient("the answer ended early")
    return SmallFile(bytes(data), response.get("ETag", ""))


class _Transient(SourceError):
    """A request failed in a way that may pass."""


class _CallEnded(CartridgeError):
    """The call that a thread works for has ended."""


class _Call:
    """One read: its deadline, its retries, and that its buffers are not written to after it ended.

    It ends where too little comes within `timeout_s`, so one over a slow link that it shares takes as long as that needs.
    Until the first of its tasks has a thread it waits for others, as long as they go on; the next follow that one.
    """

    def __init__(self, name: str, client: Any, target: dict[str, str], source: S3Source) -> None:
        self.name, self.client, self.target, self._source = name, client, target, source
        self._came_bytes = 0  # as the source's, until a task has a thread
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._last: Exception | None = None

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run tasks on the threads and return their results; raise the first error, or `SourceTimeout`. Once only."""
        futures = [self._source.threads.submit(object(), partial(self._work, task)) for task in tasks]
        try:
            while True:
                before = self._came_bytes or self._source.came_bytes
                done, waiting = wait(futures, self._source.timeout_s, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if not waiting:
                    return [future.result() for future in futures]
                if (self._came_bytes or self._source.came_bytes) < before + _LEAST_BYTES:
                    raise SourceTimeout(
                        f"{self.name} was not read: less than {_LEAST_BYTES >> 10} KiB came within s3_timeout_s, "
                        f"{self._source.timeout_s:g} s" + (f"; last: {self._last}" if self._last else "")
                    )
        except CancelledError:
            raise SourceError(f"{self.name}: the source was closed") from None
        finally:
            with self._lock:
                self._ended.set()
            for future in futures:
                future.cancel()

    def _work(self, task: Callable[[], T]) -> T:
        self._came_bytes = self._came_bytes or self._source.came_bytes
        self.came(_LEAST_BYTES)  # so much is a task worth that begins or ends
        result = task()
        self.came(_LEAST_BYTES)
        return result

    def came(self, size_bytes: int) -> None:
        """Note that bytes came. Raises `_CallEnded` if the call has ended."""
        if self._ended.is_set():
            raise _CallEnded
        with self._source.counting:
            self._came_bytes += size_bytes
            self._source.came_bytes += size_bytes

    def write(self, out: memoryview, data: bytes) -> None:
        """Copy to a part of the caller's buffer, which is the caller's alone once the call has ended."""
        with self._lock:
            self.came(len(data))
            out[:] = data

    def retry(self, request: Callable[[], T]) -> T:
        """Return what `request` returns, repeating what may pass."""
        failures = 0
        while True:
            self.came(0)
            try:
                return request()
            except _CallEnded:
                raise
            except Exception as error:
                problem = _mapped(error, self.name)
                if not isinstance(problem, _Transient):
                    raise problem from None
                failures += 1
                self._last = problem
                if failures >= self._source.attempts:
                    raise SourceError(f"{self.name}: {problem}; tried {failures} times") from None
            longest_s = min(_LONGEST_BACKOFF_S, self._source.backoff_s * 2 ** (failures - 1))
            self._ended.wait(longest_s * random.uniform(0.5, 1))


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
    without = aws.NoCredentialsError | aws.PartialCredentialsError | aws.CredentialRetrievalError
    if isinstance(error, without | aws.TokenRetrievalError | aws.SSOError):
        return SourceDenied(
            f"{name}: no credentials ({kind}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role"
        )
    if isinstance(error, aws.SSLError):
        return SourceError(f"{name}: TLS failed; is the certificate one that AWS_CA_BUNDLE or the system knows?")
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
    if status == 404:
        return SourceNotFound(f"{name}: {answer}; no such object")
    if status in (401, 403):
        return SourceDenied(
            f"{name}: {answer}; these credentials may not use it, or it is not there and they may not list the bucket"
        )
    if status == 416:
        return TruncatedPayload(f"{name} ends before the bytes that were asked for")
    if status >= 500 or status in (408, 429) or code in ("RequestTimeout", "SlowDown"):
        return _Transient(answer)
    return SourceError(f"{name}: {answer}")


def _status_of(error: Any) -> int:
    """Return the HTTP status that a `ClientError` came with, 0 where there is none."""
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
