"""Top: what it reads from a server, what it draws on 80 columns, and how it ends."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
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
    drawn = " ".join(line.split()[0] for line in _drawn(url, numbers, cartridges) if line)
    assert drawn.endswith("disk source cartridge a@1")


def test_what_is_drawn_fits_eighty_columns(url):
    numbers, [row] = top.read(url)
    loading = {"resident_chunks": 3, "chunks": 4, "failing": False}
    row |= {"id": "[bold]x[/nope]", "state": "loading", "loading": loading, "pinned": True}
    rows = [row, row | {"id": "a-very-long-name-" * 8, "state": "quarantined", "version": 10**6}]
    numbers = {name: {key: value * 2**36 for key, value in of.items()} for name, of in numbers.items()}
    lines = _drawn("https://" + "very-long-host." * 9 + "example.org", numbers, rows)
    assert max(map(len, lines)) <= 80
    tables = "\n".join(lines[lines.index("") :])
    assert "a-very-long-name-a-very-@1000000" in tables and "[bold]x[/nope]@1" in tables
    assert "…" not in tables, "a number that is cut is a wrong number"


@pytest.mark.parametrize("status, body, said", [
    (200, b"# TYPE x gauge\nx 1\n", "serves no cartridges"), (200, b"<html>hello there</html>", "serves no cartridges"),
    (401, b"", "$VLLM_API_KEY"),
])  # fmt: skip
def test_what_is_no_cartridge_server_is_said_in_one_line(capsys, status, body, said):
    with listening(Response(body, status)) as url:  # an ASGI app of its own
        assert main(["top", "--url", url, "--once"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error and url in error


def _read_until(reader: int, wanted: str) -> str:
    text = ""
    while wanted not in text:
        part = os.read(reader, 4096).decode(errors="replace")
        assert part, text
        text += part
    return text


@pytest.mark.parametrize("form, shown", [("text", "hits"), ("json", "}\n")])
def test_it_shows_at_once_and_ctrl_c_ends_it_cleanly(url, form, shown):
    """Of a terminal of its own, or for programs in a pipe."""
    tty = form == "text"
    command = [
        sys.executable,
        "-m",
        "lmcache_cartridge.cli.main",
        "top",
        "--url",
        url,
        "--interval",
        "0.1",
        "--format",
        form,
    ]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)  # as users have it
    reader, writer = os.openpty() if tty else os.pipe()
    # Shells begin what they run in the background with Ctrl-C ignored.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, env=environment, stdout=writer, stderr=subprocess.PIPE, preexec_fn=heard) as process:
        os.close(writer)
        seen = _read_until(reader, shown)
        process.send_signal(signal.SIGINT)
        if tty:
            _read_until(reader, "\x1b[?1049l")
        assert (process.wait(60), process.stderr.read()) == (130, b"")
        os.close(reader)
    assert ("\x1b[?1049h" in seen) == tty, "the terminal's other screen, which leaves what was there"
    assert ("\x1b" in seen) == tty, "no control characters in a pipe"
