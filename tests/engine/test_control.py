"""Calls reach the store of every worker over its socket; whatever a client does hurts that client alone."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from homes import STILL
from making import make_artifact
from waiting import run_threads, until

from lmcache_cartridge.engine import client, control, frames
from lmcache_cartridge.engine.client import ControlClient, RemoteClaim
from lmcache_cartridge.engine.control import ControlServer
from lmcache_cartridge.errors import CartridgeError, UnsupportedEngine


@pytest.fixture
def made(home):
    return home.make()


@pytest.fixture
def store(home, made):
    return home.open(settings=STILL)


@pytest.fixture
def serve():
    """Return a function that starts a server for a store."""
    servers = []

    def start(store: Any) -> ControlServer:
        servers.append(ControlServer(lambda: store))
        return servers[-1]

    yield start
    for server in servers:  # which takes half a second each
        threading.Thread(target=server.close).start()


@pytest.fixture
def server(serve, store):
    return serve(store)


@pytest.fixture
def connect():
    opened = []

    def make(*servers: ControlServer) -> ControlClient:
        opened.append(ControlClient([server.path for server in servers]))
        return opened[-1]

    yield make
    for workers in opened:
        workers.close()


@pytest.fixture
def workers(connect, server):
    return connect(server)


def _claimed(workers: ControlClient, digest: str) -> RemoteClaim:
    """Claim a cartridge and wait for it."""
    claim = RemoteClaim(workers, digest, {})
    assert all(rank["ready"] for rank in claim.begin(20).result())
    return claim


def test_a_claim_holds_its_chunks_until_it_is_released(workers, store, made, tmp_path):
    claim = _claimed(workers, made.manifest.digest)
    (state,) = claim.begin().result()
    assert (state["resident"], state["chunks"], state["refused"], state["eta_s"]) == (4, 4, None, 0.0)
    other = make_artifact(tmp_path / "other", positions=32, seed=7)
    elsewhere = RemoteClaim(workers, other.manifest.digest, {other.manifest.digest: [str(tmp_path / "other")] * 2})
    until(lambda: elsewhere.begin().result()[0]["ready"])  # it says where the cartridge lies
    assert store.cpu.stats().held == 6
    elsewhere.release()
    for _ in range(2):
        claim.release()
        until(lambda: store.cpu.stats().held == 0)
    with pytest.raises(UnsupportedEngine, match="does not answer claim: closed"):
        claim.begin().result()
    assert store.status()["claims"] == 0


def test_a_claim_is_answered_once_it_is_ready_stuck_or_its_time_is_up_and_ends_with_its_client(
    serve, connect, home, made
):
    """Memory has room for the first of two cartridges: the other waits, unless it can be computed."""
    other = home.make("other", positions=64, seed=3)
    small = home.open(chunks=4, settings=STILL)
    workers = connect(serve(small))
    first, second, gone = (
        _claimed(workers, made.manifest.digest),
        *(RemoteClaim(workers, other.manifest.digest, {}) for _ in "ab"),
    )
    for wait_s, may_compute in ((600, True), (0.5, False)):
        assert not second.begin(wait_s, may_compute=may_compute).result(60)[0]["ready"]
    gone.begin(600)
    until(lambda: small.status()["claims"] == 3)
    gone.release()
    until(lambda: small.status()["claims"] == 2)
    waiting = second.begin(600)
    assert first.begin().result()[0]["ready"] and not waiting.done(), "the control: nothing has changed yet"
    first.release()
    assert waiting.result(60)[0]["ready"]


def test_everything_the_store_can_do_is_there(workers, store, home, made):
    digest = made.manifest.digest
    status = workers.call("status")[0]
    assert (status["rank"], status["served"], store.names(), status["refused"]) == (0, 1, ["doc@1"], {})
    assert workers.call("preload", digest, {})[0]["chunks"] == 4
    until(lambda: store.cpu.stats().resident == 4)
    assert workers.call("pin", digest) == [4]
    until(lambda: store.cpu.stats().held == 4)
    assert (workers.call("evict", digest), workers.call("unpin", digest)) == ([0], [4])
    until(lambda: workers.call("evict", digest) == [4] or store.cpu.stats().resident == 0)
    home.make("later", seed=2)
    assert workers.call("refresh") == [None]
    numbers = workers.call("numbers")[0]
    assert (numbers["rank"], numbers["served"], numbers["refused"], numbers["pinned"]) == (0, 2, 0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("explode",), "no method 'explode'"), (("__class__",), "no method"), (("claim", "b", "c", 0, False), "AttributeError"),
        (("claim", "b", {"c": 5}, 0, False), "TypeError"), (("claim", ["a"], {}, 0, False), "AttributeError"),
        (("evict", "a", "b"), "TypeError"), (("pin", "00" * 32), "is not there"), (("pin", 7), "AttributeError"),
    ],
    ids=str,
)  # fmt: skip
def test_a_call_that_makes_no_sense_is_an_error_and_the_next_one_is_answered(workers, store, made, call, message):
    claim = _claimed(workers, made.manifest.digest)
    with pytest.raises(CartridgeError, match=message):
        workers.call(*call)
    assert workers.call("status")[0]["served"] == 1
    assert store.cpu.stats().held == 4 and claim.begin().result()[0]["ready"], "the claim was lost"


_BEGUN = [frames.encode(["status"])[:count] for count in (0, 2, 4, 5)]
"""What a frame begins with."""


@pytest.mark.parametrize(
    "data",
    [
        (5).to_bytes(4, "little") + b"\xc1\xc1\xc1\xc1\xc1", *map(frames.encode, ("status", [], {"status": 1}, 7)), bytes(4),
        *_BEGUN,
    ],
    ids=["no msgpack", "a string", "an empty list", "a map", "a number", "empty", "gone", "2 bytes", "4 bytes", "5 bytes"],
)  # fmt: skip
def test_a_client_that_talks_nonsense_or_goes_in_the_middle_of_a_frame_loses_its_claims_only(
    server, workers, store, home, made, data,
    capfd,
):  # fmt: skip
    other = home.make("other", positions=32, seed=3)
    store.refresh()
    mine = _claimed(workers, made.manifest.digest)
    with frames.connect(server.path) as connection:
        connection.sendall(frames.encode(["claim", other.manifest.digest, {}, 0.0, False]))
        assert connection.recv(4)
        until(lambda: store.cpu.stats().held == 6)
        connection.sendall(data)
        assert workers.call("status")[0]["rank"] == 0, "half a frame keeps nobody waiting"
        if data in _BEGUN:
            assert store.cpu.stats().held == 6, "the rest may come"
        else:
            until(lambda: store.cpu.stats().held == 4)
    until(lambda: store.cpu.stats().held == 4)
    assert workers.call("status")[0]["rank"] == 0 and mine.begin().result()[0]["ready"]
    assert "Traceback" not in capfd.readouterr().err


# Several ranks.


@pytest.fixture
def ranks(home, made):
    return [home.open(settings=STILL, rank=rank, world=2) for rank in range(2)]


def test_every_rank_answers_in_order_and_an_error_of_one_is_its_callers(serve, connect, ranks, made, caplog):
    workers = connect(*map(serve, ranks))

    def fail(digest: str) -> int:
        raise CartridgeError("rank 1 will not") if digest else ZeroDivisionError("a bug")

    ranks[1].evict = fail
    for digest, reason in ((made.manifest.digest, "rank 1 will not"), ("", "ZeroDivisionError: a bug")):
        with pytest.raises(CartridgeError, match=reason), caplog.at_level(logging.ERROR):
            workers.call("evict", digest)
        assert [rank["rank"] for rank in workers.call("status")] == [0, 1], "no answer is left over"
    assert "the call evict failed" in caplog.text
    claim = _claimed(workers, made.manifest.digest)
    assert [store.cpu.stats().held for store in ranks] == [4, 4]
    workers.close()
    until(lambda: [store.cpu.stats().held for store in ranks] == [0, 0])
    claim.release()


def test_a_rank_that_dies_in_a_call_is_an_error_and_one_that_takes_its_place_is_called(serve, connect, ranks, tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(str(path))
        dying.listen()
        workers = connect(serve(ranks[0]), SimpleNamespace(path=str(path)))
        call = workers.begin("status")
        connection, _ = dying.accept()
        connection.recv(1000)
        connection.close()
    # Where the dying rank had not read all of the call, Linux resets the connection instead of closing it.
    with pytest.raises(UnsupportedEngine, match="ended while it was asked|does not answer status: .*reset"):
        call.result(60)
    with pytest.raises(UnsupportedEngine, match="does not answer status: .*refused"):
        workers.call("status")
    path.unlink()
    path.symlink_to(serve(ranks[1]).path)
    assert [rank["rank"] for rank in workers.call("status")] == [0, 1]


# Many callers.


def test_thirty_two_threads_get_their_own_answers(workers, home, store):
    sizes = {home.make(f"d{n}", positions=16 * n, seed=n).manifest.digest: n for n in range(1, 5)}
    store.refresh()

    def work(number: int) -> None:
        digest = list(sizes)[number % 4]
        for turn in range(10):
            claim = RemoteClaim(workers, digest, {})
            assert claim.begin().result()[0]["chunks"] == sizes[digest]
            with pytest.raises(CartridgeError, match=f"m{number}x{turn}"):
                workers.call(f"m{number}x{turn}")
            claim.release()

    run_threads(32, work)
    until(lambda: store.cpu.stats().held == 0)


def test_a_claim_that_nobody_refers_to_or_that_is_released_while_it_is_asked_for_holds_nothing(workers, store, made):
    class Request:
        def __init__(self) -> None:
            self.itself = self  # only the garbage collector ends it
            self.claim = _claimed(workers, made.manifest.digest)

    for _ in range(40):
        Request()
    assert store.cpu.stats().held == 4, "the control"
    gc.collect()
    until(lambda: store.cpu.stats().held == 0)
    for _ in range(50):
        claim = RemoteClaim(workers, made.manifest.digest, {})
        answer = claim.begin()
        claim.release()
        with suppress(CartridgeError):
            answer.result(20)
    until(lambda: store.status()["claims"] == 0)
    assert store.cpu.stats().held == 0


def test_an_interrupted_call_leaves_no_answer_for_the_next(workers, store, made, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(store, "unpin", lambda digest: release.wait(20))

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


def test_no_other_user_can_open_the_socket(server):
    directory = Path(server.path).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in directory.iterdir()] == ["control"]


def test_calls_that_hang_end_no_claim_hold_up_no_other_call_and_are_bounded(serve, connect, store, made, monkeypatch):
    monkeypatch.setattr(control, "_MAX_CALLS", 3)
    workers = connect(serve(store))
    go_on, hanging = threading.Event(), []
    monkeypatch.setattr(store, "evict", lambda digest: go_on.wait(60))
    claim = _claimed(workers, made.manifest.digest)
    try:
        hanging.append(workers.begin("evict", "x"))
        assert workers.call("numbers")[0]["claims"] == 1
        with monkeypatch.context() as short:
            short.setattr(client, "TIMEOUT_S", 0.2)
            with pytest.raises(UnsupportedEngine, match="does not answer evict: timed out"):
                workers.call("evict", "x")
        assert (store.status()["claims"], store.cpu.stats().held) == (1, 4), "claims ended with the call"
        hanging.append(workers.begin("evict", "x"))
        waiting = workers.begin("numbers")
        assert claim.begin().result()[0]["ready"] and _claimed(workers, made.manifest.digest)
        assert not waiting.done()
    finally:
        go_on.set()
    assert [call.result(20) for call in hanging] == [[True]] * 2, "their answers come when there are some"
    assert waiting.result(20)[0]["rank"] == 0
