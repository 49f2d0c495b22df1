"""OwnServer: a server that `validate` or `bench` starts, stops and starts again, over a registry that nobody else has."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ...serve.launch import Launch, on_cpu, plan
from ...serve.processes import SMALL, ServerProcess
from ...settings import from_mapping
from ..server import Server

Mode = Literal["in-process", "multiprocess"]
MODES: tuple[Mode, ...] = ("in-process", "multiprocess")
_SMALL_BYTES = 256 << 20
"""Weights up to which one thread computes, as in the package's own tests."""
_START_S = 1800.0


def eager() -> list[str]:
    """Return vLLM's options for a server of ours to start soon; none with a GPU, where users have CUDA graphs."""
    return ["--enforce-eager"] if on_cpu() else []


class OwnServer:
    """A server over the registry of `home`, not started yet. Its logs lie in `home`."""

    def __init__(
        self, model: str, home: Path, *, vllm_args: Sequence[str] = (), settings: Mapping[str, Any] | None = None,
        **launched: Any,
    ) -> None:  # fmt: skip
        """`settings` are further ones of the server, `launched` further words of `plan`: `mode`, `chunk_tokens`, `saves`."""
        self.model, self.home, self._args = model, home, list(vllm_args)
        self._launched = {"saves": False, "mode": MODES[0]} | launched
        self._given = dict(settings or {})
        self.settings = from_mapping({"home": home, "disk_dir": home / "disk", "disk_bytes": "64MiB"} | self._given)
        """What the server is started with."""
        self._starts, self._runs = 0, False
        self.log = home / "server.log"
        """Of the last start."""

    @cached_property
    def _process(self) -> ServerProcess:
        return ServerProcess(self.launch(), self.log, environment=self.environment(), timeout_s=_START_S)

    def variant(self, *, vllm_args: Sequence[str] = (), **launched: Any) -> OwnServer:
        """Return another one over the same registry, started otherwise."""
        return OwnServer(
            self.model, self.home, vllm_args=[*self._args, *vllm_args], settings=self._given,
            **self._launched | launched,
        )  # fmt: skip

    def start(self) -> float:
        """Start it and wait until it is healthy; return the seconds. Raises `UnsupportedEngine` with the log's end."""
        start = time.monotonic()
        self._starts += 1
        self.log = self._process.log = self.home / f"server-{self._launched['mode']}-{id(self):x}-{self._starts}.log"
        self._process.__enter__()
        self._runs = True
        return time.monotonic() - start

    def client(self) -> Server:
        """Return a client of the server, which stays its client when it is started again."""
        return Server(self._process.url)

    def stop(self) -> None:
        """End the server; no change where it is not running."""
        if self._runs:
            self._process.__exit__(None, None, None)
            self._runs = False

    def launch(self) -> Launch:
        """Return what it is started by."""
        return plan(self.model, self.settings, vllm_args=self._args, **self._launched)

    def environment(self) -> dict[str, str]:
        """Return the variables that it is started with, beside those of `launch`."""
        weights = sum(file.stat().st_size for file in Path(self.model).glob("*.safetensors"))
        small = {**SMALL, "MKL_NUM_THREADS": "1"} if weights <= _SMALL_BYTES and on_cpu() else {}
        several = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if "--tensor-parallel-size" in self._args else {}
        # For the route by which vLLM forgets its own blocks, so that what is cached comes from LMCache.
        forgets = {"VLLM_SERVER_DEV_MODE": "1"} if self._launched["saves"] else {}
        return {**small, **several, **forgets}


def reason(error: str, log: Path) -> str:
    """Return the line that says why a server did not start: ours where there is one, or the last error."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    lines = lines or error.splitlines()
    ours = [line.partition("lmcache_cartridge.errors.")[2] for line in lines if "lmcache_cartridge.errors." in line]
    errors = [line for line in lines if re.search(r"\b\w+Error: ", line)]
    return (ours[:1] or errors[-1:] or lines[-1:] or [error])[0].strip()
