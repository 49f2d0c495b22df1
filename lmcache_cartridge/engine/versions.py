"""Versions: with which vLLM and LMCache this release was run; others are refused unless they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import NamedTuple

from ..errors import ENGINE, UnsupportedEngine

PROVEN = {"vllm": "0.32.0", "lmcache": "0.5.6"}
"""The versions with which this release's whole suite was run."""

LEVELS = {
    "proven": "the whole suite was run",
    "run": "`.ci/versions` was run: answers and logprobs from cartridges are the document's",
    "by other kernels": "the same, but with the CPU kernels of the proven vLLM: this one has no build for CPU",
}


class Pair(NamedTuple):
    """What was done with one version of vLLM and one of LMCache, in both modes."""

    vllm: str
    lmcache: str
    level: str
    """One of `LEVELS`."""


MATRIX = (
    Pair("0.31.0", "0.5.6", "run"),
    Pair("0.32.0", "0.5.6", "proven"),
    Pair("0.33.0", "0.5.6", "by other kernels"),
)
"""What was run. A pair that is not here is not known."""


class Problem(NamedTuple):
    """Why a version is refused, and what to do."""

    finding: str
    fix: str


def versions() -> dict[str, str | None]:
    """Return the version of vLLM and of LMCache in this environment, None where one is not installed.

    Nothing is imported: vLLM takes seconds.
    """
    return {name: _version(name) for name in PROVEN}


def _version(name: str) -> str | None:
    for distribution in (name, f"{name}-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def tried(found: Mapping[str, str | None]) -> Pair | None:
    """Return what was done with these versions, None where nothing is known.

    A build tag as in `0.32.0+cpu` makes no difference.
    """
    release = {name: (version or "").partition("+")[0] for name, version in found.items()}
    return next((pair for pair in MATRIX if (pair.vllm, pair.lmcache) == (release["vllm"], release["lmcache"])), None)


def problems() -> dict[str, Problem]:
    """Return what is wrong with the versions of vLLM and LMCache, by name."""
    found = versions()
    if None in found.values():
        return {name: Problem("not installed", ENGINE) for name, version in found.items() if version is None}
    if tried(found) is not None:
        return {}
    return {
        name: Problem(
            f"{version}; proven with {PROVEN[name]} only, and another version may answer wrongly without an error",
            f"install {name}=={PROVEN[name]}, or run {version} all the same with `lmcache-cartridge serve "
            "--unproven-versions` (setting `unproven_versions: true`)",
        )
        for name, version in found.items()
        if str(version).partition("+")[0] != PROVEN[name]
    }


def check_versions(*, unproven: bool) -> None:
    """Raise `UnsupportedEngine` where vLLM and LMCache were not run together, unless `unproven` ones may."""
    found = versions()
    for name, problem in problems().items():
        if found[name] is None or not unproven:
            raise UnsupportedEngine(f"{name} is {problem.finding}: {problem.fix}")
