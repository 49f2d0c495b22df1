"""Document: a text file as a model reads it, or token ids made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from ..artifact.chat import Chat
from ..errors import ArtifactError
from .foreign.ids import check_vocabulary
from .foreign.ids import read_ids as ids_in
from .model import CausalModel


class Document(NamedTuple):
    """A text file as a model reads it."""

    path: Path
    text: str
    ids: list[int]
    """As a prompt begins: with BOS where the tokenizer adds one."""
    blake3: str
    """Of the file's bytes."""
    chat: Chat | None = None
    """How servers go on with it, where the ids are a chat template's."""

    @property
    def name(self) -> str:
        """The file's."""
        return self.path.name


def read_document(model: CausalModel, path: Path | Document, raw: bytes | None = None) -> Document:
    """Return the document in a file, or in the bytes `raw` where they come from elsewhere and `path` names them. One that was
    read is returned as it is.

    Raises `ArtifactError` for one that is no UTF-8 text, is empty, has no tokens, or for which and a question the model's
    context has no room.
    """
    if isinstance(path, Document):
        return path
    digest, text = read_text(path, raw)
    ids = model.encode(text, special=True)
    if not ids:
        raise ArtifactError(f"{path} has no tokens")
    check_fits(model, path, ids)
    return Document(path, text, ids, digest)


def read_text(path: Path, raw: bytes | None = None) -> tuple[str, str]:
    """Return the blake3 and the text of a file, or of `raw`. Raises `ArtifactError` for no UTF-8 text, or an empty one."""
    raw = path.read_bytes() if raw is None else raw
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path} is no UTF-8 text: {error}") from error
    if not text.strip():
        raise ArtifactError(f"{path} is empty; a cartridge needs a document")
    return blake3(raw).hexdigest(), text


def read_ids(model: CausalModel, path: Path) -> Document:
    """Return the token ids of a file, with no text, as `foreign.ids.read_ids` reads them.

    Raises `ArtifactError` for no such file, and for ids outside the model's vocabulary or more than its context.
    """
    ids = ids_in(path)
    check_vocabulary(model, ids, path)
    check_fits(model, path, ids)
    return Document(path, "", ids, blake3(path.read_bytes()).hexdigest())


def check_fits(model: CausalModel, path: Path, ids: Sequence[int]) -> None:
    """Raise `ArtifactError` where the model's context has no room for the ids and a question."""
    if model.context_tokens and len(ids) >= model.context_tokens:
        hint = ""
        if any(each.parameters.get("factors") == "short" for each in model.fingerprint.rope):
            hint = (
                ", by longrope's short factors; give --max-model-len as the engine that will serve it has it, which is more, "
                "for the long ones"
            )
        raise ArtifactError(
            f"{path} has {len(ids)} tokens; the model's context is {model.context_tokens}, less the question{hint}"
        )
