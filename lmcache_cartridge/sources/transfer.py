"""Transfer: artefacts pushed to S3, and fetched from S3 or a directory into another, each whole or not at all."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..artifact import files, reading
from ..artifact.bytesource import ByteSource, read_whole
from ..artifact.manifest import MAX_MANIFEST_BYTES, Manifest, check_id, decode
from ..errors import ArtifactError, CartridgeError, CartridgeExists, CartridgeNotFound, SourceNotFound
from ..library.registry import Registry
from .locks import locked
from .s3 import S3Source

_WINDOW_BYTES = 64 << 20
_PARTIAL = ".fetch"

Progress = Callable[[str, int, int], None]
"""Gets what is being done, how much of it, of how much: bytes, or chunks when verifying."""


class Moved(NamedTuple):
    """What a push or a pull did."""

    manifest: Manifest
    """Of what is there now."""
    root: Path
    """Where it is here."""
    changed: bool
    """False where it was there already."""


def push(
    root: Path,
    location: str,
    source: S3Source,
    *,
    progress: Progress,
    manifest: Manifest | None = None,
) -> Moved:
    """Store the artefact at `root` under an `s3://` location, manifest last, having verified every checksum.

    `manifest` is its own with another id or version, which are no part of its digest.
    Raises `CartridgeExists` where an artefact of other content is there. A push that fails leaves files without a manifest, which are
    no artefact; the next one replaces them.
    """
    there = _manifest_at(location, source)
    found = verified(root, progress)
    manifest = manifest or found
    if there and there.digest != manifest.digest:  # else another push may just have completed the same
        raise CartridgeExists(
            f"{location} holds {there.name} of other content (digest {there.digest[:16]}..., that of {manifest.name} is "
            f"{manifest.digest[:16]}...); push to another prefix, or delete what is there, which fails requests that use it"
        )
    if there and _is_complete(there, location, source):
        return Moved(there, root, False)
    if found.digest != manifest.digest:
        raise ArtifactError(f"{root} was replaced while it was pushed; push it again")
    for file in [*reading.id_files(manifest), *([reading.PAYLOAD] if manifest.payload else [])]:
        with (root / file).open("rb") as opened:
            source.upload(location, file, opened, _counted(file, os.fstat(opened.fileno()).st_size, progress))
    if manifest.payload:
        _check_size(manifest, location, source)
    source.upload(location, reading.MANIFEST, BytesIO(manifest.encode()))
    return Moved(manifest, root, True)


def pull(
    location: str,
    source: S3Source,
    registry: Registry,
    directory: Path,
    *,
    progress: Progress,
    name: str | None = None,
    promote: bool = True,
) -> Moved:
    """Bring the artefact at an `s3://` location to `directory/<id>/<version>`, verify every checksum and register it.

    `name` is the id it gets here, by default its own; `promote` as for `Registry.register`. Raises `CartridgeExists` where other content has this id and
    version. Whatever fails, nothing half-made is seen or left; what a killed pull left goes with the next of that id.
    """
    manifest = _manifest_at(location, source)
    if manifest is None:
        raise SourceNotFound(f"{location} holds no {reading.MANIFEST}; is this where a cartridge was pushed?")
    if name is not None:
        manifest = msgspec.structs.replace(manifest, id=check_id(name))
    if manifest.id in registry.labels():
        raise CartridgeExists(
            f"{manifest.id} is a label here and cannot be the id of a cartridge too; give another --id"
        )
    root = directory / manifest.id / str(manifest.version)
    hint = f"pull it under another id with --id, or first `lmcache-cartridge remove {manifest.name} --delete-files`"
    root.parent.mkdir(parents=True, exist_ok=True)
    with locked(root.parent):
        with suppress(CartridgeNotFound):
            found = registry.find(manifest.name)
            if found.digest != manifest.digest:
                raise CartridgeExists(f"{manifest.name} is registered with other content; {hint}")
            here = Path(found.location)
            if holds(here, manifest):
                return Moved(manifest, here, False)
        if root.exists() and not holds(root, manifest):
            raise CartridgeExists(f"{root} exists with other content; {hint}")
        if changed := not root.exists():
            for left in root.parent.glob(f".{root.name}.*{_PARTIAL}"):
                shutil.rmtree(left, ignore_errors=True)
            fetch(manifest, location, source, root, progress, nullcontext())
        else:
            verified(root, progress)
        registry.register(root, promote=promote)
    return Moved(manifest, root, changed)


def fetch(
    manifest: Manifest,
    location: str,
    source: ByteSource,
    root: Path,
    progress: Progress,
    alone: AbstractContextManager[Any],
) -> None:
    """Bring the artefact at `location` to the directory `root`, whole or not at all, every byte checked.

    No change where it is there by then; else it takes the place of what is there. `alone` is held while names change.
    """
    partial = root.parent / f".{root.name}.{uuid.uuid4().hex}{_PARTIAL}"
    replaced = partial.with_suffix(".replaced")
    try:
        partial.mkdir(parents=True)
        for file, limit_bytes in reading.id_files(manifest).items():
            files.write(partial / file, [read_whole(source, location, file, limit_bytes)])
        if manifest.payload:
            files.write(partial / manifest.payload.file, _windows(manifest, location, source, progress))
        files.write(partial / reading.MANIFEST, [manifest.encode()])
        verified(partial, progress)
        with alone:
            if not holds(root, manifest):  # else another was first
                if root.exists():  # a part of it is missing
                    root.rename(replaced)
                partial.rename(root)
        files.sync_directory(root.parent)
    finally:
        for left in (partial, replaced):
            shutil.rmtree(left, ignore_errors=True)


def _windows(manifest: Manifest, location: str, source: ByteSource, progress: Progress) -> Iterator[memoryview]:
    """Yield the payload window by window; each is overwritten by the next."""
    file, total = manifest.stored.file, manifest.payload_bytes
    _check_size(manifest, location, source)
    window = memoryview(bytearray(min(total, _WINDOW_BYTES)))
    for start in range(0, total, _WINDOW_BYTES):
        part = window[: min(_WINDOW_BYTES, total - start)]
        source.read_into(location, file, reading.ByteRange(start, start + len(part)), part)
        yield part
        progress(file, start + len(part), total)


def verified(root: Path, progress: Progress) -> Manifest:
    """Return the manifest of the artefact at `root`, having checked every byte. Raises `ArtifactError`."""
    for done, total in reading.verify(root):
        progress("verify", done, total)
    return reading.load_manifest(root)


def holds(root: Path, manifest: Manifest) -> bool:
    """Return whether the artefact at `root` is there, of the right size, and has the manifest's content."""
    try:
        reading.load_manifest(root, manifest.digest)
    except CartridgeError:
        return False
    return True


def _manifest_at(location: str, source: S3Source) -> Manifest | None:
    try:
        data = read_whole(source, location, reading.MANIFEST, MAX_MANIFEST_BYTES)
    except SourceNotFound:
        return None
    return decode(data, f"{location}/{reading.MANIFEST}")


def _is_complete(manifest: Manifest, location: str, source: S3Source) -> bool:
    """Return whether the files that a manifest there names are there too, the payload in its size."""
    try:
        for file in reading.id_files(manifest):
            source.size(location, file)
        return not manifest.payload or source.size(location, manifest.payload.file) == manifest.payload.size_bytes
    except SourceNotFound:
        return False


def _check_size(manifest: Manifest, location: str, source: ByteSource) -> None:
    file = manifest.stored.file
    reading.check_size(manifest, source.size(location, file), f"{location}/{file}")


def _counted(file: str, total: int, progress: Progress) -> Callable[[int], None]:
    """Return what turns bytes as they go, told by several threads, into progress."""
    done, lock = 0, threading.Lock()

    def count(more: int) -> None:
        nonlocal done
        with lock:
            done += more
            progress(file, done, total)

    return count
