"""What a machine with a GPU, torch and transformers proves in ten minutes, without vLLM and LMCache.

    python benchmarks/gpu.py [--device cuda] [--only SECTION] [--smoke | --full]

The paths are those that serve: the tiers with their promotions, the injector (over blocks as vLLM lays them out, with a
stand-in for its op), int8's codec, and prefill. What is computed on the device is compared with the CPU, and every rate
stands beside a plain copy of the same bytes in the same run. With `--device cpu` the same code runs where there is no GPU,
and its ratios mean nothing. The exit status is 1 where something is WRONG or failed, not where it is slow.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_rows import Place, Row

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package, where it is not installed

PACKAGES = {
    "blake3": "blake3", "httpx": "httpx", "huggingface_hub": "huggingface_hub", "matplotlib": "matplotlib",
    "msgspec": "msgspec", "numpy": "numpy", "peft": "peft", "pydantic": "pydantic", "rich": "rich",
    "safetensors": "safetensors", "tokenizers": "tokenizers", "torch": "torch", "tqdm": "tqdm",
    "transformers": "transformers", "yaml": "PyYAML",
}  # fmt: skip
"""What is imported without vLLM and LMCache, and the package it is in."""
SECTIONS = ("slab", "blocks", "int8", "prefill")
LEAST_S = {"prefill": 60.0}
"""Sections that are not begun with less left of the budget."""


def missing() -> list[str]:
    """Return the packages that are not here."""
    return [package for name, package in PACKAGES.items() if find_spec(name) is None]


def how_to_get(packages: Sequence[str]) -> str:
    """Return what to do about packages that are not here."""
    names = " ".join(packages)
    version = ".".join(map(str, sys.version_info[:2]))
    return (
        f"gpu.py needs {', '.join(packages)}, which Python {version} here does not have: pip install {names}\n"
        f"Where there is no network, on a machine that has one:\n"
        f"    pip download -d wheels --only-binary=:all: --python-version {version} --platform manylinux_2_28_x86_64 "
        f"--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 {names}\n"
        f"and here, with that directory:\n"
        f"    pip install --no-index --find-links wheels --target site {names} && export PYTHONPATH=site"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    if packages := missing():
        print(how_to_get(packages), file=sys.stderr)
        return 2
    import report
    import torch

    bench = report.Benchmark(__file__, __doc__, ["memory", "engine/inject.py", "make/model.py", "make/prefill.py"])
    parser = bench.parser
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default cuda where there is one)")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="only this section; repeatable")
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="seconds, after which nothing begins (%(default)s)"
    )
    options = bench.start(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch {torch.__version__} finds no GPU here")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    from gpu_rows import Place

    form = "smoke" if options.smoke else "full" if options.full else "default"
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(device, form, Path(scratch), time.monotonic() + options.budget_s)
        rows: list[Row] = []
        for row in run(place, options.only or SECTIONS):
            report.say(f"{row.section}: {row.what}: {row.figure}: {row.verdict}")
            rows.append(row)
    return publish(bench, place, rows)


def run(place: Place, names: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of sections; one that fails takes no other along."""
    from gpu_rows import FAILED, UNCHECKED, Row

    for name in names:
        if place.left_s < (0.0 if place.form == "smoke" else LEAST_S.get(name, 20.0)):
            yield Row(name, "all", "-", "-", f"{UNCHECKED}: {place.left_s:.0f} s are left of --budget-s")
            continue
        try:
            yield from section(name)(place)
        except Exception as error:
            import torch

            is_room = isinstance(error, torch.OutOfMemoryError)
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            yield Row(name, "all", "-", "-", f"{UNCHECKED if is_room else FAILED}: {reason}")


def section(name: str) -> Callable[[Place], Iterator[Row]]:
    """Return what runs a section. Imports what it needs."""
    import gpu_memory

    return getattr(gpu_memory, name)


def publish(bench: Any, place: Place, rows: Sequence[Row]) -> int:
    """Write the result; return the exit status."""
    import report
    from gpu_rows import FAILED, MISSED, UNCHECKED, WRONG

    figures = []
    for row in rows:
        case = {
            "section": row.section,
            "device": str(place.device),
            "goal": row.goal,
            "verdict": row.verdict,
            "figure": row.figure,
        }
        of = row.ratio or report.Figure(row.what, "", {}, *3 * [float(not row.verdict.startswith((WRONG, FAILED)))], 1)
        figures.append(report.Figure(row.what, of.unit, case, of.value, of.low, of.high, of.n))
    bench.publish(figures)
    counts = {word: sum(row.verdict.startswith(word) for row in rows) for word in (WRONG, FAILED, MISSED, UNCHECKED)}
    print(f"{len(rows)} rows: {', '.join(f'{count} {word}' for word, count in counts.items())}")
    if not place.is_gpu:
        print("no GPU: ratios mean nothing")
    return 1 if counts[WRONG] or counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
