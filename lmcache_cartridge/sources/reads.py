"""Reads: what may block for ever, such as a file on a mount that hangs, run so that it takes nothing else with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Any


class Reads:
    """Each task has a thread of its own, which cannot be ended while it hangs. So no location has more than one, and all
    of them together no more than `most`. Safe from any thread.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: dict[Hashable, tuple[Future, frozenset[str]]] = {}
        self._lock = threading.Lock()

    def join(self, task: Hashable, locations: Iterable[str], read: Callable[[], Any]) -> Future | None:
        """Return the future of a task, which is begun if it is not under way. Does not block.

        None while another task reads one of its `locations`, or `most` are under way: ask again.
        """
        wanted = frozenset(locations)
        with self._lock:
            if (found := self._tasks.get(task)) is not None:
                return found[0]
            if len(self._tasks) >= self._most or any(wanted & taken for _, taken in self._tasks.values()):
                return None
            future: Future = Future()
            self._tasks[task] = future, wanted
        future.set_running_or_notify_cancel()  # one of several that wait for it cannot cancel it
        try:
            # A daemon: the process may end while it hangs.
            threading.Thread(target=self._run, args=(task, future, read), name="cartridge-read", daemon=True).start()
        except BaseException:
            self._end(task)
            raise
        return future

    def _run(self, task: Hashable, future: Future, read: Callable[[], Any]) -> None:
        try:
            result = read()
        except BaseException as error:
            self._end(task)
            future.set_exception(error)
        else:
            self._end(task)
            future.set_result(result)

    def _end(self, task: Hashable) -> None:
        with self._lock:
            del self._tasks[task]
