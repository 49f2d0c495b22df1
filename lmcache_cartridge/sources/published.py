"""Published libraries, put together: opened to publish, followed by a server, and cartridges published to them."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from ..artifact import reading
from ..artifact.location import is_remote
from ..artifact.manifest import Manifest
from ..errors import CartridgeError, CartridgeExists, CartridgeNotFound, SettingsError, SourceNotFound
from ..library.published import Following, Published
from ..library.registry import RegistryEntry, check_same
from ..library.workers import note
from ..settings import Settings
from .s3 import S3Source
from .sources import Sources
from .transfer import Progress
from .writers import DirectoryWriter, S3Writer

_LOOK_S = 10.0
"""Longest time that a look may wait for a byte."""
_CLOSE_S = 1.0
"""How long is waited for one that is under way."""


class Library:
    """A published library, open to read and to publish to. A context manager."""

    def __init__(self, settings: Settings) -> None:
        """Open the one that `settings.library` names. Asks nobody yet. Raises `SettingsError` where it names none."""
        location = _location(settings)
        self._source = Sources(S3Source(**settings.s3))
        self._writer = S3Writer(location, S3Source(**settings.s3)) if is_remote(location) else DirectoryWriter(location)
        self.registry = Published(settings.registry_path, location, self._source, self._writer)
        """What is published; its `label`, `promote`, `unlabel` and `remove` are seen by every server that follows."""

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def publish(
        self,
        root: Path,
        *,
        label: str | None = None,
        promote: bool = True,
        next_version: bool = False,
        progress: Progress = lambda *_: None,
    ) -> Manifest:
        """Store the artefact at `root`, let everybody see it, with `label` pointing at it, and return its manifest there.

        Whole or not at all. `promote` as for `Registry.register`; with `next_version` it gets the next number of its id
        here in place of its own. Blocks as long as it takes. The same again is no change. Raises `CartridgeExists` where
        other content has this id and version: of two publishers the second is told.
        """
        self.registry.begin()
        manifest = reading.load_manifest(root)
        while True:
            if next_version:
                manifest = msgspec.structs.replace(manifest, version=self._free_version(manifest))
            try:
                with suppress(CartridgeNotFound):
                    check_same(manifest.name, self.registry.find(manifest.name).digest, manifest.digest)
                place = self.registry.place(manifest)
                self._writer.store(root, manifest, place, progress)
                return self.registry.register(root, place, promote=promote, label=label, version=manifest.version)
            except CartridgeExists:
                if not next_version or self._free_version(manifest) == manifest.version:
                    raise  # it is not the number that is taken

    def withdraw(self, one: Manifest | RegistryEntry) -> None:
        """Delete a version's artefact and take it out of the library with its labels. What is not there is no error."""
        self._writer.delete(self.registry.place(one))
        with suppress(CartridgeNotFound):
            if self.registry.find(one.name).digest == one.digest:
                self.registry.remove(one.name, labels=True)

    def _free_version(self, manifest: Manifest) -> int:
        """Return the next version of an id, or the one that has this content already, as of the last look."""
        same = [row.version for row in self.registry.having([manifest.digest]) if row.id == manifest.id]
        return max(same) if same else self.registry.next_version(manifest.id)

    def close(self) -> None:
        """Give back connections and threads."""
        self._source.close()
        self._writer.close()


class Follower:
    """Keeps this machine's copy of a library up to date, in a thread, until it is closed."""

    def __init__(self, settings: Settings) -> None:
        """Look once, and every `reload_s` from then on. Blocks for the first look.

        Raises `CartridgeError` where that failed and nothing is known from earlier. A library where nothing was published
        yet is an empty one.
        """
        location = _location(settings)
        timeout_s = min(_LOOK_S, settings.s3_timeout_s)
        self._source = Sources(S3Source(**settings.s3 | {"connections": 1, "timeout_s": timeout_s}))
        self._every_s = settings.reload_s
        self._library = Published(settings.registry_path, location, self._source)
        try:
            self._library.follow()
        except CartridgeError as error:
            if not self._library.following.position and not isinstance(error, SourceNotFound):
                self._source.close()
                raise
            note(error)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cartridge-library", daemon=True)
        if self._every_s:
            self._thread.start()

    @property
    def latest(self) -> Following:
        """How far the library is followed."""
        return self._library.following

    def close(self) -> None:
        """Stop following. Blocks for a look that is under way, for a moment."""
        self._stopping.set()
        self._source.close()
        if self._every_s:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            try:
                self._library.follow()
            except Exception as error:  # whatever it is, later changes must be followed
                if not self._stopping.is_set():
                    note(error)


def look(settings: Settings) -> None:
    """Bring this machine's copy of the library up to date, where settings name one. Raises what `Follower` does."""
    if follower := follower_of(settings.model_copy(update={"reload_s": 0})):
        follower.close()


def follower_of(settings: Settings) -> Follower | None:
    """Return what follows the library that settings name, the caller's to close; None where they name none."""
    return None if settings.library is None else Follower(settings)


def _location(settings: Settings) -> str:
    if settings.library is None:
        raise SettingsError("no library is named; write s3://BUCKET/PREFIX or an absolute directory")
    return settings.library
