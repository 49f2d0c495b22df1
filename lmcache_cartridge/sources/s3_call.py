"""Call: one call to S3, what ends it when nothing comes, its retries, and what foreign errors mean for them."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from functools import partial
from typing import TypeVar

from ..errors import CartridgeError, SourceDenied, SourceError, SourceNotFound, SourceTimeout, TruncatedPayload
from .workers import Workers

T = TypeVar("T")

_LONGEST_BACKOFF_S = 5.0
_LEAST_BYTES = 1 << 16
"""What must come within a timeout, so that a server that sends a byte now and then is waited for no longer than that."""


class Broken(SourceError):
    """A request failed in a way that may pass."""


class GivenUp(Exception):
    """The call that a thread works for has ended."""


class Progress:
    """When a read last went on: `_LEAST_BYTES` came, or it is done. Safe from any thread."""

    def __init__(self) -> None:
        self.at_s = time.monotonic()
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, size_bytes: int = _LEAST_BYTES) -> None:
        """Note that so many bytes came."""
        with self._lock:
            self._bytes += size_bytes
            if self._bytes >= _LEAST_BYTES:
                self.at_s, self._bytes = time.monotonic(), 0


class Call:
    """One call, a context manager: its end when nothing comes, its retries, and that nothing is written for it afterwards.

    It ends `timeout_s` after it last went on, so one over a slow link that it shares takes as long as that needs. While
    none of its tasks has a thread it waits for others, as long as they go on.
    """

    def __init__(
        self, name: str, workers: Workers, timeout_s: float, attempts: int, backoff_s: float, others: Progress
    ) -> None:
        """`others` is the progress of all calls that share `workers`."""
        self.name = name
        self._workers, self._attempts, self._backoff_s = workers, attempts, backoff_s
        self._timeout_s, self._own, self._others = timeout_s, Progress(), others
        self._running = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._last: Exception | None = None

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._ended.set()

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run tasks on the workers and return their results; raise the first error, or `SourceTimeout`."""
        futures = [self._workers.submit(partial(self._work, task)) for task in tasks]
        try:
            while True:
                done, waiting = wait(futures, max(0.0, self._left_s()), FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if not waiting:
                    return [future.result() for future in futures]
                if self._left_s() <= 0:
                    last = f"; last: {self._last}" if self._last else ""
                    raise SourceTimeout(
                        f"{self.name} was not read: less than {_LEAST_BYTES >> 10} KiB came within s3_timeout_s, "
                        f"{self._timeout_s:g} s{last}"
                    )
        finally:
            for future in futures:
                future.cancel()

    def _work(self, task: Callable[[], T]) -> T:
        with self._lock:
            self._running += 1
        self._own.add()
        try:
            result = task()
        finally:
            with self._lock:
                self._running -= 1
        self._own.add()
        self._others.add()
        return result

    def _left_s(self) -> float:
        with self._lock:
            at_s = self._own.at_s if self._running else max(self._own.at_s, self._others.at_s)
        return at_s + self._timeout_s - time.monotonic()

    def came(self, size_bytes: int) -> None:
        """Note that bytes came. Raises `GivenUp` if the call has ended."""
        self.check()
        self._own.add(size_bytes)
        self._others.add(size_bytes)

    def write(self, outs: Sequence[memoryview], start: int, data: bytes) -> None:
        """Copy to `start` of the caller's buffers in a row, which stay the caller's alone once the call has ended."""
        self.came(len(data))
        rest = memoryview(data)
        with self._lock:
            self.check()
            for out in outs:
                part = rest[: max(0, len(out) - start)]
                out[start : start + len(part)] = part
                rest, start = rest[len(part) :], max(0, start - len(out))

    def check(self) -> None:
        """Raise `GivenUp` if the call has ended."""
        if self._ended.is_set():
            raise GivenUp

    def retry(self, request: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """Return what `request` returns, repeating what may pass; one that made `progress` counts as a new one."""
        failures, before = 0, progress()
        while True:
            self.check()
            try:
                return request()
            except GivenUp:
                raise
            except Exception as error:
                problem = _mapped(error, self.name)
                if not isinstance(problem, Broken):
                    raise problem from cause_of(error)
                failures = failures + 1 if progress() == before else 1
                before = progress()
                self._last = problem
                if failures >= self._attempts:
                    raise SourceError(f"{self.name}: {problem}; tried {failures} times") from cause_of(error)
            longest = min(_LONGEST_BACKOFF_S, self._backoff_s * 2 ** (failures - 1))
            self._ended.wait(longest * random.uniform(0.5, 1))


def status_of(error: Exception) -> int:
    """Return the HTTP status that an error of the client came with, 0 where there is none."""
    response = getattr(error, "response", None)
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) if isinstance(response, dict) else 0


def _mapped(error: Exception, name: str) -> CartridgeError:
    """Return the error of ours for a foreign one, `Broken` for one that may pass. None says a secret."""
    import http.client  # here, since every command would wait for it and what it imports

    import urllib3
    from botocore import exceptions as aws

    kind = type(error).__name__
    if isinstance(error, CartridgeError):
        return error
    if isinstance(error, aws.ClientError):
        return _answered(status_of(error), error.response.get("Error", {}).get("Code", ""), name)
    without = (
        aws.NoCredentialsError, aws.PartialCredentialsError, aws.CredentialRetrievalError, aws.TokenRetrievalError,
        aws.SSOError,
    )  # fmt: skip
    if isinstance(error, without):
        return SourceDenied(
            f"{name}: no credentials ({kind}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role"
        )
    if isinstance(error, aws.SSLError):
        return SourceError(f"{name}: TLS failed; is the certificate one that AWS_CA_BUNDLE or the system knows?")
    passing = (
        aws.ConnectionError, aws.ConnectionClosedError, aws.EndpointConnectionError, aws.ReadTimeoutError,
        aws.ResponseStreamingError, aws.IncompleteReadError, urllib3.exceptions.HTTPError, http.client.HTTPException,
        OSError,
    )  # fmt: skip
    if isinstance(error, passing) or kind == "ResponseParserError":
        return Broken(f"the connection failed ({kind})")
    return SourceError(f"{name}: the request failed ({kind})")


def _answered(status: int, code: str, name: str) -> CartridgeError:
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
        return Broken(answer)
    return SourceError(f"{name}: {answer}")


def final(error: Exception, name: str) -> CartridgeError:
    """Return the error of ours for a foreign one that no retry follows."""
    problem = _mapped(error, name)
    return SourceError(f"{name}: {problem}") if isinstance(problem, Broken) else problem


def cause_of(error: Exception) -> Exception | None:
    """Return the error to show as the cause; an unknown one may quote request headers, so it is not shown."""
    from botocore import exceptions as aws

    shown = (aws.ClientError, aws.ConnectionError, aws.ConnectionClosedError, aws.ReadTimeoutError, OSError)
    return error if isinstance(error, shown) and not isinstance(error, CartridgeError) else None
