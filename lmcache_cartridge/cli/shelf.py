"""Shelf: where a command puts the cartridges that it makes for a server, until its end."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CartridgeError, SettingsError
from .options import registry_of, settings_of

if TYPE_CHECKING:
    from ..make.server import Server

_FOLLOWED_S = 60.0
"""How long a server may take to know of what was published."""


class _Published:
    """A published library as a shelf of the ladder, and the server that follows it."""

    local = False

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack, server: Server) -> None:
        """Raise `SettingsError` for a directory that is missing: it may be misspelt, and is not made."""
        from ..artifact.location import is_remote
        from ..sources.published import Library

        settings = settings_of(arguments)
        where = settings.library
        if where is not None and not is_remote(where) and not Path(where).is_dir():
            raise SettingsError(f"--library {where}: there is no such directory; make it if the name is right")
        self._server = server
        self._library = stack.enter_context(Library(settings))
        self._library.registry.begin()  # as publishing does, where nothing was published yet
        self.registry: Any = self._library.registry

    def add(self, root: Path) -> Any:
        """Publish, and wait until the server knows of it: it looks every `reload_s`. Raises `CartridgeError`."""
        manifest, until = self._library.publish(root), time.monotonic() + _FOLLOWED_S
        while self._server.send("GET", f"/v1/cartridges/{manifest.name}").status_code == 404:
            if time.monotonic() > until:
                raise CartridgeError(
                    f"the server does not know of {manifest.name}, which was published {_FOLLOWED_S:g} s ago; does it "
                    "follow this library?"
                )
            time.sleep(0.1)
        return manifest

    def forget(self, digest: str) -> None:
        """Nothing corrupt is published."""


def shelf(arguments: argparse.Namespace, stack: ExitStack, server: Server) -> Any:
    """Return the `make.ladder.maker.Shelf` of `--library`, or of the registry of `--home`; open until `stack` ends.

    `server` is the one that follows it.
    """
    from ..library.quarantine import Quarantine
    from ..make.ladder.maker import Home

    if arguments.library is None:
        return Home(registry_of(arguments), Quarantine(settings_of(arguments).quarantine_dir))
    return _Published(arguments, stack, server)
