"""Doctor: is this machine ready to serve cartridges? Each check says how to fix what it finds."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..artifact.location import is_remote
from ..engine import refusals
from ..engine.forms import is_named
from ..engine.lmcache_file import VARIABLE
from ..engine.versions import PROVEN, problems, tried, versions
from ..errors import CartridgeError
from ..library.quarantine import Quarantine
from ..library.registry import Registry
from ..serve.launch import on_cpu
from ..settings import Settings, from_environment


class Check(NamedTuple):
    """One finding. `status` is ok, warn (works, maybe not as proven) or FAIL (cartridges cannot be served)."""

    status: str
    name: str
    finding: str
    fix: str = ""


def diagnose(settings: Settings) -> list[Check]:
    """Return every check, in the order in which they should be fixed. Reads; changes nothing."""
    logging.disable(logging.CRITICAL)  # LMCache logs when it is imported, in colour into a pipe too
    try:
        return list(_checks(settings))
    finally:
        logging.disable(logging.NOTSET)


def _checks(settings: Settings) -> Iterator[Check]:
    found, wrong, pair = versions(), problems(), tried(versions())
    run = "" if pair is None or pair.level == "proven" else f"; {pair.level}"
    for name, version in found.items():
        problem = wrong.get(name)
        may_run = problem is None or (settings.unproven_versions and version)
        status = "ok" if problem is None else "warn" if may_run else "FAIL"
        yield Check(status, name, problem.finding if problem else f"{version}{run}", problem.fix if problem else "")
    how = "blocks are copied" if on_cpu() else "by LMCache's kernel, once it is seen to write what vLLM's op writes"
    yield Check("ok", "KV injection", f"{how}; by our connector, also where LMCacheConnectorV1 is named")
    for texts in refusals.found(refusals.ENVIRONMENT, os.environ):
        yield Check("FAIL", *texts)
    yield _check_configuration()
    if found["lmcache"]:
        yield _check_plugin()
    yield from _check_registry(settings)


def _check_configuration() -> Check:
    """What LMCache makes of its file and variables, looked at as our plugin looks at it."""
    name = "LMCache's configuration"
    if not is_named(None):
        return Check("ok", name, "nothing names cartridges; `lmcache-cartridge serve` writes it")
    try:
        from lmcache.v1.config import LMCacheEngineConfig

        path = os.environ.get(VARIABLE)
        config = LMCacheEngineConfig.from_file(path) if path else LMCacheEngineConfig.from_env()
        config.update_config_from_env()
        from_environment()
    except Exception as error:
        return Check("FAIL", name, str(error), "see `lmcache-cartridge config lmcache.yaml`")
    for what, why, mend in refusals.found(refusals.LMCACHE, config):
        return Check("FAIL", name, f"{what}: {why}", mend)
    return Check("ok", name, f"names cartridges: storage_plugins {config.storage_plugins}")


def _check_plugin() -> Check:
    try:
        from ..engine.backend import CartridgeBackend

        missing = sorted(CartridgeBackend.__abstractmethods__)
    except Exception as error:
        found = f"does not import: {type(error).__name__}: {error}"
        fix = (
            "reinstall the engine's pinned versions; beside a torch for CPU uninstall torchvision, torchaudio and torchcodec, "
            "whose wheels on PyPI are for CUDA"
        )
        return Check("FAIL", "plugin", found, fix)
    if missing:
        return Check(
            "FAIL", "plugin", f"LMCache asks for methods it lacks: {missing}", f"install lmcache=={PROVEN['lmcache']}"
        )
    return Check("ok", "plugin", "CartridgeBackend imports and has every method that LMCache asks for")


def _check_registry(settings: Settings) -> Iterator[Check]:
    try:
        rows = Registry(settings.registry_path, read_only=True).all()
    except CartridgeError as error:
        fix = "restore the file, or move it away and register the cartridges again"
        yield Check("FAIL", "registry", str(error), fix)
        return
    yield Check("ok", "registry", f"{len(rows)} cartridges in {settings.registry_path}")
    quarantine = Quarantine(settings.quarantine_dir)
    for row in rows:
        if not is_remote(row.location) and not (Path(row.location) / "manifest.json").is_file():
            fix = "mount or restore it, or register it elsewhere"
            yield Check("warn", row.name, f"its artefact is not at {row.location}", fix)
        elif reason := quarantine.reason(row.digest):
            yield Check("warn", row.name, f"quarantined: {reason}", f"lmcache-cartridge verify {row.name}")
