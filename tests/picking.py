"""The service of a fleet in a thread of this process, on a port of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from lmcache_cartridge.fleet.service import Fleet
from lmcache_cartridge.fleet.web import LIMITS, app

T = TypeVar("T")


class Service(NamedTuple):
    """A service that runs."""

    fleet: Fleet
    url: str
    loop: asyncio.AbstractEventLoop

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine of the fleet's returns, run in its event loop."""
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(60)


@contextmanager
def service(fleet: Fleet) -> Iterator[Service]:
    """Run a fleet's service."""
    with serving(lambda: app(fleet)) as (url, loop):
        yield Service(fleet, url, loop)


@contextmanager
def serving(make: Callable[[], web.Application]) -> Iterator[tuple[str, asyncio.AbstractEventLoop]]:
    """Run an application as the service is run; yield its address and event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, loop).result(60)

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(make(), access_log=None, **LIMITS)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, runner.addresses[0][1]

    try:
        runner, port = run(start())
        try:
            yield f"http://127.0.0.1:{port}", loop
        finally:
            run(runner.cleanup())
            run(asyncio.sleep(0.01))  # aiohttp's connections close a little later
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
