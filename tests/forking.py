"""Servers of tests, forked from a process that has imported vLLM, LMCache and ours: a start by command is imports for the most part.

What is forked runs the same program with the same arguments and environment, and differs from a start by command in nothing but
when modules were imported and an eager engine's only compiled function compiled, and that the engine and its workers are forked
in turn. A server whose environment changes what is imported is started as users start it, and so are all that commands start
(`serve`, `demo`, those of the pages).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
PAIR = "lmcache_cartridge.serve.processes"
PRELOADED = (
    ENTRY,
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)
PRELOADED_LAST = (
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.scale_out.factories",
    "vllm.model_executor.layers.quantization.online.base",
    "lmcache.integration.vllm.lmcache_mp_connector",
    "lmcache.integration.vllm.vllm_v1_adapter",
    "lmcache.v1.multiprocess.http_server",
    "lmcache_cartridge.engine.backend",
    "lmcache_cartridge.engine.inject",
    "lmcache_cartridge.engine.l2",
    "lmcache_cartridge.engine.mp_connector",
    "lmcache_cartridge.serve.plugin",
    "model_hosting_container_standards.sagemaker",
    "ray.dag",
)
SCRIPTS = [Path(__file__).with_name("ask_offline.py")]
"""Programs that make an engine by themselves."""
_READ_LATE = (
    "AITER_", "AWS_", "LD_LIBRARY_PATH", "LMCACHE_", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "PYTEST_", "PYTHONPATH",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_API_KEY", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_HTTP_", "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS",
    "VLLM_SERVER_DEV_MODE",
)  # fmt: skip
"""How variables begin that nothing reads while it is imported; the path of modules is set in what is forked. Some are set by what
tests import (`cv2`, vLLM's benchmarks)."""


class Forked:
    """A forked process, as far as a `subprocess.Popen` is used here."""

    def __init__(self, command: list[str], pid: int, ask: Callable[[int], int | None]) -> None:
        self.args, self.pid, self.returncode, self._ask = command, pid, None, ask

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._ask(self.pid)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int | None:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Parent:
    """The process that servers are forked from, started for the first of them, whose `environment` is theirs."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._environment = environment

    def popen(self, command: list[str], **options: Any) -> Any:
        """Do what `subprocess.Popen` does, by a fork where that comes to the same."""
        environment = options.get("env")
        is_known = command[1] == "-m" and command[2] in (ENTRY, PAIR) or Path(command[1]) in SCRIPTS
        if command[0] != sys.executable or not is_known or environment is None:
            return subprocess.Popen(command, **options)
        if _read_early(environment) != _read_early(self._environment):
            return subprocess.Popen(command, **options)
        question = {
            "command": command,
            "environment": environment,
            "place": str(Path.cwd()),
            "log": options["stdout"].name,
        }
        pid = self._ask(question)
        return Forked(command, pid, lambda pid: self._ask({"poll": pid}))

    def _ask(self, question: dict[str, Any]) -> Any:
        with self._lock:
            if self._file is None:
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    theirs.set_inheritable(True)
                    words = [sys.executable, __file__, str(theirs.fileno())]
                    # In a group of its own: it ends when we do, and what it forked before that.
                    os.posix_spawn(sys.executable, words, self._environment, setpgroup=0)
                    self._file = ours.makefile("rw")
                atexit.register(self._file.close)  # which ends what was forked and still runs
            self._file.write(json.dumps(question) + "\n")
            self._file.flush()
            return json.loads(self._file.readline())


def substitute(popen: Callable[..., Any]) -> Any:
    """Have the package start servers by `popen`; return the module that does."""
    processes = importlib.import_module(PAIR)
    processes.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    return processes


def _read_early(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_READ_LATE)}


def _read(condition: Any) -> None:
    """Note that a message was read, as vLLM does, but spin for the next one for 20 ms: for a second on each of several workers'
    queues takes cores from other servers, and on two cores from whoever is to write it.
    """
    condition.last_read = time.monotonic() - condition.busy_loop_s + 0.02


def main() -> None:
    """Fork a server for each line of a connection that has a command; at its end kill those that still run."""
    os.dup2(2, 1)
    for name in PRELOADED:
        importlib.import_module(name)
    platform = importlib.import_module("vllm.platforms").current_platform
    platform.register_triton_kernel_overrides()  # it looks at every module, so once, and before there are more
    type(platform).register_triton_kernel_overrides = classmethod(lambda _: None)
    for name in PRELOADED_LAST:
        with suppress(ModuleNotFoundError):  # which LMCache 0.5.7 has moved
            importlib.import_module(name)
    _compile()
    importlib.import_module("vllm.distributed.device_communicators.shm_broadcast").SpinCondition.record_read = _read
    for final in weakref.finalize._registry:  # torch's own, which take longer at exit than the memory is worth
        final.atexit = False
    # No child looks for garbage in what is imported here.
    gc.collect()
    gc.freeze()
    running: set[int] = set()
    connection = open(int(sys.argv[1]), "r+b", 0)  # noqa: PTH123, SIM115
    with suppress(ConnectionError):  # whoever asked was ended
        while question := json.loads(connection.readline() or "null"):
            if "poll" in question:
                told = _status(question["poll"])
                running -= {question["poll"]} if told is not None else set()
            elif told := os.fork():
                running.add(told)
            else:
                connection.close()
                _become(question)
            connection.write(json.dumps(told).encode() + b"\n")
    for pid in running:
        for kill in (os.kill, os.killpg):  # what was forked just now leads no group yet
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)


def _become(question: dict[str, Any]) -> NoReturn:
    """Be the server that a question asks for."""
    os.setsid()
    log = os.open(question["log"], os.O_WRONLY | os.O_APPEND)
    for old, new in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.chdir(question["place"])
    os.environ.clear()
    os.environ.update(question["environment"])
    _run(question["command"])


def _compile() -> None:
    """Compile what counts an engine's logprobs, for one row and for several: torch finds out first what the processor can."""
    torch, logprobs = map(importlib.import_module, ("torch", "vllm.v1.sample.ops.logprobs"))
    with torch.inference_mode():
        for rows in (1, 2):
            logprobs.batched_count_greater_than(torch.zeros(rows, 640), torch.zeros(rows, 1))


def _status(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _popen(command: list[str], *, process_group: int, preexec_fn: Callable[[], None]) -> Forked:
    """Fork a server from the program that runs a pair of them."""
    if pid := os.fork():
        return Forked(command, pid, _status)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.setpgid(0, process_group)
    preexec_fn()
    return _run(command)


def _run(command: list[str]) -> NoReturn:
    """Run `python -m MODULE ARGUMENTS`, or `python SCRIPT ARGUMENTS`, and end this process as Python would."""
    module, arguments = (command[2], command[3:]) if command[1] == "-m" else (None, command[2:])
    status = 1
    method = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda *_: method  # on a CPU vLLM starts its engine and workers as new programs
    sys.argv = [str(Path(importlib.util.find_spec(module).origin)) if module else command[1], *arguments]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if module == PAIR and arguments[0] != "server":
            sys.exit(substitute(_popen).run_pair(json.loads(arguments[0]), arguments[1:]))
        if module is None:
            runpy.run_path(command[1], run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
