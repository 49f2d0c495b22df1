"""Servers as child processes: `ServerProcess` for programs and tests, `run_pair` for `serve --mode multiprocess`.

Run as `python -m lmcache_cartridge.serve.processes LMCACHE-COMMAND-AS-JSON VLLM-COMMAND...` it runs both servers as one
program: they start together, and neither outlives the other. `launch.plan` writes both commands, `serve --print`
shows them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx

from ..errors import SettingsError, UnsupportedEngine
from ..settings import from_environment
from .arguments import Arguments
from .launch import SHM, Launch, free_port

_LET_GO_S = 5.0
"""How long each server of a pair may take to end by itself, beside what `drain_s` and `--shutdown-timeout` give vLLM's requests."""
_PR_SET_PDEATHSIG = 1
SMALL = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
"""Environment for a small model on a shared CPU: one compute thread, and one process less."""


class ServerProcess:
    """Runs a `Launch` on a free port of the loopback interface, its output in a log file."""

    def __init__(
        self, launch: Launch, log: Path, *, environment: Mapping[str, str] = SMALL, timeout_s: float = 600.0
    ) -> None:
        """`environment` is used where the caller's own has no such variable; `timeout_s` bounds the start."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._launch, self._timeout_s = launch, timeout_s
        self._environment = {**environment, **os.environ, **launch.environment}

    def __enter__(self) -> ServerProcess:
        """Start the server and wait until it is healthy. Raises `UnsupportedEngine` with the log's end if it dies."""
        self._launch.write()
        command = [*self._launch.program, "--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + self._timeout_s
        try:
            with httpx.Client(base_url=self.url, timeout=5) as client:
                # Alive first: what answers on its port may be another's.
                while self._process.poll() is None and time.monotonic() < deadline:
                    with suppress(httpx.HTTPError):
                        if client.get("/health").is_success:
                            return self
                    time.sleep(0.2)
            tail = self.log.read_text(errors="replace")[-3000:]
            raise UnsupportedEngine(f"the server did not start; the end of {self.log} says:\n{tail}")
        except BaseException:
            _end(self._process, 10)
            raise

    def __exit__(self, *error: object) -> None:
        _end(self._process, 10)

    @property
    def pid(self) -> int:
        """The process, which is the head of its process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self._process.poll()


def _end(process: subprocess.Popen, let_go_s: float) -> None:
    """End the head of a process group, which may take so long, and then the group. Blocks."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(let_go_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_pair(lmcache: list[str], vllm: list[str]) -> int:
    """Run LMCache's server and vLLM as children until one ends or a signal comes, and end both.

    Returns 0 after a signal alone; else vLLM's exit status, or 1 where that is 0, as it is when its engine has died, so that
    supervisors start both again. Blocks.
    """
    children: dict[str, subprocess.Popen] = {}
    let_go_s = {"vLLM": _LET_GO_S + float(Arguments(vllm).get("shutdown-timeout") or 0) + _drain_s()}
    stopped: list[bool] = []  # no event: its lock may be held by the very code that the signal interrupts
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.append(True))
    try:
        for name, command in (("LMCache's server", lmcache), ("vLLM", vllm)):
            children[name] = subprocess.Popen(command, process_group=0, preexec_fn=_end_with_parent)
        while not stopped:
            time.sleep(0.2)
            for name, child in children.items():
                if child.poll() is not None:
                    print(f"lmcache-cartridge: {name} ended with {child.returncode}; ending", file=sys.stderr)
                    return children["vLLM"].poll() or 1
        return 0
    finally:
        for name, child in reversed(children.items()):  # vLLM first; each is the head of its process group
            _end(child, let_go_s.get(name, _LET_GO_S / 2))
        if "--shm-name" in lmcache:  # LMCache's server leaves it when it is killed
            (SHM / f"lmcache_l1_pool_{lmcache[lmcache.index('--shm-name') + 1]}").unlink(missing_ok=True)


def _drain_s() -> float:
    try:
        return from_environment().drain_s
    except SettingsError:
        return 0.0  # vLLM will say so


def _end_with_parent() -> None:
    """Let the kernel end this child when its parent is killed, which then could not."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run_pair(json.loads(sys.argv[1]), sys.argv[2:]))
