"""A transformers cache as a cartridge: what a KV compression left of a document, wherever its keys are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..artifact.manifest import Manifest
from ..errors import ArtifactError
from ..memory.rope import shift
from .document import check_fits
from .model import CausalModel
from .write import write_trained


def from_cache(
    model: CausalModel,
    cache: Any,
    root: Path,
    *,
    cartridge_id: str,
    version: int,
    next_position: int | None = None,
    document_ids: Sequence[int] | None = None,
    chunk_tokens: int = 256,
) -> Manifest:
    """Write a `DynamicCache` of `model` and one document as a trained cartridge at `root` and return its manifest.

    Keys and values are `[1, H, T, D]` in every layer; each head may have kept other positions, as many as the others.
    `next_position` is the position that a question has behind this cache, T unless it is given: where a compression left
    keys as they were rotated among N tokens, N. All keys are moved by T - N, so that a question at T is as far from them. The
    cache is not changed. Registers nothing. Raises `ArtifactError` for a cache of another shape, ragged, not finite or longer
    than the model, and `UnsupportedModel` for a model whose keys cannot be moved; leaves nothing then.
    """
    model.need_values("from_cache")
    of = model.fingerprint
    wanted = {(1, of.kv_heads, of.head_size)}
    try:
        found = {tuple(layer.keys.shape[:2] + layer.keys.shape[3:]) for layer in cache.layers}
        kv = model.canonical(cache)
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:
        raise ArtifactError(
            f"cartridge {cartridge_id}: no cache with as many positions in every layer and head: {error}"
        ) from None
    if len(cache.layers) != of.layers or found != wanted:
        raise ArtifactError(
            f"cartridge {cartridge_id}: a cache of {len(cache.layers)} layers with {found} sequences, heads and head size; "
            f"{model.name} has {of.layers} with {wanted}"
        )
    check_fits(model, root, range(kv.shape[2]))
    if next_position is not None:
        kv = shift(kv, of, kv.shape[2] - next_position)
    return write_trained(
        model, kv, root, model.provenance("from_cache"), cartridge_id=cartridge_id, version=version,
        chunk_tokens=chunk_tokens, document_ids=document_ids,
    )  # fmt: skip
