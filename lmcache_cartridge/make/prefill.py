"""Build a cartridge by prefill: the KV of a document, computed once by the model itself, checked before it counts."""

from __future__ import annotations

from pathlib import Path

import torch

from ..artifact.manifest import Canary, Manifest, Provenance
from ..errors import CanaryFailed
from .document import read_document
from .model import CausalModel
from .progress import Progress, silent
from .write import write_kv

CANARY = "\n\nQuestion: what does this document say?\nAnswer:"
"""Text that follows the document in the canary, unless the author gives a better one."""


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
    progress: Progress = silent,
) -> Manifest:
    """Write the KV of the text file `document` under `model` as an artefact at `root` and return its manifest.

    Before the artefact appears, the *canary* runs: the logits of `canary` after the KV as it is served are compared with
    those of a plain forward pass over document and `canary`. Raises `CanaryFailed`, leaving nothing behind, unless
    the top token at its end is the same; `ArtifactError` for a document that is no text or empty, or longer than the
    model's context. Registers nothing.
    """
    read = read_document(model, document)

    def checked(kv: torch.Tensor) -> Provenance:
        result = passed_canary(model, read.ids, kv, canary, cartridge_id)
        return model.provenance("build", document=document.name, document_blake3=read.blake3, canary=result)

    return write_kv(
        model, model.prefill(read.ids, chunk_tokens), root, checked, cartridge_id=cartridge_id, version=version,
        positions=len(read.ids), token_ids=read.ids, chunk_tokens=chunk_tokens, encoding=encoding,
        questions=[model.encode(canary, special=False)], progress=progress,
    )  # fmt: skip


def passed_canary(model: CausalModel, ids: list[int], kv: torch.Tensor, question: str, cartridge_id: str) -> Canary:
    """Return what `run_canary` does. Raises `CanaryFailed` where the top token at the question's end is another."""
    result = run_canary(model, ids, kv, question)
    if not result.top1_equal:
        raise CanaryFailed(
            f"cartridge {cartridge_id}: after the stored KV the model's next token differs from the one after the "
            f"document itself (largest logit difference {result.max_abs_logit_difference:.3g}). If two tokens are "
            "nearly tied, try another --canary text or --dtype float32; nothing was registered"
        )
    return result


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
