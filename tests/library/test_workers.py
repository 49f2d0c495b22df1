"""Workers: each job once however many want it, hung ones in nobody's way, taken back where nobody began them."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from waiting import Clock, until

from lmcache_cartridge.library.workers import STALLED_S, Workers


class Hang:
    """A job that hangs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go.wait(30)
        return "done"


@pytest.fixture
def hang():
    hang = Hang()
    yield hang
    hang.go.set()


def _hung(workers: Workers, hang: Hang, *groups: str) -> Future:
    """Have one of its threads hang."""
    future = workers.submit("hung", hang, groups)
    assert hang.begun.wait(30)
    return future


def _threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_a_job_is_done_once_for_all_who_want_it(hang):
    workers = Workers("test", 2)
    first = _hung(workers, hang)
    assert workers.submit("hung", lambda: "twice") is first
    assert workers.submit("b", lambda: "other").result(30) == "other"
    hang.go.set()
    assert first.result(30) == "done"
    assert workers.submit("hung", lambda: "again").result(30) == "again"


def test_a_stalled_thread_is_replaced_and_what_shares_a_group_with_it_waits(hang):
    clock = Clock()
    workers = Workers("stalled", 1, clock=clock)
    hung = _hung(workers, hang, "mount")
    same = workers.submit("same", lambda: "same", ["mount", "other"])
    sound = workers.submit("sound", lambda: "sound", ["disk"])
    workers.relieve()
    assert not sound.done(), "it may be slow only"
    clock.now += STALLED_S + 1
    workers.relieve()
    assert (sound.result(30), same.done()) == ("sound", False)
    hang.go.set()
    assert (hung.result(30), same.result(30)) == ("done", "same")
    until(lambda: _threads("stalled") == 1)
