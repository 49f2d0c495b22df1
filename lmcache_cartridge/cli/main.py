"""The command line: `lmcache-cartridge COMMAND`. Imports no torch until a command needs it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ENGINE, CartridgeError
from . import author, bench, compact, fleet, registry, serve, train, validate
from .options import Verb
from .show import show

_EPILOG = """\
State lives under --home, by default $LMCACHE_CARTRIDGE_HOME or ~/.local/share/lmcache-cartridge.
exit status: 0 done; 1 an error, told in one line, or a check that found something; 2 wrong usage; 130 interrupted.
example: lmcache-cartridge demo"""
SHELLS = ("bash", "zsh", "fish")


class _Store(argparse.Action):
    """argparse's usual action, which also tells shells that a path is completed as one."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)

    @property
    def complete(self) -> Any:
        """What shtab asks for."""
        if self.type is not Path and self.dest != "path":
            raise AttributeError("complete")
        import shtab

        return shtab.FILE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for an error of ours (one line on stderr), 2 for usage."""
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not getattr(arguments, "passes_on", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    try:
        return arguments.verb(arguments) or 0
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at exit
        return 128 + signal.SIGPIPE
    except (CartridgeError, OSError) as error:  # OSError: a full disk, a directory that may not be written
        problem = str(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "lmcache_cartridge"):
            raise
        extra = "fleet" if package in ("aiohttp", "zmq") else "train"
        how = ENGINE if package in ("vllm", "lmcache") else f"pip install 'lmcache-cartridge[{extra}]'"
        problem = f"this command needs {package}, which is not installed: {how}"
    except KeyboardInterrupt:
        return 130
    print(f"lmcache-cartridge: {problem}", file=sys.stderr)
    return 1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="lmcache-cartridge",
        description="Prepare KV caches of documents once and serve them through unmodified vLLM and LMCache.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    verb = _adding_to(verbs)
    for commands in (author, compact, train, registry, serve, validate, bench):
        commands.add(verb)
    summary = "Several servers: which owns a cartridge, what they hold, and which a request should go to."
    several = verbs.add_parser(
        "fleet",
        help=summary,
        description=summary,
        epilog="example: lmcache-cartridge fleet serve --help",
        allow_abbrev=False,
    )
    of_fleet = _adding_to(several.add_subparsers(title="commands", required=True, metavar="COMMAND"))
    fleet.add(of_fleet)
    completion = verb(
        "completion",
        _completion,
        "Print what lets a shell complete commands and options.",
        "completion bash > ~/.local/share/bash-completion/completions/lmcache-cartridge",
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell it is for")
    return parser


def _adding_to(verbs: Any) -> Verb:
    """Return what adds a command to these."""

    def verb(
        name: str, run: Callable[[argparse.Namespace], int | None], summary: str, example: str
    ) -> argparse.ArgumentParser:
        added = verbs.add_parser(
            name, help=summary, description=summary, epilog=f"example: lmcache-cartridge {example}", allow_abbrev=False
        )
        added.register("action", None, _Store)
        added.set_defaults(verb=run)
        added.add_argument("--home", type=Path, help="where the registry and cartridges are kept")
        added.add_argument("--format", choices=("text", "json"), default="text", help="for people or programs")
        return added

    return verb


def _completion(arguments: argparse.Namespace) -> None:
    import shtab

    script = shtab.complete(make_parser(), arguments.shell)
    show({"shell": arguments.shell, "script": script}, script, arguments.format)


if __name__ == "__main__":
    sys.exit(main())
