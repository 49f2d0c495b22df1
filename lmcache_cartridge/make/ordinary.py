"""Ordinary ids: the token ids that a trained cartridge's identity tokens are drawn from."""

from __future__ import annotations

import re

import numpy as np

from .model import CausalModel

_MARK = re.compile(r"<[^<>]+>|\[[A-Z_]+\]")
"""Texts that templates, tools and images use as marks even where a tokenizer does not list them as special."""


def ordinary_ids(model: CausalModel) -> np.ndarray:
    """Return the ids that mean nothing to a server: words, no special, added or mark-like tokens, no unused ids."""
    tokenizer = model.tokenizer
    taken = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    size = min(len(tokenizer), model.fingerprint.vocab_size)
    texts = tokenizer.convert_ids_to_tokens(range(size))
    return np.array([i for i, text in enumerate(texts) if text and i not in taken and not _MARK.fullmatch(text)])
