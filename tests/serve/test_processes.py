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

from lmcache_cartridge.serve import processes

_SLEEP = "import time; open({!r}, 'w').write(str(__import__('os').getpid())); time.sleep(300)"
_SEVEN = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.05)\ntime.sleep(0.5); raise SystemExit(7)"
_PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
_STUBBORN = "import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; "


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@contextmanager
def _pair(lmcache: list[str], vllm: list[str], files: list[Path]) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """Run the pair until every one of its programs has written its process id; none may be left."""
    pids: list[int] = []
    command = [sys.executable, "-m", "lmcache_cartridge.serve.processes", json.dumps(lmcache), *vllm]
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
    [(signal.SIGTERM, ""), (signal.SIGINT, ""), (signal.SIGHUP, ""), (signal.SIGTERM, _STUBBORN)],
)
def test_a_signal_ends_both_servers_and_what_they_started(tmp_path, number, stubborn):
    files = [tmp_path / "lmcache", tmp_path / "worker"]
    worker = stubborn + _SLEEP.format(str(files[1]))
    with _pair(_python(stubborn + _SLEEP.format(str(files[0]))), _python(_PARENT.format(worker)), files) as (
        pair,
        pids,
    ):
        pair.send_signal(number)
        assert pair.wait(60) == 0
        until(lambda: all(map(_gone, pids)))


@pytest.mark.parametrize("dying", [0, 1])
def test_the_death_of_one_server_ends_the_other_and_says_so(tmp_path, dying):
    files = [tmp_path / "lmcache", tmp_path / "vllm"]
    with _pair(*(_python(_SLEEP.format(str(file))) for file in files), files) as (pair, pids):
        os.kill(pids[dying], signal.SIGKILL)
        assert pair.wait(60) != 0
        assert f"{('LMCache', 'vLLM')[dying]}" in pair.stderr.read().decode().splitlines()[0]
        until(lambda: all(map(_gone, pids)))


@pytest.mark.parametrize(("status", "pairs"), [(0, 1), (7, 7)])
def test_vllms_end_by_itself_is_a_failure_with_its_own_status(tmp_path, status, pairs):
    file = tmp_path / "lmcache"
    vllm = _python(_SEVEN.format(str(file)).replace("(7)", f"({status})"))
    with _pair(_python(_SLEEP.format(str(file))), vllm, [file]) as (pair, _):
        assert pair.wait(60) == pairs


def test_the_servers_end_when_the_pair_is_killed(tmp_path):
    files = [tmp_path / "lmcache", tmp_path / "vllm"]
    with _pair(*(_python(_SLEEP.format(str(file))) for file in files), files) as (pair, pids):
        pair.kill()
        until(lambda: all(map(_gone, pids)))


def test_shared_memory_left_by_a_killed_server_is_removed(tmp_path):
    name = f"cartridge-test-{os.getpid()}"
    left, file = Path("/dev/shm") / f"lmcache_l1_pool_{name}", tmp_path / "lmcache"
    left.touch()
    lmcache = [*_python(_SLEEP.format(str(file))), "--shm-name", name]
    with _pair(lmcache, _python(_SLEEP.format(str(tmp_path / "vllm"))), [file]) as (pair, _):
        pair.terminate()
        pair.wait(60)
        assert not left.exists()


_DRAINS = """
import os, signal, time
def drain(*_):
    while not os.path.exists({release!r}): time.sleep(0.05)
    open({done!r}, "w").write("all answered"); os._exit(0)
signal.signal(signal.SIGTERM, drain)
open({ready!r}, "w").write(str(os.getpid()))
while True: time.sleep(1)
"""


def test_requests_under_way_are_finished_where_vllm_was_given_time_for_them(tmp_path):
    files = [tmp_path / "lmcache", tmp_path / "vllm"]
    release, done = tmp_path / "release", tmp_path / "done"
    code = _DRAINS.format(release=str(release), done=str(done), ready=str(files[1]))
    vllm = [*_python(code), "--shutdown-timeout", "60"]
    with _pair(_python(_SLEEP.format(str(files[0]))), vllm, files) as (pair, pids):
        pair.terminate()
        time.sleep(processes._LET_GO_S + 1)  # without the option it is killed by then
        assert not any(map(_gone, pids)), "both are there: what is answered may need LMCache"
        release.touch()
        assert pair.wait(60) == 0
        assert done.read_text() == "all answered"
        until(lambda: all(map(_gone, pids)))
