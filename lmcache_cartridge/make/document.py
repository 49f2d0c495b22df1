"""Document: a text file as a model reads it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from ..errors import ArtifactError
from .model import CausalModel


class Document(NamedTuple):
    """A text file as a model reads it."""

    path: Path
    text: str
    ids: list[int]
    """As a prompt begins: with BOS where the tokenizer adds one."""
    blake3: str
    """Of the file's bytes."""


def read_document(model: CausalModel, path: Path, *, must_fit: bool = True) -> Document:
    """Return the document in a file.

    Raises `ArtifactError` for one that is no UTF-8 text, is empty, or has no tokens; with `must_fit` also where the
    model's context has no room for it and a question.
    """
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path} is no UTF-8 text: {error}") from error
    if not text.strip():
        raise ArtifactError(f"{path} is empty; a cartridge needs a document")
    ids = model.encode(text, special=True)
    if not ids:
        raise ArtifactError(f"{path} has no tokens")
    if must_fit and model.context_tokens and len(ids) >= model.context_tokens:
        raise ArtifactError(
            f"{path} has {len(ids)} tokens; the model's context is {model.context_tokens}, less the question"
        )
    return Document(path, text, ids, blake3(raw).hexdigest())
