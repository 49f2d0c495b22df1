"""Time and threads for tests: a clock to move, a wait with an end, and threads that start together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def move(self, by_s: float) -> None:
        """Move it on."""
        self.now += by_s


def until(done: Callable[[], Any], *, timeout_s: float = 180) -> None:
    """Wait until something is so; fail if it never is. Looks less often the longer it waits: to look may cost a server work."""
    began, pause_s = time.monotonic(), 0.002
    while not done():
        assert time.monotonic() < began + timeout_s, "it never came to be"
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, 0.1)


def answered(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """Ask again until the answer is another than 503, which says to come again, and return that."""
    found: list[httpx.Response] = []
    until(lambda: found.append(ask()) or found[-1].status_code != 503)
    return found[-1]


def run_threads(count: int, work: Callable[[int], None], *, timeout_s: float = 180) -> None:
    """Run `work(0)` to `work(count - 1)` at once, started together; raise the first error, or that one hangs."""
    start = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            start.wait(timeout_s)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"a thread still runs after {timeout_s} s"
