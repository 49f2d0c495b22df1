"""Settings out of LMCache's configuration, for processes that do not load LMCache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..settings import Settings, from_mapping


def from_extra_config(extra_config: Mapping[str, Any] | None, class_name: str = "CartridgeBackend") -> Settings:
    """Return the settings of the plugin `class_name` in LMCache's `extra_config`.

    Raises `SettingsError` naming the full key of whatever is wrong, and when there is not exactly one such plugin.
    """
    extra = extra_config or {}
    names = _names(extra, class_name)
    if len(names) != 1:
        raise SettingsError(f"{len(names)} storage plugins have class_name {class_name}; there must be one: {names}")
    prefix = f"storage_plugin.{names[0]}."
    own = {key.removeprefix(prefix): value for key, value in extra.items() if key.startswith(prefix)}
    return from_mapping({k: v for k, v in own.items() if k not in ("module_path", "class_name")}, prefix)


def from_environment() -> Settings:
    """Return the settings in the YAML that `LMCACHE_CONFIG_FILE` names. Raises `SettingsError`."""
    return from_extra_config(_extra_config())


def is_named() -> bool:
    """Whether `LMCACHE_CONFIG_FILE` names a YAML in whose `extra_config` our storage plugin stands."""
    try:
        extra = _extra_config()
    except SettingsError:
        return False
    return isinstance(extra, dict) and bool(_names(extra))


def _names(extra: Mapping[str, Any], class_name: str = "CartridgeBackend") -> list[str]:
    """Return what the plugins of a class are called."""
    return [
        key.removeprefix("storage_plugin.").removesuffix(".class_name")
        for key, value in extra.items()
        if str(key).startswith("storage_plugin.") and key.endswith(".class_name") and value == class_name
    ]


def _extra_config() -> Any:
    import yaml

    path = os.environ.get("LMCACHE_CONFIG_FILE")
    if not path:
        raise SettingsError("LMCACHE_CONFIG_FILE is not set; the cartridge settings stand in that YAML's extra_config")
    try:
        config = yaml.safe_load(Path(path).read_text()) or {}
        return config.get("extra_config")
    except (OSError, UnicodeDecodeError, AttributeError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {error}") from error
