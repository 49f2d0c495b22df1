"""What every benchmark shares: options, fair timing, and a result: figures, what they were measured on, and of which code.

A benchmark is a script that says what it measures and of which parts of the package:

    bench = report.Benchmark(__file__, __doc__, ["memory", "sources/s3.py"])
    options = bench.start(arguments)
    bench.publish([report.Figure.of(seconds, "first token", "s", way="warm", p=1024, c=1)])

It writes `results/NAME.json`, which README and docs take their figures from as long as that code is what it was.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import io
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from lmcache_cartridge import __version__
from lmcache_cartridge.artifact.manifest import Manifest, Provenance
from lmcache_cartridge.artifact.model import Fingerprint
from lmcache_cartridge.artifact.writing import ArtifactWriter
from lmcache_cartridge.cli.show import table
from lmcache_cartridge.make.evaluate import interval
from lmcache_cartridge.make.machine import gpus, machine

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
sys.path.append(str(ROOT / "tests"))  # makers of artefacts and LMCache's engine in process

Text = Annotated[str, msgspec.Meta(min_length=1)]


class NotAResult(ValueError):
    """A file in `results` that does not say what its figures are of."""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A quantity in one case."""

    what: Text
    """`first token`, `exact answers`."""
    unit: str
    """`s`, `bytes`, `share`."""
    case: dict[str, str | int | float]
    """What sets it apart from the others: `{"way": "warm", "p": 1024, "c": 16}`."""
    value: float
    """The median, or the share."""
    low: float
    """The lower quartile, or the lower end of the share's 95% interval; `value` itself where it was counted."""
    high: float
    n: Annotated[int, msgspec.Meta(ge=1)]
    """Samples, or answers of which it is a share."""

    @classmethod
    def of(cls, samples: Sequence[float], what: str, unit: str, **case: str | int | float) -> Figure:
        """Return the median of at least one sample, between its quartiles."""
        low, high = np.quantile(samples, (0.25, 0.75)).tolist()
        return cls(what, unit, case, float(statistics.median(samples)), low, high, len(samples))

    @classmethod
    def share(cls, right: int, n: int, what: str, **case: str | int | float) -> Figure:
        """Return `right` of `n` with Wilson's 95% interval."""
        return cls(what, "share", case, right / n, *interval(right / n, n), n)

    @classmethod
    def counted(cls, value: float, what: str, unit: str, n: int = 1, **case: str | int | float) -> Figure:
        """Return a number that was counted, or the worst of `n`."""
        return cls(what, unit, case, float(value), float(value), float(value), n)

    @classmethod
    def tail(cls, samples: Sequence[float], what: str, unit: str, **case: str | int | float) -> Figure:
        """Return the smallest sample that 99 in 100 do not exceed."""
        worst = float(np.quantile(samples, 0.99, method="inverted_cdf"))
        return cls.counted(worst, f"{what}, p99", unit, len(samples), **case)


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What else the machine did."""

    before: float
    """Load average of the minute before."""
    others: float
    """Cores that other processes kept busy meanwhile, on average."""


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of a benchmark."""

    benchmark: Text
    """The script's name without `.py`."""
    what: Text
    command: Text
    when: Text
    form: str
    """`default`, `full` or `smoke`."""
    note: str
    machine: Text
    cores: Annotated[int, msgspec.Meta(ge=1)]
    memory_bytes: int | None
    load: Load
    versions: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    commit: Text
    """With a `+` behind it where files had been changed since."""
    measures: Annotated[list[str], msgspec.Meta(min_length=1)]
    """Directories and files of the package whose code the figures are of."""
    digest: Text
    """Of that code as it was; see `digest`."""
    figures: Annotated[list[Figure], msgspec.Meta(min_length=1)]

    def is_of_todays_code(self) -> bool:
        """Return whether what was measured is as it was, comments and docstrings apart."""
        try:
            return digest(self.measures) == self.digest
        except FileNotFoundError:
            return False


def read(path: Path) -> Result:
    """Return the result in a file.

    Raises:
        NotAResult: It lacks something, or has what no result has.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except msgspec.MsgspecError as error:
        raise NotAResult(f"{path.name}: {error}") from None


def digest(measures: Iterable[str], root: Path = ROOT / "lmcache_cartridge") -> str:
    """Return a digest of the code in directories and files below `root`, without comments, docstrings and blank lines."""
    hashed = hashlib.sha256()
    for name in sorted(measures):
        files = [root / name] if name.endswith(".py") else sorted((root / name).rglob("*.py"))
        if not files or not files[0].exists():
            raise FileNotFoundError(f"nothing to measure at {root / name}")
        for path in files:
            hashed.update(f"{path.relative_to(root)}\n{_code(path.read_text(encoding='utf-8'))}\n".encode())
    return hashed.hexdigest()[:32]


def _code(source: str) -> str:
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


class Benchmark:
    """One script's run: `parser` for options of its own, `start`, `publish`."""

    def __init__(self, script: str, doc: str, measures: Sequence[str]) -> None:
        """`doc` is the script's docstring, `measures` the directories and files of the package that it times."""
        self.name, self._what, self._measures = Path(script).stem, doc.strip().splitlines()[0], list(measures)
        self.parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        size = self.parser.add_mutually_exclusive_group()
        size.add_argument("--full", action="store_true", help="the long form: every case, more repetitions")
        size.add_argument(
            "--smoke", action="store_true", help="the smallest form, to see that it runs; times mean nothing"
        )
        add = self.parser.add_argument
        add(
            "--out", type=Path, help=f"where {self.name}.json goes (benchmarks/results; --smoke: a temporary directory)"
        )
        add("--note", default="", help="a remark for the record, such as what else ran on the machine")
        add("--name", default=self.name, help="of the result, beside others of the same benchmark")

    def start(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the command line, and look at the machine before anything runs."""
        words = sys.argv[1:] if arguments is None else list(arguments)
        self.options = self.parser.parse_args(words)
        if self.options.out is None:
            self.options.out = Path(tempfile.gettempdir()) / "lmcache-cartridge" if self.options.smoke else RESULTS
        self._command = shlex.join(["python", f"benchmarks/{self.name}.py", *self._said(words)])
        self._digest, self._machine, self._commit = digest(self._measures), machine(), _commit()
        self._began = time.monotonic(), *_busy_s()
        return self.options

    def _said(self, words: list[str]) -> list[str]:
        """Return the words of a command line without what says where the result goes, and what is to be remarked.

        A place on this machine is told by its last part.
        """
        beside = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        beside.add_argument("--out"), beside.add_argument("--note")
        return [Path(word).name if word.startswith("/") else word for word in beside.parse_known_args(words)[1]]

    def publish(self, figures: Sequence[Figure]) -> Path:
        """Write the result, print what is in it, and return its file. What it started has to have ended."""
        took_s, all_s, own_s = (
            now - then for now, then in zip((time.monotonic(), *_busy_s()), self._began, strict=True)
        )
        found, options = self._machine, self.options
        processors = [", ".join(gpu) for gpu in gpus("name", "driver_version")]
        result = Result(
            benchmark=self.name, what=self._what, command=self._command, note=options.note,
            when=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            form="full" if options.full else "smoke" if options.smoke else "default",
            machine=", ".join([found["cpu"], *processors]), cores=found["cores"], memory_bytes=found["memory_bytes"],
            load=Load(found["load_average"], round(max(all_s - own_s, 0.0) / max(took_s, 0.01), 2)),
            versions={"python": found["python"], "lmcache-cartridge": __version__, **found["packages"]},
            commit=self._commit, measures=self._measures, digest=self._digest, figures=list(figures),
        )  # fmt: skip
        if digest(self._measures) != self._digest:
            raise RuntimeError("the code changed while it was measured")
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{options.name}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        print(table([_row(figure) for figure in figures]), f"\n\nwritten: {path}")
        return path


def _row(figure: Figure) -> dict[str, Any]:
    case = ", ".join(f"{name} {value}" for name, value in figure.case.items())
    return {"case": case, "what": figure.what, "value": f"{figure.value:.3g}", "unit": figure.unit,
            "between": f"{figure.low:.3g}-{figure.high:.3g}", "n": figure.n}  # fmt: skip


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "lmcache_cartridge", "benchmarks/*.py")
        return git("rev-parse", "HEAD").strip() + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _busy_s() -> tuple[float, float]:
    """Return the seconds of CPU that all processes have had, and those of this one and of its children that ended."""
    with contextlib.suppress(OSError):
        user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split(None, 8)[1:8])
        own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        ticks = user + nice + system + irq + softirq
        return ticks / os.sysconf("SC_CLK_TCK"), sum(used.ru_utime + used.ru_stime for used in own)
    return 0.0, 0.0


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def in_turns(contenders: Mapping[str, Callable[[], float]], repeat: int) -> dict[str, list[float]]:
    """Return `repeat` samples of each contender, run one after the other so that all meet the same disturbances.

    A contender returns its own sample, so that it can prepare untimed. Each runs once before that counts.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.freeze()  # what is imported by now is large, and not what the collections below are for
    for turn in range(repeat + 1):
        for name, run in contenders.items():
            gc.collect()
            sample = run()
            if turn:
                samples[name].append(sample)
    gc.unfreeze()
    return samples


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds that `call` takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def write_artifact(root: Path, shape: Fingerprint, ids: np.ndarray, chunk_tokens: int, chunk: bytes) -> Manifest:
    """Write a prefill cartridge that is called as its directory, every chunk of which has the same bytes."""
    with ArtifactWriter(
        root, cartridge_id=root.name, version=1, kind="prefill", fingerprint=shape, token_ids=ids,
        chunk_tokens=chunk_tokens,
    ) as writer:  # fmt: skip
        for start in range(0, len(ids), chunk_tokens):
            writer.write(chunk[: shape.token_bytes * (len(ids) - start)])
        return writer.commit(Provenance(tool="benchmark", created="2026-01-01T00:00:00+00:00"))
