"""Writers: what publishes to a library on S3, or in a directory that machines share."""

from __future__ import annotations

import os
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile

from ..artifact import files
from ..artifact.local import LocalSource, naming
from ..artifact.manifest import Manifest
from ..artifact.reading import MANIFEST, PAYLOAD
from ..artifact.writing import TOKENS
from ..errors import SourceDenied, SourceError, SourceNotFound
from . import transfer
from .locks import locked
from .s3 import S3Source
from .transfer import Progress

_WRITES = 8
"""Conditional writes at once that tell whether a server decides between them."""
_WAIT_S = 120.0
"""How long another publisher may hold a directory; it does so for milliseconds."""


class S3Writer:
    """Writes to a library under an `s3://` location. Takes over `source`. See `LibraryWriter`."""

    def __init__(self, location: str, source: S3Source) -> None:
        self._location, self._source = location, source

    def check(self) -> None:
        probe = f"library.probe.{uuid.uuid4().hex}"  # its own, so that none but these writes meet
        self._source.upload(self._location, probe, BytesIO())
        known = self._source.revision(self._location, probe)
        try:
            with ThreadPoolExecutor(_WRITES) as threads:
                writes = [threads.submit(self.swap, probe, uuid.uuid4().bytes, known) for _ in range(_WRITES)]
                done = sum(write.result() is not None for write in writes)
        except (SourceDenied, SourceNotFound):
            raise
        except SourceError as error:
            reason = str(error)
        else:
            if done == 1:
                return
            reason = f"{done} of {_WRITES} at once were told that they were first"
        finally:
            with suppress(SourceError):  # who may not delete leaves an object of 16 bytes
                self._source.delete(self._location, probe)
        raise SourceError(
            f"{self._location} cannot be published to, since its server does not decide between conditional writes "
            f"(If-Match): {reason}. Publish to another server or to a shared directory; cartridges that `publish s3://...` stores here "
            "can be pulled, and named by their s3:// URL"
        )

    def swap(self, file: str, data: bytes, known: str | None) -> str | None:
        return self._source.swap(self._location, file, data, known)

    def store(self, root: Path, manifest: Manifest, location: str, progress: Progress) -> None:
        """Store the artefact at `root` as `manifest` numbers it; see `transfer.push`. No change where it is there already."""
        transfer.push(root, location, self._source, progress=progress, manifest=manifest)

    def delete(self, location: str) -> None:
        """Delete an artefact. No change where it is not there."""
        for file in (MANIFEST, TOKENS, PAYLOAD):
            self._source.delete(location, file)

    def close(self) -> None:
        """Give back connections and threads."""
        self._source.close()


class DirectoryWriter:
    """Writes to a library in a directory. See `LibraryWriter`."""

    def __init__(self, location: str) -> None:
        self._root, self._source = Path(location), LocalSource()

    def check(self) -> None:
        """A lock decides, where one may write."""
        with naming(self._root), self._locked():
            TemporaryFile(dir=self._root).close()

    def swap(self, file: str, data: bytes, known: str | None) -> str | None:
        path = self._root / file
        with naming(path), self._locked():
            there = path.stat().st_mtime_ns if path.exists() else 0
            if (self._source.revision(str(self._root), file) if there else None) != known:
                return None
            with files.replacing(path) as partial:
                files.write(partial, [data])
                # No two contents have one revision, also within a tick of the file system's clock.
                changed_ns = max(partial.stat().st_mtime_ns, there + 1)
                os.utime(partial, ns=(changed_ns, changed_ns))
            files.sync_directory(self._root)
            return self._source.revision(str(self._root), file)

    def store(self, root: Path, manifest: Manifest, location: str, progress: Progress) -> None:
        """Store the artefact at `root` as `manifest` numbers it, whole or not at all, having verified it.

        No change where it is there already.
        """
        target = Path(location)
        with naming(target):
            if not transfer.holds(target, manifest):
                transfer.fetch(manifest, str(root), self._source, target, progress, self._locked())

    def delete(self, location: str) -> None:
        """Delete an artefact, and what a publisher that was killed left of it."""
        path = Path(location)
        with suppress(OSError):  # another does the same, or has this id too
            for part in path.parent.glob(f"*{path.name}*"):
                shutil.rmtree(part)
            os.removedirs(path.parent)

    def close(self) -> None:
        """Nothing to give back."""

    def _locked(self) -> AbstractContextManager[int]:
        self._root.mkdir(parents=True, exist_ok=True)
        return locked(self._root / "library.lock", _WAIT_S)
