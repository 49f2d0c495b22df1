"""Document: a text file as a model reads it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from ..errors import ArtifactError
from .model import CausalModel


class Document(NamedTuple):
    """A text file, its text and its ids as a prompt begins."""

    path: Path
    text: str
    ids: list[int]
    blake3: str
    """Of the file's bytes."""


def read(model: CausalModel, path: Path) -> Document:
    """Return the document in a file. Raises `ArtifactError` for one that is no UTF-8 text, empty, or has no tokens."""
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
    return Document(path, text, ids, blake3(raw).hexdigest())


def read_fitting(model: CausalModel, path: Path) -> Document:
    """Return the document in a file as `read` does; `ArtifactError` too where the model's context has no room for it."""
    document = read(model, path)
    if model.context_tokens and len(document.ids) >= model.context_tokens:
        raise ArtifactError(
            f"{path} has {len(document.ids)} tokens; the model's context is {model.context_tokens}, less the question"
        )
    return document
