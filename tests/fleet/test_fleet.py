"""Real servers of one library behind the routers that people run: where cartridges lie, and what load, stops and kills do."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from picking import serving
from recall.ward import Fact, ask
from routers import envoy
from serving import SERVER_ARGS
from traffic import Traffic
from waiting import answered, until
from wards import MODEL, patients, save, write_ward

from lmcache_cartridge.fleet.config import of_mapping
from lmcache_cartridge.fleet.service import Fleet as Scores
from lmcache_cartridge.fleet.web import app
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import free_port, plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import Settings
from lmcache_cartridge.sources.published import Library

NAMES = [f"doc-{number}" for number in range(12)]
PLACED = {f"placed-{number}": f"s{number % 2}" for number in range(6)}
"""Cartridges that no router places, and where they are."""


class Answer(NamedTuple):
    """What a request came to."""

    server: str | None
    """The name that it calls the model by; none where there is no answer."""
    right: bool
    """Whether it is the answer of the cartridge that it names."""
    said: str


class Fleet(NamedTuple):
    """Servers that follow one library, each of which calls the model by a name of its own in its answers."""

    stack: ExitStack
    """Ends its servers."""
    home: Path
    servers: list[ServerProcess]
    facts: dict[str, Fact]
    """One that the model answers right, by id."""

    @property
    def urls(self) -> list[str]:
        for server in self.servers:
            assert server.poll() is None, server.log.read_text(errors="replace")[-3000:]
        return [server.url for server in self.servers]

    def held(self) -> dict[str, set[str]]:
        """Return which servers have each cartridge in memory."""
        held: dict[str, set[str]] = {}
        for number, url in enumerate(self.urls):
            # Its registry may just be written.
            told = answered(partial(httpx.get, f"{url}/v1/cartridges", params={"active": "true"}, timeout=60))
            for entry in told.json()["data"]:
                held.setdefault(entry["id"], set()).add(f"s{number}")
        return held

    def ask(self, http: httpx.Client, name: str) -> Answer:
        """Ask for a cartridge, by header and body."""
        fact = self.facts[name]
        body = {"model": "m", "prompt": ask(fact, 0), "max_tokens": 1, "temperature": 0, "cartridges": [name]}
        reply = http.post("/v1/completions", json=body, headers={"X-Cartridges": name})
        if reply.status_code != 200:
            return Answer(None, False, reply.text)
        told, used = reply.json(), reply.headers["x-cartridges"]
        text = told["choices"][0]["text"]
        return Answer(told["model"], used.startswith(f"{name}@1;") and text.split()[-1] == fact.value, text)


def _traffic(fleet: Fleet, http: httpx.Client) -> Traffic[Answer]:
    """Return four clients that ask for all cartridges, each in an order of its own; who fails waits as the stock client does."""

    def asking(number: int) -> Iterator[Answer]:
        for name in itertools.cycle(random.Random(number).sample(NAMES, len(NAMES))):
            yield (answer := fleet.ask(http, name))
            time.sleep(0 if answer.server else 0.5)

    return Traffic(map(asking, range(4)))


def _server(home: Path, number: int) -> ServerProcess:
    """Return a server of the fleet, not started."""
    own = home / f"s{number}"
    settings = Settings(
        home=own, disk_dir=own, library=str(home / "library"), cpu_bytes=256 << 20, required=True, reload_s=0.2,
        drain_s=3, kv_events=True,
    )  # fmt: skip
    told = {"enable_kv_cache_events": True, "publisher": "zmq"}
    told |= {name: f"tcp://*:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    args = [*SERVER_ARGS, *f"--enable-scale-out --shutdown-timeout 60 --served-model-name s{number} m".split()]
    args += ["--kv-events-config", json.dumps(told)]
    return ServerProcess(plan(MODEL, settings, vllm_args=args), home / f"{number}.log")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    home, model, facts = tmp_path_factory.mktemp("home"), CausalModel(MODEL), {}
    with (
        Library(Settings(home=home / "author", disk_dir=home / "author", library=str(home / "library"))) as library,
        ExitStack() as stack,
    ):
        for number, name in enumerate([*NAMES, *PLACED]):
            ward = write_ward(model, patients(number % 4, 4), name, tokens=300)
            save(model, home / "made" / name, ward.ids, name=name)
            library.publish(home / "made" / name)
            facts[name] = ward.facts[0]
        servers = [_server(home, number) for number in range(2)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stack.enter_context, servers))
        yield Fleet(stack, home, servers, facts)


def test_each_cartridge_lies_on_one_server_and_one_that_is_killed_costs_what_it_was_answering_and_comes_back(
    fleet, tmp_path
):
    dying = fleet.servers[1]
    with envoy(fleet.urls, tmp_path) as url, httpx.Client(base_url=url, timeout=120) as http:
        homes = {name: fleet.ask(http, name).server for name in NAMES}
        assert fleet.held() == {name: {home} for name, home in homes.items()}, "who answered has it, and nobody else"
        with _traffic(fleet, http) as traffic:
            traffic.goes_on(len(NAMES))
            os.killpg(dying.pid, signal.SIGKILL)
            until(lambda: dying.poll() is not None)
            traffic.goes_on(2 * len(NAMES))
        failed = [answer for answer in traffic.asked if answer.server is None]
        # Of four clients those in flight, and each connection that the router kept open fails once.
        assert len(failed) <= 8, failed
        assert all(answer.right or answer in failed for answer in traffic.asked)
        assert {fleet.ask(http, name).server for name in NAMES} == {"s0"}

        again = _server(fleet.home, 1)
        again.port, again.url = dying.port, dying.url
        fleet.servers[1] = fleet.stack.enter_context(again)
        own = [name for name in NAMES if homes[name] == "s1"]
        until(lambda: fleet.ask(http, own[0]).server == "s1")
        assert {fleet.ask(http, name)[:2] for name in own} == {("s1", True)}


def test_what_was_placed_past_the_router_is_found_by_the_picker(fleet, tmp_path):
    for name, server in PLACED.items():
        with httpx.Client(base_url=fleet.urls[int(server[1:])], timeout=120) as direct:
            assert fleet.ask(direct, name).server == server
    pods = [{"name": f"s{number}", "url": url} for number, url in enumerate(fleet.urls)]
    with (
        serving(lambda: app(Scores(of_mapping({"pods": pods, "poll_s": 0.2})))) as scores,
        envoy(fleet.urls, tmp_path, picker=scores) as url,
        httpx.Client(base_url=url, timeout=120) as http,
    ):

        def is_told() -> bool:
            told = [httpx.post(f"{scores}/score", json={"cartridges": [name]}, timeout=60) for name in PLACED]
            found = [reply.json()["scores"] for reply in told if reply.status_code == 200]
            return [max(each, key=each.get) for each in found] == [*PLACED.values()]

        until(is_told)
        assert {name: fleet.ask(http, name)[:2] for name in PLACED} == {name: (s, True) for name, s in PLACED.items()}


# Stopped, under traffic.


def test_of_a_server_that_is_stopped_under_traffic_no_request_fails(fleet, tmp_path):
    leaving = fleet.servers[1]
    with (
        envoy(fleet.urls, tmp_path) as url,
        httpx.Client(base_url=url, timeout=120) as http,
        httpx.Client(base_url=leaving.url, timeout=120) as direct,
        _traffic(fleet, http) as traffic,
    ):
        before = traffic.goes_on(2 * len(NAMES))
        assert {answer.server for answer in before} == {"s0", "s1"}
        os.kill(leaving.pid, signal.SIGTERM)
        until(lambda: direct.get("/health").status_code == 503)
        until(lambda: leaving.poll() is not None)
        after = traffic.goes_on(2 * len(NAMES))
    assert not [answer for answer in traffic.asked if not answer.right]
    assert {answer.server for answer in after} == {"s0"}, "it is still asked"
    assert "drained: 0 requests run still" in leaving.log.read_text(errors="replace")
