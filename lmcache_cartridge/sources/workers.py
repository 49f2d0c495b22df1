"""Workers: a few threads that run what they are given."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """`count` daemon threads. Unlike an executor's they do not hold up the end of the process, whatever they wait for."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` run when a thread is free. Does not block."""
        future: Future[T] = Future()
        self._queue.put((future, work))
        return future

    def close(self) -> None:
        """Have each thread end after what was submitted before. Does not block."""
        for _ in self._threads:
            self._queue.put(None)


def _work(tasks: queue.SimpleQueue) -> None:
    while task := tasks.get():
        future, work = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del task, future, work  # else an idle thread keeps the last caller's buffer alive
