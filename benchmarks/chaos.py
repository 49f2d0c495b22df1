"""What a server answers while everything around it goes wrong: each answer checked, and how soon all cartridges are served again.

    python benchmarks/chaos.py [--full]

Clients ask a real vLLM server for six cartridges, three of which begin with the same text: one in six leaves before its answer. There is memory for one and a half of them. Half lie in a directory, half on a real S3 server behind
a proxy. Versions and a label move all the time. Then, one after the other: the bucket is slow, or never answers; the directory
hangs (Linux has whoever opens a file wait for a lease); no file may grow, as on a full disk; the engine's core and LMCache's
server are killed, and the server started again, as a supervisor does.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import resource
import signal
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import report  # first: it makes the tests' helpers importable
import torch
from faulty_proxy import FaultyProxy, sound
from making import make_artifact
from recall.ward import Fact, ask, write_document
from s3 import MotoServer
from waiting import until
from wards import MODEL, patients, prefill, sure

from lmcache_cartridge.artifact.identity import Identity
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make import canary
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import Launch, plan
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import Settings, from_mapping

CHUNK, PART = 64, 512
SHARING = ("a", "b", "c")
TRAINED = "t"
AWAY = ("c", "d", "t")
"""On S3; the others lie in a directory."""
MOVED = ("a", "t")
"""Each has two versions, and its id means now the one, now the other."""
LABEL = "live"
IDS = (*SHARING, "d", "e", TRAINED)
NAMES = (*IDS, LABEL, "a@1", "t@2")
"""What requests name."""
AGAIN, QUIET = "served again at the end", "nothing else"
LAG_S = 10.0
"""What an id or label meant for the last time so long before a request was sent is no answer to it."""
FULL_BYTES = 1 << 16
RIGHT, WRONG, LEFT, CUT_OFF, _ = OUTCOMES = "right", "wrong", "left", "cut off", "503"
"""What becomes of a request. One of another version than its name meant is wrong; 503 says to come again."""
MODES = ("in-process", "multiprocess")
ARGS = ["--max-model-len", "2304", "--enforce-eager", "--kv-cache-memory-bytes", str(96 << 20), "--block-size", "32"]


class Meaning(NamedTuple):
    """What a name meant from some time on."""

    since: float
    version: str


class Asked(NamedTuple):
    """What became of a request."""

    phase: str
    """In which it ended."""
    outcome: str
    """One of `OUTCOMES`, or the status of an error."""
    seconds: float


class World:
    """Cartridges, what each version answers, what names mean, and the server that is asked."""

    def __init__(self, scratch: Path, server: MotoServer, proxy: FaultyProxy) -> None:
        self.scratch, self.proxy = scratch, proxy
        self.answers: dict[str, dict[tuple[str, str], Fact]] = {}
        """By version and question."""
        self.meant: dict[str, list[Meaning]] = defaultdict(list)
        self.phase, self.url, self.over = QUIET, "", threading.Event()
        self.asked: list[Asked] = []
        self.model = CausalModel(MODEL)
        self.registry = Registry(scratch / "home" / "registry.sqlite")
        for version in [f"{name}@1" for name in IDS] + [f"{name}@2" for name in MOVED]:
            self._make(version, server)
        for name in IDS:
            self.mean(name, f"{name}@1")
        self.mean(LABEL, "a@1")

    def _make(self, version: str, server: MotoServer) -> None:
        name, number = version.split("@")
        head = "head" if name in SHARING else version
        parts = [
            write_document(random.Random(seed), PART, patients(share, 8))
            for share, seed in ((0, head), (1, version + " own"))
        ]
        ids = self.model.encode("\n".join(part.text for part in parts), special=True)
        kv = prefill(self.model, ids)
        facts = sure(self.model, kv, parts[1].facts)
        self.answers[version] = {fact[:2]: fact for fact in facts}
        root = self.scratch / "made" / name / number
        make_artifact(
            root, positions=len(ids), cartridge_id=name, version=int(number), chunk_tokens=CHUNK, kv=kv,
            kind="trained" if name == TRAINED else "prefill", fingerprint=self.model.fingerprint,
            token_ids=Identity(len(ids), self.model.ordinary_ids()) if name == TRAINED else ids,
            canary=canary.make(self.model, kv, ids, CHUNK),
        )  # fmt: skip
        if name in AWAY:
            for path in root.iterdir():
                server.client.upload_file(str(path), "chaos", f"{name}/{number}/{path.name}")
        self.registry.register(root, f"s3://chaos/{name}/{number}" if name in AWAY else None)

    def mean(self, name: str, version: str) -> None:
        """Have an id, or the label, mean a version."""
        if name == LABEL:
            self.registry.label(LABEL, version)
        else:
            self.registry.promote(version)
        self.meant[name].append(Meaning(time.monotonic(), version))

    def meanings(self, name: str, since: float) -> set[str]:
        """Return what a name has meant from `since` on."""
        meant = self.meant.get(name, [Meaning(0, name)])
        later = [each.version for each in meant if each.since > since]
        return {*later, *(each.version for each in [m for m in meant if m.since <= since][-1:])}

    def payloads(self) -> list[Path]:
        """Return the files of the cartridges in the directory."""
        return [path for path in self.scratch.glob("made/*/*/payload*") if path.parts[-3] not in AWAY]

    def questions(self, name: str) -> list[tuple[str, str]]:
        """Return what all versions that a name ever means answer with certainty, no two of them alike."""
        versions = {LABEL: ["a@1", "b@1"], **{each: [f"{each}@1", f"{each}@2"] for each in MOVED}}.get(name)
        known = [self.answers[v] for v in versions or [name if "@" in name else f"{name}@1"]]
        common = set.intersection(*(set(each) for each in known))
        return sorted(q for q in common if len({each[q].value for each in known}) == len(known))


class Client:
    """Asks one request after another until all is over."""

    def __init__(self, world: World, number: int) -> None:
        self._world, self._random = world, random.Random(number)
        self._questions = {name: world.questions(name) for name in NAMES}
        assert all(len(each) >= 5 for each in self._questions.values()), self._questions

    def run(self) -> None:
        """Blocks. Raises only what is a mistake of this file."""
        with httpx.Client(timeout=120) as http:
            while not self._world.over.is_set():
                began = time.monotonic()
                name = self._random.choice(NAMES)
                outcome = self.ask(http, name, leaves=self._random.random() < 1 / 6)
                self._world.asked.append(Asked(self._world.phase, outcome, time.monotonic() - began))
                if outcome not in (RIGHT, LEFT):
                    time.sleep(0.2)

    def ask(self, http: httpx.Client, name: str, *, leaves: bool = False) -> str:
        """Return what became of a question to what `name` means."""
        world, sent = self._world, time.monotonic()
        question = self._random.choice(self._questions[name])
        body = {
            "model": MODEL,
            "max_tokens": 1,
            "temperature": 0,
            "prompt": ask(Fact(*question, ""), 0),
            "cartridges": [name],
        }
        if self._random.random() < 0.5:
            body["cache_salt"] = uuid.uuid4().hex
        try:
            reply = http.post(f"{world.url}/v1/completions", json=body, timeout=0.05 if leaves else 120)
        except httpx.TimeoutException:
            if leaves:
                return LEFT
            raise
        except httpx.TransportError:
            return CUT_OFF
        if not reply.is_success:
            return str(reply.status_code)
        [choice], told = reply.json()["choices"], reply.headers.get("x-cartridges", "")
        if choice["finish_reason"] == "abort":  # so vLLM answers what it has not begun when it is told to end
            return CUT_OFF
        used = told.partition(";")[0]
        if used in world.meanings(name, sent - LAG_S) and choice["text"].strip() == world.answers[used][question].value:
            return RIGHT
        report.say(f"wrong: {question} of {name} is not {choice}; {told}")
        return WRONG


def moving(world: World) -> None:
    """Have ids and the label mean another version each second. Blocks."""
    turn = 0
    while not world.over.wait(1):
        turn += 1
        name = [*MOVED, LABEL][turn % 3]
        now = world.meant[name][-1].version
        other = {"a@1": "b@1", "b@1": "a@1"}[now] if name == LABEL else f"{name}@{3 - int(now[-1])}"
        world.mean(name, other)


class Supervisor:
    """Runs the server, and starts it again once it ended."""

    def __init__(self, world: World, launch: Launch) -> None:
        self._world, self._launch, self._starts = world, launch, 0
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        """Start the server and wait until it is healthy."""
        self._starts += 1
        environment = SMALL | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        log = self._world.scratch / f"log-{self._starts}"
        self._server = self._stack.enter_context(ServerProcess(self._launch, log, environment=environment))
        self._world.url = self._server.url

    def processes(self) -> list[psutil.Process]:
        """Return all of the server's, the one that was started first."""
        server = psutil.Process(self._server.pid)
        return [server, *server.children(recursive=True)]

    def kill_core(self) -> None:
        """Kill the engine's core, and start the server again."""
        (core,) = set(re.findall(r"\(EngineCore pid=(\d+)\)", self._server.log.read_text(errors="replace")))
        self._kill(psutil.Process(int(core)))

    def kill_lmcache(self) -> None:
        """Kill LMCache's server, which a pair starts first, and start both again."""
        self._kill(psutil.Process(self._server.pid).children()[0])

    def _kill(self, process: psutil.Process) -> None:
        process.kill()
        until(lambda: self._server.poll() is not None)  # else the server outlives its engine
        self.close()
        self.start()

    def close(self) -> None:
        """End the server."""
        self._stack.close()


@contextmanager
def answering(world: World, how: Callable[[threading.Event], Any]) -> Iterator[None]:
    """Have something done before each answer of the bucket, which gets an event that is set at the end."""
    over = threading.Event()

    def fault(handler: Any, answer: Any) -> None:
        how(over)
        sound(handler, answer)

    world.proxy.always = fault
    try:
        yield
    finally:
        over.set()
        world.proxy.always = None


@contextmanager
def hung_directory(world: World) -> Iterator[None]:
    """Have whoever opens a payload in the directory wait. Raises `RuntimeError` where one is always open elsewhere."""
    held, before = [], signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        for path in world.payloads():
            held.append(os.open(path, os.O_RDWR))
            for _ in range(1000):
                with suppress(BlockingIOError):
                    fcntl.fcntl(held[-1], fcntl.F_SETLEASE, fcntl.F_WRLCK)
                    break
                time.sleep(0.005)
            else:
                raise RuntimeError(f"{path} is always open")
        yield
    finally:
        for file in held:
            os.close(file)
        signal.signal(signal.SIGIO, before)


@contextmanager
def full_disk(supervisor: Supervisor) -> Iterator[None]:
    """Have no file of the server's grow beyond a few KiB."""

    def limit(most: int) -> None:
        for process in supervisor.processes():
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    limit(FULL_BYTES)
    try:
        yield
    finally:
        limit(resource.RLIM_INFINITY)


def again(world: World, within_s: float) -> set[str]:
    """Return what is answered right once more `within_s`."""
    client, deadline, found = Client(world, -1), time.monotonic() + within_s, set()
    with httpx.Client() as http:
        while time.monotonic() < deadline and found < set(NAMES):
            found |= {name for name in set(NAMES) - found if client.ask(http, name) == RIGHT}
    return found


def measure(scratch: Path, mode: Any, clients: int, phase_s: float, within_s: float) -> list[report.Figure]:
    """Return what was answered in each phase."""
    server = MotoServer(scratch)
    server.start()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as environment:
        stack.callback(server.kill)
        proxy = stack.enter_context(FaultyProxy(server.port))
        for name, value in (server.environment | {"AWS_ENDPOINT_URL_S3": proxy.endpoint}).items():
            environment.setenv(name, value)
        server.client.create_bucket(Bucket="chaos")
        world = World(scratch, server, proxy)
        launch = plan(MODEL, settings(world), chunk_tokens=CHUNK, mode=mode, vllm_args=ARGS, l1_bytes=64 << 20)
        supervisor = Supervisor(world, launch)
        stack.callback(supervisor.close)
        phases: dict[str, Callable[[], Any]] = {
            QUIET: nullcontext,
            "a slow bucket": lambda: answering(world, lambda over: over.wait(1)),
            "a bucket that hangs": lambda: answering(world, threading.Event.wait),
            "a directory that hangs": lambda: hung_directory(world),
            "a full disk": lambda: full_disk(supervisor),
            "the engine's core killed": supervisor.kill_core,
        }
        if mode == "multiprocess":
            phases["LMCache's server killed"] = supervisor.kill_lmcache
        with ThreadPoolExecutor(clients + 1) as pool:
            running = [pool.submit(moving, world), *(pool.submit(Client(world, n).run) for n in range(clients))]
            try:
                for world.phase, fault in phases.items():
                    report.say(f"{time.strftime('%X')} {mode}: {world.phase}")
                    with fault() or nullcontext():
                        time.sleep(phase_s)
            finally:
                world.over.set()
            for each in running:
                each.result()
        served = len(again(world, within_s))
        return [*figures(world.asked, mode), report.Figure.share(served, len(NAMES), AGAIN, mode=mode)]


def settings(world: World) -> Settings:
    """Return the server's: memory for one and a half cartridges."""
    payload = max(path.stat().st_size for path in world.payloads())
    return from_mapping(
        {"home": world.scratch / "home", "disk_dir": world.scratch / "disk", "cpu_bytes": payload * 3 // 2,
         "ready_timeout_s": 20, "s3_timeout_s": 20}
    )  # fmt: skip


def figures(asked: Sequence[Asked], mode: str) -> list[report.Figure]:
    """Return what became of the requests of each phase, and how long right answers took."""
    found = []
    for phase in dict.fromkeys(each.phase for each in asked):
        of_phase = [each for each in asked if each.phase == phase]
        about, count = {"mode": mode, "beside": phase}, Counter(each.outcome for each in of_phase)
        for outcome in OUTCOMES:
            found.append(report.Figure.counted(count.pop(outcome, 0), outcome, "answers", len(of_phase), **about))
        found.append(report.Figure.counted(count.total(), "other errors", "answers", len(of_phase), **about))
        if right := [each.seconds for each in of_phase if each.outcome == RIGHT]:
            found.append(report.Figure.of(right, "right answer", "s", **about))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["artifact", "library", "sources", "memory", "engine", "serve"])
    options = bench.start(arguments)
    modes = MODES[1:] if options.smoke else MODES
    clients, phase_s, within_s = (4, 2.0, 60.0) if options.smoke else (16, 120.0 if options.full else 30.0, 60.0)
    torch.set_num_threads(1)
    found = []
    for mode in modes:
        with tempfile.TemporaryDirectory() as scratch:
            found += measure(Path(scratch), mode, clients, phase_s, within_s)
    bench.publish(found)
    if any(figure.what == WRONG and figure.value or figure.what == AGAIN and figure.value < 1 for figure in found):
        raise SystemExit("an answer was wrong, or a cartridge is not served again")


if __name__ == "__main__":
    main()
