"""Drain: how a server that is to stop leaves its routers, in turn: it is not healthy, takes nothing new, finishes what runs.

vLLM 0.32 stays healthy while it stops, and once it stops the engine it cannot render a request that comes then, nor one
whose cartridges are still being loaded. So `Drain.wait` stands before that, in vLLM's own order of ending.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi.responses import Response
from vllm.logger import init_logger

from . import http
from .request import Refusal

logger = init_logger("vllm.lmcache_cartridge.serve.drain")

HEALTH = "/health"
REFUSED = {
    "retry-after": "1",
    "x-should-retry": "true",
    # By the first Envoy asks another server (`retriable_headers`), by the second it sends no more here.
    "x-cartridges-draining": "true",
    "x-envoy-immediate-health-check-fail": "true",
}
"""Headers of a refusal while a server drains. Its status is 503: routers that shut a server out by it do right."""
_POLL_S = 0.05


class Drain:
    """Whether one API server drains, and what it still answers. `enter` and `leave` are for its event loop, `wait` for any thread."""

    def __init__(self, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """For `grace_s` after `wait` began new requests are answered still: routers have to see first that it is not healthy."""
        self._grace_s, self._clock = grace_s, clock
        self._began: float | None = None
        self._running = 0

    @property
    def is_draining(self) -> bool:
        """Whether routers are told to send nothing more."""
        return self._began is not None

    @property
    def is_refusing(self) -> bool:
        """Whether new requests are refused."""
        began = self._began
        return began is not None and self._clock() - began >= self._grace_s

    def wait(self, timeout_s: float) -> None:
        """Drain to the end of the server: return when nothing runs, at most `timeout_s` after the grace. Blocks."""
        self._began = self._clock()
        logger.info("draining: %d requests run, new ones are taken for %g s", self._running, self._grace_s)
        while not self.is_refusing:
            time.sleep(_POLL_S)
        deadline = self._clock() + timeout_s
        while self._running and self._clock() < deadline:
            time.sleep(_POLL_S)
        logger.info("drained: %d requests run still", self._running)

    def enter(self) -> bool:
        """Count a request; False, and it does not count, where it is refused."""
        if self.is_refusing:
            return False
        self._running += 1
        return True

    def leave(self) -> None:
        """Take back one `enter`."""
        self._running -= 1


class DrainGate:
    """ASGI middleware, the outermost of ours: `GET /health` and routes that generate answer 503 as their `Drain` says."""

    def __init__(self, app: Any, drain: Drain) -> None:
        self._app, self._drain = app, drain

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = http.path_of(scope) if scope["type"] == "http" else ""
        if path == HEALTH and self._drain.is_draining:
            await Response(status_code=503)(scope, receive, send)
        elif path not in http.GENERATES:
            await self._app(scope, receive, send)
        elif self._drain.enter():
            try:
                await self._app(scope, receive, send)
            finally:
                self._drain.leave()
        else:
            refusal = http.error(Refusal(503, "this server is about to stop; ask again, another one answers"))
            refusal.headers.update(REFUSED)
            await refusal(scope, receive, send)
