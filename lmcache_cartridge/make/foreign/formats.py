"""What files and directories of KV by other programs hold, found but not yet fitted to a model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer."""


class Foreign(NamedTuple):
    """What a file or directory of a foreign format was found to hold."""

    form: str
    """The format, for people: `PEFT CARTRIDGE adapter`."""
    source: Path
    """The file of the KV, or of the token ids where there is no KV."""
    segments: tuple[Pairs, ...] = ()
    """KV in order of position, frozen before trainable: each has every layer. Empty for token ids alone."""
    axes: str | None = None
    """A key of `axes.READINGS` where the format leaves no doubt; None where shapes must tell."""
    token_ids: list[int] | None = None
    document_ids: list[int] | None = None
    """Ids of a trained cartridge's document, as `export` writes them."""
    base_model: str | None = None
    """The model it says it is for."""
    name: str | None = None
    """The Hub id that it was fetched by; None for what lay here."""
