"""Validating: `validate`."""

from __future__ import annotations

import argparse

from .context import Verb, root_of, settings_of
from .output import show, table


def add(verb: Verb) -> None:
    """Add the command to the command line."""
    validate = verb(
        "validate", _validate, "Ask a running server what is known to follow a cartridge, and compare its answers.",
        "validate handbook --server http://localhost:8000",
    )  # fmt: skip
    validate.add_argument("name", help="id (newest version), id@version or label")
    validate.add_argument(
        "--server", required=True, metavar="URL", help="server that serves it; its key is that in $OPENAI_API_KEY"
    )


def _validate(arguments: argparse.Namespace) -> int:
    from ..artifact import reading
    from ..library.registry import Registry
    from ..make.chat import Server
    from ..make.validate import validate

    location = Registry(settings_of(arguments).registry_path, read_only=True).find(arguments.name)
    manifest = reading.load_manifest(root_of(arguments, location.location), location.digest, payload=False)
    with Server(arguments.server) as server:
        rows = validate(manifest, server)
    passed = all(row.passed for row in rows)
    result = {"name": manifest.name, "passed": passed, "sensitivity": manifest.canary.sensitivity,
              "questions": [row._asdict() for row in rows]}  # fmt: skip
    readable = [
        {"place": row.place, "positions": row.positions, "injected": row.injected, "difference": row.difference,
         "bound": round(row.bound, 4), "passed": "yes" if row.passed else f"NO {row.problem or ''}".rstrip()}
        for row in rows
    ]  # fmt: skip
    show(result, table(readable), arguments.format)
    return 0 if passed else 1
