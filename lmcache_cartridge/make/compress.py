"""Compress: a cartridge written again with another encoding of its payload."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from .. import __version__
from ..artifact import reading
from ..artifact.manifest import Manifest, Origin
from ..artifact.writing import ArtifactWriter
from ..errors import ArtifactError
from . import stored
from .canary import in_int8

Progress = Callable[[int, int], None]
"""Called with (chunks done, chunks in all)."""


def compress(
    root: Path,
    output: Path,
    *,
    cartridge_id: str,
    version: int,
    encoding: str = "int8",
    progress: Progress = lambda done, total: None,
) -> Manifest:
    """Write the artefact at `root`, verified, as one of another encoding at `output` and return its manifest.

    It stands for the same tokens; a trained one's are told apart from the old one's by their digests alone. Raises
    `ArtifactError` for an artefact that is corrupt, has no KV or is encoded already; leaves nothing then.
    """
    manifest = reading.load_manifest(root)
    if manifest.payload is None or manifest.payload.encoding != "plain":
        what = f"is in {manifest.payload.encoding} already" if manifest.payload else "has no KV"
        raise ArtifactError(f"cartridge {manifest.name} {what}; there is nothing to compress")
    writer = ArtifactWriter(
        output, cartridge_id=cartridge_id, version=version, kind=manifest.kind, fingerprint=manifest.fingerprint,
        token_ids=reading.load_token_ids(manifest, root), document_ids=reading.load_document_ids(manifest, root),
        chunk_tokens=manifest.payload.chunk_tokens, encoding=encoding,
    )  # fmt: skip
    for done, total in reading.verify(root):
        progress(done, 2 * total)
    with writer:
        chunks = stored.read_kv(manifest, root).split(manifest.payload.chunk_tokens, dim=2)
        for done, chunk in enumerate(chunks, 1):
            writer.write(stored.pack(chunk, manifest.fingerprint, encoding))
            progress(len(chunks) + done, 2 * len(chunks))
        origin = Origin("cartridge", manifest.name, manifest.digest)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return writer.commit(
            msgspec.structs.replace(
                manifest.provenance, tool=f"lmcache-cartridge {__version__} compress", created=created, canary=None,
                origin=origin,
            ),
            in_int8(manifest.canary),
        )  # fmt: skip
