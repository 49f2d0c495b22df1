"""The quickstart, typed from top to bottom in one directory, before one server: every block, and what it shows of what comes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from packed import built, copied, unpacked

from lmcache_cartridge.serve.processes import SMALL, free_port

PAGE = Path(__file__).parents[1] / "docs" / "quickstart.md"
_MARK = "=== step "


class Step(NamedTuple):
    """A block to type or to save, and the block below that shows what comes of it."""

    language: str
    code: str
    shown: str


STEPS = [
    Step(*found)
    for found in re.findall(r"^```(sh|python)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", PAGE.read_text(), re.M | re.S)
]


def _script() -> str:
    """Return the blocks as one script, which says before each which it is, and ends with the first that fails."""
    lines = ["set -e"]
    for number, step in enumerate(STEPS):
        lines.append(f"echo '{_MARK}{number}'")
        if step.language == "python":  # its first line is the name to save it under
            lines.append(f"cat > {step.code.split()[1]} <<'END'\n{step.code}END")
        else:
            lines.append(step.code)
    return "\n".join(lines)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package as the wheel of its source archive has it."""
    there = tmp_path_factory.mktemp("wheel")
    with tarfile.open(built("build_sdist", copied(there / "tree"), there)) as archive:
        archive.extractall(there / "source", filter="data")
    (source,) = (there / "source").iterdir()
    unpacked(built("build_wheel", source, there), there / "installed")
    return there / "installed"


def test_the_wheel_of_a_source_archive_has_all_of_it(installed):
    def files(root: Path) -> set[str]:
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    tree, package = installed.parent / "tree", installed / "lmcache_cartridge"
    assert files(package) == files(tree / "lmcache_cartridge") | {f"configs/{name}" for name in files(tree / "configs")}


@pytest.fixture(scope="module")
def typed(tmp_path_factory, installed):
    """Type everything, with the package as its wheel has it; return what came of each block."""
    directory, port = tmp_path_factory.mktemp("person"), free_port()
    environment = os.environ | SMALL | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LMCACHE_CARTRIDGE_CACHE": str(directory / "cache"),
        "COLUMNS": "200", "PYTHONPATH": str(installed),
    }  # fmt: skip
    configs = "from lmcache_cartridge.cli import serve; print(serve.config_directory())"
    where = _run(f'python -c "{configs}"', directory, environment)[1].strip()
    assert where == str(installed / "lmcache_cartridge" / "configs"), "not the wheel's"
    # The first answer waits for the canary, and on a busy machine that may take longer than it may.
    options = f"--port {port} --set ready_timeout_s=600"
    script = _script().replace("localhost:8000", f"localhost:{port}").replace("--port 8000", options)
    status, said = _run(script, directory, environment)
    log = directory / "server.log"
    assert status == 0, said + (log.read_text(errors="replace")[-4000:] if log.exists() else "")
    return re.split(rf"^{_MARK}\d+\n", said, flags=re.M)[1:]


def _run(script: str, directory: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a script; return its exit status and what it printed. Whatever it started ends with it, the server too."""
    shell = subprocess.Popen(
        ["bash", "-c", script], cwd=directory, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = shell.communicate(timeout=900)
    finally:
        with suppress(ProcessLookupError):  # nobody of the group is left
            os.killpg(shell.pid, signal.SIGKILL)
    return shell.returncode, said


def test_there_are_blocks_to_type_and_what_comes_of_most_is_shown():
    assert len(STEPS) >= 11 and sum(bool(step.shown) for step in STEPS) >= 8
    assert len(re.findall("^```", PAGE.read_text(), re.M)) == 2 * sum(1 + bool(step.shown) for step in STEPS)


@pytest.mark.parametrize("number", [number for number, step in enumerate(STEPS) if step.shown])
def test_what_comes_of_a_block_is_what_the_page_shows(typed, number):
    """Every line that is shown comes, in order; `...` stands for anything."""
    lines = iter(typed[number].splitlines())
    for shown in STEPS[number].shown.splitlines():
        pattern = r"\s+".join(map(re.escape, shown.split())).replace(re.escape("..."), ".*")
        assert any(re.fullmatch(pattern, line.strip()) for line in lines), (
            f"{shown!r} does not come of\n{typed[number]}"
        )
