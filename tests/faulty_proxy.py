"""A faulty HTTP proxy before a real server: it forwards each GET and damages the answer as a test says."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What the real server answered."""

    status: int
    headers: dict[str, str]
    body: bytes


Fault = Callable[["Handler", Answer], None]
"""Sends something for an answer through a handler."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    """With the five of the library some of many connections at once wait for half a minute on a busy machine."""


class FaultyProxy:
    """Listens on `endpoint`, forwards to `port` of this machine. A context manager.

    `faults` are used up one for each answer, then `always`, then answers go through sound.
    """

    def __init__(self, port: int) -> None:
        self.faults: list[Fault] = []
        self.always: Fault | None = None
        self.requests: list[str] = []
        """Range of each request, "" for one without."""
        self.open_now = self.open_most = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"proxy": self, "port": port}))
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.always = None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def next_fault(self, wanted: str) -> Fault | None:
        with self._lock:
            self.requests.append(wanted)
            return self.faults.pop(0) if self.faults else self.always

    def count(self, change: int) -> None:
        with self._lock:
            self.open_now += change
            self.open_most = max(self.open_most, self.open_now)


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy
    port: int

    def handle(self) -> None:
        self.proxy.count(1)
        try:
            with suppress(OSError):
                super().handle()
        finally:
            self.proxy.count(-1)

    def _forward(self) -> None:
        fault = self.proxy.next_fault(self.headers.get("Range", ""))
        length = int(self.headers.get("Content-Length", 0))
        sent = self.rfile.read(length) if length else None
        try:
            upstream = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            try:
                # The Host header is signed, so it goes on as the client wrote it.
                upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    upstream.putheader(name, value)
                upstream.endheaders(sent)
                response = upstream.getresponse()
                answer = Answer(response.status, dict(response.getheaders()), response.read())
            finally:
                upstream.close()
        except (OSError, http.client.HTTPException):
            reset(self, Answer(0, {}, b""))
            return
        (fault or sound)(self, answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward

    def head(self, answer: Answer, **changes: Any) -> None:
        """Send status and headers; `changes` replaces headers, `_` standing for `-`, or removes them by None."""
        self.send_response_only(changes.pop("status", answer.status))
        replaced = {name.replace("_", "-").lower(): value for name, value in changes.items()}
        for name, value in {n.lower(): v for n, v in answer.headers.items() if n.lower() != "connection"}.items():
            value = replaced.pop(name, value)
            if value is not None:
                self.send_header(name, value)
        for name, value in replaced.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def sound(handler: Handler, answer: Answer) -> None:
    """Answer as the server did."""
    handler.head(answer)
    handler.wfile.write(answer.body)


def status(code: int, name: str = "InternalError") -> Fault:
    """Answer with an error instead."""

    def send(handler: Handler, answer: Answer) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{name}</Code><Message>m</Message></Error>".encode()
        handler.head(Answer(code, {"Content-Type": "application/xml", "Content-Length": str(len(body))}, b""))
        handler.wfile.write(body)

    return send


def trickle(every_s: float, count: int = 1) -> Fault:
    """Answer `count` bytes every `every_s`."""

    def send(handler: Handler, answer: Answer) -> None:
        handler.head(answer)
        for start in range(0, len(answer.body), count):
            if handler.proxy.always is None:
                break
            handler.wfile.write(answer.body[start : start + count])
            time.sleep(every_s)
        handler.close_connection = True

    return send


class Link:
    """Answer as the server did, over a link of `rate` bytes a second that all answers share."""

    def __init__(self, rate: int) -> None:
        self._rate, self._free_s, self._lock = rate, 0.0, threading.Lock()

    def __call__(self, handler: Handler, answer: Answer) -> None:
        handler.head(answer)
        for start in range(0, len(answer.body), 4096):
            piece = answer.body[start : start + 4096]
            with self._lock:
                self._free_s = max(self._free_s, time.monotonic()) + len(piece) / self._rate
                turn_s = self._free_s
            time.sleep(max(0.0, turn_s - time.monotonic()))
            handler.wfile.write(piece)


def silence(handler: Handler, answer: Answer) -> None:
    """Answer nothing at all for as long as the fault lasts."""
    while handler.proxy.always is not None:
        time.sleep(0.02)
    handler.close_connection = True


def endless(handler: Handler, answer: Answer) -> None:
    """Answer without a length, and without an end for as long as the fault lasts."""
    handler.head(answer, content_length=None, connection="close")
    while handler.proxy.always is not None:
        handler.wfile.write(bytes(1 << 16))
    handler.close_connection = True


def truncated(count: int) -> Fault:
    """Close the connection after `count` bytes of the body."""

    def send(handler: Handler, answer: Answer) -> None:
        handler.head(answer)
        handler.wfile.write(answer.body[:count])
        handler.close_connection = True

    return send


def cut(count: int) -> Fault:
    """Reset the connection after `count` bytes of the body."""

    def send(handler: Handler, answer: Answer) -> None:
        handler.head(answer)
        handler.wfile.write(answer.body[:count])
        time.sleep(0.05)  # a reset overtakes what was sent just before
        reset(handler, answer)

    return send


def reset(handler: Handler, answer: Answer) -> None:
    """Reset the connection at once."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    # Files made of the socket keep it open; the descriptor itself is closed, which sends the reset.
    handler.connection.shutdown(socket.SHUT_RD)
    socket.close(handler.connection.detach())


def flipped(handler: Handler, answer: Answer) -> None:
    """Answer with one bit of the body changed."""
    handler.head(answer)
    handler.wfile.write(bytes([answer.body[0] ^ 1]) + answer.body[1:])


def range_ignored(whole: bytes) -> Fault:
    """Answer the whole object with 200 whatever range was asked for."""

    def send(handler: Handler, answer: Answer) -> None:
        handler.head(answer, status=200, content_range=None, content_length=str(len(whole)))
        with suppress(OSError):
            handler.wfile.write(whole)

    return send


def another_range(handler: Handler, answer: Answer) -> None:
    """Say that the body is of bytes one further on."""
    numbers = [int(n) for n in re.findall("[0-9]+", answer.headers["Content-Range"])]
    handler.head(answer, content_range=f"bytes {numbers[0] + 1}-{numbers[1] + 1}/{numbers[2]}")
    handler.wfile.write(answer.body)
