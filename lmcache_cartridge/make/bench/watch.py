"""Watch: memory of a server, read behind each run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ..machine import gpus
from .target import Target


def memory_of(target: Target) -> tuple[str, Callable[[], float] | None]:
    """Return what memory can be read of a server, in words, and what reads it in bytes."""
    where = urlsplit(target.url)
    is_local = where.hostname in ("localhost", "127.0.0.1", "::1")
    if not (processes := family(where.port or 80) if is_local else set()):
        return "not read: the server is not on this machine, or another user's", None
    pids = {process.pid for process in processes}
    if any(pid in pids for pid, _ in on_gpus()):
        return "what its processes take of GPUs, by nvidia-smi", lambda: sum(
            size for pid, size in on_gpus() if pid in pids
        )
    return "proportional set size of its processes: what they share counts once", lambda: sum(map(pss, processes))


def on_gpus() -> list[tuple[int, float]]:
    """Return the processes on this machine's GPUs, and the bytes that each takes there."""
    with suppress(ValueError):
        rows = gpus("pid", "used_memory", of="compute-apps")
        return [(int(pid), float(size) * 2**20) for pid, size in rows]
    return []


def family(port: int) -> set[Any]:
    """Return the processes that listen at a TCP port, as far as this user may see, and all their descendants."""
    import psutil  # which vLLM needs

    found = set[Any]()
    for each in psutil.net_connections("tcp"):
        if each.pid and each.laddr.port == port and each.status == psutil.CONN_LISTEN:
            with suppress(psutil.Error):
                process = psutil.Process(each.pid)
                parent = process.parent()
                # What runs vLLM's server and LMCache's as one.
                head = parent if parent and "lmcache_cartridge.serve.processes" in parent.cmdline() else process
                found |= {head, *head.children(recursive=True)}
    return found


def pss(process: Any) -> float:
    """Return the proportional set size of a process in bytes; 0 of one that has ended."""
    with suppress(Exception):
        return process.memory_full_info().pss
    return 0.0
