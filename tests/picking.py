"""The service of a fleet in a thread of this process, on a port of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from aiohttp import web

from lmcache_cartridge.fleet.web import LIMITS

T = TypeVar("T")


@contextmanager
def serving(make: Callable[[], web.Application]) -> Iterator[str]:
    """Run an application as the service is run; yield its address."""
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
            yield f"http://127.0.0.1:{port}"
        finally:
            run(runner.cleanup())
            run(asyncio.sleep(0.01))  # aiohttp's connections close a little later
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
