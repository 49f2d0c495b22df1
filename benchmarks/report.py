"""What every benchmark shares: options, the hardware, fair timing, and a result as table, JSON and picture.

    python benchmarks/report.py DIRECTORY

prints the results that benchmarks wrote there as they stand in RESULTS.md.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sizes import markdown

from lmcache_cartridge.artifact.fingerprint import Fingerprint
from lmcache_cartridge.artifact.manifest import Manifest, Provenance
from lmcache_cartridge.artifact.writing import ArtifactWriter
from lmcache_cartridge.cli.show import table
from lmcache_cartridge.make.machine import machine

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # makers of artefacts and LMCache's engine in process

GB = 1e9


class Spread(NamedTuple):
    """Samples as their median, quartiles and number."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarise at least one sample."""
        low, high = np.quantile(samples, (0.25, 0.75)).tolist()
        return cls(statistics.median(samples), low, high, len(samples))

    def text(self, scale: float = 1.0, digits: int = 3) -> str:
        """Return `median (low-high)`, each times `scale`, with `digits` significant digits."""
        median, low, high = (f"{_round(value * scale, digits):g}" for value in self[:3])
        return f"{median} ({low}-{high})"


class Point(NamedTuple):
    """One measured value of a curve."""

    x: float | str
    value: Spread


class Panel(NamedTuple):
    """One diagram of the picture."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[Point]]


def parser(doc: str, name: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has; `doc` is its module's docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = made.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="the long form: every case, more repetitions")
    size.add_argument("--smoke", action="store_true", help="the smallest form, to see that it runs; times mean nothing")
    default = Path(tempfile.gettempdir()) / "lmcache-cartridge-benchmarks"
    made.add_argument("--out", type=Path, default=default, help=f"where {name}.json and {name}.png go (%(default)s)")
    made.add_argument("--note", default="", help="a remark for the record, such as what else ran on the machine")
    return made


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


def memcpy_rate(threads: int = 1, size_bytes: int = 128 << 20) -> Spread:
    """Return the bytes per second that numpy copies between two buffers larger than any cache."""
    from concurrent.futures import ThreadPoolExecutor

    source, target = np.ones(size_bytes, np.uint8), np.empty(size_bytes, np.uint8)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:

        def run() -> float:
            return size_bytes / timed(lambda: list(pool.map(lambda part: np.copyto(*part), parts)))

        return Spread.of(in_turns({"memcpy": run}, 5)["memcpy"])


@functools.cache
def hardware() -> dict[str, Any]:
    """Return what the figures were measured on. Takes a second the first time, to measure the memory."""
    found = machine()
    return found | {
        "memcpy_gb_s": round(memcpy_rate(1).median / GB, 1),
        "memcpy_all_cores_gb_s": round(memcpy_rate(found["cores"]).median / GB, 1),
    }


def hardware_line(found: Mapping[str, Any]) -> str:
    """Return the hardware as one line."""
    versions = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    return (
        f"{found['cores']} cores of {found['cpu']}, memcpy {found['memcpy_gb_s']} GB/s on one core and "
        f"{found['memcpy_all_cores_gb_s']} GB/s on all, {found['memory_bytes'] / 2**30:.0f} GiB, load average "
        f"{found['load_average']} at the start; Python {found['python']}, {versions}"
    )


def publish(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    options: argparse.Namespace,
    machine: Mapping[str, Any],
    *,
    panels: Sequence[Panel] = (),
    details: Any = None,
    lines: Sequence[str] = (),
) -> None:
    """Print `rows` as a table between the hardware and `lines`; write `name.json`, with `details`, and `name.png`.

    What is in a row under a name that begins with `_` is not shown.
    """
    rows = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
    print(f"\n{name}: {hardware_line(machine)}")
    if options.note:
        print(f"note: {options.note}")
    print(f"\n{table(rows)}\n")
    for line in lines:
        print(line)
    options.out.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": name,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "form": "full" if options.full else "smoke" if options.smoke else "default",
        "note": options.note,
        "hardware": machine,
        "rows": rows,
        "figures": lines,
        "details": details,
    }
    path = options.out / f"{name}.json"
    path.write_text(json.dumps(record, indent=1, default=str))
    written = [path]
    if panels:
        written.append(_draw(options.out / f"{name}.png", panels, hardware_line(machine)))
    print("written:", *written)


def _draw(path: Path, panels: Sequence[Panel], caption: str) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(1.5 + 5.5 * len(panels), 5), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for name, points in panel.curves.items():
            middle = [point.value.median for point in points]
            errors = [
                [max(point.value.median - point.value.low, 0) for point in points],
                [max(point.value.high - point.value.median, 0) for point in points],
            ]
            axis.errorbar([point.x for point in points], middle, errors, marker="o", capsize=3, label=name)
        numbers = [p.x for points in panel.curves.values() for p in points if not isinstance(p.x, str)]
        if numbers and max(numbers) > 10 * max(min(numbers), 1):
            axis.set_xscale("log", base=2)
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y, yscale="log")
        axis.tick_params(axis="x", rotation=20)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.text(0.01, 0.005, caption[:180], fontsize=6)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def readme(directory: Path) -> str:
    """Return the results in a directory as Markdown: of `chunks` one caller, 256 tokens and Qwen2.5; of the others all."""
    parts = []
    for name in ("ttft", "chunks", "inject", "mix", "inits", "scale", "cold_fetch", "start"):
        path = directory / f"{name}.json"
        if path.exists():
            record = json.loads(path.read_text())
            rows = record["rows"]
            if name == "chunks":
                rows = [r for r in rows if (r["c"], r["chunk"]) == (1, 256) and r["model"].startswith("Qwen2.5")]
            note = f" {record['note'][0].upper()}{record['note'][1:]}." if record["note"] else ""
            about = (
                f"`{name}.py`, {record['form']} form, {record['when'][:10]}: {hardware_line(record['hardware'])}.{note}"
            )
            parts += [about, markdown([{key: str(value) for key, value in row.items()} for row in rows])]
    return "\n\n".join(parts)


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


if __name__ == "__main__":
    print(readme(Path(sys.argv[1])))
