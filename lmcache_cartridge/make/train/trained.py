"""Trained cartridges on disk: canonical KV that no tokens produced, written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ...artifact.fingerprint import Fingerprint
from ...artifact.identity import Identity
from ...artifact.manifest import Manifest, Provenance
from ...artifact.writing import ArtifactWriter
from ...errors import ArtifactError
from ...memory.layout import DTYPES
from .. import canary, stored
from ..model import CausalModel
from ..ordinary import ordinary_ids


def write(
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
) -> Manifest:
    """Write canonical KV `[2, L, p, H, D]` of any dtype as a trained artefact of `model` and return its manifest.

    `questions`, as ids, are those that engines may be tried with. The KV is rounded to the dtype of the model's own. Raises `ArtifactError` for KV of another shape, or not finite.
    """
    shape = model.fingerprint
    expected = (2, shape.layers, kv.shape[2] if kv.ndim == 5 else 0, shape.kv_heads, shape.head_size)
    if tuple(kv.shape) != expected:
        raise ArtifactError(f"cartridge {cartridge_id}: KV of shape {tuple(kv.shape)} for a model of {expected}")
    kv = rounded(kv, shape)
    if not kv.isfinite().all():
        raise ArtifactError(f"cartridge {cartridge_id}: its KV is not finite in {shape.dtype}")
    writer = ArtifactWriter(
        root, cartridge_id=cartridge_id, version=version, kind="trained", fingerprint=shape, chunk_tokens=chunk_tokens,
        token_ids=Identity(kv.shape[2], ordinary_ids(model)),
        document_ids=None if document_ids is None else np.array(document_ids), encoding=encoding,
    )  # fmt: skip
    with writer:
        for chunk in kv.split(chunk_tokens, dim=2):
            writer.write(stored.pack(chunk, shape, encoding))
        kv = stored.as_served(kv, shape, encoding, chunk_tokens)
        plain = encoding == "plain"
        return writer.commit(
            provenance, canary.make(model, kv, document_ids, chunk_tokens, int8=plain, questions=questions)
        )


def rounded(kv: torch.Tensor, shape: Fingerprint) -> torch.Tensor:
    """Return detached KV on the CPU in the dtype in which a cartridge of `shape` stores it."""
    return kv.detach().cpu().to(DTYPES[shape.dtype])
