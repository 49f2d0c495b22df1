"""Routers as people run them, Envoy and vllm-router from their wheels, before real servers or before stubs that say so."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml
from waiting import until

from lmcache_cartridge.serve.launch import free_port

ENVOY = Path(__file__).parent.parent / "configs" / "envoy"
LOCAL = "127.0.0.1"


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
    body: Mapping[str, Any] = {}


class Stub:
    """No engine: an HTTP server that is healthy and lists a model, and answers all else by `answer`."""

    def __init__(self, name: str, answer: Callable[[Request], Reply] = lambda request: Reply()) -> None:
        self.name, self.requests = name, []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(Reply(body={"data": [{"id": "m", "object": "model"}]}))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                request = Request(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                stub.requests.append(request)
                self._send(answer(request))

            def _send(self, reply: Reply) -> None:
                body = json.dumps({"stub": stub.name, **reply.body}).encode()
                self.send_response(reply.status)
                for name, value in {**reply.headers, "content-type": "application/json"}.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer((LOCAL, 0), Handler)
        self._server.daemon_threads = True
        self.requests: list[Request]
        self.url = f"http://{LOCAL}:{self._server.server_port}"

    def __enter__(self) -> Stub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()


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
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        with suppress(httpx.HTTPError):
            return is_ready()
        return False

    until(ready_or_dead, timeout_s=120)


@contextmanager
def envoy(urls: Sequence[str], directory: Path, *, lb_policy: str = "RING_HASH") -> Iterator[str]:
    """Run Envoy by the configuration that we give, before these servers; yield its address."""
    config: Any = yaml.safe_load((ENVOY / "envoy.yaml").read_text())
    resources, port, admin = config["static_resources"], free_port(), free_port()
    resources["listeners"][0]["address"]["socket_address"] = {"address": LOCAL, "port_value": port}
    cluster = resources["clusters"][0] | {"lb_policy": lb_policy}
    if lb_policy != "RING_HASH":
        del cluster["ring_hash_lb_config"]
    resources["clusters"] = [cluster | {"load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": [
        {"endpoint": {"hostname": f"engine-{number}", "address": {"socket_address": {
            "address": LOCAL, "port_value": int(url.rpartition(":")[2])}}}}
        for number, url in enumerate(urls)
    ]}]}}]  # fmt: skip
    for check in cluster["health_checks"]:
        check |= {"interval": "0.2s", "no_traffic_interval": "0.2s"}
    config["admin"] = {"address": {"socket_address": {"address": LOCAL, "port_value": admin}}}
    directory.mkdir(exist_ok=True)
    (directory / "envoy.yaml").write_text(yaml.safe_dump(config))
    command = [Path(sys.executable).parent / "envoy", "-c", directory / "envoy.yaml", "--use-dynamic-base-id",
               "--concurrency", "2", "--log-level", "warn"]  # fmt: skip
    log = directory / "envoy.log"

    def is_ready() -> bool:
        stats = httpx.get(f"http://{LOCAL}:{admin}/stats?filter=cluster.engines.membership_healthy").text
        return re.findall(r"\d+", stats) == [str(len(urls))]

    with _running(command, log, cwd=ENVOY) as process:
        _wait_for(process, log, is_ready)
        yield f"http://{LOCAL}:{port}"


@contextmanager
def vllm_router(urls: Sequence[str], directory: Path, *options: str, policy: str = "consistent_hash") -> Iterator[str]:
    """Run vllm-router before these servers, with its own defaults; yield its address, `directory/router.log` its log."""
    port = free_port()
    directory.mkdir(exist_ok=True)
    command = [Path(sys.executable).parent / "vllm-router", "--host", LOCAL, "--port", str(port), "--policy", policy,
               "--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1",
               "--worker-urls", *urls, *options]  # fmt: skip
    log = directory / "router.log"
    with _running(command, log) as process:
        _wait_for(process, log, lambda: httpx.get(f"http://{LOCAL}:{port}/health").status_code == 200)
        yield f"http://{LOCAL}:{port}"
