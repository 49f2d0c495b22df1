"""Canonical KV written as a prefill or a trained cartridge, and one cartridge as another of a smaller encoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import torch

from .. import __version__
from ..artifact import reading
from ..artifact.chat import Chat
from ..artifact.identity import Identity
from ..artifact.manifest import Manifest, Origin, Provenance
from ..artifact.writing import ArtifactWriter
from ..errors import ArtifactError
from . import canary
from .model import CausalModel
from .payload import as_served, pack, read_kv, read_payload, rounded
from .progress import Progress, silent


def write_kv(
    model: CausalModel,
    chunks: Iterable[torch.Tensor],
    root: Path,
    provenance: Callable[[torch.Tensor], Provenance],
    *,
    cartridge_id: str,
    version: int,
    positions: int,
    token_ids: Sequence[int] | None,
    document_ids: Sequence[int] | None = None,
    chunk_tokens: int = 256,
    encoding: str = "plain",
    questions: Sequence[list[int]] = (),
    chat: Chat | None = None,
    with_canary: bool = True,
    progress: Progress = silent,
) -> Manifest:
    """Write canonical KV, in chunks of `chunk_tokens` and of the model's dtype, as an artefact; return its manifest.

    With `token_ids`, which have to be those of the KV, it is a prefill cartridge; without any a trained one, which
    carries `document_ids`. `questions`, as ids, are further ones that engines may be tried with; `chat` is how servers go on with the ids. `provenance` is asked
    for when the KV is written, with the KV as the cartridge gives it back; if it raises, nothing is left behind. Without
    a canary the model computes nothing.
    """
    shape = model.fingerprint
    with ArtifactWriter(
        root, cartridge_id=cartridge_id, version=version, kind="trained" if token_ids is None else "prefill",
        fingerprint=shape, chunk_tokens=chunk_tokens, encoding=encoding,
        token_ids=Identity(positions, model.ordinary_ids()) if token_ids is None else np.array(token_ids),
        document_ids=None if document_ids is None else np.array(document_ids), chat=chat,
    ) as writer:  # fmt: skip
        done = 0
        for chunk in chunks:
            writer.write(pack(chunk, shape, encoding))
            done += chunk.shape[2]
            progress("KV", done, positions)
        kv = read_payload(writer.payload, shape, encoding)
        about = provenance(kv)
        if not with_canary:
            return writer.commit(about)
        small = as_served(kv, shape, "int8", chunk_tokens) if encoding == "plain" and shape.planes == 2 else None
        tokens = document_ids if token_ids is None else token_ids
        return writer.commit(
            about, canary.make(model, kv, tokens, chunk_tokens, int8=small, questions=questions, progress=progress)
        )


def write_trained(
    model: CausalModel,
    kv: torch.Tensor,
    root: Path,
    provenance: Provenance,
    *,
    cartridge_id: str,
    version: int,
    chunk_tokens: int = 256,
    document_ids: Sequence[int] | None = None,
    encoding: str = "plain",
    questions: Sequence[list[int]] = (),
    progress: Progress = silent,
) -> Manifest:
    """Write canonical KV `[planes, L, p, H, D]` of any dtype as a trained cartridge, as `write_kv` does.

    It is rounded to the model's dtype. Raises `ArtifactError` for KV that is not finite then.
    """
    shape = model.fingerprint
    kv = rounded(kv, shape)
    if not kv.isfinite().all():
        raise ArtifactError(f"cartridge {cartridge_id}: its KV is not finite in {shape.dtype}")
    return write_kv(
        model, kv.split(chunk_tokens, dim=2), root, lambda kv: provenance, cartridge_id=cartridge_id, version=version,
        positions=kv.shape[2], token_ids=None, document_ids=document_ids, chunk_tokens=chunk_tokens, encoding=encoding,
        questions=questions, progress=progress,
    )  # fmt: skip


def compress(root: Path, output: Path, *, cartridge_id: str, version: int, progress: Progress = silent) -> Manifest:
    """Write the artefact at `root`, verified, as one in int8 at `output` and return its manifest.

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
        chunk_tokens=manifest.payload.chunk_tokens, encoding="int8", chat=manifest.chat,
    )  # fmt: skip
    for done, total in reading.verify(root):
        progress("verify", done, total)
    with writer:
        chunks = read_kv(manifest, root).split(manifest.payload.chunk_tokens, dim=2)
        for done, chunk in enumerate(chunks, 1):
            writer.write(pack(chunk, manifest.fingerprint, "int8"))
            progress("compress", done, len(chunks))
        provenance = msgspec.structs.replace(
            manifest.provenance,
            tool=f"lmcache-cartridge {__version__} compress",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            canary=None,
            origin=Origin("cartridge", manifest.name, manifest.digest),
        )
        return writer.commit(provenance, canary.in_int8(manifest.canary))
