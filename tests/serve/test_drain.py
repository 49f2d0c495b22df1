"""A server that drains: what it answers, what it refuses, and what it waits for before its engine stops."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from blocks import quietly
from fastapi import FastAPI
from waiting import Clock, until
from watching import listening

with quietly():
    from lmcache_cartridge.engine.host_api import before_shutdown
    from lmcache_cartridge.errors import UnsupportedEngine
    from lmcache_cartridge.serve.admin import add_routes
    from lmcache_cartridge.serve.drain import Drain, DrainGate


class Held:
    """A server whose answers wait until they are let go."""

    def __init__(self, drain: Drain, *, admin: bool = True) -> None:
        self.drain, self.let_go, self.asked = drain, threading.Event(), threading.Semaphore(0)
        self.app = FastAPI()
        self.app.add_middleware(DrainGate, drain=drain)
        add_routes(self.app, SimpleNamespace(settings=SimpleNamespace(admin=admin)), drain)

        @self.app.get("/health")
        def health() -> None:
            """Say that all is well, as vLLM's own does while it stops."""

        @self.app.post("/v1/completions")
        def complete(held: bool = False) -> str:
            self.asked.release()
            if held:
                self.let_go.wait(60)
            return "an answer"

        @self.app.post("/tokenize")
        def tokenize() -> str:
            return "tokens"


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def http(clock):
    held = Held(Drain(10, clock))
    with listening(held.app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield held, client
        held.let_go.set()


def _statuses(client: httpx.Client) -> list[int]:
    return [client.get("/health").status_code, client.post("/v1/completions").status_code]


def test_it_is_unhealthy_at_once_and_refuses_after_the_grace(http, clock):
    _, client = http
    assert _statuses(client) == [200, 200]
    told = client.post("/v1/cartridges/drain")
    assert told.json() == {"draining": True, "refusing": False, "running": 0}
    assert _statuses(client) == [503, 200]
    clock.now += 10
    assert _statuses(client) == [503, 503]
    assert client.post("/tokenize").status_code == 200, "what generates nothing needs no engine for long"
    refusal = client.post("/v1/completions")
    assert "about to stop" in refusal.json()["error"]["message"]
    assert {name: refusal.headers[name] for name in ("retry-after", "x-should-retry", "x-cartridges-draining")} == {
        "retry-after": "1", "x-should-retry": "true", "x-cartridges-draining": "true"}  # fmt: skip
    assert refusal.headers["x-envoy-immediate-health-check-fail"] == "true"
    assert client.delete("/v1/cartridges/drain").json() == {"draining": False, "refusing": False, "running": 0}
    assert _statuses(client) == [200, 200]


def test_what_runs_is_counted_finished_and_waited_for(http, clock):
    held, client = http
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(client.post("/v1/completions?held=true")))
    asking.start()
    assert held.asked.acquire(timeout=60)
    ending = threading.Thread(target=held.drain.wait, args=(600,))
    ending.start()
    until(lambda: held.drain.is_draining)
    clock.now += 10
    until(lambda: held.drain.state == {"draining": True, "refusing": True, "running": 1})
    assert client.post("/v1/completions").status_code == 503
    assert client.delete("/v1/cartridges/drain").status_code == 409, "it is stopping"
    assert ending.is_alive()
    held.let_go.set()
    ending.join(60)
    asking.join(60)
    assert not ending.is_alive() and answers[0].json() == "an answer"


def test_it_waits_no_longer_than_it_may(clock):
    drain = Drain(0, clock)
    assert drain.enter()
    ending = threading.Thread(target=drain.wait, args=(5,))
    ending.start()
    until(lambda: drain.is_refusing)
    assert not drain.enter()
    clock.now += 5
    ending.join(60)
    assert not ending.is_alive()


def test_only_an_administrator_drains():
    drain = Drain(0)
    with listening(Held(drain, admin=False).app) as url:
        assert httpx.post(f"{url}/v1/cartridges/drain").status_code == 403
        assert httpx.delete(f"{url}/v1/cartridges/drain").status_code == 403
    assert not drain.is_draining


class _Engine:
    def __init__(self) -> None:
        self.vllm_config: Any = SimpleNamespace(shutdown_timeout=60)
        self.errored, self.calls = False, []

    def shutdown(self, timeout: float | None = None) -> None:
        self.calls.append(timeout)


def test_what_vllm_stops_first_waits_once():
    engine, waits = _Engine(), []
    before_shutdown(engine, waits.append)
    engine.shutdown(timeout=60)
    engine.shutdown(timeout=60)
    engine.shutdown()
    assert (waits, engine.calls) == ([60], [60, 60, None])


def test_a_dead_engine_is_not_waited_for():
    engine, waits = _Engine(), []
    before_shutdown(engine, waits.append)
    engine.errored = True
    engine.shutdown(timeout=0)
    assert (waits, engine.calls) == ([], [0])


def test_an_engine_that_cannot_be_told_to_wait_is_refused():
    with pytest.raises(UnsupportedEngine, match="shutdown"):
        before_shutdown(SimpleNamespace(), lambda seconds: None)
