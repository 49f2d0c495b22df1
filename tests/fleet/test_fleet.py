"""Real servers of one library behind the routers that people run: where cartridges lie, and what load, stops and kills do."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from recall.ward import Fact, ask
from routers import Named, envoy, vllm_router
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

SERVERS = int(os.environ.get("FLEET_SERVERS", "2"))
NAMES = [f"doc-{number}" for number in range(int(os.environ.get("FLEET_CARTRIDGES", "12")))]
REQUESTS = int(os.environ.get("FLEET_REQUESTS", "60"))
"""All may be larger by hand."""
TURNS = 5
RELOAD_S = 0.2
ENGINES = [f"engine-{number}" for number in range(SERVERS)]
"""What `envoy` calls the servers."""


class Answer(NamedTuple):
    """What a request came to."""

    status: int
    server: str | None
    """The name that it calls the model by."""
    used: str | None
    """`id@version`."""
    right: bool
    """Whether it is the answer of the cartridge that it names."""
    began_s: float
    took_s: float
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
        body = {"model": "m", "prompt": self.question(name), "max_tokens": 1, "temperature": 0}
        began = time.monotonic()
        reply = http.post("/v1/completions", json=body | {"cartridges": [name]}, headers={"X-Cartridges": name})
        return self.answer(reply, began)

    def answer(self, reply: httpx.Response, began_s: float = 0.0) -> Answer:
        took_s = time.monotonic() - began_s
        if reply.status_code != 200:
            return Answer(reply.status_code, None, None, False, began_s, took_s, reply.text)
        used, body = reply.headers["x-cartridges"].partition(";")[0], reply.json()
        right = body["choices"][0]["text"].split()[-1] == self.facts[used].value
        return Answer(200, body["model"], used, right, began_s, took_s)


def _traffic(fleet: Fleet, http: httpx.Client, names: Sequence[str], clients: int = 4) -> Traffic[tuple[str, Answer]]:
    """Return clients that ask for some cartridges, each in an order of its own."""

    def asking(number: int) -> Iterator[tuple[str, Answer]]:
        for name in itertools.cycle(random.Random(number).sample(names, len(names))):
            yield name, fleet.ask(http, name)

    return Traffic(asking(number) for number in range(clients))


def _server(home: Path, number: int) -> ServerProcess:
    """Return a server of the fleet, not started."""
    own = home / f"s{number}"
    settings = Settings(
        home=own, disk_dir=own, library=str(home / "library"), cpu_bytes=256 << 20, required=True, reload_s=RELOAD_S,
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
        servers = [_server(home, number) for number in range(SERVERS)]
        with ThreadPoolExecutor(SERVERS) as pool:
            list(pool.map(stack.enter_context, servers))
        yield Fleet(stack, home, servers, facts)


# Where cartridges come to lie.


def test_behind_envoy_each_cartridge_lies_on_one_server(fleet, tmp_path):
    turns = [(name, turn) for name in NAMES for turn in range(TURNS)]
    answered: dict[str, set[str | None]] = {}
    with envoy(fleet.urls, tmp_path / "envoy") as url, httpx.Client(base_url=url, timeout=120) as http:
        for name, turn in random.Random(0).sample(turns, len(turns)):
            ways: list[Named] = [
                ({}, {"X-Cartridges": name}),
                ({"cartridges": [name]}, {}),
                ({}, {"X-Cartridges": f"{name}@1"}),
            ]
            fields, headers = ways[turn % 3]
            body = {"model": "m", "prompt": fleet.question(name), "max_tokens": 1, "temperature": 0} | fields
            answer = fleet.answer(http.post("/v1/completions", json=body, headers=headers))
            assert (answer.status, answer.used, answer.right) == (200, f"{name}@1", True)
            answered.setdefault(name, set()).add(answer.server)
    assert fleet.held() == answered, "who answered has it, and nobody else"
    assert {len(servers) for servers in answered.values()} == {1}
    assert len(set(map(frozenset, answered.values()))) == SERVERS, "one server has all of them"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_what_vllm_router_drops_on_the_way_is_never_answered_without(fleet, tmp_path, path):
    """It drops the headers of requests to these two routes."""
    text = fleet.question("doc-0")
    body: dict[str, Any] = {"model": "m", "temperature": 0}
    body |= {"input": text, "max_output_tokens": 4} if path == "/v1/responses" else {
        "messages": [{"role": "user", "content": text}], "max_tokens": 4}  # fmt: skip
    ways: list[tuple[Named, bool]] = [
        (({"cartridges": ["doc-0"]}, session_headers("doc-0")), True), (({"cartridges": ["doc-0"]}, {}), True),
        (({"model": "m:doc-0"}, {}), True), (({}, session_headers("doc-0")), False),
    ]  # fmt: skip
    with vllm_router(fleet.urls, tmp_path / "router") as url, httpx.Client(base_url=url, timeout=120) as http:
        for (fields, headers), is_answered in ways:
            reply = http.post(path, json=body | fields, headers=headers)
            if is_answered:
                direct = httpx.post(fleet.urls[0] + path, json=body | fields, headers=headers, timeout=120)
                assert reply.status_code == direct.status_code == 200, reply.text
                assert _said(reply) == _said(direct), "the answer is another than the server's own"
            else:
                assert (reply.status_code, "`required`" in reply.text) == (400, True)


def _said(reply: httpx.Response) -> Any:
    body = reply.json()
    return [part["text"] for piece in body.get("output") or [body] for part in piece["content"]]


# Under load.


def test_a_killed_server_costs_what_it_was_answering_and_comes_back(fleet, tmp_path):
    names, number, clients = NAMES, SERVERS - 1, 8
    dying = fleet.servers[number]
    with envoy(fleet.urls, tmp_path) as url, httpx.Client(base_url=url, timeout=120) as http:
        homes = {name: fleet.ask(http, name).server for name in names}
        own = [name for name in names if homes[name] == f"s{number}"]

        def answered(name: str) -> list[Answer]:
            """Ask as the stock client does, which asks again after half a second and more."""
            answers = [fleet.ask(http, name)]
            if answers[0].status != 200:
                time.sleep(0.5)
                answers.append(fleet.ask(http, name))
            return answers

        with ThreadPoolExecutor(clients) as pool:
            asking = [pool.submit(answered, names[turn % len(names)]) for turn in range(REQUESTS)]
            until(lambda: sum(one.done() for one in asking) >= REQUESTS // 3)
            os.killpg(dying.pid, signal.SIGKILL)
            until(lambda: dying.poll() is not None)
            gone_s = time.monotonic()
            answers = [one.result(timeout=120) for one in asking]
        failed = [first for first, *_ in answers if first.status != 200]
        late = [one for one in failed if one.began_s > gone_s]
        print(f"killed: {len(failed)} of {REQUESTS} failed, {len(late)} of them begun later; none by the second try")
        print(Counter((one in late, one.problem[-60:]) for one in failed))
        # Those in flight, and each connection that the router kept open fails once.
        assert len(failed) <= 2 * clients, failed
        wrong = [last for *_, last in answers if not last.right]
        assert not wrong, "wrong, or not answered by the second try"
        after = {name: fleet.ask(http, name).server for name in names}
        assert f"s{number}" not in after.values()
        assert all(after[name] == home for name, home in homes.items() if name not in own), "others moved too"

        again = _server(fleet.home, number)
        again.port, again.url = dying.port, dying.url
        fleet.servers[number] = fleet.stack.enter_context(again)
        until(lambda: fleet.ask(http, own[0]).server == f"s{number}")
        found = [fleet.ask(http, name) for name in own]
        assert {(answer.right, answer.server) for answer in found} == {(True, f"s{number}")}


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
    names, [*_, leaving] = NAMES, fleet.servers
    with envoy(fleet.urls, tmp_path / "before") as url, httpx.Client(base_url=url, timeout=120) as http:
        own = [name for name in names if fleet.ask(http, name).server == f"s{SERVERS - 1}"]
    body = json.dumps({"model": "m", "prompt": fleet.question(own[0]), "max_tokens": 1, "temperature": 0}).encode()
    with (
        envoy(fleet.urls, tmp_path / "under load") as url,
        httpx.Client(base_url=url, timeout=120) as http,
        httpx.Client(base_url=leaving.url, timeout=120) as direct,
        _traffic(fleet, http, names) as traffic,
        ExitStack() as stack,
    ):
        before = traffic.goes_on(2 * len(names))
        assert {answer.server for _, answer in before} == {f"s{number}" for number in range(SERVERS)}
        running = stack.enter_context(_half_sent(leaving.url, own[0], body))
        os.kill(leaving.pid, signal.SIGTERM)
        until(lambda: direct.get("/health").status_code == 503)
        until(lambda: fleet.ask(direct, own[0]).status == 503)
        refused = direct.post("/v1/chat/completions", json={"model": "m", "messages": []})
        assert (refused.status_code, refused.headers["x-cartridges-draining"]) == (503, "true")
        assert (refused.headers["retry-after"], refused.headers["x-should-retry"]) == ("1", "true")
        traffic.goes_on(len(names))
        assert leaving.poll() is None, "it does not wait for what runs"
        running.sendall(body[len(body) // 2 :])
        with running.makefile("rb") as file:
            answer = file.read().decode()
        assert answer.startswith("HTTP/1.1 200") and f"x-cartridges: {own[0]}@1;" in answer.lower()
        assert fleet.facts[f"{own[0]}@1"].value in answer.partition("\r\n\r\n")[2]
        until(lambda: leaving.poll() is not None)
        after = traffic.goes_on(2 * len(names))
    failed = [each for each in traffic.asked if (each[1].status, each[1].used) != (200, f"{each[0]}@1")]
    assert not failed, failed
    assert all(answer.right for _, answer in traffic.asked)
    assert not {answer.server for _, answer in after} & {f"s{SERVERS - 1}"}, "it is still asked"
    assert "drained: 0 requests run still" in leaving.log.read_text(errors="replace")
    print(f"stopped: {len(traffic.asked)} requests, none failed")
