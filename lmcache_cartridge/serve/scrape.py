"""Scrape: cartridges' metrics on vLLM's `/metrics`, those of its worker processes included."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.logger import init_logger

from .metrics import StatusCollector

logger = init_logger("vllm.lmcache_cartridge.serve.metrics")

_EVERY_S = 1.0


def attach(app: FastAPI, collector: StatusCollector) -> None:
    """Have `/metrics` show what `collector` has.

    A single API server shows its process's registry. With several, or where `$PROMETHEUS_MULTIPROC_DIR` is set, vLLM
    0.32 makes a registry for each scrape, of what all of them wrote to files, and no custom collector gets into it; so
    the route is replaced, as vLLM lets endpoint plugins, by one that does the same and adds ours. All servers ask the
    same workers, so whichever answers, a worker's numbers are there once.
    """
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        REGISTRY.register(collector)
        return

    @app.get("/metrics")
    def metrics() -> Response:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        registry.register(collector)
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def follow(collector: StatusCollector, status: Callable[[], Awaitable[Any]]) -> NoReturn:
    """Keep `collector` up to date until cancelled. A failure is logged once, counted each time, and tried again."""
    complaint = None
    while True:
        try:
            collector.update(await status())
            complaint = None
        except Exception as error:
            collector.fail()
            if str(error) != complaint:
                logger.warning("the metrics are not up to date: %s", error)
            complaint = str(error)
        await asyncio.sleep(_EVERY_S)
