"""Calls reach the store of every worker over its socket; whatever a client does hurts that client alone."""

from __future__ import annotations

import gc
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from homes import STILL
from making import make_artifact
from waiting import until

from lmcache_cartridge.engine import client, frames
from lmcache_cartridge.engine.client import ControlClient, Held
from lmcache_cartridge.engine.control import ControlServer
from lmcache_cartridge.errors import CartridgeError, UnsupportedEngine
from lmcache_cartridge.memory.claims import Claim


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
def workers(server):
    return ControlClient([server])


def _asked(workers: ControlClient, digest: str, wait_s: float = 0.0, may_compute: bool = False) -> tuple[Held, Any]:
    """Claim a cartridge; return the claim and what the workers will say of it."""
    claim = Held(workers)
    return claim, claim.begin("claim", digest, {}, wait_s, may_compute)


def _claimed(workers: ControlClient, digest: str) -> Held:
    """Claim a cartridge and wait for it."""
    claim, told = _asked(workers, digest, 20)
    assert all(rank["ready"] for rank in told.result())
    return claim


def test_a_claim_holds_its_chunks_until_it_is_released(workers, store, made, tmp_path):
    claim = _claimed(workers, made.manifest.digest)
    other = make_artifact(tmp_path / "other", positions=32, seed=7).manifest.digest
    elsewhere = Held(workers)  # it says where the cartridge lies
    (state,) = elsewhere.begin("claim", other, {other: [str(tmp_path / "other")] * 2}, 20, False).result()
    assert (state["ready"], state["resident"], state["chunks"], state["refused"]) == (True, 2, 2, None)
    assert store.cpu.stats().held == 6
    for each in (elsewhere, claim, claim):
        each.release()
    until(lambda: store.cpu.stats().held == 0)


def test_a_claim_is_answered_once_it_is_ready_stuck_or_its_time_is_up_and_ends_with_its_client(
    serve, home, made, monkeypatch
):
    """Memory has room for the first of two cartridges: the other waits, unless it can be computed."""
    other = home.make("other", positions=64, seed=3).manifest.digest
    small = home.open(chunks=4, settings=STILL)
    workers = ControlClient([serve(small)])
    first = _claimed(workers, made.manifest.digest)
    polls, poll = [], Claim.poll
    monkeypatch.setattr(Claim, "poll", lambda claim: (polls.append(claim), poll(claim))[1])
    for wait_s, may_compute in ((600, True), (0.5, False)):
        claim, told = _asked(workers, other, wait_s, may_compute)
        assert not told.result(60)[0]["ready"]
        claim.release()
    assert len(polls) < 100, "it waits between two looks"
    until(lambda: small.status()["claims"] == 1)
    gone, _ = _asked(workers, other, 600)
    second, waiting = _asked(workers, other, 600)
    until(lambda: small.status()["claims"] == 3)
    gone.release()
    until(lambda: small.status()["claims"] == 2)
    assert small.cpu.stats().held == 4 and not waiting.done(), "the control: nothing has changed yet"
    first.release()
    assert waiting.result(60)[0]["ready"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("__class__",), "no method '__class__'"), (("claim", "b", {"c": 5}, 0, False), "TypeError"),
        (("pin", "00" * 32), "is not there"),
    ],
)  # fmt: skip
def test_a_call_that_makes_no_sense_is_an_error(workers, call, message):
    with pytest.raises(CartridgeError, match=message):
        workers.call(*call)
    assert workers.call("status")[0]["served"] == 1


@pytest.mark.parametrize("data", [b"\1\0\0\0\xc1", *map(frames.encode, ("status", {"status": 1})), bytes(4)])
def test_a_client_that_talks_nonsense_or_goes_in_the_middle_of_a_frame_hurts_nobody(server, workers, store, made, data):
    mine = _claimed(workers, made.manifest.digest)
    for sent in (data, frames.encode(["status"])[:5]):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(server)
            connection.sendall(sent)
            assert workers.call("status")[0]["claims"] == 1
    assert workers.call("status")[0]["rank"] == 0 and store.cpu.stats().held == 4
    mine.release()


# Several ranks.


@pytest.fixture
def ranks(home, made):
    return [home.open(settings=STILL, rank=rank, world=2) for rank in range(2)]


def test_every_rank_answers_in_order_and_an_error_of_one_is_its_callers(serve, ranks, made):
    workers = ControlClient([*map(serve, ranks)])

    def fail(digest: str) -> int:
        raise CartridgeError("rank 1 will not") if digest else ZeroDivisionError("a bug")

    ranks[1].evict = fail
    for digest, reason in ((made.manifest.digest, "rank 1 will not"), ("", "ZeroDivisionError: a bug")):
        with pytest.raises(CartridgeError, match=reason):
            workers.call("evict", digest)
        assert [rank["rank"] for rank in workers.call("status")] == [0, 1], "no answer is left over"
    claim = _claimed(workers, made.manifest.digest)
    assert [store.cpu.stats().held for store in ranks] == [4, 4]
    claim.release()
    until(lambda: [store.cpu.stats().held for store in ranks] == [0, 0])


def test_a_rank_that_dies_in_a_call_is_an_error_and_one_that_takes_its_place_is_called(serve, ranks, tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(str(path))
        dying.listen()
        workers = ControlClient([serve(ranks[0]), str(path)])
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
        claim, answer = _asked(workers, made.manifest.digest)
        claim.release()
        with suppress(CartridgeError):
            answer.result(20)
    # The last one may reach the store later than its client let go of it.
    until(lambda: store.status()["claims"] == store.cpu.stats().held == 0)


def test_no_other_user_can_open_the_socket_and_nothing_is_told_to_one_who_listens(server, workers, monkeypatch):
    assert Path(server).parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(client.os, "geteuid", lambda: 65534)
    with pytest.raises(UnsupportedEngine, match="another user listens at"):
        workers.call("status")


def test_calls_that_hang_end_no_claim_hold_up_no_other_call_and_are_bounded(serve, store, made, monkeypatch):
    monkeypatch.setattr(frames, "_MAX_CALLS", 3)
    workers = ControlClient([serve(store)])
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
        assert _claimed(workers, made.manifest.digest)
        assert not waiting.done()
    finally:
        go_on.set()
    assert [call.result(20) for call in hanging] == [[True]] * 2, "their answers come when there are some"
    assert waiting.result(20)[0]["rank"] == 0
    claim.release()
