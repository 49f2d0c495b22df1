"""Which mode `serve` takes where none is named. No GPU ran here: what tells that there is one has a stub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.serve import launch as launch_module


def _option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def _led(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, home: Path, given: str, *, gpu: bool) -> Any:
    """Return how `serve` without --mode would start, with a stub of what tells a GPU: no GPU is here to be run on."""
    monkeypatch.setattr(launch_module, "on_cpu", lambda: not gpu)
    monkeypatch.setattr(launch_module, "server_command", lambda model: ["vllm", "serve", model])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    status = main(["serve", "m", "--home", str(home), "--print", "--format", "json", "--port", "1", *given.split()])
    out = capsys.readouterr()
    return json.loads(out.out) if status == 0 else out.out + out.err


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_gpu"),
    [
        ("", "in-process", "multiprocess"),
        ("--mode in-process", "in-process", "in-process"),
        ("--mode multiprocess", "multiprocess", "multiprocess"),
        # what one mode alone has or takes
        ("--l2-adapter {}", "multiprocess", "multiprocess"),
        ("-dp 2", "multiprocess", "multiprocess"),
        ("--enable-sleep-mode", "in-process", "in-process"),
        ("--set device_bytes=1GiB", "in-process", "in-process"),
        ("--chunk-size 100", "in-process", "in-process"),
        ("--chunk-size 96", "in-process", "multiprocess"),
        ("--block-size 96", "in-process", "in-process"),
        ("-pp 3", "in-process", "in-process"),
        ('--kv-transfer-config {"kv_connector":"LMCacheConnectorV1"}', "in-process", "in-process"),
        ('--kv-transfer-config {"kv_connector":"LMCacheMPConnector"}', "multiprocess", "multiprocess"),
    ],
)
def test_the_mode_that_leads_has_what_is_asked_for(tmp_path, monkeypatch, capsys, given, on_cpu, on_gpu):
    for mode, gpu in ((on_cpu, False), (on_gpu, True)):
        made = _led(monkeypatch, capsys, tmp_path, given, gpu=gpu)
        connector = json.loads(_option(made["command"], "--kv-transfer-config"))
        wanted = {"in-process": "CartridgeConnector", "multiprocess": "CartridgeMPConnector"}[mode]
        assert connector["kv_connector"] == wanted
        assert (made["lmcache"] is not None) == (mode == "multiprocess")
        saves = "--mode multiprocess" in given or "l2-adapter" in given
        assert connector["kv_role"] == ("kv_both" if saves else "kv_consumer")


def test_a_mode_that_leads_saves_only_what_both_would(tmp_path, monkeypatch, capsys):
    for gpu in (False, True):
        made = _led(monkeypatch, capsys, tmp_path, "--l1-bytes 1GiB", gpu=gpu)
        assert json.loads(_option(made["command"], "--kv-transfer-config"))["kv_role"] == "kv_both"


@pytest.mark.parametrize(
    ("given", "mend"),
    [
        ("--mode in-process --l2-adapter {}", "give --mode multiprocess"),
        ("--mode in-process -dp 2", "serve --mode multiprocess"),
        ("--mode multiprocess --set device_bytes=1GiB", "give --mode in-process"),
        ("--mode multiprocess --chunk-size 100", "or --mode in-process"),
        ("--mode multiprocess --enable-sleep-mode", "serve in-process"),
        ("-dp 2 --enable-sleep-mode", "data parallelism"),
    ],
)
def test_what_the_chosen_mode_does_not_take_is_refused_with_the_way_out(tmp_path, monkeypatch, capsys, given, mend):
    assert mend in _led(monkeypatch, capsys, tmp_path, given, gpu=False)


def test_a_start_says_which_mode_leads_and_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch_module.Launch, "become", lambda launch: None)
    for given, line in (
        ([], "in-process mode: vLLM has no GPU here"),
        (["-dp", "2"], "multiprocess mode; in-process would be refused: data parallelism"),
        (["--mode", "multiprocess"], "m, multiprocess, home="),
    ):
        assert main(["serve", "m", "--home", str(tmp_path), "--port", "1", *given]) == 0
        assert line in capsys.readouterr().out
