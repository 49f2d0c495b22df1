"""Tasks: what LMCache asks of an L2 adapter and comes for later, each answered by a deadline of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from lmcache.lmcache_native import Bitmap
from lmcache.v1.platform import create_event_notifier

from .frames import loop

logger = logging.getLogger(__name__)


class Task:
    """One lookup or load. What is added when it is over does not count."""

    def __init__(self, size: int) -> None:
        self.bitmap, self.over = Bitmap(size), False
        self._lock = threading.Lock()

    def add(self, positions: Sequence[int], write: Callable[[], None] | None = None) -> bool:
        """Count some keys as had, after `write`; False, and nothing is written, if the task is over."""
        with self._lock:
            if self.over:
                return False
            if write is not None:
                write()
            for position in positions:
                self.bitmap.set(position)
            return True

    def end(self) -> bool:
        """End it; False if it was over. Waits for a `write` under way."""
        with self._lock:
            ended, self.over = not self.over, True
            return ended


class Tasks:
    """Work in threads whose results LMCache comes for, each answered with what there is by its deadline."""

    def __init__(self, name: str, threads: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._notifier = create_event_notifier()
        self.fd = self._notifier.fileno()
        self._ids = count(1)
        self._tasks: dict[int, Task] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"cartridge-l2-{name}")
        self._loop = loop(f"cartridge-l2-{name}-late")

    def submit(self, size: int, work: Callable[[Task], None]) -> int:
        """Have `work` done and return the task's id. Does not block, and does not raise."""
        task_id, task = next(self._ids), Task(size)
        self._tasks[task_id] = task
        try:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._deadline_s, self._late, task)
            self._pool.submit(self._run, task, work)
        except RuntimeError:  # closed
            self._end(task)
        return task_id

    def take(self, task_id: int) -> Bitmap | None:
        """Return a task's result if it is over, and forget the task."""
        task = self._tasks.get(task_id)
        if task is None or not task.over:
            return None
        del self._tasks[task_id]
        return task.bitmap

    def close(self) -> None:
        """End every task, and wait for the threads."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        for task in list(self._tasks.values()):
            self._end(task)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._notifier.close()

    def _run(self, task: Task, work: Callable[[Task], None]) -> None:
        try:
            if not task.over:
                work(task)
        except Exception:
            logger.exception("cartridges could not be had; LMCache is told of a miss")
        self._end(task)

    def _end(self, task: Task) -> None:
        if task.end():  # the result is there before LMCache is told
            self._notifier.notify()

    def _late(self, task: Task) -> None:
        if not task.over:
            logger.warning("a cartridge lookup or load took too long; LMCache is told of a miss")
            self._end(task)
