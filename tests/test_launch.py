"""What `serve` would run is what a person can run: one YAML, a few variables, one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lmcache_cartridge import cli
from lmcache_cartridge.serve.launch import CPU_KV_BYTES, plan
from lmcache_cartridge.serve.yaml_settings import from_environment, from_extra_config
from lmcache_cartridge.settings import from_mapping


def _option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_yaml_gives_the_settings_back_that_it_was_written_from(tmp_path: Path) -> None:
    settings = from_mapping(
        {
            "home": tmp_path,
            "cpu_bytes": "2GiB",
            "roots": [str(tmp_path)],
            "composites": {"all": ["a", "b"]},
            "admin": True,
        }
    )
    launch = plan("model", settings, chunk_tokens=64)
    config = yaml.safe_load(launch.yaml)
    assert config["chunk_size"] == 64
    assert from_extra_config(config["extra_config"]) == settings


def test_processes_without_lmcache_read_the_settings_by_the_variable_that_the_launch_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = from_mapping({"home": tmp_path, "on_miss": "document"})
    launch = plan("model", settings)
    launch.write()
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", launch.environment["LMCACHE_CONFIG_FILE"])
    assert from_environment() == settings


def test_servers_with_other_settings_do_not_overwrite_each_others_yaml(tmp_path: Path) -> None:
    paths = {plan("m", from_mapping({"home": tmp_path, "cpu_bytes": size})).yaml_path for size in (1 << 20, 2 << 20)}
    assert len(paths) == 2


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_the_command_names_connector_policy_and_worker_extension(tmp_path: Path, policy: str) -> None:
    command = plan("model", from_mapping({"home": tmp_path}), on_load_failure=policy, vllm_args=["--port", "1"]).command
    transfer = json.loads(_option(command, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "CartridgeConnector"
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_consumer", policy)
    assert _option(command, "--worker-extension-cls").endswith("CartridgeWorker")
    assert command[-2:] == ["--port", "1"]


def test_a_kv_cache_size_is_added_on_cpu_unless_the_user_names_one(tmp_path: Path) -> None:
    settings = from_mapping({"home": tmp_path})
    assert _option(plan("m", settings).command, "--kv-cache-memory-bytes") == str(CPU_KV_BYTES)
    own = plan("m", settings, vllm_args=["--kv-cache-memory-bytes", "7"]).command
    assert own.count("--kv-cache-memory-bytes") == 1


def test_other_vllm_plugins_stay_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    assert plan("m", from_mapping({"home": tmp_path})).environment["VLLM_PLUGINS"] == "lora_resolver,cartridges"


def test_serve_prints_what_it_would_run_and_passes_unknown_options_on(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["serve", "m", "--home", str(tmp_path), "--set", "on_miss=document", "--set", 'roots=["/srv"]']
    assert cli.main([*arguments, "--print", "--max-model-len", "77"]) == 0
    printed = capsys.readouterr().out
    assert 'on_miss: "document"' in printed
    assert 'roots: ["/srv"]' in printed
    assert "--max-model-len 77" in printed
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_setting_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["serve", "m", "--home", str(tmp_path), "--set", "on_mis=document", "--print"]) == 1
    assert "on_mis: no such setting" in capsys.readouterr().err
