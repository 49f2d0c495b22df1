"""vLLM's own connector name and the shipped YAML: a server that would answer without cartridges does not start.

Cells of the matrix are served so, and `vllm serve` itself is typed by `test_saving_served`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml
from matrix import REST, YAML, Way, stock
from serving import SERVER_ARGS, stale_installation
from wards import MODEL

from lmcache_cartridge.engine.contract import PUBLISHED
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

REFUSE = {
    "no connector": (Way(transfer=None), "the workers have no cartridges"),
    "a nested YAML": (
        Way(yaml.safe_dump({**REST, "extra_config": {"storage_plugin": {"cartridge": {
            "module_path": "lmcache_cartridge.engine.backend", "class_name": "CartridgeBackend"}}}})),
        "or a flat key of extra_config, does not name it",
    ),
    "a variable that is no JSON": (Way(environment={"LMCACHE_EXTRA_CONFIG": "{"}), "LMCACHE_EXTRA_CONFIG: "),
}  # fmt: skip
"""What starts no server, and what its log says."""


@pytest.mark.parametrize("way", REFUSE)
def test_a_server_that_would_answer_without_cartridges_does_not_start(tmp_path, way):
    given, reason = REFUSE[way]
    launch = stock(tmp_path, tmp_path, given)
    with pytest.raises(UnsupportedEngine), ServerProcess(launch, tmp_path / "log"):
        pass
    assert reason in (tmp_path / "log").read_text()


def test_an_engine_without_an_adapter_in_lmcaches_server_does_not_start(tmp_path):
    launch = plan(MODEL, from_mapping({"home": tmp_path}), vllm_args=SERVER_ARGS, mode="multiprocess")
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
    launch = plan(MODEL, from_mapping({"home": tmp_path}), vllm_args=arguments)
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
