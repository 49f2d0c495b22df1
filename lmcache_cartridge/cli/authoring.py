"""Authoring: what the commands that make cartridges share, checks that are cheap, made before torch is loaded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ArtifactError

USUAL_CHUNKS = 16, 256
"""Chunk sizes of servers: the smallest that is usual, and the default."""


def add_payload(parser: Any) -> None:
    """Add the option that says how KV is stored."""
    parser.add_argument(
        "--payload", choices=("plain", "int8"), default="plain",
        help="store KV as it is, or in int8 at half the bytes of bfloat16; what is served is the model's dtype either way",
    )  # fmt: skip


def add_no_promote(parser: Any) -> None:
    """Add the option that leaves an id where it is; `arguments.promote` is False with it."""
    parser.add_argument(
        "--no-promote", dest="promote", action="store_false",
        help="the new version is had as id@version alone, until `lmcache-cartridge promote`; the id means what it meant",
    )  # fmt: skip


def warnings_of(positions: int) -> list[str]:
    """Return what an author should know of a prefill cartridge of so many positions: that servers would inject none."""
    if positions >= USUAL_CHUNKS[1]:
        return []
    least, usual = USUAL_CHUNKS
    only = f"only one with --chunk-size {positions} or less does" if positions >= least else "none of a usual one does"
    return [
        f"{positions} positions fill no chunk of {usual} tokens, so a server with the default chunk size injects none of "
        f"them and computes the document each time; {only}"
    ]


def warn(warnings: Sequence[str], form: str) -> None:
    """Tell people on stderr; programs have it in the result."""
    for warning in warnings if form == "terminal" else ():
        print(f"lmcache-cartridge: warning: {warning}", file=sys.stderr)


def check_files(*paths: Path | None) -> None:
    """Raise `ArtifactError` for a path that is given and no file."""
    for path in paths:
        if path is not None and not path.is_file():
            raise ArtifactError(f"{path}: no such file")


def check_numbers(
    arguments: argparse.Namespace, *, at_least_one: tuple[str, ...], at_least_zero: tuple[str, ...] = ()
) -> None:
    """Raise `ArtifactError` for an option that is given and too small."""
    for least, names in ((1, at_least_one), (0, at_least_zero)):
        for name in names:
            value = getattr(arguments, name)
            if value is not None and value < least:
                raise ArtifactError(f"--{name.replace('_', '-')} {value} must be at least {least}")


def check_dtype(arguments: argparse.Namespace) -> None:
    """Raise `ArtifactError` unless `--dtype` is one that KV can have, or auto."""
    from ..artifact.fingerprint import DTYPE_BYTES

    if arguments.dtype not in ("auto", *DTYPE_BYTES):
        raise ArtifactError(f"--dtype {arguments.dtype} is not one of auto, {', '.join(DTYPE_BYTES)}")
