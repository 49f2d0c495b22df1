"""A server that drains: what it answers, what it refuses, and what it waits for; under traffic behind a router in test_fleet."""

from __future__ import annotations

import threading

import pytest
from blocks import quietly
from fastapi import FastAPI
from test_http import post
from waiting import Clock, until

with quietly():
    from lmcache_cartridge.serve.drain import Drain, DrainGate


@pytest.mark.parametrize("is_finished", [True, False])
def test_it_is_unhealthy_at_once_refuses_after_the_grace_and_waits_for_what_runs_as_long_as_it_may(is_finished):
    drain, app = Drain(10, clock := Clock()), FastAPI()
    app.add_middleware(DrainGate, drain=drain)
    paths = "/health", "/v1/completions", "/tokenize"  # what generates nothing needs no engine for long
    for path in paths:
        app.post(path)(lambda: "an answer")

    def statuses() -> list[int]:
        return [post(app, path).status_code for path in paths]

    assert statuses() == [200] * 3 and drain.enter()
    ending = threading.Thread(target=drain.wait, args=(5,), daemon=True)
    ending.start()
    until(lambda: drain.is_draining)
    assert statuses() == [503, 200, 200]
    clock.move(10)
    assert statuses() == [503, 503, 200]
    assert post(app, "/v1/completions").headers["x-cartridges-draining"] == "true"
    assert not drain.enter() and ending.is_alive()
    if is_finished:
        drain.leave()

    def has_ended() -> bool:
        clock.move(0 if is_finished else 5)
        return not ending.is_alive()

    until(has_ended, timeout_s=60)
