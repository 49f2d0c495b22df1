"""Helpers of the tests of metrics and top: real stores of two ranks, and a small server with their real routes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from homes import CHUNK, Home
from making import Made, make_fingerprint, make_rope
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lmcache_cartridge.serve.admin import add_routes
from lmcache_cartridge.serve.drain import Drain
from lmcache_cartridge.serve.metrics import PREFIX, RequestMetrics, StatusCollector
from lmcache_cartridge.serve.resolve import Resolver
from lmcache_cartridge.settings import Settings

RANKS = 2
ROPE = msgspec.structs.replace(make_rope(), pairing="half")
"""Keys can be moved, so there may be chains."""
CHUNK_BYTES = make_fingerprint().token_bytes * CHUNK // RANKS
"""Of one rank."""
CPU_CHUNKS, DEVICE_CHUNKS, DISK_CHUNKS = 16, 8, 32
Labels = dict[str, str]


class Watched:
    """Stores of two ranks with every tier, or without the device's, what collects their numbers, and a registry that has it all."""

    def __init__(self, path: Path, *, device: bool = True) -> None:
        sizes = {
            "cpu_bytes": CPU_CHUNKS * CHUNK_BYTES, "device_bytes": device * DEVICE_CHUNKS * CHUNK_BYTES,
            "disk_bytes": DISK_CHUNKS * CHUNK_BYTES, "disk_local": True, "reload_s": 0,
        }  # fmt: skip
        self.settings, self._home = Settings(home=path, **sizes), Home(path)
        self.registry = CollectorRegistry()
        self.collector = StatusCollector()
        self.registry.register(self.collector)
        self.requests = RequestMetrics(self.registry)
        ranks = [{"rank": rank, "world": RANKS} for rank in range(RANKS)]
        self.stores = [
            self._home.open(fingerprint=make_fingerprint(rope=ROPE), settings=sizes, **rank) for rank in ranks
        ]

    def make(self, name: str, positions: int = 4 * CHUNK + 8, dtype: str = "bfloat16", **arguments: Any) -> Made:
        """Register an artefact, and have the stores take it in."""
        shape = make_fingerprint(rope=ROPE, dtype=dtype)
        made = self._home.make(name, positions=positions, fingerprint=shape, **arguments)
        for store in self.stores:
            store.refresh()
        return made

    def look_up(self, made: Made, name: str) -> None:
        """Ask every rank for all chunks of a cartridge, and give back what was promised."""
        hashes = self._home.prompt(name).hashes[: made.manifest.positions // CHUNK]
        for store in self.stores:
            assert store.lookup(hashes) == len(hashes)
            assert sum(store.release(chunk_hash) for chunk_hash in hashes) == len(hashes)

    def status(self) -> list[dict[str, Any]]:
        """Return every rank's status."""
        return [store.status() for store in self.stores]

    def exposition(self) -> str:
        """Return what `/metrics` shows after an update."""
        self.collector.update([store.numbers() for store in self.stores])
        return generate_latest(self.registry).decode()

    def value(self, name: str, **labels: str) -> float | None:
        """Return one number, without our prefix, after an update; None if there is none."""
        return value(self.exposition(), name, **labels)

    def close(self) -> None:
        self._home.close()


def value(exposition: str, name: str, **labels: str) -> float | None:
    """Return the one sample of a name, without our prefix, and exactly these labels; None if there is none."""
    found = [
        sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if (sample.name, sample.labels) == (PREFIX + name, labels)
    ]
    assert len(found) <= 1, f"{name} {labels} is there {len(found)} times"
    return found[0] if found else None


@contextmanager
def serving(watched: Watched, key: str | None = None) -> Iterator[str]:
    """Serve `/metrics` and our own `/v1/cartridges`, the latter behind an API key as vLLM has it; lend the URL."""
    app = FastAPI()

    async def ask(method: str) -> list[Any]:
        return [getattr(store, method)() for store in watched.stores]

    nobody_asked = SimpleNamespace(outcome=lambda *_: (None, None))
    add_routes(
        app,
        SimpleNamespace(
            drain=Drain(0),
            library=None,
            settings=watched.settings,
            client=SimpleNamespace(ask=ask),
            canaries=nobody_asked,
            resolver=Resolver(watched.settings),
            maker=None,
        ),
    )

    @app.middleware("http")
    async def authenticate(request: Request, call_next: Any) -> Response:
        wrong = key is not None and request.headers.get("authorization") != f"Bearer {key}"
        return Response(status_code=401) if wrong and request.url.path.startswith("/v1") else await call_next(request)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(watched.exposition(), media_type="text/plain")

    with listening(app) as url:
        yield url


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Run an ASGI app on a free port; lend its URL."""
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_keep_alive=3600)
    server, bound = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.01)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
