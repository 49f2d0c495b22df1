"""Multiprocess: LMCache's server and vLLM as one program: started together, and none outlives the other.

Run as `python -m lmcache_cartridge.serve.multiprocess LMCACHE-COMMAND-AS-JSON VLLM-COMMAND...`; `launch.plan` writes
both commands, and `serve --print` shows them.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..settings import Settings

CONTROL = "cartridge.control"
"""Key in `kv_connector_extra_config` whose value is the path of the adapter's socket."""
_LEAST_L1_BYTES = 256 << 20
_COLD_AT_ONCE = 4
"""Requests for the largest cartridge that may be staged at the same time, each in memory of its own (LMCache 0.5.6)."""
_LET_GO_S = 5.0
"""How long the two may take to end by themselves."""
_SHM = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1


def lmcache_command(settings: Settings, chunk_tokens: int, *, l1_bytes: int, port: int, on_cpu: bool) -> list[str]:
    """Return the command of LMCache's server with our adapter; its ports are free ones but for `port`."""
    http_port = free_port()
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
        # A vLLM that was idle for an hour before its first request would be forgotten, for good (LMCache 0.5.6).
        "--worker-reap-timeout-seconds", "0",
    ]  # fmt: skip
    if on_cpu:
        command += ["--supported-transfer-mode", "engine_driven"]
        if _SHM.is_dir() and shutil.disk_usage(_SHM).free > 2 * l1_bytes:
            command += ["--no-l1-use-lazy", "--shm-name", shm_name(port)]
    return command


def as_parameters(settings: Settings) -> dict[str, Any]:
    """Return settings as plain values, without those that are not set."""
    return {k: v for k, v in settings.model_dump(mode="json").items() if v is not None and v != []}


def control_path(port: int) -> str:
    """Return where the adapter of the LMCache server at `port` listens for workers: short, and nobody else's."""
    # A socket's path has at most 107 bytes, which a long $TMPDIR takes alone.
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < 64 else "/tmp"
    return str(Path(parent) / f"lmcache-cartridge-{os.getuid()}" / f"{port}.sock")


def shm_name(port: int) -> str:
    """Return the name of the memory that LMCache and vLLM share."""
    return f"lmcache-cartridge-{port}"


def l1_size_bytes(largest_bytes: int) -> int:
    """Return how much memory LMCache needs for its own copies of cartridges of which the largest has `largest_bytes`.

    LMCache reserves memory for a whole prefix or refuses it, once for each request that is cold at the same time.
    """
    return max(_LEAST_L1_BYTES, _COLD_AT_ONCE * largest_bytes)


def free_port() -> int:
    """Return a TCP port on the loopback interface that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Pair:
    """LMCache's server and vLLM as children of this process."""

    def __init__(self, lmcache: list[str], vllm: list[str]) -> None:
        self._commands = {"LMCache's server": lmcache, "vLLM": vllm}
        self._children: dict[str, subprocess.Popen] = {}
        self._stop = False

    def run(self) -> int:
        """Start both, wait until one ends or a signal comes, end both; return vLLM's exit status, or 1."""

        def stop(*_: object) -> None:
            self._stop = True  # no event: its lock may be held by the very code that the signal interrupts

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)
        try:
            for name, command in self._commands.items():
                self._children[name] = subprocess.Popen(command, process_group=0, preexec_fn=_end_with_parent)
            while not self._stop:
                time.sleep(0.2)
                for name, child in self._children.items():
                    if child.poll() is not None:
                        print(f"lmcache-cartridge: {name} ended with {child.returncode}; ending", file=sys.stderr)
                        status = self._children["vLLM"].poll()
                        return 1 if status is None else status
            return 0
        finally:
            self._end()

    def _end(self) -> None:
        """End vLLM, then LMCache's server, and whatever they started; each is the head of its process group."""
        for name in reversed(self._commands):
            if (child := self._children.get(name)) is None:
                continue
            with suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LET_GO_S if name == "vLLM" else _LET_GO_S / 2)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _end_with_parent() -> None:
    """Let the kernel end this child when its parent is killed, which then could not."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _remove_shared_memory(command: list[str]) -> None:
    """Remove what LMCache's server leaves in shared memory when it is killed."""
    if "--shm-name" in command:
        (_SHM / f"lmcache_l1_pool_{command[command.index('--shm-name') + 1]}").unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    """Run the pair; `arguments` are LMCache's command as JSON, then vLLM's."""
    lmcache, vllm = json.loads(arguments[0]), arguments[1:]
    try:
        return Pair(lmcache, vllm).run()
    finally:
        _remove_shared_memory(lmcache)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
