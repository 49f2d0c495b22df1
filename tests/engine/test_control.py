"""Calls reach the store of every worker over its socket; whatever a client does hurts that client alone."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from homes import STILL, Home, assert_served, prompt_for
from making import Made, make_artifact
from waiting import run_threads, until

from lmcache_cartridge.engine import client, control, frames
from lmcache_cartridge.engine.client import ControlClient, RemoteClaim
from lmcache_cartridge.engine.control import ControlServer
from lmcache_cartridge.errors import CartridgeError, UnsupportedEngine
from lmcache_cartridge.memory.store import CartridgeStore


@pytest.fixture
def made(home: Home) -> Made:
    return home.make()


@pytest.fixture
def store(home: Home, made: Made) -> CartridgeStore:
    return home.open(settings=STILL)


@pytest.fixture
def serve() -> Iterator[Callable[..., ControlServer]]:
    """Return a function that starts a server for a store."""
    servers = []

    def start(store: Any) -> ControlServer:
        servers.append(ControlServer(lambda: store))
        return servers[-1]

    yield start
    for server in servers:  # which takes half a second each
        threading.Thread(target=server.close).start()


@pytest.fixture
def server(serve: Callable, store: CartridgeStore) -> ControlServer:
    return serve(store)


@pytest.fixture
def connect() -> Iterator[Callable[..., ControlClient]]:
    opened = []

    def make(*servers: ControlServer) -> ControlClient:
        opened.append(ControlClient([server.path for server in servers]))
        return opened[-1]

    yield make
    for workers in opened:
        workers.close()


@pytest.fixture
def workers(connect: Callable, server: ControlServer) -> ControlClient:
    return connect(server)


def _claimed(workers: ControlClient, digest: str) -> RemoteClaim:
    """Claim a cartridge and wait for it."""
    claim = RemoteClaim(workers, digest, {})
    assert all(rank["ready"] for rank in claim.begin(20).result())
    return claim


def test_a_claim_holds_its_chunks_until_it_is_released(
    workers: ControlClient, store: CartridgeStore, made: Made
) -> None:
    claim = _claimed(workers, made.manifest.digest)
    (state,) = claim.begin().result()
    assert (state["resident"], state["chunks"], state["refused"], state["eta_s"]) == (4, 4, None, 0.0)
    assert store.cpu.stats().held == 4
    for _ in range(2):
        claim.release()
        until(lambda: store.cpu.stats().held == 0)
    with pytest.raises(UnsupportedEngine, match="does not answer claim: closed"):
        claim.begin().result()
    assert store.status()["claims"] == 0


def test_a_claim_is_answered_once_it_is_ready_stuck_or_its_time_is_up(
    serve: Callable, connect: Callable, home: Home, made: Made
) -> None:
    """Memory has room for the first of two cartridges: the other waits, unless it can be computed."""
    other = home.make("other", positions=64, seed=3)
    small = home.open(chunks=4, settings=STILL)
    workers = connect(serve(small))
    first = _claimed(workers, made.manifest.digest)
    second, began = RemoteClaim(workers, other.manifest.digest, {}), time.monotonic()
    (state,) = second.begin(20, may_compute=True).result()
    assert not state["ready"] and time.monotonic() < began + 10
    began = time.monotonic()
    (state,) = second.begin(0.5).result()
    assert not state["ready"] and 0.5 <= time.monotonic() - began < 10
    waiting = second.begin(60)
    time.sleep(0.2)
    assert not waiting.done(), "the control: nothing has changed yet"
    first.release()
    assert waiting.result(20)[0]["ready"]


def test_a_client_that_leaves_while_its_claim_is_waited_for_lets_it_go(
    serve: Callable, connect: Callable, home: Home, made: Made
) -> None:
    other = home.make("other", positions=64, seed=3)
    store = home.open(chunks=4, settings=STILL)
    workers = connect(serve(store))
    first = _claimed(workers, made.manifest.digest)
    second = RemoteClaim(workers, other.manifest.digest, {})
    second.begin(600)
    until(lambda: store.status()["claims"] == 2)
    second.release()
    until(lambda: store.status()["claims"] == 1)
    assert first.begin().result()[0]["ready"]


def test_a_claim_may_say_where_a_cartridge_lies(workers: ControlClient, tmp_path: Path, store: CartridgeStore) -> None:
    other = make_artifact(tmp_path / "other", positions=32, seed=7)
    places = {other.manifest.digest: (str(tmp_path / "other"), str(tmp_path / "other"))}
    claim = RemoteClaim(workers, other.manifest.digest, places)
    until(lambda: claim.begin().result()[0]["ready"])
    assert store.cpu.stats().held == 2


def test_everything_the_store_can_do_is_there(
    workers: ControlClient, store: CartridgeStore, home: Home, made: Made
) -> None:
    digest = made.manifest.digest
    status = workers.call("status")[0]
    assert (status["rank"], status["served"], store.names(), status["refused"]) == (0, 1, ["doc@1"], {})
    assert workers.call("preload", digest, {})[0]["chunks"] == 4
    until(lambda: store.cpu.stats().resident == 4)
    assert workers.call("pin", digest) == [4]
    assert workers.call("status")[0]["pinned"] == [digest]
    until(lambda: store.cpu.stats().held == 4)
    assert workers.call("evict", digest) == [0]
    assert workers.call("unpin", digest) == [4]
    until(lambda: workers.call("evict", digest) == [4] or store.cpu.stats().resident == 0)
    home.make("later", seed=2)
    assert workers.call("refresh") == [None]
    assert (workers.call("status")[0]["served"], store.names()) == (2, ["doc@1", "later@1"])
    numbers = workers.call("numbers")[0]
    assert (numbers["rank"], numbers["served"], numbers["refused"], numbers["pinned"]) == (0, 2, 0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("explode",), "no method 'explode'"),
        (("__class__",), "no method"),
        (("claim", "b", "c", 0, False), "AttributeError"),
        (("claim", "b", {"c": 5}, 0, False), "TypeError"),
        (("claim", ["a"], {}, 0, False), "AttributeError"),
        (("evict", "a", "b"), "TypeError"),
        (("pin", "00" * 32), "is not there"),
        (("pin", 7), "AttributeError"),
    ],
    ids=str,
)
def test_a_call_that_makes_no_sense_is_an_error_and_the_next_one_is_answered(
    workers: ControlClient, store: CartridgeStore, made: Made, call: tuple, message: str
) -> None:
    claim = _claimed(workers, made.manifest.digest)
    with pytest.raises(CartridgeError, match=message):
        workers.call(*call)
    assert (workers.call("status")[0]["served"], store.names()) == (1, ["doc@1"])
    assert store.cpu.stats().held == 4 and claim.begin().result()[0]["ready"], "the claim was lost"


@pytest.mark.parametrize(
    "data",
    [
        (5).to_bytes(4, "little") + b"\xc1\xc1\xc1\xc1\xc1",
        frames.encode("status"),
        frames.encode([]),
        frames.encode({"status": 1}),
        frames.encode(7),
        (0).to_bytes(4, "little"),
    ],
    ids=["no msgpack", "a string", "an empty list", "a map", "a number", "empty"],
)
def test_a_client_that_talks_nonsense_is_disconnected_and_loses_its_claims_only(
    server: ControlServer, workers: ControlClient, store: CartridgeStore, home: Home, made: Made, data: bytes,
    capfd: pytest.CaptureFixture,
) -> None:  # fmt: skip
    other = home.make("other", positions=32, seed=3)
    store.refresh()
    mine = _claimed(workers, made.manifest.digest)
    with frames.connect(server.path) as connection:
        connection.sendall(frames.encode(["claim", other.manifest.digest, {}, 0.0, False]))
        assert connection.recv(4)
        until(lambda: store.cpu.stats().held == 6)
        connection.sendall(data)
        until(lambda: store.cpu.stats().held == 4)
        rest = b"x"
        while rest:
            try:
                rest = connection.recv(1 << 16)
            except ConnectionResetError:
                rest = b""
    assert workers.call("status")[0]["rank"] == 0 and mine.begin().result()[0]["ready"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("sent", [0, 2, 4, 10])
def test_a_client_that_goes_in_the_middle_of_a_frame_loses_its_claims(
    server: ControlServer, store: CartridgeStore, made: Made, sent: int
) -> None:
    with frames.connect(server.path) as connection:
        connection.sendall(frames.encode(["claim", made.manifest.digest, {}, 0.0, False]))
        until(lambda: store.cpu.stats().held == 4)
        connection.sendall(frames.encode(["claim", made.manifest.digest, {}, 0.0, False])[:sent])
        time.sleep(0.05)
        assert store.cpu.stats().held == 4
    until(lambda: store.cpu.stats().held == 0)


def test_a_client_that_says_half_a_frame_keeps_nobody_waiting(
    server: ControlServer, connect: Callable, made: Made
) -> None:
    with frames.connect(server.path) as connection:
        connection.sendall(frames.encode(["status"])[:5])
        assert connect(server).call("status")[0]["rank"] == 0
        connection.sendall(frames.encode(["status"])[5:])
        assert connection.recv(4), "its own answer comes too"


# Several ranks.


@pytest.fixture
def ranks(home: Home, made: Made) -> list[CartridgeStore]:
    return [home.open(settings=STILL, rank=rank, world=2) for rank in range(2)]


def test_every_rank_answers_in_order(serve: Callable, connect: Callable, ranks: list, made: Made) -> None:
    workers = connect(*map(serve, ranks))
    assert [rank["rank"] for rank in workers.call("status")] == [0, 1]
    claim = _claimed(workers, made.manifest.digest)
    assert [store.cpu.stats().held for store in ranks] == [4, 4]
    workers.close()
    until(lambda: [store.cpu.stats().held for store in ranks] == [0, 0])
    claim.release()


def test_an_error_of_one_rank_is_the_callers_and_no_answer_is_left_over(
    serve: Callable, connect: Callable, ranks: list, made: Made
) -> None:
    workers = connect(*map(serve, ranks))

    def fail(digest: str) -> int:
        raise CartridgeError("rank 1 will not")

    ranks[1].evict = fail
    with pytest.raises(CartridgeError, match="rank 1 will not"):
        workers.call("evict", made.manifest.digest)
    assert [rank["rank"] for rank in workers.call("status")] == [0, 1]


class _Dying(socket.socket):
    """A worker that reads one call and dies."""

    def __init__(self, path: str) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.bind(path)
        self.listen()
        self.path = path
        threading.Thread(target=self._die, daemon=True).start()

    def _die(self) -> None:
        connection, _ = self.accept()
        with connection:
            connection.recv(1000)
        self.close()


def test_a_rank_that_dies_in_a_call_is_an_error_and_one_that_takes_its_place_is_called(
    serve: Callable, connect: Callable, ranks: list, made: Made, tmp_path: Path
) -> None:
    first, path = serve(ranks[0]), tmp_path / "s"
    workers = connect(first, _Dying(str(path)))
    # Where the dying rank had not read all of the call, Linux resets the connection instead of closing it.
    for message in ("ended while it was asked|does not answer status: .*reset", "does not answer status: .*refused"):
        with pytest.raises(UnsupportedEngine, match=message):
            workers.call("status")
    until(lambda: ranks[0].cpu.stats().held == 0)
    path.unlink()
    path.symlink_to(serve(ranks[1]).path)
    assert [rank["rank"] for rank in workers.call("status")] == [0, 1]


# Many callers.


def test_thirty_two_threads_get_their_own_answers(workers: ControlClient, home: Home, store: CartridgeStore) -> None:
    sizes = {home.make(f"d{n}", positions=16 * n, seed=n).manifest.digest: n for n in range(1, 5)}
    store.refresh()

    def work(number: int) -> None:
        digest = list(sizes)[number % 4]
        for turn in range(10):
            claim = RemoteClaim(workers, digest, {})
            assert claim.begin().result()[0]["chunks"] == sizes[digest]
            with pytest.raises(CartridgeError, match=f"m{number}x{turn}"):
                workers.call(f"m{number}x{turn}")
            assert workers.call("unpin", digest) == [0]
            claim.release()

    run_threads(32, work)
    until(lambda: store.cpu.stats().held == 0)


def test_a_claim_that_nobody_refers_to_is_released_wherever_that_is_found_out(
    workers: ControlClient, store: CartridgeStore, made: Made
) -> None:
    class Request:
        def __init__(self) -> None:
            self.itself = self  # only the garbage collector ends it
            self.claim = _claimed(workers, made.manifest.digest)

    for _ in range(40):
        Request()
    assert store.cpu.stats().held == 4
    gc.collect()
    until(lambda: store.cpu.stats().held == 0)


def test_an_interrupted_call_leaves_no_answer_for_the_next(
    workers: ControlClient, store: CartridgeStore, made: Made
) -> None:
    workers.call("status")
    release, unpin = threading.Event(), store.unpin
    store.unpin = lambda digest: (release.wait(20), unpin(digest))[1]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            workers.call("unpin", made.manifest.digest)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    release.set()
    assert workers.call("status")[0]["rank"] == 0


def test_no_other_user_can_open_the_socket(server: ControlServer) -> None:
    directory = Path(server.path).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in directory.iterdir()] == ["control"]


def test_a_bug_in_the_store_is_an_error_for_its_caller_and_in_the_log(
    workers: ControlClient, store: CartridgeStore, home: Home, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    def bug() -> dict:
        raise ZeroDivisionError("a bug")

    status, store.status = store.status, bug
    with caplog.at_level(logging.ERROR), pytest.raises(CartridgeError, match="ZeroDivisionError: a bug"):
        workers.call("status")
    assert "the call status failed" in caplog.text
    store.status = status
    assert workers.call("status")[0]["rank"] == 0
    assert_served(store, made, prompt_for(home, made))


# Claims that end while they are asked for.


def test_a_claim_that_is_released_while_it_is_asked_for_holds_nothing(
    workers: ControlClient, store: CartridgeStore, made: Made
) -> None:
    for _ in range(50):
        claim = RemoteClaim(workers, made.manifest.digest, {})
        answer = claim.begin()
        claim.release()
        with suppress(CartridgeError):
            answer.result(20)
    until(lambda: store.status()["claims"] == 0)
    assert store.cpu.stats().held == 0
    there = _claimed(workers, made.manifest.digest)
    assert there.begin().result()[0]["ready"], "the control"
    assert store.cpu.stats().held == 4


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(
    workers: ControlClient, store: CartridgeStore, made: Made
) -> None:
    claim = RemoteClaim(workers, made.manifest.digest, {})
    for _ in range(20):
        claim.begin().cancel()
    until(lambda: claim.begin().result()[0]["ready"])
    store.cpu.stats()
    (state,) = claim.begin().result()
    assert (state["resident"], store.status()["claims"]) == (4, 1)


# Calls beside each other.


def test_a_call_that_hangs_ends_no_claim_and_holds_up_no_other_call(
    workers: ControlClient, store: CartridgeStore, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = _claimed(workers, made.manifest.digest)
    go_on, hangs = threading.Event(), threading.Event()
    monkeypatch.setattr(store, "evict", lambda digest: (hangs.set(), go_on.wait(60), 7)[2])
    late = workers.begin("evict", made.manifest.digest)
    assert hangs.wait(20)
    try:
        assert claim.begin().result()[0]["ready"]
        other = RemoteClaim(workers, made.manifest.digest, {})
        assert other.begin().result()[0]["ready"]
        assert workers.call("numbers")[0]["claims"] == 2
        with monkeypatch.context() as short:
            short.setattr(client, "TIMEOUT_S", 0.2)
            with pytest.raises(UnsupportedEngine, match="does not answer evict: timed out"):
                workers.call("evict", made.manifest.digest)
        assert (store.status()["claims"], store.cpu.stats().held) == (2, 4), "claims ended with the call"
    finally:
        go_on.set()
    assert late.result(20) == [7], "its answer comes when there is one"


def test_calls_that_hang_are_bounded_and_claims_go_on(
    serve: Callable, connect: Callable, store: CartridgeStore, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_MAX_CALLS", 3)
    workers = connect(serve(store))
    go_on = threading.Event()
    monkeypatch.setattr(store, "evict", lambda digest: go_on.wait(60))
    hanging = [workers.begin("evict", "x") for _ in range(3)]
    try:
        waiting = workers.begin("numbers")
        assert _claimed(workers, made.manifest.digest)
        assert not waiting.done()
    finally:
        go_on.set()
    assert [call.result(20) for call in hanging] == [[True]] * 3
    assert waiting.result(20)[0]["rank"] == 0
