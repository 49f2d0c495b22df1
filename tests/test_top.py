"""Top: what it reads from a server, the rates it computes, what it draws on 80 columns, and how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from starlette.responses import Response
from watching import CHUNK_BYTES, CPU_CHUNKS, DISK_CHUNKS, RANKS, Watched, listening, serving

from lmcache_cartridge.cli import top
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.errors import CartridgeError

ROOT = Path(__file__).parents[1]
KEY = "sk-test"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    watched = Watched(tmp_path_factory.mktemp("home"), device=False)
    watched.look_up(watched.make("a"), "a")
    watched.make("cold", seed=1)
    yield watched
    watched.close()


@pytest.fixture(scope="module")
def url(watched: Watched) -> Iterator[str]:
    with serving(watched, KEY) as url:
        yield url


def _drawn(summary: dict[str, Any], url: str = "http://localhost:8000", *, width: int = 80, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(top.draw(url, summary, **options))
    return console.file.getvalue()


def test_a_reading_sums_ranks_but_not_the_disk_they_share(watched: Watched, url: str) -> None:
    summary = top.summarise(top.read(url))
    assert summary["ranks"] == RANKS
    cpu, disk = summary["tiers"]["cpu"], summary["tiers"]["disk"]
    assert cpu["misses"] == {"total": 4 * RANKS, "per_s": None}
    assert cpu["budget_bytes"] == RANKS * CPU_CHUNKS * CHUNK_BYTES
    assert cpu["resident_bytes"] >= RANKS * 4 * CHUNK_BYTES
    assert disk["budget_bytes"] == DISK_CHUNKS * CHUNK_BYTES
    assert list(summary["tiers"]) == ["cpu", "disk", "source"], "fastest first, and no tier that there is not"
    states = {row["id"]: row["state"] for row in summary["cartridges"]}
    assert states == {"a": "resident", "cold": "cold"}


def test_rates_are_what_happened_between_two_readings(watched: Watched, url: str) -> None:
    made = watched.make("rated", seed=7)
    watched.look_up(made, "rated")
    clock = iter([100.0, 104.0, 104.0])
    before = top.read(url, clock=lambda: next(clock))
    watched.look_up(made, "rated")
    watched.requests.injected(400)
    now = top.read(url, clock=lambda: next(clock))
    summary = top.summarise(now, before)
    assert summary["tiers"]["cpu"]["hits"]["per_s"] == 4 * RANKS / 4
    assert summary["tiers"]["cpu"]["misses"]["per_s"] == 0
    assert summary["positions"]["per_s"] == 100
    assert summary["tiers"]["source"]["read_bytes"]["per_s"] == 0
    same = top.summarise(top.read(url, clock=lambda: next(clock)), now)
    assert same["tiers"]["cpu"]["hits"]["per_s"] is None, "no time has passed"


def test_a_server_that_was_started_again_has_no_rates_below_zero(url: str) -> None:
    before = top.read(url)
    fewer = {name: [(labels, value / 2) for labels, value in found] for name, found in before.samples.items()}
    summary = top.summarise(before._replace(samples=fewer, at_s=before.at_s + 1), before)
    assert summary["tiers"]["cpu"]["misses"]["per_s"] is None


def test_what_is_drawn_fits_eighty_columns(watched: Watched, url: str) -> None:
    reading = top.read(url)
    long = [
        row | {"id": "a-very-long-name-" * 8, "state": "quarantined", "version": 10**6} for row in reading.cartridges
    ]
    loading = {"resident_chunks": 3, "chunks": 4, "eta_s": 12.5, "failing": False}
    long += [row | {"id": "[bold]x[/nope]", "state": "loading", "loading": loading} for row in reading.cartridges]
    huge = {name: [(labels, value * 2**36) for labels, value in found] for name, found in reading.samples.items()}
    for samples in (reading.samples, huge):
        before = reading._replace(samples={}, at_s=reading.at_s - 1)
        summary = top.summarise(reading._replace(samples=samples, cartridges=long), before)
        text = _drawn(summary, "https://" + "very-long-host." * 9 + "example.org", width=80)
        assert max(map(len, text.splitlines())) <= 80
        assert "quarantined" in text
        assert "75 %" in text and "[bold]x[/nope]@1" in text
        for line in text.splitlines():
            if line.split()[:1] in (["tier"], ["cpu"], ["disk"], ["source"], ["[bold]x[/nope]@1"]):
                assert "…" not in line, "a number that is cut is a wrong number"
    assert _drawn(top.summarise(reading)).count("\n") < 24


def test_it_shows_totals_first_and_rates_then(watched: Watched, url: str) -> None:
    first = top.read(url)
    assert "hits/s" not in _drawn(top.summarise(first))
    assert "hits/s" in _drawn(top.summarise(first._replace(at_s=first.at_s + 1), first))


def test_old_numbers_and_a_lost_server_are_said(url: str) -> None:
    reading = top.read(url)
    old = reading.samples | {"status_age_seconds": [({}, 63.0)]}
    assert "63 s old" in _drawn(top.summarise(reading._replace(samples=old)))
    assert "s old" not in _drawn(top.summarise(reading))
    assert "gone away" in _drawn(top.summarise(reading), problem="gone away")


# The command.


def test_once_as_json_is_one_object(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url + "/", "--once", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {row["id"] for row in shown["cartridges"]} >= {"a", "cold"}


@pytest.mark.parametrize("key", ["", "wrong"])
def test_without_the_key_the_tiers_are_shown_and_the_key_is_asked_for(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    assert main(["top", "--url", url, "--once"]) == 0
    out = capsys.readouterr().out
    assert "$VLLM_API_KEY" in out
    assert "cpu" in out and "a@1" not in out


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(200, b"# TYPE x gauge\nx 1\n", "serves no cartridges"), (200, b"<html>hello there</html>", "is it a vLLM server"),
     (200, b"\xff\xfe", "is it a vLLM server"), (404, b"", "404"), (500, b"", "500"), (200, b"", "serves no cartridges"),
     (401, b"", "401")],
)  # fmt: skip
def test_what_is_no_cartridge_server_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], status: int, body: bytes, said: str
) -> None:
    with listening(Response(body, status)) as url:  # an ASGI app of its own
        assert main(["top", "--url", url, "--once"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error and url in error


@pytest.mark.parametrize(
    ("url", "why"),
    [("http://127.0.0.1:9", "[Errno 111] Connection refused"), ("localhost:8000", "protocol"), ("ftp://x", "protocol"),
     ("http://", "does not answer"), ("http://x:y", "is no URL of a server"), ("file:///etc/passwd", "protocol")],
)  # fmt: skip
@pytest.mark.parametrize("once", [[], ["--once"]])
def test_a_url_where_no_server_answers_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], url: str, why: str, once: list[str]
) -> None:
    assert main(["top", "--url", url, *once]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ("/metrics does not answer: " in error or "http://x:y is" in error) and why in error, error


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "x", "1e9"])
def test_an_interval_that_makes_no_sense_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--interval", interval]) == 2
    assert "--interval" in capsys.readouterr().err


def test_a_server_that_goes_is_said_and_asked_again(watched: Watched, url: str) -> None:
    with serving(watched) as other:
        views = top.views(other, 0.01, top.read(other))
        assert next(views)[1] is None
        assert next(views)[1] is None
    summary, problem = next(views)
    assert "does not answer" in problem
    assert summary["cartridges"], "the last numbers stay on the screen"
    with pytest.raises(CartridgeError, match="does not answer"):
        top.read(other)


@contextmanager
def _running(url: str, *arguments: str, tty: bool) -> Iterator[tuple[subprocess.Popen, int]]:
    """Run the command on a terminal of its own, or into a pipe; lend the process and what to read from."""
    command = [sys.executable, "-m", "lmcache_cartridge.cli.main", "top", "--url", url, "--interval", "0.1", *arguments]
    terminal = {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    environment = os.environ | terminal | {"PYTHONPATH": str(ROOT), "VLLM_API_KEY": KEY}
    environment.pop("PYTHONUNBUFFERED", None)  # as users have it
    reader, writer = os.openpty() if tty else os.pipe()
    with subprocess.Popen(
        command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, preexec_fn=_interruptible
    ) as process:
        os.close(writer)
        try:
            yield process, reader
        finally:
            process.kill()
            os.close(reader)


def _interruptible() -> None:
    """Let Ctrl-C reach a process, though shells begin what they run in the background with it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _read_until(reader: int, wanted: str) -> str:
    text, deadline = "", time.monotonic() + 30
    while wanted not in text:
        assert time.monotonic() < deadline
        text += os.read(reader, 4096).decode(errors="replace")
    return text


@pytest.mark.parametrize("tty", [True, False])
def test_ctrl_c_ends_it_cleanly(url: str, tty: bool) -> None:
    with _running(url, tty=tty) as (process, reader):
        seen = _read_until(reader, "hits/s")
        process.send_signal(signal.SIGINT)
        rest = ""
        while tty and "\x1b[?1049l" not in rest:
            rest += os.read(reader, 4096).decode(errors="replace")
        assert process.wait(60) == 130
        assert process.stderr.read() == ""
    assert ("\x1b[?1049h" in seen) == tty, "the terminal's other screen, which leaves what was there"
    assert ("\x1b" in seen) == tty, "no control characters in a pipe"


def test_json_is_a_line_a_refresh(url: str) -> None:
    with _running(url, "--format", "json", tty=False) as (_, reader):
        first = json.loads(_read_until(reader, "}\n{").split("\n")[0])
    assert first["tiers"]["cpu"]["misses"]["per_s"] is None
    with _running(url, "--format", "json", "--interval", "5", tty=False) as (_, reader):
        assert _read_until(reader, "}\n").count("\n") == 1, "a line is there before the next one is made"
