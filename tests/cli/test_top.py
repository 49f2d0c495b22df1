"""Top: what it reads from a server, what it draws on 80 columns, and how it ends."""

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


def _drawn(url: str, *view: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(top.draw(url, *view))
    return console.file.getvalue().splitlines()


def test_a_reading_sums_ranks_but_not_what_they_share(url):
    numbers, cartridges = top.read(url)
    assert numbers["misses_total"]["cpu"] == 4 * RANKS
    assert numbers["budget_bytes"] == {"cpu": RANKS * CPU_CHUNKS * CHUNK_BYTES, "disk": DISK_CHUNKS * CHUNK_BYTES}
    assert numbers["resident_bytes"]["cpu"] >= RANKS * 4 * CHUNK_BYTES
    assert numbers["served_cartridges"] == {"": 2}
    assert {row["id"]: row["state"] for row in cartridges} == {"a": "resident"}
    assert [line.split()[0] for line in _drawn(url, numbers, cartridges)[-5:] if line] == [
        "disk",
        "source",
        "cartridge",
        "a@1",
    ]


def test_what_is_drawn_fits_eighty_columns(url):
    numbers, [row] = top.read(url)
    loading = {"resident_chunks": 3, "chunks": 4, "failing": False}
    row |= {"id": "[bold]x[/nope]", "state": "loading", "loading": loading, "pinned": True}
    rows = [row, row | {"id": "a-very-long-name-" * 8, "state": "quarantined", "version": 10**6}]
    numbers = {name: {key: value * 2**36 for key, value in of.items()} for name, of in numbers.items()}
    lines = _drawn("https://" + "very-long-host." * 9 + "example.org", numbers, rows)
    assert max(map(len, lines)) <= 80
    assert "a-very-long-name-a-very-@1000000" in "".join(lines)
    for line in lines:
        if line.split()[:1] in (["tier"], ["cpu"], ["disk"], ["source"], ["[bold]x[/nope]@1"]):
            assert "…" not in line, "a number that is cut is a wrong number"


@pytest.mark.parametrize("status, body, said", [
    (200, b"# TYPE x gauge\nx 1\n", "serves no cartridges"), (200, b"<html>hello there</html>", "serves no cartridges"),
    (401, b"", "$VLLM_API_KEY"),
])  # fmt: skip
def test_what_is_no_cartridge_server_is_said_in_one_line(capsys, status, body, said):
    with listening(Response(body, status)) as url:  # an ASGI app of its own
        assert main(["top", "--url", url, "--once"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error and url in error


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


@pytest.mark.parametrize("tty, form, shown", [(True, "text", "hits"), (False, "text", "hits"), (False, "json", "}\n")])
def test_it_shows_at_once_and_ctrl_c_ends_it_cleanly(url, tty, form, shown):
    with _running(url, "--interval", "0.1", "--format", form, tty=tty) as (process, reader):
        seen = _read_until(reader, shown)
        process.send_signal(signal.SIGINT)
        if tty:
            _read_until(reader, "\x1b[?1049l")
        assert (process.wait(60), process.stderr.read()) == (130, b"")
    assert ("\x1b[?1049h" in seen) == tty, "the terminal's other screen, which leaves what was there"
    assert ("\x1b" in seen) == tty, "no control characters in a pipe"
