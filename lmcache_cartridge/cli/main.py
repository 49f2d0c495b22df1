"""The command line: `lmcache-cartridge COMMAND`. Imports no torch until a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

from typer import Exit
from typer.main import get_command

from .. import __version__
from ..errors import ENGINE, CartridgeError
from . import author, bench, registry, serve, train, validate  # noqa: F401  each adds its commands
from .options import app, option


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise Exit


@app.callback()
def _root(
    version: Annotated[bool, option("print the version", "--version", is_eager=True, callback=_version)] = False,
) -> None:
    """Take what stands before a command."""


COMMANDS: Any = get_command(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for an error of ours (one line on stderr), 2 for wrong usage."""
    try:
        COMMANDS.main(argv, prog_name=app.info.name)
    except SystemExit as ended:
        return int(ended.code or 0)
    except (CartridgeError, OSError) as error:  # OSError: a full disk, a directory that may not be written
        problem = str(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "lmcache_cartridge"):
            raise
        extra = {"aiohttp": "fleet", "zmq": "fleet", "pytest": "validate", "ray": "ray"}.get(package, "train")
        how = ENGINE if package in ("vllm", "lmcache") else f"pip install 'lmcache-cartridge[{extra}]'"
        problem = f"this command needs {package}, which is not installed: {how}"
    print(f"lmcache-cartridge: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
