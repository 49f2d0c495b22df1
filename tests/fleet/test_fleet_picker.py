"""Envoy asks a picker for each request: who is picked answers, no client chooses a server, and no failure is an error."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from aiohttp import web
from picking import serving
from routers import ENVOY, Reply, Request, Stub, envoy, stubs
from waiting import until

from lmcache_cartridge.fleet.config import FleetConfig, PodConfig
from lmcache_cartridge.fleet.index import Index
from lmcache_cartridge.fleet.pods import Pod
from lmcache_cartridge.fleet.web import HEADER, PREFIX, destination, route

NAMES = [f"doc-{number}" for number in range(12)]


def test_without_a_pick_the_hash_is_that_of_the_other_configuration():
    """Whoever adds a picker, or loses it, finds each cartridge where it was."""
    before, now = (
        yaml.safe_load((ENVOY / name).read_text())["static_resources"]["clusters"][0]
        for name in ("envoy.yaml", "picker.yaml")
    )
    [policy] = now["load_balancing_policy"]["policies"]
    [fallback] = policy["typed_extension_config"]["typed_config"]["fallback_policy"]["policies"]
    typed = fallback["typed_extension_config"]["typed_config"]
    assert typed.pop("@type").endswith("Maglev") and before["lb_policy"] == "MAGLEV"
    assert now["common_lb_config"] | typed == before["common_lb_config"]


# Before stubs: no engine, and a picker that says what it is told to say.


class Fleet:
    """Stubs, a picker whose answer can be set, a stub that no pod is, and Envoy before them."""

    def __init__(self, count: int, directory: Path, stack: ExitStack, **config: str) -> None:
        self.says: Callable[[Request], Reply] = lambda request: Reply()
        self.servers = stack.enter_context(stubs(count))
        self.picker = stack.enter_context(Stub("picker", lambda request: self.says(request)))
        self.outside = stack.enter_context(Stub("outside"))
        urls = [stub.url for stub in self.servers]
        url = stack.enter_context(envoy(urls, directory, picker=self.picker.url, **config))
        self.http = stack.enter_context(httpx.Client(base_url=url, timeout=60))

    def pick(self, number: int) -> None:
        """Have the picker name a stub."""
        self.says = lambda request: Reply(headers={HEADER: self.address(number)})

    def address(self, number: int) -> str:
        """Return a stub's address as Envoy knows it."""
        return self.servers[number].url.removeprefix("http://")

    def answered(self, names: list[str] = NAMES, **headers: str) -> dict[str, str]:
        """Return which stub answers for each cartridge; all must."""
        found = {}
        for number, name in enumerate(names):
            named = {"X-Cartridges": f"{name}@{number}"} if number % 2 else {}
            body = {"model": "m", "prompt": "x"} | ({} if named else {"cartridges": [name]})
            reply = self.http.post("/v1/completions", json=body, headers=named | headers)
            assert reply.status_code == 200, reply.text
            found[name] = reply.json()["stub"]
        return found

    def is_asked(self) -> bool:
        before = len(self.picker.requests)
        self.answered(NAMES[:1])
        return len(self.picker.requests) > before


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with ExitStack() as stack:
        yield Fleet(3, tmp_path_factory.mktemp("envoy"), stack)


@pytest.fixture
def fleet(running):
    running.says = lambda request: Reply()
    until(running.is_asked)
    return running


def test_the_picker_is_told_what_it_needs_and_no_more(fleet):
    body = json.dumps({"model": "m", "prompt": "word " * 16_384})
    sent = {"X-Cartridges": "a, b@2", "Authorization": "Bearer key", "Cookie": "secret", HEADER: "mine"}
    assert fleet.http.post("/v1/completions?beta=1", content=body, headers=sent).status_code == 200
    asked = fleet.picker.requests[-1]
    assert (asked.path, asked.body) == (f"{PREFIX}/v1/completions?beta=1", body.encode())
    assert (asked.headers["x-cartridges"], asked.headers["authorization"]) == ("a, b@2", "Bearer key")
    assert not asked.headers.keys() & {"cookie", HEADER}
    before = len(fleet.picker.requests)
    assert fleet.http.get("/v1/models").status_code == 200
    assert len(fleet.picker.requests) == before, "what generates nothing is not asked about"


FAILURES: dict[str, Callable[[Fleet], Reply]] = {
    "names nobody": lambda fleet: Reply(),
    "breaks": lambda fleet: Reply(500),
    "names no address": lambda fleet: Reply(headers={HEADER: "engine-0,,[::1"}),
    "names a server that is not of the fleet": lambda fleet: Reply(headers={HEADER: fleet.outside.url[7:]}),
    "says more than it may": lambda fleet: Reply(headers={"x-cartridges": "another", "x-affinity": "another"}),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_picker_that_fails_leaves_the_hash_and_no_client_chooses_a_server(fleet, failure):
    homes = fleet.answered()
    assert set(homes.values()) == {"0", "1", "2"}, "the control: the hash spreads them"
    fleet.says = lambda request: FAILURES[failure](fleet)
    for aim in ("", fleet.address(1), f"{fleet.outside.url[7:]},{fleet.address(2)}"):
        assert fleet.answered(**({HEADER: aim} if aim else {})) == homes
    fleet.pick(0)
    until(fleet.is_asked)
    assert set(fleet.answered(**{HEADER: fleet.address(1)}).values()) == {"0"}
    assert fleet.outside.requests == []


def test_a_picker_that_hangs_is_soon_left_alone_and_asked_again_later(tmp_path):
    go_on = threading.Event()

    def hang(request: Request) -> Reply:
        go_on.wait(60)
        return Reply(headers={HEADER: fleet.address(1)})

    with ExitStack() as stack:
        fleet = Fleet(2, tmp_path, stack, picker_timeout="0.25s")
        fleet.says = hang
        assert len(fleet.answered()) == len(NAMES), "no answer is lost"
        until(lambda: not fleet.is_asked())
        assert set(fleet.answered().values()) == {"0", "1"}, "the hash"
        go_on.set()
        until(lambda: set(fleet.answered().values()) == {"1"})


def test_a_body_that_is_too_large_for_the_picker_reaches_its_server_whole(fleet):
    home, body = fleet.answered(NAMES[:1]), json.dumps({"cartridges": NAMES[:1], "prompt": "x" * (17 << 20)}).encode()
    reply = fleet.http.post("/v1/completions", content=body)
    assert reply.json()["stub"] == home[NAMES[0]]
    assert fleet.servers[int(home[NAMES[0]])].requests[-1].body == body
    asked = fleet.picker.requests[-1]
    assert (asked.headers["x-envoy-auth-partial-body"], len(asked.body)) == ("true", 16 << 20)


def test_a_picked_server_that_is_gone_is_passed_over(tmp_path):
    with ExitStack() as stack:
        fleet = Fleet(3, tmp_path, stack)
        fleet.pick(2)
        assert set(fleet.answered().values()) == {"2"}
        fleet.servers[2].close()
        assert set(fleet.answered().values()) == {"0", "1"}, "Envoy need not know yet"
        fleet.picker.close()
        assert set(fleet.answered().values()) == {"0", "1"}, "no picker either"


# What Envoy is told.


class Says:
    """A picker that says one thing, after a while, and keeps what it was asked."""

    def __init__(self, answer: str = "10.0.0.5:8000", after_s: float = 0) -> None:
        self.answer, self.after_s = answer, after_s
        self.asked: list[tuple[dict[str, str], bytes]] = []

    async def pick(self, headers: Any, body: bytes) -> Any:
        self.asked.append((dict(headers), body))
        await asyncio.sleep(self.after_s)
        return SimpleNamespace(pod=SimpleNamespace(resolved=self.answer))


LONG = b"a," * 14_000
ODD: dict[str, tuple[bytes, bytes]] = {
    "a line's end in the path": (b"/%0Ax", b""), "no text": (b"/%ff%00", b""),
    "a long path": (b"/" + b"a" * 30_000, b""),
    "a long list": (b"/v1/completions", b"x-cartridges: " + LONG + b"\r\n"),
    "no ASCII": (b"/v1/completions", b"x-cartridges: \xff\r\ncontent-type: \x80\r\n"),
    "the list in two": (b"/v1/completions", b"x-cartridges: a\r\nx-cartridges: b\r\n"),
    "bytes that are packed": (b"/v1/completions", b"content-encoding: gzip\r\nexpect: 100-continue\r\n"),
}  # fmt: skip


def test_whatever_envoy_lets_through_the_picker_reads(tmp_path):
    """A 4xx of the picker's web server would go to the client."""

    def make() -> web.Application:
        made = web.Application(client_max_size=64 << 20)
        made.add_routes([route(picker.pick)])
        return made

    picker = Says("")
    with (
        stubs(2) as servers,
        serving(make) as service,
        envoy([s.url for s in servers], tmp_path, picker=service) as url,
    ):
        for number, (what, (path, headers)) in enumerate(ODD.items()):
            picker.answer = servers[number % 2].url.removeprefix("http://")
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as connection:
                head = b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%scontent-length: 3\r\n\r\n{}\n"
                connection.sendall(head % (path, headers))
                answer = b"".join(iter(lambda connection=connection: connection.recv(1 << 16), b""))
            assert b'"stub": "%d"' % (number % 2) in answer, (what, answer[:500])
            assert len(picker.asked) == number + 1 and picker.asked[-1][1] == b"{}\n", what
        told = dict(zip(ODD, picker.asked, strict=True))
        assert told["the list in two"][0]["x-cartridges"] == "a,b"
        assert told["a long list"][0]["x-cartridges"] == LONG.decode()


async def test_a_body_that_envoy_cut_is_not_read():
    picker, headers = Says(), {"x-envoy-auth-partial-body": "true", "x-cartridges": "a"}
    assert await destination(picker.pick, headers, b'{"model": "m') == picker.answer
    assert picker.asked == [(headers, b"")]


@pytest.mark.parametrize("limit_ms, after_s, told", [("25", 60, None), ("9000", 0, "x"), ("\u00b2", 0, "x")])
async def test_a_pick_that_takes_too_long_is_given_up_before_envoy_does(limit_ms, after_s, told):
    assert await destination(Says("x", after_s).pick, {"x-envoy-expected-rq-timeout-ms": limit_ms}, b"") == told


@pytest.mark.parametrize(
    "url, told",
    [("http://engine-0:8000", "10.0.0.1:8000,[::1]:8000"), ("https://[2600::1]", "10.0.0.1:443,[::1]:443")],
)
async def test_envoy_is_told_every_address_of_a_server_also_once_its_name_is_gone(monkeypatch, url, told):
    names = ["10.0.0.1", "::1", "10.0.0.1"]

    async def look_up(host: str, port: str, **options: Any) -> list[Any]:
        if not names or host not in url or "[" in host:
            raise OSError("gone")
        return [(2, 1, 6, "", (ip, port)) for ip in names]

    async def answers(session: Any, path: str) -> str:
        return "{}" if path == "/kv_event_sources" else '{"data": []}'

    config = PodConfig(name="a", url=url)
    pod = Pod(0, config, FleetConfig(pods=(config,)), Index())
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    monkeypatch.setattr(pod, "_get", answers)
    for _ in range(2):
        await pod.poll(SimpleNamespace())
        assert (pod.problem, pod.resolved) == (None, told)
        names.clear()
