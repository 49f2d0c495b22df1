"""Which cores the threads that load chunks run on."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def use_all_cores() -> None:
    """Let this thread run on every core that any thread of its process may run on.

    A new thread inherits the cores of the thread that began it. vLLM's CPU worker binds its main thread to one core, which
    every thread that fetches or loads would share with it. Changes nothing where the system does not allow it.
    """
    with suppress(OSError, AttributeError):  # a sandbox may forbid it, or another system lack it
        cores = os.sched_getaffinity(0)
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                cores |= os.sched_getaffinity(int(thread.name))
        os.sched_setaffinity(0, cores)
