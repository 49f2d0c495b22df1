"""The command line in this process, on a home of its own."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from waiting import until

from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.artifact.reading import load_manifest
from lmcache_cartridge.cli.main import COMMANDS, main
from lmcache_cartridge.library.registry import Registry


class Ran(NamedTuple):
    status: int
    out: str
    err: str


class Cli:
    """Runs commands on a home."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def __call__(self, command: str, *words: object) -> Ran:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            status = main([command, "--home", str(self.home), *map(str, words)])
        return Ran(status, out.getvalue(), err.getvalue())

    def json(self, *words: Any, status: int = 0) -> Any:
        """Return what a command tells programs."""
        ran = self(*words, "--format", "json")
        assert ran.status == status, ran.err
        return json.loads(ran.out)

    def refused(self, *words: Any) -> str:
        """Return what a command says that ends with status 1."""
        ran = self(*words)
        assert (ran.status, ran.out) == (1, ""), ran
        return ran.err

    def killed(self, command: str, *words: object, once: Callable[[], Any]) -> None:
        """Run a command in a process of its own, and kill that once something is so."""
        argv = [sys.executable, "-m", "lmcache_cartridge.cli.main", command, "--home", self.home, *words]
        process = subprocess.Popen(
            list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            until(lambda: process.poll() is not None or once(), timeout_s=600)
            assert process.poll() is None, process.communicate()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def artefact(self, name: str) -> tuple[Manifest, Path]:
        """Return a registered cartridge."""
        root = Path(Registry(self.home / "registry.sqlite").find(name).location)
        return load_manifest(root), root


def understood(command: str) -> None:
    """Raise what a command line would be refused with. The text files that it names are made."""
    group, words = COMMANDS, shlex.split(command)[1:]
    for word in words:
        if Path(word).suffix in (".txt", ".jsonl"):
            Path(word).touch()
    while hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    group.make_context(command, words)


@pytest.fixture
def cli(tmp_path):
    return Cli(tmp_path / "home")
