"""The two servers of `serve --mode multiprocess` live and die together. Other programs take their places here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from waiting import until

_SLEEP = "import time; open('{0}', 'w').write(str(__import__('os').getpid())); time.sleep(300)"
_ENDS = "import os, time\nwhile not os.path.exists('{0}'): time.sleep(0.05)\ntime.sleep(0.5); raise SystemExit({1})"
_PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', {0}])"
_PAIR = """
import json, sys
from lmcache_cartridge.serve import processes
processes._LET_GO_S = 1.0
sys.exit(processes.run_pair(json.loads(sys.argv[1]), sys.argv[2:]))
"""
"""As the module runs a pair, in less time."""
_STUBBORN = "import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; "


def _python(code: str, *given: object) -> list[str]:
    """Return a command of Python's, with paths in its code."""
    return [sys.executable, "-c", code.format(*map(str, given))]


@pytest.fixture
def files(tmp_path):
    """Where the two programs write their process ids."""
    return [tmp_path / "lmcache", tmp_path / "vllm"]


@contextmanager
def _pair(lmcache: list[str], vllm: list[str], files: list[Path]) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """Run the pair until every one of its programs has written its process id; none may be left."""
    pids: list[int] = []
    command = [sys.executable, "-c", _PAIR, json.dumps(lmcache), *vllm]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    try:
        until(lambda: all(file.exists() and file.read_text() for file in files))
        pids += [int(file.read_text()) for file in files]
        yield process, pids
    finally:
        for pid in [process.pid, *pids]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("number", "stubborn"),
    [(signal.SIGINT, ""), (signal.SIGHUP, ""), (signal.SIGTERM, _STUBBORN)],
)
def test_a_signal_ends_both_servers_and_what_they_started(files, number, stubborn):
    worker = _python(stubborn + _SLEEP, files[1])[-1]
    with _pair(_python(stubborn + _SLEEP, files[0]), _python(_PARENT, repr(worker)), files) as (pair, pids):
        pair.send_signal(number)
        assert pair.wait(60) == 0
        until(lambda: all(map(_gone, pids)))


@pytest.mark.parametrize("dying", [0, 1])
def test_the_death_of_one_server_ends_the_other_and_says_so(files, dying):
    """And what LMCache's leaves in shared memory is removed."""
    name = f"cartridge-test-{os.getpid()}"
    left = Path("/dev/shm") / f"lmcache_l1_pool_{name}"
    left.touch()
    lmcache, vllm = (_python(_SLEEP, file) for file in files)
    with _pair([*lmcache, "--shm-name", name], vllm, files) as (pair, pids):
        os.kill(pids[dying], signal.SIGKILL)
        assert pair.wait(60) != 0
        assert ("LMCache", "vLLM")[dying] in pair.stderr.read().decode().splitlines()[0]
        until(lambda: all(map(_gone, pids)))
        assert not left.exists()


@pytest.mark.parametrize(("status", "pairs"), [(0, 1), (7, 7)])
def test_vllms_end_by_itself_is_a_failure_with_its_own_status(files, status, pairs):
    with _pair(_python(_SLEEP, files[0]), _python(_ENDS, files[0], status), files[:1]) as (pair, _):
        assert pair.wait(60) == pairs


def test_the_servers_end_when_the_pair_is_killed(files):
    with _pair(*(_python(_SLEEP, file) for file in files), files) as (pair, pids):
        pair.kill()
        until(lambda: all(map(_gone, pids)))


_DRAINS = """
import os, signal, time
def drain(*_):
    while not os.path.exists("{1}"): time.sleep(0.05)
    open("{1}", "w").write("all answered"); os._exit(0)
signal.signal(signal.SIGTERM, drain)
open("{0}", "w").write(str(os.getpid()))
while True: time.sleep(1)
"""


def test_requests_under_way_are_finished_where_vllm_was_given_time_for_them(tmp_path, files):
    release = tmp_path / "release"
    vllm = [*_python(_DRAINS, files[1], release), "--shutdown-timeout", "60"]
    with _pair(_python(_SLEEP, files[0]), vllm, files) as (pair, pids):
        pair.terminate()
        time.sleep(2)  # without the option it is killed by then
        assert not any(map(_gone, pids)), "both are there: what is answered may need LMCache"
        release.touch()
        assert pair.wait(60) == 0
        assert release.read_text() == "all answered"
        until(lambda: all(map(_gone, pids)))
