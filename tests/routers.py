"""Routers as people run them, Envoy and vllm-router from their wheels, before real servers or before stubs that say so."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from waiting import until
from watching import listening

from lmcache_cartridge.serve.launch import free_port

ENVOY = Path(__file__).parent.parent / "configs" / "envoy"
LOCAL = "127.0.0.1"


Named = tuple[dict[str, Any], dict[str, str]]
"""A request's body and headers."""


class Request(NamedTuple):
    """What a stub got."""

    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class Reply(NamedTuple):
    """What a stub answers."""

    status: int = 200
    headers: Mapping[str, str] = {}
    body: Mapping[str, Any] | bytes = {}
    """Sent as JSON with the name of the stub, or as it is."""


class Stub:
    """No engine: an HTTP server that is healthy and lists a model, and answers all else by `answer`, each in a thread."""

    def __init__(self, name: str, answer: Callable[[Request], Reply] = lambda request: Reply()) -> None:
        self.name = name
        self.requests: list[Request] = []
        self.connections: set[Any] = set()
        """Of whoever asked."""
        self._says, self._threads, self._ends = answer, ThreadPoolExecutor(128), ExitStack()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, as an ASGI app."""
        got = StarletteRequest(scope, receive)
        path = b"?".join(filter(None, (scope["raw_path"], scope["query_string"]))).decode("latin-1")
        request = Request(path, dict(got.headers), await got.body())
        self.connections.add(scope["client"])
        if got.method == "GET":
            status, headers, body = self.get(path)
        else:
            self.requests.append(request)
            loop = asyncio.get_running_loop()
            status, headers, body = await loop.run_in_executor(self._threads, self._says, request)
        shown = body if isinstance(body, bytes) else json.dumps({"stub": self.name, **body})
        await Response(shown, status, headers, "application/json")(scope, receive, send)

    def get(self, path: str) -> Reply:
        """Return what a GET is answered."""
        return Reply(body={"data": [{"id": "m", "object": "model"}]})

    def __enter__(self) -> Stub:
        self.url = self._ends.enter_context(listening(self))
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End it with all of its connections, as a process that is killed does."""
        self._ends.close()


@contextmanager
def stubs(count: int, answer: Callable[[Request], Reply] = lambda request: Reply()) -> Iterator[list[Stub]]:
    """Run so many stubs, called `0`, `1` and so on."""
    with ExitStack() as stack:
        yield [stack.enter_context(Stub(str(number), answer)) for number in range(count)]


@contextmanager
def _running(command: Sequence[str | Path], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            **options,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(process: subprocess.Popen[bytes], log: Path, is_ready: Callable[[], bool]) -> None:
    def ready_or_dead() -> bool:
        with suppress(httpx.HTTPError):
            return process.poll() is not None or is_ready()
        return False

    try:
        until(ready_or_dead, timeout_s=120)
        assert process.poll() is None
    except AssertionError:
        pytest.fail(f"it is not ready; its log ends:\n{log.read_text(errors='replace')[-3000:]}")


@contextmanager
def envoy(
    urls: Sequence[str],
    directory: Path,
    *,
    picker: str | None = None,
    picker_timeout: str = "30s",
) -> Iterator[str]:
    """Run Envoy by a configuration that we give, before these servers; yield its address.

    It is `picker.yaml` where the address of a picker is given, else `envoy.yaml`. The picker gets more time than there,
    as whoever looks at who is picked must not look at how busy the machine is.
    """
    config: Any = yaml.safe_load((ENVOY / ("picker.yaml" if picker else "envoy.yaml")).read_text())
    resources, port, admin = config["static_resources"], free_port(), free_port()
    resources["listeners"][0]["address"]["socket_address"] = {"address": LOCAL, "port_value": port}
    cluster, *others = resources["clusters"]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [
        {"endpoint": {"hostname": f"engine-{number}", "address": _address(url)}} for number, url in enumerate(urls)
    ]}]  # fmt: skip
    for other in others:
        manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        [authz] = [one for one in manager["http_filters"] if one["name"] == "envoy.filters.http.ext_authz"]
        authz["typed_config"]["http_service"]["server_uri"]["timeout"] = picker_timeout
        other["connect_timeout"] = "5s"
        other["outlier_detection"] |= {"interval": "0.1s", "base_ejection_time": "1s", "max_ejection_time": "1s"}
        other["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": {"address": _address(str(picker))}}]}]
    for check in cluster["health_checks"]:
        check |= {"interval": "0.2s", "no_traffic_interval": "0.2s"}
    config["admin"] = {"address": {"socket_address": {"address": LOCAL, "port_value": admin}}}
    directory.mkdir(exist_ok=True)
    (directory / "envoy.yaml").write_text(yaml.safe_dump(config))
    command = [Path(sys.executable).parent / "envoy", "-c", directory / "envoy.yaml", "--disable-hot-restart",
               "--concurrency", "1", "--log-level", "warn"]  # fmt: skip
    log = directory / "envoy.log"

    def asked() -> dict[str, int]:
        """Return how many requests each server got that Envoy's worker knows of."""
        found = httpx.get(f"http://{LOCAL}:{admin}/clusters?format=json").json()["cluster_statuses"]
        return {
            str(host["address"]): int(stat.get("value", 0))
            for cluster in found
            if cluster["name"] == "engines"
            for host in cluster["host_statuses"]
            for stat in host["stats"]
            if stat["name"] == "rq_total"
        }

    def is_ready() -> bool:
        """Whether requests reach all servers: the worker learns of healthy ones some time after the main thread."""
        before = asked()
        for number in range(16 * len(urls)):
            httpx.get(f"http://{LOCAL}:{port}/health", headers={"X-Cartridges": f"probe-{number}"})
        after = asked()
        return len(after) == len(urls) and all(after[host] > before.get(host, 0) for host in after)

    with _running(command, log, cwd=ENVOY) as process:
        _wait_for(process, log, is_ready)
        yield f"http://{LOCAL}:{port}"


def _address(url: str) -> dict[str, Any]:
    return {"socket_address": {"address": LOCAL, "port_value": int(url.rpartition(":")[2])}}


@contextmanager
def vllm_router(urls: Sequence[str], directory: Path) -> Iterator[str]:
    """Run vllm-router before these servers, with its own defaults; yield its address, `directory/router.log` its log."""
    port = free_port()
    directory.mkdir(exist_ok=True)
    command = [Path(sys.executable).parent / "vllm-router", "--host", LOCAL, "--port", str(port), "--policy", "consistent_hash",
               "--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1",
               "--worker-urls", *urls]  # fmt: skip
    log = directory / "router.log"
    with _running(command, log) as process:
        _wait_for(process, log, lambda: httpx.get(f"http://{LOCAL}:{port}/health").status_code == 200)
        yield f"http://{LOCAL}:{port}"
