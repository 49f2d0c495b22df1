"""Build a cartridge by prefill: the KV of a document, computed once by the model itself, checked before it counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..artifact.manifest import Canary, Manifest
from ..artifact.writing import ArtifactWriter
from ..errors import CanaryFailed
from . import canary as served
from . import stored
from .document import read_fitting
from .model import CausalModel

CANARY = "\n\nQuestion: what does this document say?\nAnswer:"
"""Text that follows the document in the canary, unless the author gives a better one."""

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""


def build(
    model: CausalModel,
    document: Path,
    root: Path,
    *,
    cartridge_id: str,
    version: int,
    chunk_tokens: int = 256,
    canary: str = CANARY,
    encoding: str = "plain",
    progress: Progress = lambda done, total: None,
) -> Manifest:
    """Write the KV of the text file `document` under `model` as an artefact at `root` and return its manifest.

    Before the artefact appears, the *canary* runs: the logits of `canary` after the KV as it is served are compared with
    those of a plain forward pass over document and `canary`. Raises `CanaryFailed`, leaving nothing behind, unless
    the top token at its end is the same; `ArtifactError` for a document that is no text or empty.
    """
    read = read_fitting(model, document)
    ids = read.ids
    writer = ArtifactWriter(
        root,
        cartridge_id=cartridge_id,
        version=version,
        kind="prefill",
        fingerprint=model.fingerprint,
        token_ids=np.array(ids),
        chunk_tokens=chunk_tokens,
        encoding=encoding,
    )
    with writer:
        done = 0
        for kv in model.prefill(ids, chunk_tokens):
            writer.write(stored.pack(kv, model.fingerprint, encoding))
            done += kv.shape[2]
            progress(done, len(ids))
        kv = stored.read_payload(writer.payload, model.fingerprint, encoding)
        result = run_canary(model, ids, kv, canary)
        if not result.top1_equal:
            raise CanaryFailed(
                f"cartridge {cartridge_id}: after the stored KV the model's next token differs from the one after the "
                f"document itself (largest logit difference {result.max_abs_logit_difference:.3g}). If two tokens are "
                "nearly tied, try another --canary text or --dtype float32; nothing was registered"
            )
        return writer.commit(
            model.provenance("build", document=document.name, document_blake3=read.blake3, canary=result),
            served.make(
                model, kv, ids, chunk_tokens, int8=encoding == "plain", questions=[model.encode(canary, special=False)]
            ),
        )


def run_canary(model: CausalModel, ids: list[int], kv: torch.Tensor, question: str) -> Canary:
    """Compare the logits of `question` after canonical KV with those after the tokens `ids` themselves."""
    question_ids = model.encode(question, special=False)
    after_kv = model.logits_after(kv, question_ids)
    plain = model.logits(ids + question_ids, len(question_ids))
    return Canary(
        question=question,
        top1_equal=bool(after_kv[-1].argmax() == plain[-1].argmax()),
        max_abs_logit_difference=float((after_kv - plain).abs().max()),
    )
