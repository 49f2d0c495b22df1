"""Bench measures what each way means: answers that came otherwise are marked, errors counted, and it ends when it is told.

What asks is vLLM's own load generator. The server here is a mock without an engine, which streams as OpenAI's do. A real one is
asked in `test_api.py`.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from routers import Reply, Request, Stub
from waiting import run_threads

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.making import room_bytes
from lmcache_cartridge.make.bench import load
from lmcache_cartridge.make.bench.figures import stats
from lmcache_cartridge.make.bench.load import WAYS, not_so
from lmcache_cartridge.make.bench.places import Place
from lmcache_cartridge.make.bench.target import Target
from lmcache_cartridge.make.bench.watch import family, memory_of, on_gpus, pss
from lmcache_cartridge.make.server import Server

BLOCK, CHUNK, LONGEST = 16, 32, 600
POSITIONS = 70
"""Of the cartridge: two chunks and a tail."""
LENGTHS = ["--p", "64", "--c", "1,2", "--repeat", "2"]
NAMED = ["--cartridge", "doc@1", *LENGTHS]
ONCE = ["--c", "1", "--repeat", "1"]


class Mock(Stub):
    """It streams answers and keeps a prefix cache, or does what `fault` says."""

    def __init__(self, fault: str = "") -> None:
        super().__init__("bench", self._posted)
        self.fault = fault
        self.vllm = self.connector = 0
        """Its counters of cached tokens."""
        self.resident = False
        self.keys: set[str] = set()
        """`Authorization` of all that was asked."""
        self.events: list[str] = []
        """What was asked, in order: the way as the server sees it, evictions, errors."""
        self._salts: set[str] = set()
        self._lock = threading.Lock()

    def get(self, path: str) -> Reply:
        if path == "/v1/models":
            return Reply(body={"data": [{"id": "m", "max_model_len": LONGEST}]})
        if path == "/metrics" and self.fault != "no counters":
            labels = 'engine="0",model_name="m"'
            shown = (
                f"vllm:prefix_cache_hits_total{{{labels}}} {self.vllm}.0\nvllm:external_prefix_cache_hits_total{{{labels}}} "
                f'{self.connector}.0\nvllm:cache_config_info{{block_size="{BLOCK}",engine="0"}} 1.0\n'
            )
            return Reply(body=shown.encode())
        if path.startswith("/v1/cartridges") and self.fault != "no cartridges":
            held = POSITIONS // CHUNK if self.resident and self.fault != "never resident" else 0
            tiers = {"cpu": {"resident_chunks": held, "chunks": POSITIONS // CHUNK}}
            row = {"id": "doc", "version": 1, "current": True, "kind": "prefill", "positions": POSITIONS,
                   "state": "resident" if held else "cold", "tiers": tiers}  # fmt: skip
            return Reply(body={"data": [row]} if path == "/v1/cartridges" else row)
        return Reply(404)

    def _posted(self, request: Request) -> Reply:
        self.keys.add(request.headers.get("authorization") or "")
        path, body = request.path, json.loads(request.body or b"{}")
        if path == "/v1/cartridges/doc@1/evict":
            allowed = self.fault != "no admin"
            self.events += ["evict"] * allowed
            self.resident = self.resident and not allowed
            return Reply(200 if allowed else 403)
        if path == "/v1/cartridges/tokens":
            known = POSITIONS - (self.fault == "tells a part of the document")
            return Reply(body={"token_ids": list(range(900, 900 + known))})
        if path == "/tokenize" and self.fault != "no /tokenize":
            return Reply(body={"tokens": [ord(c) for c in body["prompt"]]})
        return self._answer(body) if path == "/v1/completions" else Reply(404)

    def _answer(self, body: dict[str, Any]) -> Reply:
        ids, salt = body["prompt"], body["cache_salt"]
        way = "prefix" if salt in self._salts else "dense"
        if body.get("cartridges"):
            way = "warm" if self.resident else "cold"
            self.resident = True
        with self._lock:
            self._salts.add(salt)
            if body.get("cartridges"):
                self.connector += CHUNK if self.fault == "injects a part" else POSITIONS // CHUNK * CHUNK
            elif way == "prefix":
                self.vllm += len(ids) // BLOCK * BLOCK
        self.events.append(way)
        if self.fault == "errors sometimes" and len(self.events) % 5 == 0:
            self.events.append("error")
            return Reply(500, body={"error": {"message": "EngineCore encountered an issue"}})
        words = ["x"] * body["max_tokens"]
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(words)}
        events = [*({"choices": [{"text": word}]} for word in words), {"choices": [], "usage": usage}]
        return Reply(body="".join(f"data: {line}\n\n" for line in (*map(json.dumps, events), "[DONE]")).encode())


@pytest.fixture
def start():
    """Start mocks; they end with the test."""
    with ExitStack() as stack:
        yield lambda fault="": stack.enter_context(Mock(fault))


class Ran:
    """What one run of the command left."""

    def __init__(self, status: int, out: Path) -> None:
        self.status, self.out = status, out
        self.found = json.loads((out / "bench.json").read_text())
        self.remarks, self.page = "\n".join(self.found["remarks"]), (out / "report.html").read_text()


@pytest.fixture
def bench(tmp_path, monkeypatch, start):
    """Run the command against a mock, or one with a fault, without pictures, and once at a time unless something else is asked for."""

    monkeypatch.setattr(load, "TOKENS", 3)

    def ran(mock: Mock | str, *options: str) -> Ran:
        out, mock = tmp_path / "out", start(mock) if isinstance(mock, str) else mock
        monkeypatch.setattr("lmcache_cartridge.make.bench.page.find_spec", lambda name: None)
        return Ran(main(["bench", "--url", mock.url, "--output", str(out), *(options or ONCE)]), out)

    return ran


@pytest.fixture
def refused(tmp_path, capsys):
    """Run the command where it ends at once, and return what it says."""

    def said(*words: str) -> str:
        assert main(["bench", "--output", str(tmp_path / "out"), *words]) == 1
        return capsys.readouterr().err

    return said


@pytest.mark.parametrize("fault, told", [
    ("injects a part", "its connector brought 32"), ("errors sometimes", "Internal Server Error"),
])  # fmt: skip
def test_a_run_that_errs_or_is_none_of_its_way_is_told_and_in_no_figure(bench, fault, told):
    ran = bench(fault, "--c", "1", "--repeat", "2")
    good = sum(len(run["ttft_s"]) for run in ran.found["runs"] if not run["wrong"])
    assert sum(row["requests"] for row in ran.found["rows"]) == good
    assert ran.status == 1 and told in ran.remarks and "not as they should be" in ran.page


@pytest.mark.parametrize("way, cached, is_so", [
    ("dense", (16, 0), False), ("dense", (0, 16), False), ("prefix", (64, 0), False), ("prefix", (0, 128), False), ("warm", (0, 128), True),
    ("warm", (16, 128), False), ("cold", (0, 140), True), ("cold", (0, 141), False),
])  # fmt: skip
def test_the_counters_prove_a_way(way, cached, is_so):
    place = Place(POSITIONS, tuple(range(POSITIONS)), "doc@1", 2)
    assert (not_so(way, place, 2, cached, BLOCK) is None) == is_so


def test_without_vllm_here_a_line_says_what_to_do(start, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.benchmarks.serve", None)
    assert "vLLM's load generator cannot be imported here" in refused("--url", start().url)


def test_a_server_without_cartridges_is_measured(bench):
    ran = bench("no cartridges", *LENGTHS)
    assert ran.status == 0, ran.remarks
    assert [(row["way"], row["cached"][0] > 0) for row in ran.found["rows"]] == [("dense", False), ("prefix", True)] * 2
    assert "no cartridges: the server has no route /v1/cartridges" in ran.remarks


@pytest.mark.parametrize("fault, way, why", [
    ("no admin", "cold", "/v1/cartridges/doc@1/evict answered 403"), ("never resident", "warm", "was not in memory before"),
])  # fmt: skip
def test_a_way_that_cannot_be_is_left_out_and_said_why(bench, fault, way, why):
    ran = bench(fault)
    assert ran.status == 0 and {row["way"] for row in ran.found["rows"]} == {*WAYS} - {way} and why in ran.remarks


def test_a_given_p_means_the_cartridge_of_this_length_and_what_is_longer_than_the_context_is_left_out(start, bench):
    """That the figures are of their ways is seen on a real engine, in served/test_api."""
    ran = bench(mock := start(), "--p", f"64,{POSITIONS},{LONGEST}", "--c", "1", "--repeat", "2")
    asked = [event for before, event in itertools.pairwise(mock.events) if before == "evict"]
    assert asked.count("cold") == 2, "evicted before each run"
    ways = {(row["p"], row["way"]) for row in ran.found["rows"]}
    assert ran.status == 0 and ways == {(64, "dense"), (64, "prefix")} | {(POSITIONS, way) for way in WAYS}
    assert "warm, p = 64: no cartridge of this length" in ran.remarks
    assert f"p = {LONGEST}: with a question longer than the server's context of {LONGEST}" in ran.remarks


@pytest.mark.parametrize("fault, options, told", [
    ("", "", "bench needs --url or --model"), ("", "--url http://a:port", "is no URL of a server"),
    ("", "--url URL --vllm=--x", "--vllm excludes --url"), ("no counters", "--url URL", "has no counters of vLLM's"),
    ("no cartridges", "--url URL --cartridge nobody", "no route /v1/cartridges"),
    ("no /tokenize", "--url URL", "what forwards /v1 has to forward /tokenize too"),
    ("tells a part of the document", "--url URL", f"gave {POSITIONS - 1} token ids of the {POSITIONS} of doc@1"),
])  # fmt: skip
def test_what_cannot_be_measured_ends_in_a_line(start, tmp_path, refused, fault, options, told):
    assert told in refused(*options.replace("URL", start(fault).url).split())
    assert not list((tmp_path / "out").glob("*"))


def test_interrupted_it_reports_what_there_is(bench, monkeypatch, capsys):
    run, begun = load.Load.run, itertools.count()

    def interrupted(*given: Any) -> load.Run:
        if next(begun) == 2:
            raise KeyboardInterrupt
        return run(*given)

    monkeypatch.setattr(load.Load, "run", interrupted)
    ran = bench("")
    assert ran.status == 0 and len(ran.found["runs"]) == 2
    assert "Not whole" in ran.page and "interrupted" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_known_before_anything_is_asked(start, tmp_path, refused):
    mock, taken = start(), tmp_path / "taken"
    taken.write_text("mine")
    for out in (taken, taken / "below"):
        assert f"'{out}'" in refused("--url", mock.url, "--output", str(out))
    assert not mock.events and taken.read_text() == "mine"


def test_no_secret_is_shown(start, bench, refused, monkeypatch, capsys):
    mock = start()
    secret = f"user:pass-word@127.0.0.1:{mock.url.rpartition(':')[2]}"
    monkeypatch.setenv("VLLM_API_KEY", "sk-bearer\n")
    ran = bench(mock, "--url", f"http://{secret}/v1", *ONCE)
    assert ran.status == 0 and ran.found["server"]["url"] == mock.url, ran.remarks
    assert f"Basic {base64.b64encode(b'user:pass-word').decode()}" in mock.keys, "it is sent"
    shown = [file.read_text() for file in ran.out.iterdir()]
    mock.fault = "no /tokenize"
    shown += capsys.readouterr()
    for url in (f"http://{secret}", "http://user:pass-word/x@127.0.0.1:9"):
        shown.append(refused("--url", url))
    monkeypatch.setenv("VLLM_API_KEY", "sk-bearer\n\u2028x")
    shown.append(refused("--url", mock.url))
    assert not any(word in text for text in shown for word in ("pass-word", "sk-bearer"))


def test_no_request_waits_for_a_connection_of_its_client(monkeypatch):
    """Neither for one of 100, nor to connect again: httpx itself keeps 20, for five seconds, and none that was not read."""
    count, clock = 110, time.monotonic
    gate = threading.Barrier(count)
    with (
        Stub("kept", lambda request: Reply(headers={"x": str(gate.wait(60))})) as stub,
        Server(stub.url, "m") as server,
    ):
        for later_s in (0, 600):
            monkeypatch.setattr(time, "monotonic", lambda later_s=later_s: clock() + later_s)
            run_threads(count, lambda number: server.request("POST", "/v1/completions", json={}), timeout_s=60)
        assert len(stub.connections) == count


@pytest.mark.parametrize("key", ["sk-server", ""])
def test_a_key_for_openai_is_not_shown_to_the_server(start, bench, monkeypatch, key):
    """vLLM's client sends $OPENAI_API_KEY wherever it asks."""
    mock = start()
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    monkeypatch.setenv("VLLM_API_KEY", key)
    assert bench(mock).status == 0
    assert mock.keys == {f"Bearer {key}" if key else ""} and os.environ["OPENAI_API_KEY"] == "sk-openai"


def test_a_server_of_ones_own_has_memory_for_the_two_longest():
    assert room_bytes([256, 32_768], None, 1 << 17) >= 2 * 32_768 << 17 > room_bytes([256, 32_768], 8192, 1 << 17)


def test_statistics_are_those_of_the_textbook():
    assert stats([]) is None
    assert list(stats([float(n) for n in range(20, 0, -1)]).values()) == pytest.approx([20, 10.5, 19.05, 1, 20])


def test_memory_is_that_of_the_processes_behind_a_port_and_what_is_shared_counts_once(start):
    """One that has ended since it was listed is no error."""
    with Target(start().url) as target, subprocess.Popen(["sleep", "60"]) as child:
        found = {each.pid: each for each in family(int(target.url.rpartition(":")[2]))}
        child.kill()
        assert memory_of(target)[0].startswith("proportional set size")
    own = found[os.getpid()]
    assert os.getppid() not in found and pss(found[child.pid]) == 0
    assert 1 << 20 < pss(own) <= own.memory_info().rss * 1.01


def test_processes_on_gpus_are_read_as_nvidia_smi_tells_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert on_gpus() == []
    told = tmp_path / "nvidia-smi"
    told.write_text(
        '#!/bin/sh\n[ "$1" = --query-compute-apps=pid,used_memory ] && echo "11, 512" && echo "12, 7" && exit\nexit 1\n'
    )
    told.chmod(0o755)
    assert on_gpus() == [(11, 512 << 20), (12, 7 << 20)]
