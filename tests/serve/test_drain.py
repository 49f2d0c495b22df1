"""A server that drains: what it answers, what it refuses, and what it waits for before its engine stops."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
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
    from lmcache_cartridge.serve.drain import Drain, DrainGate


@pytest.fixture
def clock():
    return Clock()


def served(drain: Drain, *, asked: threading.Semaphore, let_go: threading.Event) -> FastAPI:
    """Return a server whose completions say that they were asked, and wait until they are let go."""
    app = FastAPI()
    app.add_middleware(DrainGate, drain=drain)

    @app.get("/health")
    @app.post("/tokenize")
    @app.post("/v1/completions")
    def answer(held: bool = False) -> str:
        if held:
            asked.release()
            let_go.wait(60)
        return "an answer"

    return app


def test_it_is_unhealthy_at_once_refuses_after_the_grace_and_waits_for_what_runs(clock):
    drain, asked, let_go = Drain(10, clock), threading.Semaphore(0), threading.Event()
    with (
        listening(served(drain, asked=asked, let_go=let_go)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor() as pool,
    ):

        def statuses() -> list[int]:
            return [client.get("/health").status_code, client.post("/v1/completions").status_code]

        assert statuses() == [200, 200]
        answer = pool.submit(httpx.post, f"{url}/v1/completions?held=true", timeout=60)
        assert asked.acquire(timeout=60)
        ending = pool.submit(drain.wait, 600)
        until(lambda: drain.is_draining)
        assert statuses() == [503, 200]
        clock.move(10)
        assert statuses() == [503, 503]
        assert client.post("/tokenize").status_code == 200, "what generates nothing needs no engine for long"
        refusal = client.post("/v1/completions")
        assert "about to stop" in refusal.json()["error"]["message"]
        told = {"retry-after": "1", "x-should-retry": "true", "x-cartridges-draining": "true",
                "x-envoy-immediate-health-check-fail": "true"}  # fmt: skip
        assert told.items() <= dict(refusal.headers).items()
        assert not ending.done()
        let_go.set()
        ending.result(60)
        assert answer.result(60).json() == "an answer"


def test_it_waits_no_longer_than_it_may(clock):
    drain = Drain(0, clock)
    assert drain.enter()
    with ThreadPoolExecutor() as pool:
        ending = pool.submit(drain.wait, 5)
        until(lambda: drain.is_refusing)
        assert not drain.enter()
        clock.move(5)
        ending.result(60)


class _Engine:
    def __init__(self) -> None:
        self.vllm_config: Any = SimpleNamespace(shutdown_timeout=60)
        self.errored, self.calls = False, []

    def shutdown(self, timeout: float | None = None) -> None:
        self.calls.append(timeout)


def test_what_vllm_stops_first_waits_once_and_not_for_a_dead_engine():
    engine, dead, waits = _Engine(), _Engine(), []
    dead.errored = True
    for each, timeouts in ((engine, (60, 60, None)), (dead, (0,))):
        before_shutdown(each, waits.append)
        for timeout in timeouts:
            each.shutdown(timeout=timeout)
    assert (waits, engine.calls, dead.calls) == ([60], [60, 60, None], [0])
