"""vLLM's own connector name and the shipped YAML, to the letter: cartridges are served, or the server does not start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from serving import SERVER_ARGS, Client, difference, question_ids, stale_installation
from waiting import until

from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR, load_sheet
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make import prefill
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import Launch, plan, server_command
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

YAML = Path(__file__).parents[1] / "configs" / "lmcache-stock-connector.yaml"
TRANSFER = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_consumer"}
NOISE = 0.25
"""As in test_end_to_end."""


class Built(NamedTuple):
    home: Path
    model: CausalModel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    home, model = tmp_path_factory.mktemp("home"), CausalModel(str(MODEL_DIR))
    settings = from_mapping({"home": home})
    root = settings.cartridges_dir / "ward-a"
    prefill.build(model, SHEETS_DIR / "ward-a.txt", root, cartridge_id="ward-a", version=1)
    Registry(settings.registry_path).register(root)
    return Built(home, model)


def _launch(built: Built, path: Path, yaml: str, transfer: dict[str, str] | None = TRANSFER) -> Launch:
    command = [*server_command(str(MODEL_DIR)), *SERVER_ARGS]
    command += [] if transfer is None else ["--kv-transfer-config", json.dumps(transfer)]
    environment = {"LMCACHE_CONFIG_FILE": str(path), "LMCACHE_CARTRIDGE_HOME": str(built.home)}
    return Launch(path, yaml, environment, command, {})


@pytest.fixture(scope="module")
def client(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("stock")
    launch = _launch(built, directory / "lmcache.yaml", YAML.read_text())
    launch.command.append("--enable-prompt-tokens-details")  # only to count with
    assert "VLLM_PLUGINS" not in os.environ
    with ServerProcess(launch, directory / "log") as server, Client(server.url, str(MODEL_DIR)) as client:
        yield client


def test_a_document_at_the_head_of_a_prompt_is_injected_and_the_answer_is_that_of_a_prefill(
    client: Client, built: Built
) -> None:
    sheet = load_sheet("ward-a")
    document = built.model.encode(sheet.text, special=True)
    # By default no prompt waits for chunks that it does not name: the first has them loaded, and is computed.
    until(lambda: client.ask(document + [5]).cached_tokens)
    for question in sheet.questions[:4]:
        prompt = document + question_ids(built.model, question.text)
        reply = client.ask(prompt)
        assert (reply.cached_tokens, reply.text.strip()) == (1024, question.answer)
        assert difference(reply, client.computed(prompt)) < NOISE


def test_the_request_api_is_there_and_names_are_answered_from_the_cartridge(client: Client, built: Built) -> None:
    for question in load_sheet("ward-a").questions[:4]:
        own = question_ids(built.model, question.text)
        reply = client.post({"prompt": own, "cartridges": ["ward-a"], "max_tokens": 4, "temperature": 0})
        assert reply.json()["choices"][0]["text"].strip() == question.answer
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 1024
        assert reply.headers["x-cartridges"].endswith(";injected=1024")
    assert client.post({"prompt": "x", "cartridge": ["ward-a"]}).status_code == 400


@pytest.mark.parametrize(
    ("old", "new", "transfer", "reason"),
    [
        ("cpu_bytes: 1GiB", "cpu_byte: 1GiB", TRANSFER, "cpu_byte: no such setting"),
        ("", "", None, "the workers have no cartridges"),
    ],
)
def test_a_server_that_would_answer_without_cartridges_does_not_start(
    built: Built, tmp_path: Path, old: str, new: str, transfer: dict[str, str] | None, reason: str
) -> None:
    launch = _launch(built, tmp_path / "lmcache.yaml", YAML.read_text().replace(old, new), transfer)
    with pytest.raises(UnsupportedEngine), ServerProcess(launch, tmp_path / "log", timeout_s=240):
        pass
    assert reason in (tmp_path / "log").read_text()


def test_a_server_whose_request_api_vllm_cannot_load_does_not_start(built: Built, tmp_path: Path) -> None:
    """As after an upgrade that moved the plugin under an installation that still names the old place."""
    stale = stale_installation(tmp_path, "lmcache_cartridge.endpoint_plugin:CartridgePlugin")
    launch = plan(str(MODEL_DIR), from_mapping({"home": built.home}), vllm_args=SERVER_ARGS)
    launch = launch._replace(environment=launch.environment | {"PYTHONPATH": str(stale)})
    with pytest.raises(UnsupportedEngine), ServerProcess(launch, tmp_path / "log", timeout_s=240):
        pass
    assert "install lmcache-cartridge again" in (tmp_path / "log").read_text()


_ONCE = """
asked = 0

def __getattr__(name):
    global asked
    if name != "CartridgePlugin" or asked:
        raise AttributeError("the worker has asked")
    asked += 1
    from lmcache_cartridge.serve.plugin import CartridgePlugin
    return CartridgePlugin
"""


def test_a_server_whose_scheduler_refuses_in_the_workers_process_ends(built: Built, tmp_path: Path) -> None:
    """LMCache's storage thread is there by then, and nobody else would end it."""
    (tmp_path / "once.py").write_text(_ONCE)
    stale = stale_installation(tmp_path, "once:CartridgePlugin")
    arguments = [*SERVER_ARGS, "--distributed-executor-backend", "uni"]
    launch = plan(str(MODEL_DIR), from_mapping({"home": built.home}), vllm_args=arguments)
    launch = launch._replace(environment=launch.environment | {"PYTHONPATH": str(stale)})
    server = ServerProcess(launch, tmp_path / "log", timeout_s=240)
    with pytest.raises(UnsupportedEngine), server:
        pass
    log = (tmp_path / "log").read_text()
    assert "the worker has asked" in log and server.poll() == 1, "ended by itself"


_LOADED = """
import os, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
assert "lmcache" not in sys.modules, "on CPU that import breaks vLLM when it comes too early"
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print(KVConnectorFactory.get_connector_class_by_name("LMCacheConnectorV1").__name__, os.environ.get("VLLM_PLUGINS"))
"""


@pytest.mark.parametrize("named", ["ours", "another's", "nobody's"])
def test_the_plugin_does_nothing_unless_the_yaml_names_cartridges(tmp_path: Path, named: str) -> None:
    file = tmp_path / "lmcache.yaml"
    text = YAML.read_text()
    file.write_text(
        {"ours": text, "another's": text.replace("CartridgeBackend", "Other"), "nobody's": ": : :"}.get(named, "")
    )
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"} | {"LMCACHE_CONFIG_FILE": str(file)}
    done = subprocess.run([sys.executable, "-c", _LOADED], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    name, plugins = done.stdout.split()[-2:]
    assert name == ("CartridgeConnector" if named == "ours" else "LMCacheConnectorV1")
    assert ("cartridges" in plugins.split(",")) == (named == "ours")


_FROZEN = """
import gc, multiprocessing, sys
from lmcache_cartridge.serve.stock import register

def count(queue):
    register()
    queue.put(gc.get_freeze_count())

if __name__ == "__main__":
    register()
    spawned = multiprocessing.get_context("spawn")
    queue = spawned.Queue()
    spawned.Process(target=count, args=(queue,)).start()
    print(gc.get_freeze_count(), queue.get())
"""


@pytest.mark.parametrize(("plugins", "spared"), [("other,cartridges", True), ("other", False)])
def test_the_collector_leaves_out_imports_in_vllms_own_processes_that_serve_cartridges(
    tmp_path: Path, plugins: str, spared: bool
) -> None:
    script = tmp_path / "frozen.py"
    script.write_text(_FROZEN)
    environment = {k: v for k, v in os.environ.items() if k != "LMCACHE_CONFIG_FILE"} | {"VLLM_PLUGINS": plugins}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    own, spawned = map(int, done.stdout.split())
    assert own == 0, "the caller's own process is the caller's"
    assert (spawned > 0) == spared
