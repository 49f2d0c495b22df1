"""Doctor says what is wrong and how to mend it, by what the package brings; `config` prints that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from blocks import quietly
from making import make_artifact
from packed import built, copied, unpacked

from lmcache_cartridge import make
from lmcache_cartridge.cli import doctor
from lmcache_cartridge.cli.main import main
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


def _loaded() -> dict[str, Any]:
    return {name: module for name, module in sys.modules.items() if name.startswith("lmcache_cartridge.make.")}


@pytest.fixture
def asked(home):
    """A question on a registered cartridge, in a process that has imported none of what makes cartridges."""
    make_artifact(home / "a", positions=16, cartridge_id="a")
    Registry(Settings(home=home).registry_path).register(home / "a")
    (home / "file.json").write_text('{"question": "x?", "answer": "y"}')
    before, known = _loaded(), dict(vars(make))
    for name in before:
        del sys.modules[name]
    yield home / "file.json"
    for name in _loaded():  # or what is imported later would find some of them, and some of those before
        del sys.modules[name]
    sys.modules.update(before)
    vars(make).clear()
    vars(make).update(known)


TRAIN = "train --model m --document {0} --id a --compress 4x --questions {0}"


@pytest.mark.parametrize("command, missing", [
    ("build --model m --document {0} --id a", "torch"), ("import {0} --model m --id a", "torch"), ("demo", "transformers"),
    ("evaluate a --questions {0} --model m", "transformers"), (TRAIN, "peft"),
])  # fmt: skip
def test_a_library_that_lacks_is_one_line_and_what_to_install(command, missing, asked, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(command.format(asked).split()) == 1
    assert capsys.readouterr().err == (
        f"lmcache-cartridge: this command needs {missing}, which is not installed: "
        "pip install 'lmcache-cartridge[train]'\n"
    )


def test_a_server_is_asked_without_torch(home, asked, monkeypatch, capsys):
    (home / "document.txt").write_bytes(b"caf\xe9")
    for name in ("torch", "transformers", "safetensors", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    command = ["evaluate", "a", "--questions", str(asked), "--url", "http://127.0.0.1:1"]
    assert main(command) == 1
    assert capsys.readouterr().err.startswith("lmcache-cartridge: http://127.0.0.1:1/v1/models: ConnectError")
    assert main([*command, "--document", str(home / "document.txt")]) == 1
    assert "document.txt is no UTF-8 text: " in capsys.readouterr().err


def test_the_wheel_of_a_source_archive_has_all_of_it(tmp_path):
    """It runs from where it was unpacked."""
    tree = copied(tmp_path / "tree")
    with tarfile.open(built("build_sdist", tree, tmp_path)) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    names = unpacked(built("build_wheel", source, tmp_path), tmp_path / "installed")
    found = {name for name in names if ".dist-info/" not in name}
    expected = {str(path.relative_to(tree)) for path in (tree / "lmcache_cartridge").rglob("*") if path.is_file()}
    files = [path.relative_to(tree) for path in (tree / "configs").rglob("*") if path.is_file()]
    assert found == expected | {f"lmcache_cartridge/{path}" for path in files}

    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), HOME_VARIABLE: str(tmp_path / "home")}
    commands = ("config", "config envoy/affinity.lua", "list", "doctor")
    ran = subprocess.run(
        [sys.executable, "-c", _EACH, *commands], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    where, *printed = ran.stdout.split("\x1e")
    assert where.startswith(str(tmp_path / "installed")), "the control: it was the wheel"
    said = dict(zip(commands, printed, strict=True))
    assert said["config"].split() == sorted(path.relative_to("configs").as_posix() for path in files)
    assert said["config envoy/affinity.lua"] == (CONFIGS / "envoy" / "affinity.lua").read_text()
    assert "no cartridges yet" in said["list"] and all(word in said["doctor"] for word in ("registry", "every method"))


_EACH = """
import sys, lmcache_cartridge
from lmcache_cartridge.cli.main import main
print(lmcache_cartridge.__file__, end="")
for command in sys.argv[1:]:
    print("\x1e", end="")
    main(command.split())
"""
