"""Real servers of one library behind the routers that people run: where cartridges lie, and what load, stops and kills do."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from recall.ward import Fact, ask
from routers import envoy, vllm_router
from serving import SERVER_ARGS
from traffic import Traffic
from waiting import answered, until
from wards import MODEL, patients, save, write_ward

from lmcache_cartridge.fleet.affinity import session_headers
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import Settings
from lmcache_cartridge.sources.published import Library

NAMES = [f"doc-{number}" for number in range(12)]
REQUESTS = 60


class Answer(NamedTuple):
    """What a request came to."""

    status: int
    server: str | None
    """The name that it calls the model by."""
    used: str | None
    """`id@version`."""
    right: bool
    """Whether it is the answer of the cartridge that it names."""
    problem: str = ""


class Fleet(NamedTuple):
    """Servers that follow one library, each of which calls the model by a name of its own in its answers."""

    stack: ExitStack
    """Ends its servers."""
    home: Path
    servers: list[ServerProcess]
    facts: dict[str, Fact]
    """One that the model answers right, by `id@version`."""

    @property
    def urls(self) -> list[str]:
        for server in self.servers:
            assert server.poll() is None, server.log.read_text(errors="replace")[-3000:]
        return [server.url for server in self.servers]

    def question(self, name: str) -> str:
        return ask(self.facts[f"{name}@1"], 0)

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
        body = {"model": "m", "prompt": self.question(name), "max_tokens": 1, "temperature": 0, "cartridges": [name]}
        reply = http.post("/v1/completions", json=body, headers={"X-Cartridges": name})
        if reply.status_code != 200:
            return Answer(reply.status_code, None, None, False, reply.text)
        used, told = reply.headers["x-cartridges"].partition(";")[0], reply.json()
        return Answer(200, told["model"], used, told["choices"][0]["text"].split()[-1] == self.facts[used].value)


def _traffic(fleet: Fleet, http: httpx.Client) -> Traffic[tuple[str, Answer]]:
    """Return four clients that ask for all cartridges, each in an order of its own."""

    def asking(number: int) -> Iterator[tuple[str, Answer]]:
        for name in itertools.cycle(random.Random(number).sample(NAMES, len(NAMES))):
            yield name, fleet.ask(http, name)

    return Traffic(asking(number) for number in range(4))


def _server(home: Path, number: int) -> ServerProcess:
    """Return a server of the fleet, not started."""
    own = home / f"s{number}"
    settings = Settings(
        home=own, disk_dir=own, library=str(home / "library"), cpu_bytes=256 << 20, required=True, reload_s=0.2,
        drain_s=3,
    )  # fmt: skip
    args = [*SERVER_ARGS, "--served-model-name", f"s{number}", "m", "--shutdown-timeout", "60"]
    return ServerProcess(plan(MODEL, settings, vllm_args=args), home / f"{number}.log")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    home, model, facts = tmp_path_factory.mktemp("home"), CausalModel(MODEL), {}
    with (
        Library(Settings(home=home / "author", disk_dir=home / "author", library=str(home / "library"))) as library,
        ExitStack() as stack,
    ):
        for number, name in enumerate(NAMES):
            ward = write_ward(model, patients(number % 4, 4), name, tokens=300)
            save(model, home / "made" / name, ward.ids, name=name)
            library.publish(home / "made" / name)
            facts[f"{name}@1"] = ward.facts[0]
        servers = [_server(home, number) for number in range(2)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stack.enter_context, servers))
        yield Fleet(stack, home, servers, facts)


def test_each_cartridge_lies_on_one_server_and_one_that_is_killed_costs_what_it_was_answering_and_comes_back(
    fleet, tmp_path
):
    dying, clients = fleet.servers[1], 8
    with envoy(fleet.urls, tmp_path) as url, httpx.Client(base_url=url, timeout=120) as http:
        homes = {name: fleet.ask(http, name).server for name in NAMES}
        assert fleet.held() == {name: {home} for name, home in homes.items()}, "who answered has it, and nobody else"
        own = [name for name in NAMES if homes[name] == "s1"]

        def answered(name: str) -> list[Answer]:
            """Ask as the stock client does, which asks again after half a second and after another."""
            answers = [fleet.ask(http, name)]
            while answers[-1].status != 200 and len(answers) < 3:
                time.sleep(0.5 * len(answers))
                answers.append(fleet.ask(http, name))
            return answers

        with ThreadPoolExecutor(clients) as pool:
            asking = [pool.submit(answered, NAMES[turn % len(NAMES)]) for turn in range(REQUESTS)]
            until(lambda: sum(one.done() for one in asking) >= REQUESTS // 3)
            os.killpg(dying.pid, signal.SIGKILL)
            until(lambda: dying.poll() is not None)
            answers = [one.result(timeout=120) for one in asking]
        failed = [first for first, *_ in answers if first.status != 200]
        # Those in flight, and each connection that the router kept open fails once.
        assert len(failed) <= 2 * clients, failed
        wrong = [last for *_, last in answers if not last.right]
        assert not wrong, "wrong, or not answered by the third try"
        after = {name: fleet.ask(http, name).server for name in NAMES}
        assert set(after.values()) == {"s0"}

        again = _server(fleet.home, 1)
        again.port, again.url = dying.port, dying.url
        fleet.servers[1] = fleet.stack.enter_context(again)
        until(lambda: fleet.ask(http, own[0]).server == "s1")
        found = [fleet.ask(http, name) for name in own]
        assert {(answer.right, answer.server) for answer in found} == {(True, "s1")}


# What a router drops.


def test_what_vllm_router_drops_on_the_way_is_never_answered_without(fleet, tmp_path):
    """It drops the headers of requests to these two routes."""
    text, session = fleet.question("doc-0"), session_headers("doc-0")
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": text, "max_output_tokens": 4},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
    }
    with vllm_router(fleet.urls, tmp_path / "router") as url, httpx.Client(base_url=url, timeout=120) as http:
        for path, body in bodies.items():
            body |= {"model": "m", "temperature": 0}
            for fields, headers in (
                ({"cartridges": ["doc-0"]}, session),
                ({"cartridges": ["doc-0"]}, {}),
                ({"model": "m:doc-0"}, {}),
            ):
                reply = http.post(path, json=body | fields, headers=headers)
                direct = httpx.post(fleet.urls[0] + path, json=body | fields, headers=headers, timeout=120)
                assert reply.status_code == direct.status_code == 200, reply.text
                assert _said(reply) == _said(direct), "the answer is another than the server's own"
            reply = http.post(path, json=body, headers=session)
            assert (reply.status_code, "`required`" in reply.text) == (400, True)


def _said(reply: httpx.Response) -> Any:
    body = reply.json()
    return [part["text"] for piece in body.get("output") or [body] for part in piece["content"]]


# Stopped, under traffic.


def _half_sent(url: str, name: str, body: bytes) -> socket.socket:
    """Begin a request and keep half of its body back."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=120)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nX-Cartridges: {name}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body[: len(body) // 2])
    return connection


def test_a_server_that_is_stopped_under_traffic_finishes_what_runs_and_no_request_fails(fleet, tmp_path):
    leaving, own = fleet.servers[1], NAMES[0]
    body = json.dumps({"model": "m", "prompt": fleet.question(own), "max_tokens": 1, "temperature": 0}).encode()
    with (
        envoy(fleet.urls, tmp_path / "under load") as url,
        httpx.Client(base_url=url, timeout=120) as http,
        httpx.Client(base_url=leaving.url, timeout=120) as direct,
        _traffic(fleet, http) as traffic,
        ExitStack() as stack,
    ):
        before = traffic.goes_on(2 * len(NAMES))
        assert {answer.server for _, answer in before} == {"s0", "s1"}
        running = stack.enter_context(_half_sent(leaving.url, own, body))
        os.kill(leaving.pid, signal.SIGTERM)
        until(lambda: direct.get("/health").status_code == 503)
        until(lambda: fleet.ask(direct, own).status == 503)
        traffic.goes_on(len(NAMES))
        assert leaving.poll() is None, "it does not wait for what runs"
        running.sendall(body[len(body) // 2 :])
        with running.makefile("rb") as file:
            answer = file.read().decode()
        assert answer.startswith("HTTP/1.1 200") and f"x-cartridges: {own}@1;" in answer.lower()
        assert fleet.facts[f"{own}@1"].value in answer.partition("\r\n\r\n")[2]
        until(lambda: leaving.poll() is not None)
        after = traffic.goes_on(2 * len(NAMES))
    failed = [each for each in traffic.asked if (each[1].status, each[1].used) != (200, f"{each[0]}@1")]
    assert not failed, failed
    assert all(answer.right for _, answer in traffic.asked)
    assert not {answer.server for _, answer in after} & {"s1"}, "it is still asked"
    assert "drained: 0 requests run still" in leaving.log.read_text(errors="replace")
