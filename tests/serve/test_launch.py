"""What `serve` would run is what a person can run: one YAML, a few variables, and a command or two."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest
import torch
import yaml
from making import make_artifact

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.engine.contract import PUBLISHED
from lmcache_cartridge.errors import SettingsError, UnsupportedEngine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve import launch as launching
from lmcache_cartridge.serve.launch import CPU_KV_BYTES, Launch, free_port, l1_watermark, plan
from lmcache_cartridge.settings import from_mapping

KEY = "sk-very-secret"


@pytest.fixture
def planned(tmp_path):
    """Return a function that plans a server of a model `m` by vLLM's options, in words, and what `plan` takes."""

    def planned(given: str = "", *, settings: Any = (), **options: Any) -> Launch:
        return plan("m", from_mapping({"home": tmp_path, **dict(settings)}), vllm_args=given.split(), **options)

    return planned


@pytest.fixture
def serve(tmp_path, capsys):
    """Return a function that types `serve m` with such options behind it; it returns the status and what was printed."""

    def serve(given: str, *more: str, model: str = "m") -> tuple[int, str]:
        status = main(["serve", model, "--home", str(tmp_path / "home"), *given.split(), *more])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return serve


def _option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def _transfer(command: list[str]) -> dict[str, Any]:
    return json.loads(_option(command, "--kv-transfer-config"))


@pytest.mark.parametrize(
    ("l1_bytes", "given", "role", "local_cpu", "size"),
    [
        (4 << 30, "", "kv_both", True, 4), (64 << 20, "", "kv_both", True, 0.1), (0, "kv_both", "kv_both", False, 0.1),
    ],
)  # fmt: skip
def test_lmcache_saves_in_process_in_the_memory_that_is_asked_for(planned, l1_bytes, given, role, local_cpu, size):
    launch = planned(f"--kv-transfer-config.kv_role {given}" * bool(given), l1_bytes=l1_bytes)
    assert _transfer(launch.command)["kv_role"] == role
    config = yaml.safe_load(launch.yaml)
    assert (config["local_cpu"], config["max_local_cpu_size"]) == (local_cpu, size)


def test_a_kv_cache_size_is_added_on_cpu_unless_the_user_names_one(planned):
    assert _option(planned().command, "--kv-cache-memory-bytes") == str(CPU_KV_BYTES)
    assert planned("--kv-cache-memory-bytes 7").command.count("--kv-cache-memory-bytes") == 1


@pytest.mark.parametrize(
    ("allowed", "then"), [("x", "x,cartridges"), ("", "cartridges"), ("cartridges,x", "cartridges,x")]
)
def test_other_vllm_plugins_stay_allowed(planned, monkeypatch, allowed, then):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert planned().environment["VLLM_PLUGINS"] == then


def test_without_an_allow_list_every_plugin_that_vllm_would_load_stays_allowed(tmp_path, planned, monkeypatch):
    installed = tmp_path / "other-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    groups = ("vllm.platform_plugins", "vllm.general_plugins", "vllm.endpoint_plugins", "console_scripts")
    (installed / "entry_points.txt").write_text("".join(f"[{group}]\nof-{group} = os:getcwd\n" for group in groups))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    names = planned().environment["VLLM_PLUGINS"].split(",")
    found = [f"of-{group}" in names for group in groups]
    assert found == [True, True, False, False], "routes must be named by a person"
    assert "cartridges" in names


@pytest.mark.parametrize(
    "given",
    [f"--api-key {KEY} {KEY}2", f"--api_key={KEY}", f"--hf_token={KEY}"],
)  # fmt: skip
def test_no_secret_is_printed(serve, given):
    status, printed = serve(f"--print {given} --port 1")
    assert (status, KEY in printed, "***" in printed, "--port 1" in printed) == (0, False, True, True)


REFUSED = {
    **{f"--mode in-process {given}": told for given, told in {
        "-dcp=2": "context", '--speculative-config {"method":"eagle"}': "by eagle: other methods",
        "--speculative-config.method mtp": "by mtp", "-sc {}": "by no method", "--spec-method eagle3": "suffix, draft_model",
        "--kv_cache_dtype=nvfp4": "quantised", "-dp=2": "serve --mode multiprocess",
        "--l2-adapter {}": "give --mode multiprocess", "-pp 2 --l1-bytes 1GiB": "another could not load",
        "--kv-offloading-size 4": "another connector",
        '--kv-transfer-config {"kv_connector":"NixlConnector"}': "kv_connector 'NixlConnector'",
        "--kv-transfer-config.kv_role kv_producer": "kv_role",
        '--kv-transfer-config {"kv_connector_module_path":"x"}': "leave it out",
        "--kv-transfer-config [1]": "JSON object", "--kv-transfer-config {": "kv-transfer-config",
        '--kv-transfer-config {"kv_connector_extra_config":{"use_native":true}}': "older LMCache",
    }.items()},
    **{f"--mode multiprocess {given}": told for given, told in {
        "--enable_sleep_mode": "keeps handles .*serve in-process", "--set device_bytes=1GiB": "give --mode in-process",
        "--chunk-size 100": "or --mode in-process", '--kv-transfer-config {"kv_role":"kv_producer"}': "kv_producer",
        '--kv-transfer-config {"kv_connector_extra_config":{"lmcache.mp.port":1}}': "lmcache.mp.port",
        "--l1-bytes 1mile": "--l1-bytes",
    }.items()},
    "-dp 2 --enable-sleep-mode": "data parallelism",
    "--set contexts=true": r"contexts need LMCache's saving \(--l1-bytes\)",
    "--set contexts=true --l1-bytes 1GiB --no-save": r"contexts need LMCache's saving \(--l1-bytes\)",
    "--home /x --set home=/x": "home", "--library /x --set library=/x": "library",
    "--set on_mis=document": "on_mis: no such setting",
}  # fmt: skip


@pytest.mark.parametrize("given", REFUSED)
def test_what_does_not_go_with_cartridges_is_refused_in_a_line_before_anything_is_started(tmp_path, serve, given):
    status, said = serve(f"{given} --port 1")
    assert status == 1
    assert re.search(REFUSED[given], said), said
    assert said.count("\n") == 1, "one line"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "given",
    ["--kv-cache-dtype auto", "--seed -1", "--speculative-config.method suffix", "-sc.method=draft_model", "--spec-method ngram",
     '--kv-transfer-config {"kv_connector":"LMCacheConnectorV1","kv_role":"kv_consumer"}',
     f'--kv-transfer-config {{"kv_connector":"CartridgeConnector","kv_connector_module_path":"{PUBLISHED}"}}',
     "-tp 2 --set contexts=true --l1-bytes 1GiB", "--mode multiprocess --set contexts=true",
     "--mode multiprocess -pp 2 --l1-bytes 1GiB"],
)  # fmt: skip
def test_what_goes_with_cartridges_passes(serve, given):
    mode = "" if "--mode" in given else "--mode in-process "
    assert serve(f"{mode}--print {given}")[0] == 0


def test_a_config_file_of_vllms_is_read_too(tmp_path, planned):
    file = tmp_path / "vllm.yaml"

    def of(text: str, more: str = "") -> list[str]:
        file.write_text(text)
        return planned(f"--config {file} {more}").command

    with pytest.raises(UnsupportedEngine, match="by eagle"):
        of("speculative-config:\n  method: eagle")
    of("")
    of("decode-context-parallel-size: 2\nenable-lora: true\n", "-dcp 1")  # the command line holds over the file
    extra = "kv-transfer-config:\n  kv_connector_extra_config: {mine: 1}\napi-key: [one]\n"
    command = of(extra, f"--api-key {KEY}")
    assert _transfer(command)["kv_connector_extra_config"] == {"mine": 1}
    assert _option(command, "--api-key") == KEY, "a variable would not hold over the file"
    for wrong in ("[1]", ": : :"):
        with pytest.raises(SettingsError, match="--config"):
            of(wrong)


@pytest.mark.parametrize(
    ("mode", "connector"), [("in-process", "LMCacheConnectorV1"), ("multiprocess", "LMCacheMPConnector")]
)
def test_the_users_own_transfer_configuration_is_merged_into_ours(planned, mode, connector):
    given = {"kv_connector": connector, "engine_id": "mine", "kv_connector_extra_config": {"lmcache.x": 1}}
    words = f"--kv-transfer-config {json.dumps(given, separators=(',', ':'))} --kv-transfer-config.kv_rank 3 --port 1"
    words += " --kv-transfer-config.kv_connector_extra_config.lmcache.y 2"
    command = planned(words, mode=mode).command
    assert [word for word in command if word.startswith("--kv-transfer-config")] == ["--kv-transfer-config"]
    transfer = _transfer(command)
    assert (transfer["engine_id"], transfer["kv_rank"], transfer["kv_load_failure_policy"]) == ("mine", 3, "fail")
    extra = transfer["kv_connector_extra_config"]
    assert (extra["lmcache.x"], extra["lmcache"]["y"], "lmcache.mp.port" in extra) == (1, 2, mode == "multiprocess")


def test_what_vllm_would_end_with_late_is_one_line_before_anything_is_started(tmp_path, serve):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for model, on, told in (
            (f"{tmp_path}/none", free_port(), "none: there is no such model"),
            (str(tmp_path), port, f"port {port} is taken; name another by --port"),
        ):
            status, said = serve(f"--port {on}", model=model)
            assert (status, told in said, said.count("\n")) == (1, True, 1)
    assert list(tmp_path.iterdir()) == []


def test_who_makes_cartridges_computes_on_the_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    CausalModel(str(MODEL_DIR), device="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):  # there is none
        CausalModel(str(MODEL_DIR), device="auto")


# Which mode leads where none is named. No GPU ran here: what tells that there is one has a stub.


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("given", "on_cpu", "on_gpu"),
    [
        ("", "in-process", "multiprocess"),
        ("--l1-bytes 1GiB", "in-process", "multiprocess"),
        ("--mode in-process", "in-process", "in-process"),
        # what one mode alone has or takes
        ("--l2-adapter {}", "multiprocess", "multiprocess"),
        ("-dp 2", "multiprocess", "multiprocess"),
        ("--enable-sleep-mode", "in-process", "in-process"),
        ("--chunk-size 100", "in-process", "in-process"),
        ("--chunk-size 96", "in-process", "multiprocess"),
        ("--block-size 96", "in-process", "in-process"),
        ("-pp 3", "in-process", "in-process"),
        ('--kv-transfer-config {"kv_connector":"LMCacheConnectorV1"}', "in-process", "in-process"),
        ('--kv-transfer-config {"kv_connector":"LMCacheMPConnector"}', "multiprocess", "multiprocess"),
    ],
)
def test_the_mode_that_leads_has_what_is_asked_for(serve, monkeypatch, given, on_cpu, on_gpu, gpu):
    monkeypatch.setattr(launching, "on_cpu", lambda: not gpu)
    monkeypatch.setattr(launching, "server_command", lambda model: ["vllm", "serve", model])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    made = json.loads(serve(f"--print --format json --port 1 {given}")[1])
    transfer = _transfer(made["command"])
    connector = "CartridgeMPConnector" if (on_gpu if gpu else on_cpu) == "multiprocess" else "CartridgeConnector"
    assert (transfer["kv_connector"], made["lmcache"] is None) == (connector, connector == "CartridgeConnector")
    saves = given in ("--l2-adapter {}", "--l1-bytes 1GiB")
    assert transfer["kv_role"] == ("kv_both" if saves else "kv_consumer")


# LMCache's server.


def test_shared_memory_is_used_where_it_is_large_enough(planned):
    small = planned(mode="multiprocess", l1_bytes=64 << 20).lmcache
    assert _option(small, "--shm-name")
    assert "--no-l1-use-lazy" in small, "lazy allocation switches sharing off"
    assert "--shm-name" not in planned(mode="multiprocess", l1_bytes=1 << 50).lmcache


def test_lmcaches_memory_holds_the_largest_cartridge_for_several_requests_at_once(tmp_path, planned, monkeypatch):
    def gib(given: str = "", **options: Any) -> float:
        return float(_option(planned(given, mode="multiprocess", **options).lmcache, "--l1-size-gb"))

    monkeypatch.setattr(launching, "_LEAST_L1_BYTES", 1)
    small, large = (
        make_artifact(tmp_path / str(n), positions=n, cartridge_id=str(n)).manifest.payload_bytes for n in (64, 96)
    )
    Registry(tmp_path / "registry.sqlite").register(tmp_path / "64")
    assert gib(saves=False) == pytest.approx(4 * small / 2**30)
    assert gib() == pytest.approx(8 * small / 2**30), "and as much for what it saves"
    named = json.dumps({"kv_connector_extra_config": {"cartridge_path": f"{tmp_path}/96"}}, separators=(",", ":"))
    assert gib(f"--kv-transfer-config {named}", saves=False) == pytest.approx(4 * large / 2**30)


@pytest.mark.parametrize(
    ("given", "saves", "role"),
    [
        ("", True, "kv_both"), ("", False, "kv_consumer"),
        ('--kv-transfer-config {"kv_role":"kv_consumer"}', True, "kv_consumer"),
    ],
)  # fmt: skip
def test_lmcache_saves_unless_told_otherwise_and_only_then_its_memory_is_kept_from_filling_up(
    planned, given, saves, role
):
    launch = planned(given, mode="multiprocess", saves=saves)
    assert _transfer(launch.command)["kv_role"] == role
    assert ("--eviction-trigger-watermark" in launch.lmcache) is (role == "kv_both")


@pytest.mark.parametrize(("largest", "full"), [(10, 0.8), (25, 0.5), (60, 0.3)])
def test_there_stays_room_for_two_of_the_largest_cartridges(largest, full):
    assert l1_watermark(100, largest) == full


def test_lmcache_keeps_what_it_loads_and_forgets_no_idle_engine(planned):
    command = planned(mode="multiprocess", chunk_tokens=128).lmcache
    names = ("--l2-prefetch-policy", "--worker-reap-timeout-seconds", "--chunk-size", "--supported-transfer-mode")
    assert [_option(command, name) for name in names] == ["retain", "0", "128", "engine_driven"]
    assert len({_option(command, name) for name in ("--port", "--http-port", "--prometheus-port")}) == 3
    assert "--hash-algorithm" not in command, "the default has no seed"


def test_a_start_says_which_mode_leads_and_why_and_what_it_will_take(serve, monkeypatch):
    monkeypatch.setattr(Launch, "become", lambda launch: None)
    for given, line in (
        ("", "in-process mode: vLLM has no GPU here"),
        ("", "compiles it, which takes minutes"),
        ("-dp 2", "multiprocess mode; in-process would be refused: data parallelism"),
        ("--mode multiprocess", "m, multiprocess, home="),
    ):
        status, said = serve(f"--port {free_port()} {given}")
        assert (status, line in said) == (0, True)
    assert "compiles" not in serve(f"--port {free_port()} --enforce-eager")[1]
