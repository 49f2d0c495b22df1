"""The package as users have it: a wheel and a source archive, built from a copy of the tree, since building writes into it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

TREE = Path(__file__).parents[1]
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def copied(to: Path) -> Path:
    """Copy what building reads to a directory and return it."""
    for name in ("lmcache_cartridge", "configs"):
        shutil.copytree(TREE / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TREE / name, to)
    return to


def built(kind: str, tree: Path, to: Path) -> Path:
    """Run `build_wheel` or `build_sdist` on a tree and return the file, in the directory `to`."""
    command = [sys.executable, "-W", "ignore", "-c", _BUILD, kind, str(to)]
    ran = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True, timeout=600)
    return to / ran.stdout.splitlines()[-1]


def unpacked(wheel: Path, to: Path) -> None:
    """Unpack a wheel as an installation has it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to)
