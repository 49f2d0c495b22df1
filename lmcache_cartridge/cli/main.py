"""The command line: `lmcache-cartridge VERB`. Imports no torch until a verb needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ENGINE, CartridgeError
from . import configuring, making, moving, registering, serving, training, validating


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for an error of ours (one line on stderr), 2 for usage."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not getattr(arguments, "passes_on", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    try:
        return arguments.verb(arguments) or 0
    except CartridgeError as error:
        print(f"lmcache-cartridge: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, a directory that may not be written
        print(f"lmcache-cartridge: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", __package__):
            raise
        how = ENGINE if package in ("vllm", "lmcache") else "pip install 'lmcache-cartridge[train]'"
        print(f"lmcache-cartridge: this command needs {package}, which is not installed: {how}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lmcache-cartridge",
        description="Prepare KV caches of documents once and serve them through unmodified vLLM and LMCache.",
        epilog="State lives under --home, by default $LMCACHE_CARTRIDGE_HOME or ~/.local/share/lmcache-cartridge.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def verb(name: str, run: Any, summary: str, example: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(
            name, help=summary, description=summary, epilog=f"example: lmcache-cartridge {example}", allow_abbrev=False
        )
        added.set_defaults(verb=run)
        added.add_argument("--home", type=Path, help="where the registry and cartridges are kept")
        if name == "export":  # whose --format is another thing
            added.add_argument("--json", action="store_true", help="tell programs instead of people")
        elif name != "serve":
            added.add_argument(
                "--format", choices=("terminal", "json"), default="terminal", help="for people or programs"
            )
        return added

    for commands in (making, training, registering, moving, serving, validating, configuring):
        commands.add(verb)
    return parser


if __name__ == "__main__":
    sys.exit(main())
