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
    parse_bytes,
)  # fmt: skip

PREFIX = "storage_plugin.cartridge."


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("1024", 1024), ("1024 B", 1024), ("1KiB", 1 << 10), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29),
        (" 2gib ", 2 << 30), ("1TiB", 1 << 40), (77, 77),
    ],
)  # fmt: skip
def test_a_size_is_bytes_or_a_number_with_a_binary_unit(text, count):
    assert parse_bytes(text) == count
    assert from_mapping({"cpu_bytes": text}).cpu_bytes == count


@pytest.mark.parametrize(
    "value",
    ["", "lots", "1GB", "1 GiB 2", "-1", -1, "1e9", "1.2.3", ".", "0x10", 1.5, None, [], float("nan"), float("inf"),
     "9" * 400],
    ids=lambda value: repr(value)[:16],
)  # fmt: skip
def test_a_size_that_is_none_is_refused_by_its_full_key(value):
    with pytest.raises(SettingsError, match=r"^storage_plugin\.cartridge\.cpu_bytes: "):
        from_mapping({"cpu_bytes": value}, PREFIX)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lookup_timeout_s", -1), ("lookup_timeout_s", 61), ("lookup_timeout_s", float("nan")),
        ("lookup_timeout_s", "soon"), ("lease_s", 0), ("lease_s", float("nan")), ("load_threads", 0),
        ("load_threads", 257), ("load_threads", 1.5), ("disk_bytes", "-1"), ("home", 7),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_its_full_key(key, value):
    with pytest.raises(SettingsError, match=rf"^storage_plugin\.cartridge\.{key}: "):
        from_mapping({key: value}, PREFIX)


def test_an_unknown_setting_is_refused_by_its_full_key_with_those_there_are():
    with pytest.raises(SettingsError) as caught:
        from_mapping({"gpu_bytes": 1, "cpu_bytes": "1MiB"}, PREFIX)
    message = str(caught.value)
    assert message.startswith("storage_plugin.cartridge.gpu_bytes: no such setting. Settings are: ")
    assert message.endswith(", ".join(Settings.model_fields))


def test_a_wrong_value_is_told_in_a_line():
    with pytest.raises(SettingsError) as caught:
        from_mapping({"library": "here"})
    assert str(caught.value) == "library: write s3://BUCKET/PREFIX or an absolute directory"


def test_every_problem_is_told_at_once():
    with pytest.raises(SettingsError, match=r"a\.cpu_bytes: .*; a\.lease_s: .*; a\.more: no such setting"):
        from_mapping({"cpu_bytes": "x", "lease_s": 0, "more": 1}, "a.")


def test_directories_lie_under_home_unless_said_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("LMCACHE_CARTRIDGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    settings = from_mapping({"home": str(tmp_path)})
    assert settings.registry_path == tmp_path / "registry.sqlite"
    assert settings.cartridges_dir == tmp_path / "cartridges"
    assert settings.quarantine_dir == tmp_path / "quarantine"
    assert settings.cache_dir == tmp_path / "xdg" / "lmcache-cartridge"
    monkeypatch.setenv("LMCACHE_CARTRIDGE_CACHE", str(tmp_path / "own"))
    assert settings.cache_dir == tmp_path / "own"
    assert from_mapping({"home": tmp_path, "disk_dir": "/ssd"}).cache_dir == Path("/ssd")


def test_home_is_what_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(HOME_VARIABLE, "~/mine")
    assert default_home() == tmp_path / "mine"
    assert from_mapping({}).home == tmp_path / "mine"
    monkeypatch.delenv(HOME_VARIABLE)
    assert default_home() == tmp_path / ".local/share/lmcache-cartridge"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_home() == Path("/data/lmcache-cartridge")


def test_a_relative_home_in_the_environment_is_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(HOME_VARIABLE, "here")
    assert default_home() == tmp_path / "here"


def test_the_secret_of_a_fleet_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text("f" * 64 + "\n")
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert from_mapping({}).salt_secret() is None
    monkeypatch.setenv(SECRET_VARIABLE, "e" * 32)
    assert from_mapping({}).salt_secret() == b"e" * 32
    assert from_mapping({"salt_secret_file": str(file)}).salt_secret() == b"f" * 64, "the file goes first"


def test_a_secret_that_is_none_is_refused_without_telling_it(tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "short-and-private")
    with pytest.raises(SettingsError, match=f"{SECRET_VARIABLE} has 17 bytes") as caught:
        from_mapping({}).salt_secret()
    assert "private" not in str(caught.value)
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        from_mapping({"salt_secret_file": str(tmp_path / "nothing")}).salt_secret()
