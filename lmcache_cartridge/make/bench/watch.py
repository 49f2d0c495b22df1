"""Watch: memory of a server over time, and the hits that it counts, beside what is measured."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...serve.metrics import PREFIX
from ..machine import gpus
from .target import Target

_EVERY_S = 1.0
_LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""
_SETTLE_S = 5.0
_PAIR = "lmcache_cartridge.serve.processes"
"""What runs vLLM's server and LMCache's as one."""
Tiers = dict[str, dict[str, float]]
"""Counters by tier and name, all ranks together."""
_COUNTERS = ("hits", "misses", "read_bytes")


class Reading(NamedTuple):
    """What a server's metrics said."""

    at_s: float
    answers: int
    """How many there had been."""
    tiers: Tiers


class Watch:
    """Reads memory in the background from `with` on, and metrics when it is told. One `with` at a time."""

    def __init__(self, target: Target, *, every_s: float = _EVERY_S) -> None:
        self._target, self._every_s = target, every_s
        self.what, self._memory = _memory_of(target)
        """Whose memory is read and how, or why it is not."""
        self.memory: list[tuple[float, float]] = []
        """Seconds from the start, and bytes."""
        self.readings: list[Reading] = []
        self._stop = threading.Event()
        self._started = time.perf_counter()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._started = time.perf_counter()
        self.read(0)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(2 * _SETTLE_S)

    def between(self, answers: int) -> None:
        """Read the metrics if the last time is a while ago: when no request is on its way, which that would delay."""
        if self.readings and time.perf_counter() - self._started - self.readings[-1].at_s >= self._every_s:
            self.read(answers)

    def read(self, answers: int) -> None:
        """Read the metrics; no change where there are none of cartridges. Blocks for the answer."""
        text = self._target.metrics() if self._target.has_cartridges else None
        if text is not None:
            self.readings.append(Reading(time.perf_counter() - self._started, answers, tier_counters(text)))

    def settle(self, answers: int) -> None:
        """Read the metrics once the server has counted what was answered: it asks its workers each second."""
        if self.readings:
            self._stop.wait(2 * _EVERY_S)
            self.read(answers)

    def counted(self) -> Tiers:
        """Return by how much each tier's counters grew."""
        if not self.readings:
            return {}
        first, last = self.readings[0].tiers, self.readings[-1].tiers
        return {
            tier: {name: value - first.get(tier, {}).get(name, 0.0) for name, value in of.items()}
            for tier, of in last.items()
        }

    def _run(self) -> None:
        while self._memory is not None and not self._stop.is_set():
            if found := self._memory():
                self.memory.append((time.perf_counter() - self._started, float(found)))
            self._stop.wait(self._every_s)


def tier_counters(text: str) -> Tiers:
    """Return the counters of each tier in Prometheus text. Empty where there are none."""
    from prometheus_client.parser import text_string_to_metric_families

    wanted, tiers = {f"{PREFIX}{name}_total": name for name in _COUNTERS}, defaultdict[str, dict[str, float]](dict)
    with suppress(ValueError):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if (name := wanted.get(sample.name)) and "tier" in sample.labels:
                    of = tiers[sample.labels["tier"]]
                    of[name] = of.get(name, 0.0) + sample.value
    return dict(tiers)


def _memory_of(target: Target) -> tuple[str, Callable[[], float | None] | None]:
    """Return what memory can be read of a server, in words, and what reads it in bytes."""
    if target.is_local:
        if gpus("memory.used"):
            return "all NVIDIA GPUs of this machine, by nvidia-smi", _of_gpus
        if processes := serving(target.port):
            return (
                f"resident memory of what listens at port {target.port} of this machine "
                f"({', '.join(sorted(set(map(_called, processes))))}) and its children; what they share counts in each",
                lambda: resident_bytes(family(processes)),
            )
    if _of_metrics(target) is not None:
        return "the API server's process alone, by its metric process_resident_memory_bytes", lambda: _of_metrics(
            target
        )
    return "not known: the server is on another machine and has no metric process_resident_memory_bytes", None


def _of_gpus() -> float | None:
    with suppress(ValueError):
        return sum(float(row[0]) for row in gpus("memory.used")) * (1 << 20) or None
    return None


def _of_metrics(target: Target) -> float | None:
    for line in (target.metrics() or "").splitlines():
        if line.startswith("process_resident_memory_bytes "):
            with suppress(ValueError):
                return float(line.split()[1])
    return None


def serving(port: int) -> set[int]:
    """Return the processes of this machine that listen at a TCP port, as far as this user may see; Linux alone."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                cells = line.split()
                if cells[3] == _LISTENS and int(cells[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{cells[9]}]")
    found = set()
    for process in _processes():
        with suppress(OSError):
            if sockets and any(_link(entry) in sockets for entry in Path(f"/proc/{process}/fd").iterdir()):
                found.add(process)
    return found | {parent for process in found if _PAIR in _command(parent := _parent(process))}


def family(processes: Iterable[int]) -> set[int]:
    """Return processes and all their descendants that run now."""
    found, parents = set(processes), {process: _parent(process) for process in _processes()}
    grown = True
    while grown:
        more = {process for process, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return found


def resident_bytes(processes: Iterable[int]) -> int:
    """Return the resident memory of processes; what they share counts in each."""
    pages = 0
    for process in processes:
        with suppress(OSError, ValueError, IndexError):
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def _processes() -> list[int]:
    with suppress(OSError):
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return []


def _parent(process: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _command(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace")
    return ""


def _called(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip()
    return "gone"


def _link(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:
        return ""
