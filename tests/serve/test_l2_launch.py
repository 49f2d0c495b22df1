"""What `serve --mode multiprocess` would run is what a person can run, and the two servers live and die together."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from making import make_artifact

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.engine.contract import CONTROL
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.serve import processes
from lmcache_cartridge.serve.launch import l1_size_bytes, l1_watermark, plan
from lmcache_cartridge.settings import Settings, from_mapping


def _option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def _adapter(command: list[str]) -> dict[str, Any]:
    return json.loads(_option(command, "--l2-adapter"))


def test_both_servers_are_told_of_the_same_settings_ports_and_socket(tmp_path):
    settings = from_mapping({"home": tmp_path, "cpu_bytes": "2GiB", "admin": True, "roots": [str(tmp_path)]})
    launch = plan("m", settings, mode="multiprocess", lmcache_port=5999)
    command, adapter = launch.lmcache, _adapter(launch.lmcache)
    assert (adapter["type"], adapter["module_path"]) == ("plugin", "lmcache_cartridge.engine.l2")
    own = dict(adapter["adapter_params"])
    control, where = own.pop("control"), own.pop("lmcache_http")
    assert from_mapping(own) == settings
    assert where == f"http://{_option(command, '--http-host')}:{_option(command, '--http-port')}"
    transfer = json.loads(_option(launch.command, "--kv-transfer-config"))
    extra = transfer["kv_connector_extra_config"]
    assert transfer["kv_connector"] == "CartridgeMPConnector"
    assert extra["lmcache.mp.port"] == 5999 == int(_option(command, "--port"))
    assert extra[CONTROL] == control
    assert len(control) < 100, "a Unix socket's path has 107 characters at most"


def test_lmcache_keeps_what_it_loads_and_forgets_no_idle_engine(tmp_path):
    command = plan("m", from_mapping({"home": tmp_path}), mode="multiprocess", chunk_tokens=128).lmcache
    assert _option(command, "--l2-prefetch-policy") == "retain"
    assert _option(command, "--worker-reap-timeout-seconds") == "0"
    assert _option(command, "--chunk-size") == "128"
    assert _option(command, "--supported-transfer-mode") == "engine_driven"
    ports = [_option(command, name) for name in ("--port", "--http-port", "--prometheus-port")]
    assert len(set(ports)) == 3
    assert "--hash-algorithm" not in command, "the default has no seed"


def test_shared_memory_is_used_where_it_is_large_enough(tmp_path):
    settings = from_mapping({"home": tmp_path})
    small = plan("m", settings, mode="multiprocess", l1_bytes=64 << 20).lmcache
    assert _option(small, "--shm-name")
    assert "--no-l1-use-lazy" in small, "lazy allocation switches sharing off"
    assert "--shm-name" not in plan("m", settings, mode="multiprocess", l1_bytes=1 << 50).lmcache


def test_lmcaches_memory_holds_the_largest_cartridge_for_several_requests_at_once(tmp_path):
    settings = Settings(home=tmp_path)
    assert _gib(settings, saves=False) == 0.25, "with nothing registered"
    for name, positions in (("small", 64), ("large", 4096)):
        made = make_artifact(tmp_path / name, cartridge_id=name, positions=positions, layers=24, chunk_tokens=256)
        Registry(settings.registry_path).register(tmp_path / name)
    largest = made.kv.numel() * 2
    assert _gib(settings) == pytest.approx(2 * l1_size_bytes(largest) / 2**30), "and as much for what it saves"
    assert _gib(settings, saves=False) == pytest.approx(l1_size_bytes(largest) / 2**30)
    assert l1_size_bytes(largest) == max(256 << 20, 4 * largest)
    assert float(_option(plan("m", settings, mode="multiprocess", l1_bytes=1 << 31).lmcache, "--l1-size-gb")) == 2


def _gib(settings: Settings, **options: Any) -> float:
    return float(_option(plan("m", settings, mode="multiprocess", **options).lmcache, "--l1-size-gb"))


def test_lmcache_saves_unless_told_otherwise_and_only_then_its_memory_is_kept_from_filling_up(tmp_path):
    settings = from_mapping({"home": tmp_path})
    for options, role in (
        ({}, "kv_both"),
        ({"saves": False}, "kv_consumer"),
        ({"vllm_args": ["--kv-transfer-config", '{"kv_role": "kv_consumer"}']}, "kv_consumer"),
        ({"vllm_args": ["--kv-transfer-config.kv_role", "kv_both"], "saves": False}, "kv_both"),
    ):
        launch = plan("m", settings, mode="multiprocess", **options)
        assert launch.engine["kv_transfer_config"]["kv_role"] == role
        assert ("--eviction-trigger-watermark" in launch.lmcache) is (role == "kv_both")
    with pytest.raises(UnsupportedEngine, match="kv_producer"):
        plan("m", settings, mode="multiprocess", vllm_args=["--kv-transfer-config", '{"kv_role": "kv_producer"}'])


@pytest.mark.parametrize(("l1", "largest", "full"), [(100, 10, 0.8), (100, 25, 0.5), (100, 60, 0.3), (100, 0, 0.8)])
def test_there_stays_room_for_two_of_the_largest_cartridges(l1, largest, full):
    assert l1_watermark(l1, largest) == full


def test_lmcaches_other_places_come_after_ours(tmp_path):
    other = '{"type": "fs", "base_path": "/x"}'
    launch = plan("m", from_mapping({"home": tmp_path}), mode="multiprocess", l2_adapters=[other, other])
    assert _adapter(launch.lmcache)["class_name"] == "CartridgeL2Adapter"
    assert json.loads(launch.environment[processes.L2_ADAPTERS]) == [other, other]
    code = "import sys; sys.argv[1:] = {!r}; from lmcache_cartridge.serve.processes import lmcache_words; print(lmcache_words())"
    told = subprocess.run(
        [sys.executable, "-c", code.format(launch.lmcache[3:])], env=os.environ | launch.environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = ast.literal_eval(told.stdout)
    assert words[0] == "server" and words[-4:] == ["--l2-adapter", other, "--l2-adapter", other]


def test_serve_becomes_a_program_in_whose_arguments_and_output_no_secret_is(tmp_path, capsys, monkeypatch):
    became: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *words: became.append(words))
    secret = "abc-very-secret"
    other = json.dumps({"type": "s3", "aws_secret_access_key": secret})
    words = ["serve", "m", "--home", str(tmp_path), "--mode", "multiprocess", "--port", "1", "--hf-token", secret]
    for form in ("text", "json"):
        main([*words, "--format", form, "--l2-adapter", other])
        monkeypatch.setenv(processes.L2_ADAPTERS, json.dumps([other]))
        main([*words, "--format", form])
        monkeypatch.delenv(processes.L2_ADAPTERS)
    printed = capsys.readouterr().out
    assert secret not in printed and printed.count("***") >= 4
    assert len(became) == 4
    for program, arguments, environment in became:
        assert program == arguments[0] == sys.executable and "lmcache_cartridge.serve.processes" in arguments
        assert secret not in " ".join(arguments)
        assert (environment["HF_TOKEN"], environment[processes.L2_ADAPTERS]) == (secret, json.dumps([other]))


def test_in_process_mode_runs_vllm_alone(tmp_path):
    launch = plan("m", from_mapping({"home": tmp_path}))
    assert launch.lmcache is None
    assert launch.program == launch.command


# The pair, with other programs in the servers' places.

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
        _wait(lambda: all(file.exists() and file.read_text() for file in files))
        pids += [int(file.read_text()) for file in files]
        yield process, pids
    finally:
        for pid in [process.pid, *pids]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def _wait(true: Any) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("stubborn", ["", _STUBBORN])
def test_a_signal_ends_both_servers_and_what_they_started(tmp_path, number, stubborn):
    files = [tmp_path / "lmcache", tmp_path / "worker"]
    worker = stubborn + _SLEEP.format(str(files[1]))
    with _pair(_python(stubborn + _SLEEP.format(str(files[0]))), _python(_PARENT.format(worker)), files) as (
        pair,
        pids,
    ):
        pair.send_signal(number)
        assert pair.wait(60) == 0
        _wait(lambda: all(map(_gone, pids)))


@pytest.mark.parametrize("dying", [0, 1])
def test_the_death_of_one_server_ends_the_other_and_says_so(tmp_path, dying):
    files = [tmp_path / "lmcache", tmp_path / "vllm"]
    with _pair(*(_python(_SLEEP.format(str(file))) for file in files), files) as (pair, pids):
        os.kill(pids[dying], signal.SIGKILL)
        assert pair.wait(60) != 0
        assert f"{('LMCache', 'vLLM')[dying]}" in pair.stderr.read().decode().splitlines()[0]
        _wait(lambda: all(map(_gone, pids)))


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
        _wait(lambda: all(map(_gone, pids)))


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
        _wait(lambda: all(map(_gone, pids)))
