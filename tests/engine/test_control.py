"""Calls reach the store of every worker over its socket; whatever a client does hurts that client alone."""

from __future__ import annotations

import gc
import socket
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from homes import STILL
from making import make_artifact
from waiting import until

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
    """Return a function that starts a server for a store and returns the path of its socket."""
    servers = []

    def start(store: Any) -> str:
        servers.append(ControlServer(lambda: store))
        return servers[-1].path

    yield start
    for server in servers:  # which takes half a second each
        threading.Thread(target=server.close).start()


@pytest.fixture
def server(serve, store):
    return serve(store)


@pytest.fixture
def connect():
    with ExitStack() as opened:
        yield lambda *paths: opened.enter_context(closing(ControlClient(paths)))


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
    assert (state["resident"], state["chunks"], state["refused"]) == (4, 4, None)
    other = make_artifact(tmp_path / "other", positions=32, seed=7).manifest.digest
    elsewhere = RemoteClaim(workers, other, {other: [str(tmp_path / "other")] * 2})  # it says where the cartridge lies
    assert elsewhere.begin(20).result()[0]["ready"]
    for each in (elsewhere, claim, claim):
        each.release()
    until(lambda: store.cpu.stats().held == 0)
    with pytest.raises(UnsupportedEngine, match="does not answer claim: closed"):
        claim.begin().result()


def test_a_claim_is_answered_once_it_is_ready_stuck_or_its_time_is_up_and_ends_with_its_client(
    serve, connect, home, made
):
    """Memory has room for the first of two cartridges: the other waits, unless it can be computed."""
    other = home.make("other", positions=64, seed=3)
    small = home.open(chunks=4, settings=STILL)
    workers = connect(serve(small))
    first = _claimed(workers, made.manifest.digest)
    second, gone = (RemoteClaim(workers, other.manifest.digest, {}) for _ in "ab")
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("__class__",), "no method '__class__'"), (("claim", "b", {"c": 5}, 0, False), "TypeError"),
        (("evict", "a", "b"), "TypeError"), (("pin", "00" * 32), "is not there"),
    ],
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
    [(5).to_bytes(4, "little") + b"\xc1" * 5, *map(frames.encode, ("status", [], {"status": 1})), bytes(4), *_BEGUN],
)
def test_a_client_that_talks_nonsense_or_goes_in_the_middle_of_a_frame_loses_its_claims_only(
    server, workers, store, home, made, data
):
    other = home.make("other", positions=32, seed=3)
    store.refresh()
    mine = _claimed(workers, made.manifest.digest)
    with frames.connect(server) as connection:
        connection.sendall(frames.encode(["claim", other.manifest.digest, {}, 0.0, False]))
        until(lambda: store.cpu.stats().held == 6)
        connection.sendall(data)
        assert workers.call("status")[0]["rank"] == 0, "half a frame keeps nobody waiting"
        assert data not in _BEGUN or store.cpu.stats().held == 6, "the rest may come"
    until(lambda: store.cpu.stats().held == 4)
    assert workers.call("status")[0]["rank"] == 0 and mine.begin().result()[0]["ready"]


# Several ranks.


@pytest.fixture
def ranks(home, made):
    return [home.open(settings=STILL, rank=rank, world=2) for rank in range(2)]


def test_every_rank_answers_in_order_and_an_error_of_one_is_its_callers(serve, connect, ranks, made):
    workers = connect(*map(serve, ranks))

    def fail(digest: str) -> int:
        raise CartridgeError("rank 1 will not") if digest else ZeroDivisionError("a bug")

    ranks[1].evict = fail
    for digest, reason in ((made.manifest.digest, "rank 1 will not"), ("", "ZeroDivisionError: a bug")):
        with pytest.raises(CartridgeError, match=reason):
            workers.call("evict", digest)
        assert [rank["rank"] for rank in workers.call("status")] == [0, 1], "no answer is left over"
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
        workers = connect(serve(ranks[0]), str(path))
        call = workers.begin("status")
        connection, _ = dying.accept()
        connection.recv(1000)
        connection.close()
    # Where the dying rank had not read all of the call, Linux resets the connection instead of closing it.
    with pytest.raises(UnsupportedEngine, match="does not answer status: .*(0 bytes|reset)"):
        call.result(60)
    with pytest.raises(UnsupportedEngine, match="does not answer status: .*refused"):
        workers.call("status")
    path.unlink()
    path.symlink_to(serve(ranks[1]))
    assert [rank["rank"] for rank in workers.call("status")] == [0, 1]


def test_a_claim_that_nobody_refers_to_or_that_is_released_while_it_is_asked_for_holds_nothing(workers, store, made):
    for _ in range(40):
        request: list[Any] = [_claimed(workers, made.manifest.digest)]
        request.append(request)  # only the garbage collector ends it
    del request
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


def test_no_other_user_can_open_the_socket(server):
    assert Path(server).parent.stat().st_mode & 0o777 == 0o700


def test_calls_that_hang_end_no_claim_hold_up_no_other_call_and_are_bounded(serve, connect, store, made, monkeypatch):
    monkeypatch.setattr(control, "_MAX_CALLS", 3)
    workers = connect(serve(store))
    go_on = threading.Event()
    monkeypatch.setattr(store, "evict", lambda digest: go_on.wait(60))
    claim = _claimed(workers, made.manifest.digest)
    try:
        hanging = [workers.begin("evict", "x") for _ in "ab"]
        assert workers.call("numbers")[0]["claims"] == 1
        with monkeypatch.context() as short:
            short.setattr(client, "TIMEOUT_S", 0.2)
            with pytest.raises(UnsupportedEngine, match="does not answer evict: timed out"):
                workers.call("evict", "x")
        assert (store.status()["claims"], store.cpu.stats().held) == (1, 4), "claims ended with the call"
        waiting = workers.begin("numbers")
        assert claim.begin().result()[0]["ready"] and _claimed(workers, made.manifest.digest)
        assert not waiting.done()
    finally:
        go_on.set()
    assert [call.result(20) for call in hanging] == [[True]] * 2, "their answers come when there are some"
    assert waiting.result(20)[0]["rank"] == 0
