"""Configuring: `config`, which prints the configuration files that the package brings."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import CartridgeError
from .context import Verb
from .output import show


def add(verb: Verb) -> None:
    """Add the command to the command line."""
    config = verb("config", _config, "Print a configuration file to start from; without a name, list them.",
                  "config lmcache.yaml > lmcache.yaml")  # fmt: skip
    config.add_argument("name", nargs="?", help="name of the file")


def directory() -> Path:
    """Return where the files lie: in the installed package, or beside it in a source tree."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.with_name("configs")


def _config(arguments: argparse.Namespace) -> None:
    names = sorted(path.name for path in directory().iterdir() if path.is_file() and path.suffix != ".py")
    if arguments.name is None:
        show(names, "\n".join(names), arguments.format)
        return
    if arguments.name not in names:
        raise CartridgeError(f"there is no configuration file {arguments.name!r}; there are {', '.join(names)}")
    text = (directory() / arguments.name).read_text(encoding="utf-8")
    show({"name": arguments.name, "text": text}, text.removesuffix("\n"), arguments.format)
