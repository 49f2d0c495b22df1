"""Context: what commands share: the settings and registry of `--home`, and where artefacts lie."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..artifact.location import is_remote

Verb = Callable[[str, Any, str, str], argparse.ArgumentParser]
"""Called with (name, what runs it, summary, example); returns its parser."""


def settings_of(arguments: argparse.Namespace, **values: Any) -> Any:
    """Return the settings of a command: `values`, and the directory that `--home` names."""
    from ..settings import from_mapping

    if arguments.home is not None:
        values["home"] = arguments.home.expanduser().absolute()
    return from_mapping(values)


def registry_of(arguments: argparse.Namespace) -> Any:
    """Return the registry of a command, to be read and written."""
    from ..library.registry import Registry

    return Registry(settings_of(arguments).registry_path)


def copy_of(arguments: argparse.Namespace, location: str) -> Path:
    """Return a local copy of the manifest and token ids of an artefact on S3, as they are there now."""
    from ..sources.manifest_cache import Mirror
    from ..sources.sources import Sources

    settings = settings_of(arguments)
    sources = Sources(settings)
    try:
        return Mirror(settings.mirror_dir, sources).fetch(location, force=True)
    finally:
        sources.close()


def local_root(location: Any) -> Path:
    """Return the directory of a registered cartridge. Raises `ArtifactError` for one that lies on S3."""
    from ..errors import ArtifactError

    if is_remote(location.location):
        raise ArtifactError(
            f"cartridge {location.name} lies on S3; `lmcache-cartridge pull {location.location}` brings it here first"
        )
    return Path(location.location)


def root_of(arguments: argparse.Namespace, location: str) -> Path:
    """Return the directory that holds the manifest of what lies at a location."""
    return copy_of(arguments, location) if is_remote(location) else Path(location)
