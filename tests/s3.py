"""Two S3 servers for tests: OpenStack Swift with its s3api, one replica, four processes on loopback; and moto's.

They were written by different people, so what both do is likely what S3 does. `both` has a test run with each.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar

import pytest
from faulty_proxy import FaultyProxy

from lmcache_cartridge.serve.launch import free_port

KEY, SECRET = "test:tester", "testing"
STORAGE = ("account", "container", "object")
FILTERS = {
    "catch_errors": "catch_errors", "gatekeeper": "gatekeeper", "cache": "memcache", "listing_formats": "listing_formats",
    "bulk": "bulk", "s3api": "s3api", "tempauth": "tempauth", "slo": "slo", "dlo": "dlo",
}  # fmt: skip
OPTIONS = {
    # `reader` has no rights, so the server denies it every bucket of the account.
    "tempauth": "user_test_tester = testing .admin\nuser_test_reader = reading\n",
    "s3api": "location = us-east-1\n",
    "cache": "memcache_servers = 127.0.0.1:1\n",
}
PATIENCE = "conn_timeout = 60\nnode_timeout = 60\nerror_suppression_limit = 1000000\n"
"""Its parts wait half a second for each other, and after ten delays answer 503 for a minute: not on a busy machine."""

END_WITH_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Has Linux end a server (PR_SET_PDEATHSIG) with the test run, however that ends, and becomes the server."""

MOTO = """
import sys, threading
from moto.s3.responses import S3Response
from moto.server import main
put, one_at_a_time = S3Response.put_object, threading.Lock()
def put_alone(self):
    with one_at_a_time:
        return put(self)
S3Response.put_object = put_alone
main(sys.argv[1:])
"""
"""Moto 5.2 compares an `If-Match` and stores later: of 8 writes at once two were told that they were first, 5 times in 150
rounds with threads that change every 10 us. S3 decides between them, and so does moto when it stores one at a time."""

MAKE_RINGS = """
import sys
from swift.common.ring import RingBuilder
for kind, port in zip(sys.argv[2:5], sys.argv[5:]):
    ring = RingBuilder(part_power=4, replicas=1, min_part_hours=1)
    device = {"id": 0, "region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "d1", "weight": 1}
    ring.add_dev(device)
    ring.rebalance()
    ring.get_ring().save(f"{sys.argv[1]}/{kind}.ring.gz")
"""
"""Run in a process of its own: swift brings eventlet, which warns of every fork from then on."""


class _Server:
    """What the two have in common: `endpoint`, `port` and credentials."""

    endpoint: str
    environment: ClassVar = {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }  # fmt: skip

    @functools.cached_property
    def client(self) -> Any:
        """A boto3 client that bypasses the code under test."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET,
            region_name="us-east-1", config=Config(s3={"addressing_style": "path"}),
        )  # fmt: skip

    def _wait(self, root: Path, *ports: int) -> None:
        """Wait until what listens on each port answers, whatever it does."""
        for port in ports:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5).close()
                except urllib.error.HTTPError as error:
                    error.close()
                except (OSError, HTTPException):
                    time.sleep(0.1)
                    continue
                break
            else:
                raise TimeoutError(f"nothing answers on port {port}; its logs lie in {root}")


class MotoServer(_Server):
    """Moto's server, with what it is given in memory and its log in `root`."""

    def __init__(self, root: Path) -> None:
        self._root, self.port = root, free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        server = [sys.executable, "-c", END_WITH_PARENT, sys.executable, "-c", MOTO]
        with (self._root / "moto.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*server, "-H", "127.0.0.1", "-p", str(self.port)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._wait(self._root, self.port)

    def kill(self) -> None:
        """End it at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class S3Server(_Server):
    """Swift under `root`, a directory of a file system with user extended attributes (ext4, xfs, tmpfs)."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._processes: dict[str, subprocess.Popen] = {}
        self._ports = {kind: free_port() for kind in (*STORAGE, "proxy")}
        self.endpoint = f"http://127.0.0.1:{self._ports['proxy']}"
        self._configure()

    @property
    def port(self) -> int:
        """Where clients connect."""
        return self._ports["proxy"]

    def start(self) -> None:
        """Start what does not run and wait until all of it answers: without the others the proxy answers 503."""
        for kind in self._ports:
            if kind not in self._processes:
                server = Path(sys.executable).with_name(f"swift-{kind}-server")
                command = [sys.executable, "-c", END_WITH_PARENT, server, self._root / "etc" / f"{kind}.conf"]
                with (self._root / f"{kind}.log").open("ab") as log:
                    self._processes[kind] = subprocess.Popen(
                        command,
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
        self._wait(self._root, *self._ports.values())

    def kill(self, *kinds: str) -> None:
        """End the server at once, or only some of its processes: `proxy` is the one that clients connect to."""
        for kind in kinds or tuple(self._processes):
            process = self._processes.pop(kind)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _configure(self) -> None:
        etc, devices = self._root / "etc", self._root / "node"
        etc.mkdir(parents=True)
        (devices / "d1").mkdir(parents=True)
        (etc / "swift.conf").write_text(
            "[swift-hash]\nswift_hash_path_prefix = t\nswift_hash_path_suffix = t\n"
            "[storage-policy:0]\nname = gold\ndefault = yes\n"
        )
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        common = f"bind_ip = 127.0.0.1\nworkers = 0\nuser = {user}\nswift_dir = {etc}\nlog_level = WARNING\n{PATIENCE}"
        ports = [str(self._ports[kind]) for kind in STORAGE]
        subprocess.run([sys.executable, "-c", MAKE_RINGS, etc, *STORAGE, *ports], check=True, timeout=60)
        for kind in STORAGE:
            (etc / f"{kind}.conf").write_text(
                f"[DEFAULT]\n{common}bind_port = {self._ports[kind]}\ndevices = {devices}\nmount_check = false\n"
                f"disable_fallocate = true\n[pipeline:main]\npipeline = {kind}-server\n"
                f"[app:{kind}-server]\nuse = egg:swift#{kind}\n"
            )
        filters = "".join(f"[filter:{f}]\nuse = egg:swift#{egg}\n{OPTIONS.get(f, '')}" for f, egg in FILTERS.items())
        (etc / "proxy.conf").write_text(
            f"[DEFAULT]\n{common}bind_port = {self.port}\n[pipeline:main]\npipeline = {' '.join(FILTERS)} proxy-server\n"
            f"[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true\n{filters}"
        )


@pytest.fixture(scope="session")
def descriptions():
    """Have botocore read its descriptions of services once in a process: for each client that is 100 ms of 150."""
    from botocore.loaders import JSONFileLoader

    read = functools.cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda self, path: read(path)


@pytest.fixture(scope="session")
def s3_server(descriptions, tmp_path_factory):
    """The server, started for the first test that asks for it; a test that kills it starts it again."""
    server = S3Server(tmp_path_factory.mktemp("swift"))
    try:
        server.start()
        yield server
    finally:
        server.kill()
        server.client.close()


@pytest.fixture(scope="session")
def moto_server(descriptions, tmp_path_factory):
    """Moto's server, started for the first test that asks for it."""
    server = MotoServer(tmp_path_factory.mktemp("moto"))
    server.start()
    yield server
    server.kill()
    server.client.close()


@pytest.fixture
def s3_kind():
    """Which server `s3_credentials` and `bucket` are of."""
    return "swift"


both = pytest.mark.parametrize("s3_kind", ["swift", "moto"])


@pytest.fixture
def s3_credentials(s3_kind, request, monkeypatch):
    """The server, with its credentials in the environment and no others to be found."""
    s3_server = request.getfixturevalue({"swift": "s3_server", "moto": "moto_server"}[s3_kind])
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def bucket(s3_credentials):
    """A new, empty bucket."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    s3_credentials.client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def proxy(s3_credentials):
    """A proxy before the server, to break its answers."""
    with FaultyProxy(s3_credentials.port) as proxy:
        yield proxy
