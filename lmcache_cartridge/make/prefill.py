"""Build a cartridge by prefill: the KV of a document, computed once by the model itself, checked before it counts."""

from __future__ import annotations

from pathlib import Path

import torch

from ..artifact.chat import Chat
from ..artifact.manifest import Canary, Manifest, Provenance
from ..errors import CanaryFailed
from .canary import TEXTS
from .chat import question_ids
from .document import Document, read_document
from .model import CausalModel
from .progress import Progress, silent
from .write import write_kv

CANARY = TEXTS[0]
"""Text that follows the document in the canary, unless the author gives a better one."""


def build(
    model: CausalModel,
    document: Path | Document,
    root: Path,
    *,
    cartridge_id: str,
    version: int,
    chunk_tokens: int = 256,
    canary: str = CANARY,
    encoding: str = "plain",
    progress: Progress = silent,
) -> Manifest:
    """Write the KV of `document`, a text file or what was read of one, under `model` as an artefact at `root` and return its manifest.

    Before the artefact appears, the *canary* runs: the logits of `canary` after the KV as it is served are compared with
    those of a plain forward pass over document and `canary`. Raises `CanaryFailed`, leaving nothing behind, unless
    the top token at its end is the same; `ArtifactError` for a document that is no text or empty, or longer than the
    model's context. Registers nothing.
    """
    read = read_document(model, document)

    def checked(kv: torch.Tensor) -> Provenance:
        result = passed_canary(model, read.ids, kv, canary, cartridge_id, read.chat)
        return model.provenance("build", document=read.path.name, document_blake3=read.blake3, canary=result)

    return write_kv(
        model, model.prefill(read.ids, chunk_tokens), root, checked, cartridge_id=cartridge_id, version=version,
        positions=len(read.ids), token_ids=read.ids, chunk_tokens=chunk_tokens, encoding=encoding,
        questions=questions(model, canary, read.chat), chat=read.chat, progress=progress,
    )  # fmt: skip


def questions(model: CausalModel, canary: str, chat: Chat | None) -> list[list[int]]:
    """Return what engines may be tried with beside words of the document: `canary`, in a chat as users ask, and others."""
    texts = [canary] if chat is None else [canary, *TEXTS]
    return [question_ids(model, text, chat) for text in texts]


def passed_canary(
    model: CausalModel, ids: list[int], kv: torch.Tensor, question: str, cartridge_id: str, chat: Chat | None = None
) -> Canary:
    """Compare the logits of `question` after canonical KV with those after the tokens `ids` themselves.

    In a `chat` the question is a user's message. Raises `CanaryFailed` where the top token at the end is another.
    """
    asked = question_ids(model, question, chat)
    after_kv, plain = model.logits_after(kv, asked), model.logits(ids + asked, len(asked))
    apart = float((after_kv - plain).abs().max())
    if after_kv[-1].argmax() != plain[-1].argmax():
        raise CanaryFailed(
            f"cartridge {cartridge_id}: after the stored KV the model's next token differs from the one after the "
            f"document itself (largest logit difference {apart:.3g}). If two tokens are nearly tied, try another "
            "--canary text or --dtype float32; nothing was registered"
        )
    return Canary(question=question, top1_equal=True, max_abs_logit_difference=apart)
