"""LMCache's configuration file, as this package writes it. Pure: every process writes the same file of the same settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..settings import Settings

PLUGIN = "cartridge"
"""The name our plugin gets in LMCache's configuration; no built-in backend may have it."""
MODULE = "lmcache_cartridge.engine.backend"
CLASS = "CartridgeBackend"
VARIABLE, EXTRA_VARIABLE = "LMCACHE_CONFIG_FILE", "LMCACHE_EXTRA_CONFIG"
"""The environment variables that name the file, and that hold over its `extra_config`, for LMCache and for us."""


def as_parameters(settings: Settings) -> dict[str, Any]:
    """Return settings as plain values, without those that are not set."""
    return {k: v for k, v in settings.model_dump(mode="json").items() if v is not None and v != []}


def lmcache_yaml(settings: Settings, chunk_tokens: int, saved_bytes: int = 0) -> str:
    """Return the LMCache configuration: hashes that agree between processes, and `saved_bytes` for what LMCache saves.

    Without these it is for nothing but cartridges.
    """
    extra = {
        f"storage_plugin.{PLUGIN}.module_path": MODULE,
        f"storage_plugin.{PLUGIN}.class_name": CLASS,
        **{f"storage_plugin.{PLUGIN}.{k}": v for k, v in as_parameters(settings).items()},
    }
    lines = [
        f"chunk_size: {chunk_tokens}",
        "pre_caching_hash_algorithm: sha256_cbor  # builtin hashes differ from process to process",
        f"local_cpu: {json.dumps(saved_bytes > 0)}  # whether LMCache keeps what vLLM computes",
        f"max_local_cpu_size: {max(0.1, round(saved_bytes / (1 << 30), 3)):g}  # GiB for that; LMCache does not start with 0",
        f"lookup_timeout_ms: {max(3000, round(1000 * settings.lookup_timeout_s) + 2000)}  # above lookup_timeout_s",
        "save_unfull_chunk: false",
        "enable_async_loading: false",
        "use_layerwise: false",
        f"storage_plugins: [{PLUGIN}]",
        "extra_config:",
        *(f"  {key}: {json.dumps(value)}" for key, value in extra.items()),
    ]
    return "\n".join(lines) + "\n"


def yaml_path(settings: Settings, yaml: str) -> Path:
    """Return where the file lies: named by its content, since servers with other settings may share the home."""
    return settings.home / "run" / f"lmcache-{blake3(yaml.encode()).hexdigest(4)}.yaml"
