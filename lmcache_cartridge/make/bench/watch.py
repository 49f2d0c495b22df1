"""Watch: memory of a server, read behind each run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..machine import gpus
from .target import Target


def memory_of(target: Target) -> tuple[str, Callable[[], float] | None]:
    """Return what memory can be read of a server, in words, and what reads it in bytes."""
    if not target.is_local or not (processes := family(target.port)):
        return "not read: the server is not on this machine, or another user's", None
    pids = {process.pid for process in processes}
    names = ", ".join(sorted({process.info["name"] for process in processes}))
    if any(pid in pids for pid, _ in on_gpus()):
        return f"memory of GPUs that {names} take, by nvidia-smi", lambda: sum(
            size for pid, size in on_gpus() if pid in pids
        )
    return (
        f"{names}: proportional set size, in which what processes share counts once",
        lambda: sum(map(pss, processes)),
    )


def on_gpus() -> list[tuple[int, float]]:
    """Return the processes on this machine's GPUs, and the bytes that each takes there."""
    with suppress(ValueError):
        rows = gpus("pid", "used_memory", of="compute-apps")
        return [(int(pid), float(size) * 2**20) for pid, size in rows]
    return []


def family(port: int) -> list[Any]:
    """Return the processes that listen at a TCP port, as far as this user may see, and all their descendants, with `info["name"]`."""
    import psutil  # which vLLM needs

    found = set[int]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp")):
                parent = process.parent()
                # What runs vLLM's server and LMCache's as one.
                head = parent if parent and "lmcache_cartridge.serve.processes" in parent.cmdline() else process
                found |= {each.pid for each in (head, *head.children(recursive=True))}
    return [each for each in psutil.process_iter(["name"]) if each.pid in found]


def pss(process: Any) -> float:
    """Return the proportional set size of a process in bytes; 0 of one that has ended."""
    with suppress(Exception):
        return process.memory_full_info().pss
    return 0.0
