"""Settings are read once at the edge: right ones are typed, wrong and unknown ones are named in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_cartridge.errors import SettingsError
from lmcache_cartridge.settings import (
    HOME_VARIABLE,
    SECRET_VARIABLE,
    Settings,
    default_home,
    from_mapping,
)  # fmt: skip

PREFIX = "storage_plugin.cartridge."


@pytest.mark.parametrize(
    ("text", "count"),
    [("1024 B", 1024), ("1.5 GiB", 3 << 29), (" 2gib ", 2 << 30), ("1TiB", 1 << 40), (77, 77)],
)  # fmt: skip
def test_a_size_is_bytes_or_a_number_with_a_binary_unit(text, count):
    assert from_mapping({"cpu_bytes": text}).cpu_bytes == count


@pytest.mark.parametrize(("memory", "count"), [(8 << 30, 1 << 30), (256 << 30, 8 << 30)])
def test_the_cpu_tier_has_a_share_of_the_memory(monkeypatch, memory, count):
    monkeypatch.setattr("lmcache_cartridge.settings.memory_bytes", lambda: memory)
    assert Settings().cpu_bytes == count


@pytest.mark.parametrize(
    "value",
    ["", "1GB", "1 GiB 2", "-1", -1, "1e9", 1.5, None, float("nan"), "9" * 400],
    ids=lambda value: repr(value)[:16],
)  # fmt: skip
def test_a_size_that_is_none_is_refused_by_its_full_key(value):
    with pytest.raises(SettingsError, match=r"^storage_plugin\.cartridge\.cpu_bytes: "):
        from_mapping({"cpu_bytes": value}, PREFIX)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lookup_timeout_s", 61), ("lookup_timeout_s", float("nan")), ("lookup_timeout_s", "soon"), ("lease_s", 0),
        ("load_threads", 1.5), ("home", 7),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_its_full_key(key, value):
    with pytest.raises(SettingsError, match=rf"^storage_plugin\.cartridge\.{key}: "):
        from_mapping({key: value}, PREFIX)


def test_every_problem_is_told_at_once():
    with pytest.raises(SettingsError, match=r"a\.cpu_bytes: .*; a\.lease_s: .*; a\.more: no such setting"):
        from_mapping({"cpu_bytes": "x", "lease_s": 0, "more": 1}, "a.")


def test_the_cache_is_where_the_environment_and_the_settings_say(tmp_path, monkeypatch):
    monkeypatch.delenv("LMCACHE_CARTRIDGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    settings = from_mapping({"home": str(tmp_path)})
    assert settings.cache_dir == tmp_path / "xdg" / "lmcache-cartridge"
    monkeypatch.setenv("LMCACHE_CARTRIDGE_CACHE", str(tmp_path / "own"))
    assert settings.cache_dir == tmp_path / "own"
    assert from_mapping({"home": tmp_path, "disk_dir": "/ssd"}).cache_dir == Path("/ssd")


def test_home_is_what_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(HOME_VARIABLE, "~/mine")
    assert from_mapping({}).home == tmp_path / "mine"
    monkeypatch.delenv(HOME_VARIABLE)
    assert default_home() == tmp_path / ".local/share/lmcache-cartridge"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_home() == Path("/data/lmcache-cartridge")


def test_the_secret_of_a_fleet_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert from_mapping({}).salt_secret() is None
    monkeypatch.setenv(SECRET_VARIABLE, "e" * 32)
    assert from_mapping({}).salt_secret() == b"e" * 32


def test_a_secret_that_is_none_is_refused_without_telling_it(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "short-and-private")
    with pytest.raises(SettingsError, match=f"{SECRET_VARIABLE} has 17 bytes") as caught:
        from_mapping({}).salt_secret()
    assert "private" not in str(caught.value)
