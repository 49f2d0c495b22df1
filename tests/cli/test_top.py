"""Top: what it reads from a server, the rates it computes, what it draws on 80 columns, and how it ends."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from starlette.responses import Response
from watching import CHUNK_BYTES, CPU_CHUNKS, DISK_CHUNKS, RANKS, Watched, listening, serving

from lmcache_cartridge.cli import top
from lmcache_cartridge.cli.main import main

ROOT = Path(__file__).parents[2]
KEY = "sk-test"


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    watched = Watched(tmp_path_factory.mktemp("home"), device=False)
    watched.look_up(watched.make("a"), "a")
    watched.make("cold", seed=1)
    yield watched
    watched.close()


@pytest.fixture(scope="module")
def url(watched):
    with serving(watched, KEY) as url:
        yield url


def _view(url: str, **change: Any) -> dict[str, Any]:
    numbers, cartridges = top.read(url)
    return {"numbers": numbers, "rates": None, "cartridges": cartridges} | change


def _drawn(view: dict[str, Any], url: str = "http://localhost:8000") -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(top.draw(url, view))
    return console.file.getvalue()


def test_a_reading_sums_ranks_but_not_what_they_share(watched, url):
    view = _view(url)
    numbers = view["numbers"]
    assert numbers["misses_total"]["cpu"] == 4 * RANKS
    assert numbers["budget_bytes"] == {"cpu": RANKS * CPU_CHUNKS * CHUNK_BYTES, "disk": DISK_CHUNKS * CHUNK_BYTES}
    assert numbers["resident_bytes"]["cpu"] >= RANKS * 4 * CHUNK_BYTES
    assert numbers["served_cartridges"] == {"": 2} and view["rates"] is None
    assert {row["id"]: row["state"] for row in view["cartridges"]} == {"a": "resident"}
    drawn = [" ".join(line.split()[:3]) for line in _drawn(view).splitlines() if line]
    assert [line.split()[0] for line in drawn[-6:-1]] == ["cpu", "disk", "source", "cartridge", "a@1"]
    assert drawn[-1] == "and 1 more"


def test_rates_are_what_happened_between_two_readings(watched, url):
    made = watched.make("rated", seed=7)
    watched.look_up(made, "rated")
    before, _ = top.read(url)
    watched.look_up(made, "rated")
    watched.requests.positions.inc(400)
    now, _ = top.read(url)
    rates = top.rates(now, before, 4.0)
    assert rates["hits_total"]["cpu"] == 4 * RANKS / 4
    assert rates["misses_total"]["cpu"] == rates["read_bytes_total"]["source"] == 0
    assert rates["positions_total"][""] == 100
    assert not any(top.rates(before, now, 4.0)["hits_total"].values()), (
        "of a server that was started again none is below 0"
    )


def test_what_is_drawn_fits_eighty_columns(url):
    view = _view(url)
    assert "hits/s" not in _drawn(view)
    loading = {"resident_chunks": 3, "chunks": 4, "failing": False}
    row = view["cartridges"][0] | {"id": "[bold]x[/nope]", "state": "loading", "loading": loading, "pinned": True}
    numbers = {name: {key: value * 2**36 for key, value in of.items()} for name, of in view["numbers"].items()}
    rows = [row, row | {"id": "a-very-long-name-" * 8, "state": "quarantined", "version": 10**6}]
    view |= {"numbers": numbers, "rates": top.rates(numbers, {}, 1.0), "cartridges": rows}
    lines = _drawn(view, "https://" + "very-long-host." * 9 + "example.org").splitlines()
    assert max(map(len, lines)) <= 80
    assert "hits/s" in "".join(lines) and "a-very-long-name-a-very-@1000000" in "".join(lines)
    for line in lines:
        if line.split()[:1] in (["tier"], ["cpu"], ["disk"], ["source"], ["[bold]x[/nope]@1"]):
            assert "…" not in line, "a number that is cut is a wrong number"


def test_old_numbers_are_said(url):
    view = _view(url)
    assert "s old" not in _drawn(view)
    assert "63 s old" in _drawn(view | {"numbers": view["numbers"] | {"status_age_seconds": {"": 63.0}}})


@pytest.mark.parametrize("key", [KEY, "", "wrong"])
def test_without_the_key_the_tiers_are_shown_and_the_key_is_asked_for(url, capsys, monkeypatch, key):
    monkeypatch.setenv("VLLM_API_KEY", key)
    assert main(["top", "--url", url + "/", "--once"]) == 0
    out = capsys.readouterr().out
    assert "cpu" in out and ("$VLLM_API_KEY" not in out) == ("a@1" in out) == (key == KEY)


@pytest.mark.parametrize("status, body, said", [
    (200, b"# TYPE x gauge\nx 1\n", "serves no cartridges"), (200, b"<html>hello there</html>", "not as vLLM"),
    (200, b"\xff\xfe", "not as vLLM"), (401, b"", "401"),
])  # fmt: skip
def test_what_is_no_cartridge_server_is_said_in_one_line(capsys, status, body, said):
    with listening(Response(body, status)) as url:  # an ASGI app of its own
        assert main(["top", "--url", url, "--once"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error and url in error


@pytest.mark.parametrize("url, why", [
    ("http://127.0.0.1:9", "[Errno 111] Connection refused"), ("localhost:8000", "is no URL of a server"), ("http://x:y", "is no URL of a server"),
])  # fmt: skip
def test_a_url_where_no_server_answers_is_said_in_one_line(capsys, url, why):
    assert main(["top", "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and why in error


@contextmanager
def _running(url: str, *arguments: str, tty: bool) -> Iterator[tuple[subprocess.Popen, int]]:
    """Run the command on a terminal of its own, or into a pipe; lend the process and what to read from."""
    command = [sys.executable, "-m", "lmcache_cartridge.cli.main", "top", "--url", url, *arguments]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)  # as users have it
    reader, writer = os.openpty() if tty else os.pipe()
    # Shells begin what they run in the background with Ctrl-C ignored.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, env=environment, stdout=writer, stderr=subprocess.PIPE, preexec_fn=heard) as process:
        os.close(writer)
        try:
            yield process, reader
        finally:
            process.kill()
            os.close(reader)


def _read_until(reader: int, wanted: str) -> str:
    text, deadline = "", time.monotonic() + 30
    while wanted not in text:
        assert time.monotonic() < deadline
        text += os.read(reader, 4096).decode(errors="replace")
    return text


@pytest.mark.parametrize(
    "tty, form, shown", [(True, "text", "hits/s"), (False, "text", "hits/s"), (False, "json", "}\n")]
)
def test_it_shows_at_once_and_ctrl_c_ends_it_cleanly(url, tty, form, shown):
    with _running(url, "--interval", "0.1", "--format", form, tty=tty) as (process, reader):
        seen = _read_until(reader, shown)
        process.send_signal(signal.SIGINT)
        if tty:
            _read_until(reader, "\x1b[?1049l")
        assert (process.wait(60), process.stderr.read()) == (130, b"")
    assert ("\x1b[?1049h" in seen) == tty, "the terminal's other screen, which leaves what was there"
    assert ("\x1b" in seen) == tty, "no control characters in a pipe"
