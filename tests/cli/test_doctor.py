"""Doctor says what is wrong and how to mend it, by what the package brings; `config` prints that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest
from blocks import quietly
from making import make_artifact

from lmcache_cartridge.cli import doctor
from lmcache_cartridge.errors import ENGINE
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.settings import HOME_VARIABLE, Settings

with quietly():
    import lmcache_cartridge.engine.backend  # noqa: F401  of others' warnings, as they are imported

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    return tmp_path


def _check(name: str) -> doctor.Check | None:
    return {check.name: check for check in doctor.diagnose(Settings())}.get(name)


@pytest.mark.parametrize("name, value, told", [
    ("VLLM_PLUGINS", "", "has no `cartridges`: vLLM loads nothing of ours"), ("VLLM_PLUGINS", "other,cartridges", None),
    ("VLLM_USE_RUST_FRONTEND", "1", "no request API"), ("VLLM_USE_RUST_FRONTEND", "0", None),
])  # fmt: skip
def test_what_keeps_vllm_from_loading_ours_is_a_failure(monkeypatch, name, value, told):
    monkeypatch.setenv(name, value)
    found = _check(name)
    assert (found is None) if told is None else (found.status == "FAIL" and told in found.finding)


EXTRA = {
    "storage_plugin.cartridge.module_path": "lmcache_cartridge.engine.backend",
    "storage_plugin.cartridge.class_name": "CartridgeBackend",
}


@pytest.mark.parametrize("given, told", [
    ({}, "nothing names cartridges"),
    ({"CONFIG_FILE": str(CONFIGS / "lmcache-stock-connector.yaml")}, "names cartridges: storage_plugins"),
    ({"EXTRA_CONFIG": json.dumps(EXTRA)}, "pre_caching_hash_algorithm is builtin"),
    ({"EXTRA_CONFIG": json.dumps(EXTRA), "PRE_CACHING_HASH_ALGORITHM": "sha256_cbor", "SAVE_UNFULL_CHUNK": "False"},
     "storage_plugins names no plugin"),
    ({"CONFIG_FILE": str(CONFIGS / "lmcache.yaml"), "EXTRA_CONFIG": "{"}, "LMCACHE_EXTRA_CONFIG: "),
    ({"CONFIG_FILE": str(CONFIGS / "lmcache.yaml"), "USE_LAYERWISE": "True"}, "use_layerwise is on"),
])  # fmt: skip
def test_lmcaches_configuration_is_looked_at_as_lmcache_reads_it(monkeypatch, given, told):
    for name in [name for name in os.environ if name.startswith("LMCACHE_") and name != HOME_VARIABLE]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(f"LMCACHE_{name}", value)
    found = _check("LMCache's configuration")
    assert told in found.finding and (found.status == "ok") == ("names cartridges" in told)


def test_the_plugin_has_what_lmcache_asks_for():
    assert _check("plugin").status == "ok"


def test_what_is_advised_is_there(monkeypatch, tmp_path):
    monkeypatch.setattr(metadata, "version", Mock(side_effect=metadata.PackageNotFoundError))
    for name in ("vllm", "lmcache"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "lmcache.yaml").write_text("lmcache_cartridge.engine.backend: no plugin")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "lmcache.yaml"))
    fixes = " ".join(check.fix for check in doctor.diagnose(Settings()))
    named = set(re.findall(r"lmcache-cartridge config ([\w.-]+)", fixes))
    assert ENGINE in fixes and named >= {"requirements-cpu.lock", "lmcache.yaml"}
    assert "configs/" not in fixes, "no wheel has it there"
    assert all((CONFIGS / name).is_file() for name in named)


_EACH = """
import sys
from lmcache_cartridge.cli.main import main
for line in sys.stdin:
    command, lacking = line.split(" without ")
    sys.modules |= dict.fromkeys(lacking.split())
    assert main(command.split()) == 1, command
    for name in lacking.split():
        del sys.modules[name]
"""
ASKED = "evaluate a --questions ids.json --url http://127.0.0.1:1{} without torch transformers safetensors matplotlib"
LACKING = [
    "build --model m --document text.txt --id a without torch", "import ids.json --model m --id a without torch",
    "demo without transformers", "evaluate a --questions ids.json --model m without transformers",
    "train --model m --document text.txt --id a --compress 4x --questions ids.json without peft",
]  # fmt: skip


def test_a_library_that_lacks_is_one_line_and_what_to_install_and_a_server_is_asked_without_any(home):
    """In a process that has imported nothing."""
    make_artifact(home / "a", positions=16, cartridge_id="a")
    Registry(Settings(home=home).registry_path).register(home / "a")
    (home / "ids.json").write_text('{"question": "x?", "answer": "y"}')
    (home / "text.txt").write_bytes(b"caf\xe9")
    lines = "\n".join([ASKED.format(""), ASKED.format(" --document text.txt"), *LACKING])
    ran = subprocess.run([sys.executable, "-c", _EACH], input=lines, cwd=home, capture_output=True, text=True)
    unasked, no_text, *lacking = ran.stderr.splitlines()
    assert unasked.startswith("lmcache-cartridge: http://127.0.0.1:1/v1/models: ConnectError")
    assert "text.txt is no UTF-8 text: " in no_text
    assert lacking == [
        f"lmcache-cartridge: this command needs {line.split()[-1]}, which is not installed: "
        "pip install 'lmcache-cartridge[train]'"
        for line in LACKING
    ]
