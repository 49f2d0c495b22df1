"""Token ids in files, alone or beside the KV that they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import ArtifactError, ForeignFormatError
from ..model import CausalModel

IDS = "prefix_token_ids.json"
"""The name under which token ids lie beside KV that they belong to."""
DOCUMENT_IDS = "document_token_ids.json"
"""The name under which `export` writes the ids of a trained cartridge's document."""
MAX_FILE_BYTES = 256 << 20
MAX_IDS = 1 << 22


def check_vocabulary(model: CausalModel, ids: list[int], source: Path) -> None:
    """Raise `ArtifactError` unless the model has every id."""
    vocabulary = model.fingerprint.vocab_size
    if outside := [i for i in ids if not 0 <= i < vocabulary]:
        raise ArtifactError(f"{source}: token id {outside[0]} is outside the model's vocabulary of {vocabulary}")


def read_ids(source: Path) -> list[int]:
    """Return the ids in a file: a `.npy` array, a JSON list, one under `token_ids`, or numbers with spaces between them.

    Raises `ForeignFormatError` for anything else.
    """
    try:
        if source.suffix == ".npy":
            content = np.load(source, allow_pickle=False).tolist()
        elif source.suffix == ".json" or source.read_bytes().lstrip().startswith(b"["):
            content = read_json(source)
        else:
            content = [int(word) for word in source.read_text(encoding="utf-8").split()]
    except (ValueError, EOFError, OSError) as error:
        raise ForeignFormatError(f"{source} is no list of token ids: {error}") from None
    if isinstance(content, dict) and content.get("kv_cache") is not None:
        raise ForeignFormatError(f"{source}: KV in JSON is no known format; save it as a .pt file of tensors")
    return plain_ids(content.get("token_ids") if isinstance(content, dict) else content, source)


def ids_beside(directory: Path, name: str) -> list[int] | None:
    """Return the ids in the file `name` in a directory, or None if it is not there."""
    return read_ids(directory / name) if (directory / name).is_file() else None


def plain_ids(ids: Any, source: Path) -> list[int]:
    """Return token ids, a list or a tensor, as a list. Raises `ForeignFormatError` for anything else."""
    if isinstance(ids, torch.Tensor) and ids.numel() <= MAX_IDS:
        ids = ids.flatten().tolist()
    if not isinstance(ids, list) or not 0 < len(ids) <= MAX_IDS or any(type(i) is not int for i in ids):
        raise ForeignFormatError(f"{source}: `token_ids` is not a list of at least one whole number")
    return ids


def read_json(source: Path) -> Any:
    """Return what a JSON file of at most `MAX_FILE_BYTES` holds. Raises `ForeignFormatError` for one that is none."""
    try:
        if source.stat().st_size > MAX_FILE_BYTES:
            raise ForeignFormatError(f"{source}: larger than {MAX_FILE_BYTES} bytes")
        return json.loads(source.read_bytes())
    except OSError as error:
        raise ForeignFormatError(f"{source}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ForeignFormatError(f"{source}: no JSON: {error}") from error
