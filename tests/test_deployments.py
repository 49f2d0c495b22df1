"""What is shipped for Kubernetes and Docker, neither of which runs here: read, and compared with the code and its sources."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.engine.contract import API_PLUGIN
from lmcache_cartridge.engine.versions import PROVEN
from lmcache_cartridge.errors import ENGINE
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.settings import SECRET_VARIABLE, Settings

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
STACK = CONFIGS / "production-stack" / "values.yaml"
RENDERED = Path(__file__).parent / "data" / "production-stack.json"
LLM_D = CONFIGS / "llm-d" / "values.yaml"
ENGINES = CONFIGS / "llm-d" / "engines.yaml"
KSERVE = CONFIGS / "kserve" / "llm-inference-service.yaml"
COMPOSE = CONFIGS / "docker" / "compose.yaml"
DOCKERFILES = [CONFIGS / "docker" / "Dockerfile", CONFIGS / "docker" / "Dockerfile.cpu"]


def _all(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def _one(path: Path) -> Any:
    [document] = _all(path)
    return document


def _engines(values: Any) -> list[Any]:
    return values["servingEngineSpec"]["modelSpec"]


def _environment(container: Any) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container["env"]}


def _settings(config_map: Any) -> Settings:
    """Return the settings of a ConfigMap's LMCache YAML, which otherwise is the shipped one."""
    given, shipped = yaml.safe_load(config_map["data"]["lmcache.yaml"]), _one(CONFIGS / "lmcache.yaml")
    extra = given.pop("extra_config")
    shipped_extra = shipped.pop("extra_config")
    assert given == shipped
    plugin = "storage_plugin.cartridge."
    assert all(name.startswith(plugin) for name in extra)
    ours = {name.removeprefix(plugin): value for name, value in extra.items()}
    for name in ("module_path", "class_name"):
        assert ours.pop(name) == shipped_extra[plugin + name]
    assert ours.keys() <= Settings.model_fields.keys()
    return Settings(**ours)


def test_the_production_stack_offloads_as_without_cartridges():
    """`test_saving_served` starts a server by what its chart made of these values."""
    rendered = json.loads(RENDERED.read_text(encoding="utf-8"))
    assert rendered["values_sha256"] == hashlib.sha256(STACK.read_bytes()).hexdigest(), "render it again"
    for engine in _engines(_one(STACK)):
        assert engine["tag"] == f"vllm-{PROVEN['vllm']}"
        assert engine["replicaCount"] == 1 and engine["pvcAccessMode"] == ["ReadWriteOnce"], "a volume for each server"
        assert engine["vllmConfig"]["enablePrefixCaching"] is True, "left out it is switched off"
        assert "VLLM_PLUGINS" not in {variable["name"] for variable in engine["env"]}, "it would have to name ours"


def test_the_production_stack_has_one_library_and_a_disk_tier_on_its_volume():
    values = _one(STACK)
    [config_map] = values["extraObjects"]
    settings = _settings(config_map)
    assert settings.library == "s3://cartridges/fleet" and not settings.required, "ordinary requests are answered"
    assert settings.disk_dir is not None and settings.disk_dir.is_relative_to("/data"), "where pvcStorage is mounted"
    for engine in _engines(values):
        assert settings.disk_bytes < int(engine["pvcStorage"].removesuffix("Gi")) << 30
        offloaded_bytes = int(engine["lmcacheConfig"]["cpuOffloadingBufferSize"]) << 30
        assert settings.cpu_bytes + offloaded_bytes < int(engine["requestMemory"].removesuffix("Gi")) << 30
        assert engine["extraVolumes"] == [{"name": "lmcache", "configMap": {"name": config_map["metadata"]["name"]}}]


def test_the_production_stacks_router_has_our_callback(monkeypatch):
    """`test_affinity` has it name sessions."""
    values = _one(STACK)
    router = values["routerSpec"]
    option, callback = router["extraArgs"]
    module_name, _, instance = callback.rpartition(".")
    assert (router["routingLogic"], option) == ("session", "--callbacks")
    monkeypatch.setenv("CARTRIDGE_NAMING", _environment(router)["CARTRIDGE_NAMING"])
    module = runpy.run_path(str(CONFIGS / "production-stack" / f"{module_name}.py"))
    assert router["sessionKey"] == module["KEY"]
    assert set(module[instance].naming.models) == {engine["modelURL"] for engine in _engines(values)}


# llm-d and KServe.


def test_engines_of_llm_d_and_kserve_serve_as_serve_does(tmp_path):
    sized = ("--kv-cache-memory-bytes", "1")  # no default of the CPU's is added
    launch = plan("MODEL", Settings(home=tmp_path), vllm_args=sized)
    connector, *options = launch.command[launch.command.index("--kv-transfer-config") + 1 : -len(sized)]
    config_map, service, deployment = _all(ENGINES)
    _settings(config_map)
    [of_llm_d], [of_kserve] = (
        deployment["spec"]["template"]["spec"]["containers"],
        _one(KSERVE)["spec"]["template"]["containers"],
    )
    kserve_env = _environment(of_kserve)
    for arguments, given in (
        (of_llm_d["args"], _environment(of_llm_d)), (shlex.split(kserve_env["VLLM_ADDITIONAL_ARGS"]), kserve_env),
    ):  # fmt: skip
        at = arguments.index("--kv-transfer-config") + 1
        assert json.loads(arguments[at]) == json.loads(connector) and arguments[at + 1 :] == options
        own = {"LMCACHE_CONFIG_FILE": "/etc/cartridges/lmcache.yaml", "VLLM_PLUGINS": given["VLLM_PLUGINS"]}
        assert given.items() >= (launch.environment | own).items()
        assert API_PLUGIN in given["VLLM_PLUGINS"].split(",")
    assert of_llm_d["image"].endswith(f":vllm-{PROVEN['vllm']}")
    selectors = [service["spec"]["selector"], deployment["spec"]["selector"]["matchLabels"]]
    selectors.append(_one(LLM_D)["router"]["modelServers"]["matchLabels"])
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert "{{" not in KSERVE.read_text(encoding="utf-8"), "KServe takes that for a template"


# Docker.


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_has_what_it_copies_and_proven_versions(path):
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    copied = {source for line in re.findall("^COPY (.*)", text, re.M) for source in line.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    # What building the wheel reads.
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "configs", "lmcache_cartridge"} <= copied
    assert "check_versions()" in re.findall("^RUN (.*)", text, re.M)[-1], "else it may be built with others"


_SECRET = re.compile(r"\b\w*(?:SECRET|PASSWORD|_TOKEN|ACCESS_KEY|API_KEY)[\"']?\s*[:=]\s*([^\s,;}`]+)", re.IGNORECASE)
_NO_DEFAULT = re.compile(r"\.\.\.|\$\(.*|\$\w+|\$\{\w+(:\?.*)?|\{name:|request\..*|api_key")
"""Left to whoever starts it: an ellipsis, a command, a variable without a default, a Kubernetes secret; or code."""


def test_no_file_has_a_secret_that_everybody_knows():
    files = [path for path in CONFIGS.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    found = [value for path in files for value in _SECRET.findall(path.read_text(encoding="utf-8"))]
    assert found and [value for value in found if not _NO_DEFAULT.fullmatch(value)] == []


def test_whoever_says_how_a_lock_is_installed_leaves_pips_own_resolution_out():
    """It would add CUDA builds, with which transformers does not load."""
    commands = [ENGINE]
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *CONFIGS.glob("*.lock"), ROOT / "Makefile", *DOCKERFILES]:
        commands += re.findall(r"pip install .*?-r .*?\.lock", path.read_text(encoding="utf-8").replace("\\\n", " "))
    assert len(commands) > 4 and [each for each in commands if "--no-deps" not in each] == []


def test_what_runs_may_finish_before_a_pod_is_killed():
    """`drain_s`, `--shutdown-timeout` and some seconds to end fit in what Kubernetes and Docker wait."""
    config_map, _, deployment = _all(ENGINES)
    pod = deployment["spec"]["template"]["spec"]
    kserve, stack, [shared] = _one(KSERVE)["spec"]["template"], _one(STACK), _one(STACK)["extraObjects"]
    engine = _one(COMPOSE)["services"]["engine-0"]
    drain_s = float(engine["command"][engine["command"].index("--set") + 1].removeprefix("drain_s="))
    arguments = _environment(kserve["containers"][0])["VLLM_ADDITIONAL_ARGS"]
    waits = [
        (_settings(config_map).drain_s, pod["containers"][0]["args"], pod["terminationGracePeriodSeconds"]),
        (_settings(config_map).drain_s, shlex.split(arguments), kserve["terminationGracePeriodSeconds"]),
        (drain_s, engine["command"], float(engine["stop_grace_period"].removesuffix("s"))),
        *((_settings(shared).drain_s, one["vllmConfig"]["extraArgs"], 30) for one in _engines(stack)),
    ]
    for drain_s, arguments, grace_s in waits:
        runs_s = float(arguments[arguments.index("--shutdown-timeout") + 1])
        assert drain_s > 0 and runs_s > 0 and drain_s + runs_s + 5 <= grace_s


def test_compose_starts_what_envoys_configuration_names():
    services = _one(COMPOSE)["services"]
    envoy = _one(CONFIGS / "envoy" / "envoy.yaml")["static_resources"]
    [cluster], [listener] = envoy["clusters"], envoy["listeners"]
    [group] = cluster["load_assignment"]["endpoints"]
    addresses = [one["endpoint"]["address"]["socket_address"] for one in group["lb_endpoints"]]
    assert {one["address"] for one in addresses} == {name for name in services if name.startswith("engine-")}
    [port] = {str(one["port_value"]) for one in addresses}
    assert services["envoy"]["ports"] == [f"8080:{listener['address']['socket_address']['port_value']}"]
    engine = services["engine-0"]
    assert engine == services["engine-1"] and SECRET_VARIABLE in engine["environment"]
    assert engine["command"][engine["command"].index("--port") + 1] == port
    host, _, s3_port = engine["environment"]["AWS_ENDPOINT_URL_S3"].removeprefix("http://").partition(":")
    assert services[host]["entrypoint"][-2:] == ["-p", s3_port]
    bucket = re.search(r"Bucket='([^']+)'", services["bucket"]["entrypoint"][-1])
    assert bucket is not None and f"s3://{bucket[1]}/fleet" in engine["command"]


def test_the_command_in_compose_is_one_that_serve_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LMCACHE_CARTRIDGE_HOME", str(tmp_path))
    command = _one(COMPOSE)["services"]["engine-0"]["command"]
    assert main([*command, "--print"]) == 0
    assert 'library: "s3://cartridges/fleet"' in capsys.readouterr().out
