"""Multiprocess mode as supervisors and operators meet it: it is not put to sleep, and its end is a failure to them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from forking import BY_COMMAND
from serving import SERVER_ARGS
from waiting import until

from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR, load_sheet
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make import prefill
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

ENVIRONMENT = BY_COMMAND | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
"""As users start it, with the engine in a process of its own, and the routes of development."""
SECRET = "no-one-may-see-this-9f3c"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20})
    root = settings.cartridges_dir / "ward-a"
    prefill.build(CausalModel(str(MODEL_DIR)), SHEETS_DIR / "ward-a.txt", root, cartridge_id="ward-a", version=1)
    Registry(settings.registry_path).register(root)
    place = json.dumps({"type": "fs", "base_path": str(home / "fs"), "secret_access_key": SECRET})
    launch = plan(
        str(MODEL_DIR), settings, mode="multiprocess", l1_bytes=256 << 20, vllm_args=SERVER_ARGS, l2_adapters=[place]
    )
    with ServerProcess(launch, home / "log", environment=ENVIRONMENT, timeout_s=900) as server:
        yield server


def _ask(server: ServerProcess) -> bool:
    """Whether a question on the sheet is answered right, and from its cartridge."""
    question = load_sheet("ward-a").questions[0]
    body = {"model": str(MODEL_DIR), "prompt": " " + question.text, "max_tokens": 4, "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/completions", json=body | {"cartridges": ["ward-a"]}, timeout=60)
    injected = reply.headers["x-cartridges"].endswith("=1024")
    return injected and reply.json()["choices"][0]["text"].strip() == question.answer


def test_it_refuses_to_sleep_and_answers_on(server):
    """It would take requests, and answer none: nothing tells LMCache's server that the KV cache is gone."""
    assert _ask(server)
    for level in range(3):
        refused = httpx.post(f"{server.url}/sleep", params={"level": level}, timeout=60)
        assert refused.status_code == 409 and "serve in-process" in refused.text
        assert _ask(server)


def test_no_secret_of_another_place_is_in_an_argument_or_the_output(server):
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            commands.append((process / "cmdline").read_bytes().decode(errors="replace"))
    assert sum("CartridgeL2Adapter" in command for command in commands) >= 2, "the pair runs"
    assert not [command for command in commands if SECRET in command]
    assert SECRET not in server.log.read_text(errors="replace")
    assert (server.log.parent / "fs").is_dir(), "LMCache was told of the place"


def test_an_engine_that_dies_ends_it_with_a_status_by_which_supervisors_start_it_again(server):
    cores = [pid for pid in _below(server.pid) if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(cores) == 1
    os.kill(cores[0], signal.SIGKILL)
    until(lambda: server.poll() is not None, timeout_s=60)
    assert server.poll() not in (None, 0)


def _below(parent: int) -> Iterator[int]:
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _below(child)
