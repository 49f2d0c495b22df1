"""ServerProcess: a vLLM server as a child process that is up when entered and gone, children too, when left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ..errors import UnsupportedEngine
from .launch import Launch
from .multiprocess import free_port

SMALL = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
"""Environment for a small model on a shared CPU: one compute thread, and one process less."""


class ServerProcess:
    """Runs a `Launch` on a free port of the loopback interface, its output in a log file."""

    def __init__(
        self, launch: Launch, log: Path, *, environment: Mapping[str, str] = SMALL, timeout_s: float = 300.0
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
            while not self._healthy():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    tail = self.log.read_text(errors="replace")[-3000:]
                    raise UnsupportedEngine(f"the server did not start; the end of {self.log} says:\n{tail}")
                time.sleep(0.2)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _stop(self) -> None:
        """End the server and every process it started: they are all in its process group."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
