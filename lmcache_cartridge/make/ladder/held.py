"""Held: a cartridge on a server, with what may be asked about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ...artifact.manifest import Manifest

_WINDOW = 12
"""Tokens of a question that is a part of the document."""


class Held(NamedTuple):
    """A cartridge on the server, made of a document by prefill."""

    name: str
    """`id@version`."""
    ids: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]
    """Token ids that may follow it: on its facts, or parts of it."""
    texts: tuple[str, ...]
    """Questions as a user's message."""
    chunk: int | None = None
    """Tokens a chunk, where that is known."""
    manifest: Manifest | None = None
    root: Path | None = None

    @property
    def whole(self) -> int | None:
        """Positions in whole chunks, which are injected; None where the chunk size is not known."""
        return None if self.chunk is None else len(self.ids) // self.chunk * self.chunk


def parts(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Return parts of a document as questions: a model that reads words again looks there for what follows."""
    starts = [max(1, int(share * (len(ids) - _WINDOW))) for share in (0.2, 0.5, 0.8)]
    return [tuple(ids[start : start + _WINDOW]) for start in starts]
