"""Fixtures that several files of tests ask for."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

# The models are tiny: more threads than one only wait for each other, and with another number sums are rounded otherwise.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from commands import cli  # noqa: F401
from forking import Parent, substitute
from homes import clock, home, opened  # noqa: F401
from s3 import bucket, descriptions, moto_server, proxy, s3_credentials, s3_kind, s3_server  # noqa: F401

from lmcache_cartridge.serve import launch, processes

CACHE = "LMCACHE_CARTRIDGE_CACHE"
# No test, nor a server that it starts, uses the download cache of the person who runs it.
os.environ[CACHE] = tempfile.mkdtemp(prefix="lmcache-cartridge-cache-")
atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)
_caches = itertools.count()
# To load a machine's certificates takes 30 to 50 ms of each new HTTP client, and nothing here is asked over TLS.
os.environ["SSL_CERT_DIR"] = os.devnull
os.environ.pop("SSL_CERT_FILE", None)
# Torch sets it where it is missing, once it compiles: a server with another environment than the first is not forked.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"))
# vLLM closes a connection that was idle for 5 s, at the moment at which a client that keeps one for as long may use it.
os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "60")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    """Give each test a download cache of its own: artefacts of one test may be those of another, to the byte."""
    monkeypatch.setenv(CACHE, str(Path(os.environ[CACHE]) / str(next(_caches))))


@pytest.fixture
def vllm_log(caplog, monkeypatch):
    """Return what is logged as vLLM's own: where vLLM was imported it keeps that to itself, and where it was to be quiet drops it."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm")
    return caplog


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take minutes: the short ones then fill what is left of the time of several workers."""
    files = {"test_bench", "test_benchmarks", "test_cluster", "test_commands", "test_corpus", "test_outside", "test_published",
             "test_quickstart", "test_s3_faults", "test_structure", "test_train", "test_validate"}  # fmt: skip

    def is_long(path: Path) -> bool:
        return path.parent.name in ("served", "fleet") or path.stem in files or "_served" in path.name

    items.sort(key=lambda item: not is_long(item.path))


@pytest.fixture(scope="session", autouse=True)
def forked_servers():
    """Have `ServerProcess` fork the servers of tests where that comes to the same as starting them."""
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": launch.allowed_plugins()}
    parent = Parent({**processes.SMALL, **os.environ, **environment})
    substitute(parent.popen)
    return parent


@pytest.fixture
def run_offline(forked_servers, tmp_path):
    """Return a function that runs a script with an engine of its own and returns what it printed."""

    def run(script: str, *words: object) -> str:
        command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, words)]
        with (tmp_path / "said").open("w") as log:
            process = forked_servers.popen(command, env={**processes.SMALL, **os.environ}, stdout=log)
        status, said = process.wait(1200), (tmp_path / "said").read_text()
        assert status == 0, said[-3000:]
        return said

    return run
