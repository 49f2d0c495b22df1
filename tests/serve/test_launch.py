"""What `serve` would run is what a person can run: one YAML, a few variables, one command."""

from __future__ import annotations

import json
import re
import socket
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import yaml

from lmcache_cartridge.cli.demo import SERVER_ARGS
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.engine.contract import PUBLISHED
from lmcache_cartridge.errors import SettingsError, UnsupportedEngine
from lmcache_cartridge.make.checkpoint import outline
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.trial import own
from lmcache_cartridge.serve.launch import CPU_KV_BYTES, Launch, free_port, plan
from lmcache_cartridge.settings import from_environment, from_extra_config, from_mapping


def _option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_yaml_gives_the_settings_back_that_it_was_written_from(tmp_path, monkeypatch):
    given = {"cpu_bytes": "2GiB", "roots": [str(tmp_path)], "composites": {"all": ["a", "b"]}, "admin": True}
    settings = from_mapping({"home": tmp_path} | given)
    launch = plan("model", settings, chunk_tokens=64)
    config = yaml.safe_load(launch.yaml)
    assert config["chunk_size"] == 64
    assert from_extra_config(config["extra_config"]) == settings
    launch.write()
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", launch.environment["LMCACHE_CONFIG_FILE"])
    assert from_environment() == settings, "as processes without LMCache read them"
    assert plan("model", from_mapping({"home": tmp_path})).yaml_path != launch.yaml_path, "others have another file"


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_the_command_names_connector_and_policy(tmp_path, policy):
    command = plan("model", from_mapping({"home": tmp_path}), on_load_failure=policy, vllm_args=["--port", "1"]).command
    transfer = json.loads(_option(command, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "CartridgeConnector"
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_consumer", policy)
    assert command[-2:] == ["--port", "1"]


@pytest.mark.parametrize(
    ("l1_bytes", "given", "role", "local_cpu", "size"),
    [
        (0, None, "kv_consumer", False, 0.1), (4 << 30, None, "kv_both", True, 4), (64 << 20, None, "kv_both", True, 0.1),
        (0, "kv_both", "kv_both", False, 0.1), (1 << 30, "kv_consumer", "kv_consumer", True, 1),
    ],
)  # fmt: skip
def test_lmcache_saves_in_process_in_the_memory_that_is_asked_for(tmp_path, l1_bytes, given, role, local_cpu, size):
    args = [] if given is None else ["--kv-transfer-config", json.dumps({"kv_role": given})]
    launch = plan("m", from_mapping({"home": tmp_path}), l1_bytes=l1_bytes, vllm_args=args)
    assert json.loads(_option(launch.command, "--kv-transfer-config"))["kv_role"] == role
    config = yaml.safe_load(launch.yaml)
    assert (config["local_cpu"], config["max_local_cpu_size"]) == (local_cpu, size)
    assert "retrieve_locations" not in config


def test_a_kv_cache_size_is_added_on_cpu_unless_the_user_names_one(tmp_path):
    settings = from_mapping({"home": tmp_path})
    assert _option(plan("m", settings).command, "--kv-cache-memory-bytes") == str(CPU_KV_BYTES)
    own = plan("m", settings, vllm_args=["--kv-cache-memory-bytes", "7"]).command
    assert own.count("--kv-cache-memory-bytes") == 1


@pytest.mark.parametrize(
    ("allowed", "then"), [("x", "x,cartridges"), ("", "cartridges"), ("cartridges,x", "cartridges,x")]
)
def test_other_vllm_plugins_stay_allowed(tmp_path, monkeypatch, allowed, then):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert plan("m", from_mapping({"home": tmp_path})).environment["VLLM_PLUGINS"] == then


def test_without_an_allow_list_every_plugin_that_vllm_would_load_stays_allowed(tmp_path, monkeypatch):
    installed = tmp_path / "other-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    groups = ("vllm.platform_plugins", "vllm.general_plugins", "vllm.stat_logger_plugins", "vllm.io_processor_plugins",
              "vllm.endpoint_plugins", "console_scripts")  # fmt: skip
    entries = "".join(f"[{group}]\n{group.removeprefix('vllm.')}-of-others = os:getcwd\n" for group in groups)
    (installed / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    names = plan("m", from_mapping({"home": tmp_path})).environment["VLLM_PLUGINS"].split(",")
    assert {f"{group.removeprefix('vllm.')}-of-others" for group in groups[:4]} <= set(names)
    assert "cartridges" in names
    assert not {"endpoint_plugins-of-others", "console_scripts-of-others"} & set(names), (
        "routes must be named by a person"
    )


KEY = "sk-very-secret"


@pytest.mark.parametrize("given", [["--api-key", KEY], [f"--api-key={KEY}"], ["--api_key", KEY], ["--api-key", KEY, KEY + "2"],
                                   ["--api-k", KEY], ["--hf-token", KEY], ["--hf_token=" + KEY]])  # fmt: skip
@pytest.mark.parametrize("mode", ["in-process", "multiprocess"])
def test_no_secret_is_printed(tmp_path, capsys, given, mode):
    assert main(["serve", "m", "--home", str(tmp_path), "--mode", mode, "--print", *given, "--port", "1"]) == 0
    printed = capsys.readouterr().out
    assert KEY not in printed
    assert "***" in printed
    assert "--port 1" in printed


def test_the_key_is_no_argument_of_any_process(tmp_path):
    settings = from_mapping({"home": tmp_path})
    for mode in ("in-process", "multiprocess"):
        launch = plan("m", settings, mode=mode, vllm_args=["--port", "1", f"--api-key={KEY}", "--seed", "2"])
        assert KEY not in " ".join(launch.program)
        assert launch.environment["VLLM_API_KEY"] == KEY
        assert launch.command[-4:] == ["--port", "1", "--seed", "2"]
    both = plan("m", settings, vllm_args=["--api-key", KEY, "other"])
    assert both.command[-3:] == ["--api-key", KEY, "other"]
    assert "VLLM_API_KEY" not in both.environment, "the variable holds one key only"


REFUSED = {
    "-dcp=2": "context", "--prefill-context-parallel-size 2": "context",
    '--speculative-config {"method":"eagle"}': "by eagle: other methods", "--speculative-config.method mtp": "by mtp",
    "-sc {}": "by no method", "--spec-model x": "by no method", "--spec-method eagle3": "suffix, draft_model",
    "--kv-cache-dtype fp8_per_token_head": "use one of fp8, fp8_e4m3, fp8_e5m2", "--kv_cache_dtype=nvfp4": "quantised",
    "--data-parallel-size 2": "--mode multiprocess", "-dp 2": "--mode multiprocess", "-dp=2": "second engine",
    "--kv-offloading-size 4": "another connector",
    '--kv-transfer-config {"kv_connector":"NixlConnector"}': "kv_connector 'NixlConnector'",
    '--kv-transfer-config {"kv_role":"kv_producer"}': "kv_role 'kv_producer'",
    "--kv-transfer-config.kv_role kv_producer": "kv_role",
    '--kv-transfer-config {"kv_connector_module_path":"x"}': "leave it out", "--kv-transfer-config [1]": "JSON object",
    "--kv-transfer-config {": "kv-transfer-config",
    '--kv-transfer-config {"kv_connector_extra_config":{"lmcache.max_tokens_per_load":512}}': "in the middle",
    '--kv-transfer-config {"kv_connector_extra_config":{"use_native":true}}': "older LMCache",
}  # fmt: skip


@pytest.mark.parametrize("given", REFUSED)
def test_what_does_not_go_with_cartridges_is_refused_before_anything_is_started(tmp_path, capsys, given):
    words = ["--mode", "in-process", *given.split(" "), "--port", "1"]
    assert main(["serve", "m", "--home", str(tmp_path), *words]) == 1
    error = capsys.readouterr().err
    assert re.search(REFUSED[given], error), error
    assert error.count("\n") == 1, "one line"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "given",
    ["-pp 2", "--data-parallel-size=1", "--kv-cache-dtype auto", "-tp 2", "--enable-lora",
     "--kv-cache-dtype fp8_e5m2", "--enable-sleep-mode",
     '--speculative-config {"method":"ngram"}', "--speculative-config.method suffix", "-sc.method=draft_model",
     "--spec-method ngram",
     '--kv-transfer-config {"kv_connector":"LMCacheConnectorV1","kv_role":"kv_consumer"}', "--seed -1",
     f'--kv-transfer-config {{"kv_connector":"CartridgeConnector","kv_connector_module_path":"{PUBLISHED}"}}'],
)  # fmt: skip
def test_what_goes_with_cartridges_passes(tmp_path, given):
    plan("m", from_mapping({"home": tmp_path}), vllm_args=given.split(" "))


@pytest.mark.parametrize(
    ("mode", "given", "l1_bytes", "reason"),
    [
        ("multiprocess", "-dp 2", 0, None),
        ("multiprocess", "--enable-lora", 0, None),
        ("multiprocess", "-pp 2", 1 << 30, None),
        ("in-process", "-pp 2", 1 << 30, "another could not load"),
        ("multiprocess", "--enable-sleep-mode", 0, "keeps handles"),
        ("multiprocess", "--enable_sleep_mode", 0, "keeps handles"),
    ],
)
def test_what_goes_in_one_mode_alone(tmp_path, mode, given, l1_bytes, reason):
    with pytest.raises(UnsupportedEngine, match=reason) if reason else nullcontext():
        plan("m", from_mapping({"home": tmp_path}), mode=mode, l1_bytes=l1_bytes, vllm_args=given.split(" "))


@pytest.mark.parametrize(
    ("mode", "given", "l1_bytes", "reason"),
    [
        ("in-process", "", 1 << 30, None), ("multiprocess", "", 0, None), ("in-process", "-tp 2", 1 << 30, None),
        ("in-process", '--kv-transfer-config {"kv_role":"kv_both"}', 0, "give --l1-bytes"),
        ("multiprocess", "-dp 2", 0, "remove data parallelism"), ("multiprocess", "-pp 2", 0, "use one stage"),
        ("in-process", "--kv-cache-dtype fp8", 1 << 30, "caches KV in fp8"),
    ],
)  # fmt: skip
def test_contexts_are_refused_before_a_model_is_loaded(tmp_path, mode, given, l1_bytes, reason):
    how: Any = {"mode": mode, "l1_bytes": l1_bytes, "vllm_args": given.split()}
    with pytest.raises(UnsupportedEngine, match=f"setting contexts: .*{reason}") if reason else nullcontext():
        plan("m", from_mapping({"home": tmp_path, "contexts": True}), **how)
    plan("m", from_mapping({"home": tmp_path}), **how)


def test_full_and_sliding_layers_have_blocks_of_the_same_kind(tmp_path):
    settings, option = from_mapping({"home": tmp_path}), "--disable-hybrid-kv-cache-manager"
    assert option not in plan("m", settings).command, "vLLM does so for our connector in-process"
    assert plan("m", settings, mode="multiprocess").command.count(option) == 1
    assert plan("m", settings, mode="multiprocess", vllm_args=[option]).command.count(option) == 1


def test_a_config_file_of_vllms_is_read_too(tmp_path):
    settings, file = from_mapping({"home": tmp_path}), tmp_path / "vllm.yaml"
    options = ["--config", str(file)]
    for text, reason in (("prefill_context_parallel_size: 2", "context"),
                         ("speculative-config:\n  method: eagle", "by eagle")):  # fmt: skip
        file.write_text(text)
        with pytest.raises(UnsupportedEngine, match=reason):
            plan("m", settings, vllm_args=options)
    file.write_text("decode-context-parallel-size: 2\nenable-lora: true\n")
    plan("m", settings, vllm_args=[*options, "-dcp", "1"])  # the command line holds over the file
    file.write_text("kv-transfer-config:\n  kv_connector_extra_config: {mine: 1}\napi-key: [one]\n")
    launch = plan("m", settings, vllm_args=[*options, "--api-key", KEY])
    assert json.loads(_option(launch.command, "--kv-transfer-config"))["kv_connector_extra_config"] == {"mine": 1}
    assert _option(launch.command, "--api-key") == KEY, "a variable would not hold over the file"
    for wrong in ("", "[1]", ": : :"):
        file.write_text(wrong)
        if not wrong:
            plan("m", settings, vllm_args=options)
            continue
        with pytest.raises(SettingsError, match="--config"):
            plan("m", settings, vllm_args=options)
    with pytest.raises(SettingsError, match="--config"):
        plan("m", settings, vllm_args=["--config", str(tmp_path / "none.yaml")])


def test_the_users_own_transfer_configuration_is_merged_into_ours(tmp_path):
    given = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_consumer", "engine_id": "mine",
             "kv_connector_extra_config": {"lmcache.x": 1}}  # fmt: skip
    for mode in ("in-process", "multiprocess"):
        if mode == "multiprocess":
            given["kv_connector"] = "LMCacheMPConnector"
        arguments = ["--kv-transfer-config", json.dumps(given), "--kv-transfer-config.kv_rank", "3", "--port", "1"]
        command = plan("m", from_mapping({"home": tmp_path}), mode=mode, vllm_args=arguments).command
        assert [a for a in command if a.startswith("--kv-transfer-config")] == ["--kv-transfer-config"]
        transfer = json.loads(_option(command, "--kv-transfer-config"))
        assert transfer["kv_connector_module_path"].startswith("lmcache_cartridge.engine.")
        assert (transfer["engine_id"], transfer["kv_rank"], transfer["kv_load_failure_policy"]) == ("mine", 3, "fail")
        assert transfer["kv_connector_extra_config"]["lmcache.x"] == 1
        assert ("lmcache.mp.port" in transfer["kv_connector_extra_config"]) == (mode == "multiprocess")
    clash = {"kv_connector_extra_config": {"lmcache.mp.port": 1}}
    with pytest.raises(UnsupportedEngine, match="lmcache.mp.port"):
        plan("m", from_mapping({"home": tmp_path}), mode="multiprocess",
             vllm_args=["--kv-transfer-config", json.dumps(clash)])  # fmt: skip


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("", ["cpu_bytes: 1073741824", '"kv_load_failure_policy": "fail"']),
        ("--on-load-failure recompute", ['"kv_load_failure_policy": "recompute"']),
        ("--set cpu_bytes=3MiB", ["cpu_bytes: 3145728"]),
        ('--set on_miss=document --set roots=["/srv"] --max-model-len 77',
         ['on_miss: "document"', 'roots: ["/srv"]', "--max-model-len 77"]),
        ("--mode multiprocess --l1-bytes 1GiB --max-model-len 77",
         ["lmcache.cli.main server", "--l1-size-gb 1 ", " &\n", "CartridgeMPConnector", "--max-model-len 77"]),
    ],
)  # fmt: skip
def test_serve_prints_what_it_would_run_and_passes_unknown_options_on(tmp_path, capsys, given, shown):
    assert main(["serve", "m", "--home", str(tmp_path), "--print", *given.split()]) == 0
    printed = capsys.readouterr().out
    assert [words for words in shown if words not in printed] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("serve m --home HOME --home /x --set home=/x", "home"),
        ("serve m --home HOME --library /x --set library=/x", "library"),
        ("serve m --home HOME --set on_mis=document", "on_mis: no such setting"),
        ("serve --port 8000 m --home HOME", "--port: name the model first"),
        ("serve m --home HOME --mode multiprocess --l1-bytes 1mile", "--l1-bytes"),
    ],
)
def test_what_is_given_twice_or_is_none_is_an_error_that_names_it(tmp_path, capsys, given, told):
    assert main([*given.replace("HOME", str(tmp_path)).split(), "--print"]) == 1
    assert told in capsys.readouterr().err


def test_what_vllm_would_end_with_late_is_one_line_before_anything_is_started(tmp_path, monkeypatch, capsys):
    class Started(Exception):
        pass

    def become(launch: Launch) -> None:
        raise Started

    monkeypatch.setattr(Launch, "become", become)
    home = ["--home", str(tmp_path / "home")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for mode in ("in-process", "multiprocess"):
            for wrong, told in (
                ([f"{tmp_path}/none", "--port", str(free_port())], "none: there is no such model"),
                ([str(tmp_path), "--port", port], f"port {port} is taken; name another by --port"),
            ):
                assert main(["serve", *wrong, *home, "--mode", mode]) == 1
                error = capsys.readouterr().err
                assert told in error and error.count("\n") == 1
    assert not (tmp_path / "home").exists()
    contexts = ["serve", str(tmp_path), "--port", str(free_port()), *home, "--set", "contexts=true"]
    for wrong in ([], ["--l1-bytes", "1GiB", "--no-save"]):
        assert main([*contexts, *wrong]) == 1
        assert capsys.readouterr().err.startswith("lmcache-cartridge: contexts need LMCache's saving (--l1-bytes)")
    for library in ([], ["--library", str(tmp_path)]):
        with pytest.raises(Started):
            main([*contexts, "--l1-bytes", "1GiB", *library])
        assert "contexts=True" in capsys.readouterr().out
    for options, is_told in (([], True), (["--enforce-eager"], False)):
        with pytest.raises(Started):
            main(["serve", str(tmp_path), "--port", str(free_port()), *home, *options])
        assert ("compiles it, which takes minutes" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize("is_cpu", [True, False])
def test_servers_of_our_own_have_cuda_graphs_where_users_have_them(monkeypatch, is_cpu):
    monkeypatch.setattr(own, "on_cpu", lambda: is_cpu)
    assert own.eager() == (["--enforce-eager"] if is_cpu else [])
    assert not [word for word in SERVER_ARGS if "eager" in word]


@pytest.mark.parametrize(
    ("given", "has_gpu", "taken"), [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu")]
)
def test_who_makes_cartridges_computes_on_the_gpu_where_there_is_one(monkeypatch, given, has_gpu, taken):
    class Moved(Exception):
        pass

    def to(model: object, device: torch.device) -> None:
        raise Moved(str(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(CausalModel, "_load", lambda _, directory, dtype, __: outline(directory, dtype))
    monkeypatch.setattr(torch.nn.Module, "to", to)
    with pytest.raises(Moved, match=f"^{taken}$"):
        CausalModel(str(MODEL_DIR), device=given)
