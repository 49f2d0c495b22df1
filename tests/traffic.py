"""Traffic: clients that ask one after the other, in threads, while a test does something to the servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from waiting import until

Answer = TypeVar("Answer")


class Traffic(Generic[Answer]):
    """Each of `clients` asks whenever its next answer is wanted, again and again until the block is left.

    Leaving it fails where a client raised.
    """

    def __init__(self, clients: Iterable[Iterator[Answer]]) -> None:
        self.asked: list[Answer] = []
        """What came, as it came."""
        self._errors: list[BaseException] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(client,)) for client in clients]

    def __enter__(self) -> Traffic[Answer]:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)
        assert not self._errors

    def until(self, done: Callable[[], Any]) -> None:
        """Wait until something is so, or a client raised."""
        until(lambda: done() or self._errors)

    def goes_on(self, count: int) -> list[Answer]:
        """Wait for so many more answers and return them."""
        before = len(self.asked)
        self.until(lambda: len(self.asked) >= before + count)
        return self.asked[before:]

    def _run(self, client: Iterator[Answer]) -> None:
        try:
            while not self._stopping.is_set():
                self.asked.append(next(client))
        except BaseException as error:
            self._errors.append(error)
