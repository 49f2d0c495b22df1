"""Shelves: where a published library lies, on S3 or in a directory that machines share, for those who write there."""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from ..artifact import files, reading
from ..artifact.manifest import Manifest
from ..errors import CartridgeError, SourceDenied, SourceError
from . import transfer
from .s3 import S3Source
from .transfer import Progress

_SETTLE_S, _SETTLE_PUTS, _LONGEST_SETTLE_S = 1.0, 10, 30.0
"""How long a PUT may take from its look whether there is an object to its end, on servers that do not do it in one step: so
many seconds, or so many times as long as our own took, since a busy server has others wait too. No longer than the last: a
PUT that failed was tried for minutes. Measured with OpenStack Swift: of 100 pairs of PUTs at once both were told in 64 that
they were first."""
_AT_ONCE = re.compile(r"s3([.-][a-z0-9-]+)*\.amazonaws\.com(\.cn)?")
"""Host names of servers that promise to decide between two conditional PUTs: the loser gets 409 or 412."""


class S3Shelf:
    """A library under an `s3://` location. Takes over `source`. See `Shelf`."""

    def __init__(self, location: str, source: S3Source, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._location, self._source, self._pause = location, source, pause
        self._took_s = 0.0

    def create(self, file: str, data: bytes) -> bool:
        started = time.monotonic()
        try:
            return self._source.create(self._location, file, data)
        finally:
            self._took_s = time.monotonic() - started

    def replace(self, file: str, data: bytes) -> None:
        self._source.upload(self._location, file, BytesIO(data))

    def remove(self, file: str) -> None:
        self._source.delete(self._location, file)

    def settle(self) -> bool:
        if _AT_ONCE.fullmatch(self._source.host(self._location)):
            return False
        self._pause(min(max(_SETTLE_S, _SETTLE_PUTS * self._took_s), _LONGEST_SETTLE_S))
        return True

    def store(self, root: Path, file: str, progress: Progress) -> Manifest:
        """Store the artefact at `root` under the name `file` of the library, having verified it; see `transfer.push`."""
        return transfer.push(root, f"{self._location}/{file}", self._source, force=False, progress=progress).manifest

    def close(self) -> None:
        """Give back connections and threads."""
        self._source.close()


class DirectoryShelf:
    """A library in a directory, of a file system that can link files. See `Shelf`."""

    def __init__(self, location: str) -> None:
        self._root = Path(location)

    def create(self, file: str, data: bytes) -> bool:
        path = self._path(file)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        try:
            files.write(partial, [data])
            try:
                os.link(partial, path)  # unlike a rename it never takes the place of another
            except FileExistsError:
                return False
            files.sync_directory(path.parent)
        except OSError as error:
            raise _mapped(path, error) from error
        finally:
            with suppress(OSError):
                partial.unlink()
        return True

    def replace(self, file: str, data: bytes) -> None:
        path = self._path(file)
        try:
            files.replace(path, [data])
        except OSError as error:
            raise _mapped(path, error) from error

    def remove(self, file: str) -> None:
        try:
            (self._root / file).unlink(missing_ok=True)
        except OSError as error:
            raise _mapped(self._root / file, error) from error

    def settle(self) -> bool:
        return False

    def store(self, root: Path, file: str, progress: Progress) -> Manifest:
        """Copy the artefact at `root`, whole or not at all, under the name `file` of the library, having verified it."""
        for done, total in reading.verify(root):
            progress("verify", done, total)
        manifest = reading.load_manifest(root)
        target = self._path(file)
        if not _holds(target, manifest):
            shutil.rmtree(target, ignore_errors=True)  # a part of it is missing
            try:
                with files.replacing(target) as partial:
                    partial.mkdir()
                    for name in (*_payload(manifest), *reading.id_files(manifest), reading.MANIFEST):
                        _copy(root / name, partial / name, progress)
            except OSError as error:
                if not _holds(target, manifest):  # else another publisher of the same was first
                    raise _mapped(target, error) from error
        return manifest

    def close(self) -> None:
        """Nothing to give back."""

    def _path(self, file: str) -> Path:
        path = self._root / file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _mapped(path.parent, error) from error
        return path


def _payload(manifest: Manifest) -> list[str]:
    return [manifest.payload.file] if manifest.payload else []


def _holds(target: Path, manifest: Manifest) -> bool:
    try:
        return reading.load_manifest(target).digest == manifest.digest
    except CartridgeError:
        return False


def _copy(source: Path, target: Path, progress: Progress) -> None:
    with source.open("rb") as read, files.create(target) as written:
        total = os.fstat(read.fileno()).st_size
        while piece := read.read(8 << 20):
            written.write(piece)
            progress(source.name, written.tell(), total)
        files.sync(written)


def _mapped(path: Path, error: OSError) -> SourceError:
    kind = SourceDenied if isinstance(error, PermissionError) else SourceError
    return kind(f"{path}: {error.strerror}")
