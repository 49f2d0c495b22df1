"""Cartridge: a manifest and where its artefact lies."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .manifest import Manifest


class Place(NamedTuple):
    """Where an artefact lies."""

    root: Path
    """Directory of the manifest and token ids."""
    location: str
    """Where the payload lies: the same directory, or `s3://bucket/key`."""


class Cartridge(NamedTuple):
    """A manifest and where its artefact lies."""

    manifest: Manifest
    root: Path
    """See `Place`."""
    location: str


class Segment(NamedTuple):
    """A cartridge at its place in a prompt."""

    cartridge: Cartridge
    offset: int
    """Position of its first token; its keys are rotated there."""
