"""vLLM's own connector name and the shipped YAML: cartridges are served, or the server does not start. `vllm serve` itself is
typed by `test_saving_served`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from matrix import REST, YAML, Way, stock
from processor import noise
from serving import SERVER_ARGS, Client, difference, question_ids, stale_installation
from waiting import until

from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR, load_sheet
from lmcache_cartridge.engine.contract import PUBLISHED
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make import prefill
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

NOISE = noise(0.25)
"""As the matrix has it."""


class Built(NamedTuple):
    home: Path
    model: CausalModel


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    home, model = tmp_path_factory.mktemp("home"), CausalModel(str(MODEL_DIR))
    settings = from_mapping({"home": home})
    root = settings.cartridges_dir / "ward-a"
    prefill.build(model, SHEETS_DIR / "ward-a.txt", root, cartridge_id="ward-a", version=1)
    Registry(settings.registry_path).register(root)
    return Built(home, model)


REFUSE = {
    "no connector": (Way(transfers=False), "the workers have no cartridges"),
    "a nested YAML": (
        Way(yaml.safe_dump({**REST, "extra_config": {"storage_plugin": {"cartridge": {
            "module_path": "lmcache_cartridge.engine.backend", "class_name": "CartridgeBackend"}}}})),
        "or a flat key of extra_config, does not name it",
    ),
    "a variable that is no JSON": (Way(environment={"LMCACHE_EXTRA_CONFIG": "{"}), "LMCACHE_EXTRA_CONFIG: "),
}  # fmt: skip
"""What starts no server, and what its log says."""


@pytest.fixture(scope="module")
def client(built, tmp_path_factory):
    """By the shipped YAML; the other ways are cells of the matrix."""
    directory = tmp_path_factory.mktemp("stock")
    launch = stock(built.home, directory, Way(), options=("--enable-prompt-tokens-details",))  # only to count with
    assert "VLLM_PLUGINS" not in os.environ
    with ServerProcess(launch, directory / "log") as server, Client(server.url, str(MODEL_DIR)) as client:
        yield client
    assert "lmcache-cartridge's connector takes the place of LMCacheConnectorV1" in (directory / "log").read_text()


def test_a_document_at_the_head_of_a_prompt_is_injected_and_the_answer_is_that_of_a_prefill(client, built):
    sheet = load_sheet("ward-a")
    document = built.model.encode(sheet.text, special=True)
    # By default no prompt waits for chunks that it does not name: the first has them loaded, and is computed.
    until(lambda: client.ask(document + [5]).cached_tokens)
    for question in sheet.questions[:4]:
        prompt = document + question_ids(built.model, question.text)
        reply = client.ask(prompt)
        assert (reply.cached_tokens, reply.text.strip()) == (1024, question.answer)
        assert difference(reply, client.computed(prompt)) < NOISE
    assert client.post({"prompt": "x", "cartridge": ["ward-a"]}).status_code == 400, "the request API is there"


@pytest.mark.parametrize("way", REFUSE)
def test_a_server_that_would_answer_without_cartridges_does_not_start(tmp_path, way):
    given, reason = REFUSE[way]
    launch = stock(tmp_path, tmp_path, given)
    with pytest.raises(UnsupportedEngine), ServerProcess(launch, tmp_path / "log"):
        pass
    assert reason in (tmp_path / "log").read_text()


def test_an_engine_without_an_adapter_in_lmcaches_server_does_not_start(tmp_path):
    launch = plan(str(MODEL_DIR), from_mapping({"home": tmp_path}), vllm_args=SERVER_ARGS, mode="multiprocess")
    command = [argument.replace("/lmcache-cartridge-", "/nobody-") for argument in launch.command]
    assert command != launch.command
    with pytest.raises(UnsupportedEngine), ServerProcess(launch._replace(command=command), tmp_path / "log"):
        pass
    assert "no cartridge adapter listens" in (tmp_path / "log").read_text(errors="replace")


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


def test_a_server_whose_scheduler_refuses_in_the_workers_process_ends(tmp_path):
    """LMCache's storage thread is there by then, and nobody else would end it. An installation that names an old place of the
    request API, as after an upgrade, is refused in the same way.
    """
    (tmp_path / "once.py").write_text(_ONCE)
    stale = stale_installation(tmp_path, "once:CartridgePlugin")
    arguments = [*SERVER_ARGS, "--distributed-executor-backend", "uni"]
    launch = plan(str(MODEL_DIR), from_mapping({"home": tmp_path}), vllm_args=arguments)
    launch = launch._replace(environment=launch.environment | {"PYTHONPATH": str(stale)})
    server = ServerProcess(launch, tmp_path / "log", timeout_s=900)
    with pytest.raises(UnsupportedEngine), server:
        pass
    log = (tmp_path / "log").read_text()
    assert "the worker has asked" in log and server.poll() == 1, "ended by itself"
    assert "install lmcache-cartridge again" in log


_LOADED = """
import json, os, sys
import vllm.config, vllm.plugins
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

def look(file):
    os.environ["LMCACHE_CONFIG_FILE"] = file
    vllm.plugins.load_general_plugins()
    from lmcache_cartridge.serve.stock import register
    register()
    assert heavy or "lmcache" not in sys.modules, "on CPU that import breaks vLLM when it comes too early"
    chosen = []
    for transfer in json.loads(sys.argv[1]):
        try:
            transfer = vllm.config.KVTransferConfig(kv_role="kv_both", **transfer)
            chosen.append(KVConnectorFactory.get_connector_class(transfer).__name__)
        except ImportError as error:
            chosen.append(type(error).__name__)
    print(json.dumps([chosen, os.environ.get("VLLM_PLUGINS")]), flush=True)

heavy = None
for file in sys.argv[2:]:
    if (pid := os.fork()) == 0:
        look(file)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    heavy = heavy or __import__("lmcache.integration.vllm.vllm_v1_adapter")  # once, for the others
"""
_PUBLISHED = {"kv_connector": "CartridgeConnector", "kv_connector_module_path": PUBLISHED}
_BY_NAME = {"kv_connector": "LMCacheConnectorV1"}
_NAMING = {"kv_connector_extra_config": {"cartridge_path": "/a.pt"}}
_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"


def test_our_connector_takes_a_place_where_something_names_cartridges_and_no_other(tmp_path):
    subclass = YAML.replace("lmcache_cartridge.engine.backend", "lmcache_cartridge_of_others")
    another = subclass.replace("CartridgeBackend", "OthersBackend")
    texts = {"ours": YAML, "a subclass of ours": subclass, "another's": another, "nobody's": ": : :"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    asked = [_BY_NAME, _BY_NAME | {"kv_connector_module_path": _MODULE}, _PUBLISHED]
    asked += [{**each, **_NAMING} for each in asked] + [{"kv_connector": "NixlConnector", **_NAMING}]
    command = [sys.executable, "-c", _LOADED, json.dumps(asked), *(tmp_path / name for name in texts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    of_vllm = ["LMCacheConnectorV1", "LMCacheConnectorV1", "ModuleNotFoundError"]
    for name, (chosen, plugins) in zip(texts, told, strict=True):
        is_ours = "ours" in name
        assert chosen[:3] == (["CartridgeConnector"] * 3 if is_ours else of_vllm), name
        assert chosen[3:6] == ["CartridgeConnector"] * 3 and chosen[6] != "CartridgeConnector", name
        assert ("cartridges" in (plugins or "").split(",")) == is_ours, name
