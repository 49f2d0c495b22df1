"""Neighbours: registered cartridges and documents made into what stands around a cartridge while it is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from ...artifact import reading
from ..compact.job import make
from ..compact.wanted import Wanted
from ..document import read_document
from ..model import CausalModel
from ..payload import read_checked
from ..progress import Progress, silent
from ..questions import Question
from .beside import Neighbour
from .initial import prefilled
from .lesson import Lesson

Ask = Callable[[str], Sequence[Question]]
"""Returns questions on a document, from its text; none where nobody knows any."""


class Teach(Protocol):
    """Returns what the model predicts at questions on the document `ids`, whose KV is given."""

    def __call__(self, ids: list[int], questions: Sequence[Question], *, kv: torch.Tensor) -> Lesson: ...


def of_cartridge(model: CausalModel, root: Path, ask: Ask, teach: Teach, *, progress: Progress = silent) -> Neighbour:
    """Return the cartridge at `root`, verified, as a neighbour; asked nothing if it does not carry its document's ids.

    Raises `ModelMismatch` for one of another model, `ArtifactError` for one that is corrupt or has no KV.
    """
    manifest = reading.load_manifest(root)
    kv = read_checked(manifest, root, model, progress).float()
    is_prefill = manifest.kind == "prefill"
    found = reading.load_token_ids(manifest, root) if is_prefill else reading.load_document_ids(manifest, root)
    ids = [] if found is None else found.tolist()
    questions = ask(model.tokenizer.decode(ids, skip_special_tokens=True))
    if not questions:
        return Neighbour(kv, Lesson([], None, None))
    return Neighbour(kv, teach(ids, questions, kv=kv if is_prefill else prefilled(model, ids, progress)))


def of_document(
    model: CausalModel,
    path: Path,
    positions: int,
    form: str,
    ask: Ask,
    teach: Teach,
    *,
    progress: Progress = silent,
) -> Neighbour:
    """Return a document as a neighbour, compacted to `positions`; one that is no longer than that stays whole."""
    document = read_document(model, path)
    kv = prefilled(model, document.ids, progress)
    questions = ask(document.text)
    small = kv
    if positions < len(document.ids):
        wanted = Wanted(positions, questions, form)
        small = make(model, kv, document.ids, wanted, progress=progress).kv.float()
    return Neighbour(small, teach(document.ids, questions, kv=kv) if questions else Lesson([], None, None))
