"""Bench measures what each way means: answers that came otherwise are marked, errors counted, and it ends when it is told.

The server here is a mock without an engine, which streams as OpenAI's do; its answers are a hash of the tokens before
them. A real one is asked in `test_api.py`, and by `test_commands.py`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import Clock, run_threads, until

from lmcache_cartridge.cli.bench import room_bytes
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.make.bench.figures import Stats, rows
from lmcache_cartridge.make.bench.places import Place
from lmcache_cartridge.make.bench.remarks import remarks
from lmcache_cartridge.make.bench.run import Measured, Plan, run
from lmcache_cartridge.make.bench.watch import family, resident_bytes, serving, tier_counters
from lmcache_cartridge.make.bench.ways import WAYS, Answer, Asked
from lmcache_cartridge.make.machine import gpus
from lmcache_cartridge.make.server import Server

BLOCK, CHUNK, LONGEST = 16, 32, 600
POSITIONS = 70
"""Of the cartridge: two chunks and a tail."""
LENGTHS = ["--p", "64", "--c", "1,2", "--repeat", "2", "--tokens", "3"]
NAMED = ["--cartridge", "doc@1", *LENGTHS]
REQUESTS = {1: 2, 2: 4}
"""Of each way, by c."""


class Mock:
    """No engine: an HTTP server that streams answers and keeps a prefix cache, or does what `fault` says."""

    def __init__(self, *, cartridges: bool = True, tokenizes: bool = True, path: str = "/v1/completions") -> None:
        self.cartridges, self.tokenizes, self.path = cartridges, tokenizes, path
        self.fault, self.extras, self.tells, self.counts = "", True, True, False
        self.resident = False
        self.keys: set[str] = set()
        """`Authorization` of all that was asked."""
        self.events: list[str] = []
        """What was asked, in order: the way as the server sees it, evictions, errors."""
        self.held, self.free = threading.Event(), threading.Event()
        self._cache: set[Any] = set()
        self._lock = threading.Lock()
        mock = self

        class Handler(BaseHTTPRequestHandler):
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._send(*mock.get(self.path))

            def do_POST(self) -> None:
                mock.keys.add(self.headers.get("authorization") or "")
                size = int(self.headers.get("content-length") or 0)
                mock.post(self, json.loads(self.rfile.read(size) or b"{}"))

            def _send(self, status: int, body: Any) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode() if isinstance(body, str) else json.dumps(body).encode())

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads, block_on_close, request_queue_size = True, False, 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """The client went away."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.free.set()
        self._server.shutdown()
        self._server.server_close()

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "max_model_len": LONGEST}]}
        if path == "/metrics" and self.counts:
            return 200, f'lmcache_cartridge_hits_total{{tier="cpu",rank="0"}} {len(self.events)}.0\n'
        if path.startswith("/v1/cartridges") and self.cartridges:
            held = POSITIONS // CHUNK if self.resident and self.fault != "never resident" else 0
            tiers = {"cpu": {"resident_chunks": held, "chunks": POSITIONS // CHUNK}}
            row = {"id": "doc", "version": 1, "current": True, "kind": "prefill", "positions": POSITIONS,
                   "state": "resident" if held else "cold", "tiers": tiers}  # fmt: skip
            return 200, ({"data": [row]} if path == "/v1/cartridges" else row)
        return 404, {}

    def post(self, to: Any, body: dict[str, Any]) -> None:
        if to.path == "/v1/cartridges/doc@1/evict" and self.cartridges:
            allowed = self.fault != "no admin"
            self.events += ["evict"] * allowed
            self.resident = self.resident and not allowed
            to._send(200 if allowed else 403, {})
        elif to.path == "/v1/cartridges/tokens" and self.cartridges:
            known = POSITIONS - (self.fault == "tells a part of the document")
            to._send(200, {"token_ids": list(range(900, 900 + known))})
        elif to.path == "/tokenize" and self.tokenizes:
            to._send(200, {"tokens": [ord(c) for c in body["prompt"]]})
        elif to.path == self.path:
            if not self.extras and "ignore_eos" in body:
                to._send(400, {"error": "what is ignore_eos?"})
            else:
                self._answer(to, body)
        else:
            to._send(404, {})

    def _answer(self, to: Any, body: dict[str, Any]) -> None:
        own = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        ids = [ord(c) for c in own] if isinstance(own, str) else own
        with self._lock:
            cached = self._cached(ids, body.get("cache_salt"))
        way = "prefix" if cached else "dense"
        if body.get("cartridges"):
            cached, way = POSITIONS // CHUNK * CHUNK, "warm" if self.resident else "cold"
            ids, self.resident = [*range(900, 900 + POSITIONS), *ids], True
        if len(ids) > 1:
            self.events.append(way)
        if self.fault == "errors sometimes" and len(self.events) % 5 == 0:
            self.events.append("error")
            to._send(500, {"error": {"message": "EngineCore encountered an issue"}})
            return
        if self.fault == "holds" and len(self.events) > 20:
            self.held.set()
            self.free.wait()
        self._stream(to, body, ids, cached, way)

    def _cached(self, ids: list[int], salt: Any) -> int:
        """Return how many tokens a prefix cache has, and keep these in it."""
        if self.fault == "one cache for all":
            salt = None
        elif self.fault == "no prefix cache":
            return 0
        blocks = [(salt, tuple(ids[:end])) for end in range(BLOCK, len(ids) + 1, BLOCK)]
        known = next((n for n, block in enumerate(blocks) if block not in self._cache), len(blocks))
        self._cache.update(blocks)
        return known * BLOCK

    def _stream(self, to: Any, body: dict[str, Any], ids: list[int], cached: int, way: str) -> None:
        to.send_response(200)
        if way in ("warm", "cold"):
            injected = CHUNK if self.fault == "injects a part" else cached
            to.send_header("X-Cartridges", f"doc@1;positions={POSITIONS};injected={injected}")
        to.end_headers()
        chat, tokens = "messages" in body, body["max_tokens"]
        words = [hashlib.sha256(f"{ids}{n}".encode()).hexdigest()[:4] for n in range(tokens)]
        if self.fault == "other answers" and way in ("warm", "cold"):
            words = ["?"] * tokens
        if self.fault == "odd letters":
            words = ["a\u2028b\u2029c\u0085d"] * tokens
        if self.fault == "no tokens" and len(ids) > 1:
            words = []
        choices = [{"delta": {"content": word}} if chat else {"text": word} for word in words]
        for choice in ([{"delta": {"role": "assistant", "content": ""}}] if chat else []) + choices:
            event = {"choices": [choice]} | ({"error": None} if self.fault == "odd letters" else {})
            to.wfile.write(f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode())
        counted = len(ids) // 3 if self.fault == "truncates" else len(ids)
        usage: dict[str, Any] = {"prompt_tokens": counted, "completion_tokens": len(words)}
        if self.tells:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        to.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())


@pytest.fixture
def start() -> Iterator[Callable[..., Mock]]:
    """Start mocks; they end with the test."""
    started = []

    def begin(**options: Any) -> Mock:
        started.append(Mock(**options))
        return started[-1]

    yield begin
    for mock in started:
        mock.close()


class Ran:
    """What one run of the command left."""

    def __init__(self, status: int, out: Path) -> None:
        self.status, self.out = status, out
        self.found = json.loads((out / "bench.json").read_text())
        self.rows = {(row["p"], row["c"], row["way"]): row for row in self.found["rows"]}
        self.remarks = "\n".join(self.found["remarks"])

    def of(self, way: str) -> list[dict[str, Any]]:
        return [row for row in self.found["rows"] if row["way"] == way]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run the command against a mock, without pictures where it counts no hits."""

    def ran(mock: Mock, *options: str) -> Ran:
        out = tmp_path / "out"
        if not mock.counts:
            monkeypatch.setattr("lmcache_cartridge.make.bench.page.find_spec", lambda name: None)
        return Ran(main(["bench", "--url", mock.url, "--out", str(out), *(options or LENGTHS)]), out)

    return ran


def test_every_way_is_measured_as_it_is_meant(
    start: Callable[..., Mock], bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    mock = start()
    mock.counts = True
    ran = bench(mock, *NAMED)
    assert ran.status == 0, ran.remarks
    assert set(ran.rows) == {
        (p, c, way)
        for p, ways in ((64, ("dense", "prefix")), (POSITIONS, ("dense", "prefix", "warm", "cold")))
        for c in (1, 2)
        for way in ways
    }
    for (p, c, way), row in ran.rows.items():
        assert (row["requests"], row["errors"], row["not_so"]) == (REQUESTS[c], 0, 0), ran.remarks
        assert row["ttft_ms"]["number"] == REQUESTS[c] and row["total"]["number"] == 2
        assert row["cached"] == {"dense": 0, "prefix": p // BLOCK * BLOCK}.get(way, POSITIONS // CHUNK * CHUNK)
        assert row["equal"] == (None if way == "dense" else [REQUESTS[c], REQUESTS[c]])
    asked = [event for before, event in zip(mock.events, mock.events[1:], strict=False) if before == "evict"]
    assert asked == ["cold"] * 5, "evicted before the first of each batch, one of them to warm up"
    assert "tier cpu" in ran.remarks and "no file was dropped" in ran.remarks
    requests = ran.found["requests"]
    assert len(requests) == sum(row["requests"] for row in ran.found["rows"])
    assert all(0 < each["asked_s"] <= each["first_s"] <= each["last_s"] for each in requests)
    page = (ran.out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "<script" not in page and 'src="http' not in page
    assert (ran.out / "report.md").read_text().count("](") == 3
    assert all((ran.out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("ttft", "hits", "memory"))
    assert "deviation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "way", "told"),
    [
        ("one cache for all", "dense", "tokens came from a cache"),
        ("no prefix cache", "prefix", "of 70 tokens came from the cache"),
        ("injects a part", "warm", "32 of 70 positions were injected"),
        ("injects a part", "cold", "32 of 70 positions were injected"),
        ("never resident", "warm", "was not in memory before"),
        ("truncates", "dense", "fewer than the document's 70"),
        ("truncates", "prefix", "fewer than the document's 70"),
    ],
)
def test_an_answer_that_is_none_of_its_way_is_in_no_figure(
    start: Callable[..., Mock], bench: Any, fault: str, way: str, told: str
) -> None:
    mock = start()
    mock.fault = fault
    ran = bench(mock, "--c", "1", "--repeat", "3")
    assert ran.status == 1
    [row] = ran.of(way)
    # The first of all prompts is in no cache yet.
    assert row["not_so"] >= 2 and row["requests"] + row["not_so"] == 3
    assert told in " ".join(row["remarks"]) and told in ran.remarks
    assert row["ttft_ms"] is None or row["ttft_ms"]["number"] == row["requests"]
    assert "not so" in (ran.out / "report.html").read_text()


def test_other_answers_with_a_cartridge_are_counted(start: Callable[..., Mock], bench: Any) -> None:
    mock = start()
    mock.fault = "other answers"
    ran = bench(mock, "--c", "1", "--repeat", "3")
    assert [row["equal"] for row in ran.of("warm") + ran.of("cold") + ran.of("prefix")] == [[0, 3], [0, 3], [3, 3]]


def test_errors_are_counted_and_in_no_figure(start: Callable[..., Mock], bench: Any) -> None:
    mock = start()
    mock.fault = "errors sometimes"
    ran = bench(mock, *NAMED)
    assert ran.status == 1
    wrong = sum(row["errors"] for row in ran.found["rows"])
    assert 0 < wrong <= mock.events.count("error")
    assert wrong == sum(each["error"] is not None for each in ran.found["requests"])
    assert all(row["requests"] + row["errors"] == REQUESTS[row["c"]] for row in ran.found["rows"])
    assert "answered 500" in ran.remarks


def test_a_stream_without_tokens_is_an_error_and_nothing_measured(start: Callable[..., Mock], bench: Any) -> None:
    mock = start()
    mock.fault = "no tokens"
    ran = bench(mock, "--ways", "dense", *LENGTHS)
    assert ran.status == 2 and "ended without a token" in ran.remarks
    assert ran.of("dense")[0]["ttft_ms"] is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_any_server_is_measured_without_cartridges(start: Callable[..., Mock], bench: Any, path: str) -> None:
    mock = start(cartridges=False, tokenizes=False, path=path)
    mock.extras = False
    ran = bench(mock)
    assert ran.status == 0, ran.remarks
    assert [(row["way"], row["cached"] > 0) for row in ran.rows.values()] == [("dense", False), ("prefix", True)] * 2
    assert "warm: no cartridges: the server has no route /v1/cartridges" in ran.remarks
    assert "cold: no cartridges" in ran.remarks
    assert [row["equal"] for row in ran.rows.values()] == [None] * 4, "each way's documents begin otherwise"
    assert "not told of a server without cartridges" in (ran.out / "report.md").read_text()
    assert 48 <= ran.rows[64, 1, "dense"]["prompt_tokens"] - 40 <= 80, "64 tokens as its usage counts, and a question"


def test_a_server_that_tells_no_cached_tokens_is_said_to(start: Callable[..., Mock], bench: Any) -> None:
    mock = start(cartridges=False)
    mock.tells = False
    ran = bench(mock)
    assert ran.status == 0 and "does not tell cached tokens" in ran.remarks
    assert "not told" in (ran.out / "report.md").read_text()


def test_without_evicting_cold_is_left_out_and_said_why(start: Callable[..., Mock], bench: Any) -> None:
    mock = start()
    mock.fault = "no admin"
    ran = bench(mock, "--c", "1", "--repeat", "2")
    assert ran.status == 0 and not ran.of("cold") and ran.of("warm")
    assert "--set admin=true" in ran.remarks


def test_what_is_longer_than_the_context_is_left_out(start: Callable[..., Mock], bench: Any) -> None:
    ran = bench(start(), "--p", f"64,{LONGEST}", "--c", "1", "--repeat", "1")
    assert ran.status == 0 and {row["p"] for row in ran.found["rows"]} == {64}, "and no other p"
    assert "warm: p = 64: no cartridge of this length" in ran.remarks
    assert f"p = {LONGEST}: longer than the server's context of {LONGEST}" in ran.remarks


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "give --url URL"),
        (["--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--url", "URL", "--cartridge", "nobody"], "no route /v1/cartridges"),
        (["--url", "URL", "--model", "m"], "leave out --model"),
        (["--url", "URL", "--vllm=--x"], "leave out --url"),
        (["--url", "URL", "--repeat", "0"], "--repeat 0 must be above 0"),
        (["--url", "URL", "--budget-s", "nan"], "--budget-s nan must be above 0"),
        (["--url", "URL", "--chunk-size", "0"], "--chunk-size 0 must be at least 16"),
        (["--url", "http://a b:port"], "is no URL of a server"),
    ],
)
def test_what_cannot_be_measured_ends_with_2_and_a_line(
    start: Callable[..., Mock], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    url = start(cartridges=False).url
    given = [option.replace("URL", url) for option in options]
    assert main(["bench", "--out", str(tmp_path / "out"), *given]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_interrupted_it_reports_what_there_is(start: Callable[..., Mock], tmp_path: Path) -> None:
    mock = start()
    mock.fault = "holds"
    # A shell has what it runs in the background ignore this signal, and so has Python what it starts.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from lmcache_cartridge.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "bench", "--url", mock.url, "--out", "out", *NAMED]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert mock.held.wait(120), "it asked as often"
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=120)
        finally:
            process.kill()
    ran = Ran(process.returncode, tmp_path / "out")
    assert ran.status == 130, told
    assert "interrupted" in told and "Traceback" not in told
    assert "interrupted" in ran.found["stopped"]
    assert 0 < len(ran.found["requests"]) <= 20
    assert "Not whole: interrupted" in (ran.out / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--ways", ","], "names no way; there are dense"),
        (["--ways", "hot"], "there is no way hot"),
        (["--p", "abc"], "'abc' is no list of numbers from 1 on"),
        (["--c", "1,-2"], "'1,-2' is no list of numbers from 1 on"),
    ],
)
def test_what_is_no_list_is_said_so(capsys: pytest.CaptureFixture[str], options: list[str], told: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--url", "http://127.0.0.1:9", *options])
    assert ended.value.code == 2 and told in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_known_before_anything_is_asked(
    start: Callable[..., Mock], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mock, taken = start(), tmp_path / "taken"
    taken.write_text("mine")
    for out in (taken, taken / "below"):
        assert main(["bench", "--url", mock.url, "--out", str(out), *LENGTHS]) == 2
        assert f"--out {out} is no directory to write to" in capsys.readouterr().err
    assert not mock.events and taken.read_text() == "mine"


def test_a_given_p_means_the_cartridge_of_this_length(start: Callable[..., Mock], bench: Any) -> None:
    ran = bench(start(), "--p", f"64,{POSITIONS}", "--c", "1", "--repeat", "1")
    ways = {(row["p"], row["way"]) for row in ran.found["rows"]}
    assert ways == {(64, "dense"), (64, "prefix")} | {(POSITIONS, way) for way in WAYS}


@pytest.mark.parametrize(
    ("tokenizes", "fault", "told"),
    [
        (False, "", "does not answer /tokenize beside /v1/completions, so the document of doc@1"),
        (True, "tells a part of the document", f"gave {POSITIONS - 1} token ids of the {POSITIONS} of doc@1"),
    ],
)
def test_a_cartridge_whose_document_cannot_be_computed_is_no_measurement(
    start: Callable[..., Mock],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tokenizes: bool,
    fault: str,
    told: str,
) -> None:
    """Dense requests were a question alone, before."""
    mock = start(tokenizes=tokenizes)
    mock.fault = fault
    assert main(["bench", "--url", mock.url, "--out", str(tmp_path / "out"), "--c", "1"]) == 2
    assert told in capsys.readouterr().err


def test_answers_may_have_any_letter_and_no_error(start: Callable[..., Mock], bench: Any) -> None:
    """Line ends of Unicode are no end of an event, and `"error": null` is no error."""
    mock = start()
    mock.fault = "odd letters"
    ran = bench(mock, "--c", "1", "--repeat", "1")
    assert ran.status == 0, ran.remarks
    assert {row["equal"] and tuple(row["equal"]) for row in ran.found["rows"]} == {None, (1, 1)}


def test_no_secret_is_shown(
    start: Callable[..., Mock], bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mock = start()
    secret = f"user:pass-word@127.0.0.1:{mock.port}"
    monkeypatch.setenv("VLLM_API_KEY", "sk-bearer\n")
    ran = bench(mock, "--url", f"http://{secret}/v1", "--c", "1", "--repeat", "1")
    assert ran.status == 0 and ran.found["server"]["url"] == mock.url
    assert f"Basic {base64.b64encode(b'user:pass-word').decode()}" in mock.keys, "it is sent"
    shown = [file.read_text() for file in ran.out.iterdir() if file.suffix != ".png"]
    mock.path = "/nowhere"
    for url in (f"http://{secret}", secret, "http://user:pass-word@127.0.0.1:9", "http://user:pass-word/x@127.0.0.1:9"):
        assert main(["bench", "--url", url, "--out", str(ran.out / "other")]) == 2
    monkeypatch.setenv("VLLM_API_KEY", "sk-bearer\n\u2028x")
    assert main(["bench", "--url", mock.url, "--out", str(ran.out / "other")]) == 2
    told = capsys.readouterr()
    assert told.err.count("lmcache-cartridge: ") == 5 and "characters that no HTTP header can have" in told.err
    for text in (*shown, told.out, told.err):
        assert "pass-word" not in text and "sk-bearer" not in text


class Keeps(BaseHTTPRequestHandler):
    """A server that keeps connections and counts them; it answers when as many requests are there as `gate` lets by."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    connections: list[Any]
    gate: threading.Barrier

    def setup(self) -> None:
        self.connections.append(self)
        super().setup()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.gate.wait(60)
        body = b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def test_no_request_waits_for_a_connection_of_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for one of 100, nor to connect again: httpx itself keeps 20, for five seconds, and none that was not read."""
    count, clock = 110, time.monotonic
    handler = type("Handler", (Keeps,), {"connections": [], "gate": threading.Barrier(count)})

    class Web(ThreadingHTTPServer):
        daemon_threads, block_on_close, request_queue_size = True, False, 256

    with Web(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, args=(0.05,), daemon=True).start()
        with Server(f"http://127.0.0.1:{web.server_port}", "m", 50.0) as server:
            run_threads(count, lambda number: assert_none(server.events("/v1/completions", b"{}")), timeout_s=60)
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 600)
            run_threads(count, lambda number: assert_none(server.events("/v1/completions", b"{}")), timeout_s=60)
        assert len(handler.connections) == count
        web.shutdown()


def assert_none(events: Any) -> None:
    assert list(events) == []


def test_only_tokens_are_waited_for_an_hour(
    start: Callable[..., Mock], bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: dict[str, set[float]] = {}
    send = httpx.HTTPTransport.handle_request

    def noted(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        waits.setdefault(request.url.path, set()).add(request.extensions["timeout"]["read"])
        return send(transport, request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", noted)
    bench(start(), "--c", "1", "--repeat", "1")
    assert waits.pop("/v1/completions") == {3600}
    assert {"/v1/models", "/metrics", "/tokenize", "/v1/cartridges/doc@1/evict"} <= set(waits)
    assert set().union(*waits.values()) == {60}


class Slow:
    """Ways whose third batch uses up the budget and never ends."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.sent, self.free = clock, 0, threading.Event()

    def without(self, way: str, place: Place) -> None:
        return None

    warm_up = prepare = without

    def asked(self, place: Place, answer: Answer) -> Asked:
        return Asked(answer, b"", 0, None)

    def send(self, asked: Asked) -> Answer:
        self.sent += 1
        if self.sent > 3:  # the first one warms up
            self.clock.now += 100
            self.free.wait()
        return asked.answer._replace(first_s=1.0, last_s=1.0)


def test_out_of_time_it_returns_what_there_is() -> None:
    clock = Clock()
    slow: Any = Slow(clock)
    found = run(Plan([Place(8, (1,))], [1], 9, ("dense",), budget_s=50), slow, clock=clock)
    slow.free.set()
    assert len(found.answers) == 2 and "budget of 50 s" in (found.stopped or "") and not found.was_interrupted


class SlowToPrepare(Slow):
    """Ways that are not ready before the budget is used up."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.is_ready = False

    def prepare(self, way: str, place: Place) -> None:
        self.clock.now += 100
        self.free.wait(20)
        self.is_ready = True


def test_preparing_is_within_the_budget() -> None:
    clock = Clock()
    slow: Any = SlowToPrepare(clock)
    found = run(Plan([Place(8, (1,))], [1], 9, ("prefix",), budget_s=50), slow, clock=clock)
    assert not slow.is_ready and "budget of 50 s" in (found.stopped or "")
    slow.free.set()


def test_files_are_said_to_be_dropped_where_they_were() -> None:
    def told(*places: Place) -> str:
        answers = Measured(0.0)
        answers.answers = [Answer("cold", place.p, 1, 0, 1, error="x") for place in places]
        plan = Plan(places, [1], 1)
        return remarks(plan, rows(answers, {}), {}, ())[-1]

    made, other, plain = Place(64, (1,), "made@1", files=(Path("x"),)), Place(128, (1,), "doc@1"), Place(256, (1,))
    assert "their files were dropped" in told(made)
    assert "no file was dropped" in told(other)
    assert "the files of p = 64 were dropped from the system's page cache, those of p = 128 were not" in told(
        made, other
    )
    plan = Plan([made, plain], [1], 1)
    cold = Measured(0.0)
    cold.answers = [Answer("cold", 64, 1, 0, 1, error="x"), Answer("dense", 256, 1, 0, 1, error="x")]
    assert "their files were dropped" in remarks(plan, rows(cold, {}), {}, ())[-1], "the other one is not asked cold"


def test_room_is_for_what_the_model_can_have() -> None:
    token = 1 << 20
    assert room_bytes([256, 32_768], 4096, token) == 3 * 4096 * token
    assert room_bytes([256, 2048], 4096, token) == 3 * 2048 * token
    assert room_bytes([2048], None, token) == 3 * 2048 * token
    assert room_bytes([16], 4096, 1) == 1 << 30


def test_statistics_are_those_of_the_textbook() -> None:
    assert Stats.of([]) is None
    assert Stats.of([3.0]) == (1, 3, 3, 3, 3, 3, 0)
    found = Stats.of([float(n) for n in range(21, 0, -1)])
    assert found is not None
    assert found[:6] == (21, 11, 11, 20, 1, 21) and round(found.deviation**2, 6) == 38.5


def test_counters_of_a_tier_are_summed_over_ranks() -> None:
    lines = [f'lmcache_cartridge_{name}_total{{tier="cpu",rank="{rank}"}} {rank + 2}' for name in ("hits", "reads") for rank in (0, 1)]  # fmt: skip
    assert tier_counters("\n".join(lines) + "\n") == {"cpu": {"hits": 5.0}}
    assert tier_counters("<html>") == {}


def test_memory_is_that_of_the_processes_behind_a_port(start: Callable[..., Mock]) -> None:
    mock = start()
    until(lambda: os.getpid() in serving(mock.port))
    with subprocess.Popen(["sleep", "60"]) as child:
        mine = family({os.getpid()})
        child.kill()
    assert {os.getpid(), child.pid} <= mine and os.getppid() not in mine
    assert resident_bytes({os.getpid()}) > 1 << 20


def test_gpus_are_read_as_nvidia_smi_tells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus("memory.used") == []
    told = tmp_path / "nvidia-smi"
    told.write_text(
        '#!/bin/sh\n[ "$1" = --query-gpu=name,memory.used ] && echo "NVIDIA H100, 512" && echo "NVIDIA H100, 7"\n'
    )
    told.chmod(0o755)
    assert gpus("name", "memory.used") == [["NVIDIA H100", "512"], ["NVIDIA H100", "7"]]
    assert gpus("temperature") == []
