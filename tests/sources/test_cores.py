"""What loads and fetches may use every core of the process, also where the thread that begins it is bound to one."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from chunks import one_by_one
from waiting import run_threads

from lmcache_cartridge.library.index import ChunkKey
from lmcache_cartridge.memory.tier import MemoryTier

CORES = os.sched_getaffinity(0)
BOUND = """
import os
from lmcache_cartridge.sources.cores import use_all_cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
use_all_cores()
print(*os.sched_getaffinity(0))
"""


def _load(found: list[set[int]]) -> None:
    def load(key: ChunkKey, out: torch.Tensor) -> None:
        found.append(os.sched_getaffinity(0))

    tier = MemoryTier(64, 64, one_by_one(load))
    assert tier.lease([ChunkKey("d", 0)], 20.0) == 1
    tier.close()


def test_a_thread_that_loads_runs_on_every_core():
    """Also where the thread that begins it is bound to one, as vLLM binds the main thread of its CPU workers."""
    found: list[set[int]] = []
    run_threads(1, lambda _: (os.sched_setaffinity(0, {min(CORES)}), _load(found)))
    assert found == [CORES]


def test_a_process_that_is_bound_stays_on_its_cores():
    """What an operator's `taskset` or a container leaves it: no thread of it may use others."""
    told = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == [str(min(CORES))]
