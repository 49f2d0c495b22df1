"""Token ids in files, alone or beside the KV that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from ...errors import ArtifactError, ForeignFormatError
from ..model import CausalModel

IDS = "prefix_token_ids.json"
"""The name under which token ids lie beside KV that they belong to."""
DOCUMENT_IDS = "document_token_ids.json"
"""The name under which `export` writes the ids of a trained cartridge's document."""
MAX_FILE_BYTES = 256 << 20
MAX_IDS = 1 << 22
Ids = Annotated[list[int], msgspec.Meta(min_length=1, max_length=MAX_IDS)]


class _Named(msgspec.Struct):
    token_ids: Ids


_decode_ids = msgspec.json.Decoder(Ids | _Named).decode


def check_vocabulary(model: CausalModel, ids: list[int], source: Path) -> None:
    """Raise `ArtifactError` unless the model has every id."""
    vocabulary = model.fingerprint.vocab_size
    if outside := [i for i in ids if not 0 <= i < vocabulary]:
        raise ArtifactError(f"{source}: token id {outside[0]} is outside the model's vocabulary of {vocabulary}")


def read_ids(source: Path) -> list[int]:
    """Return the ids in a JSON file: a list, or one under `token_ids`. Raises `ForeignFormatError` for anything else."""
    found = read_json(source, _decode_ids)
    return found.token_ids if isinstance(found, _Named) else found


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


def read_json(source: Path, decode: Callable[[bytes], Any] = msgspec.json.decode) -> Any:
    """Return what `decode` finds in a JSON file of at most `MAX_FILE_BYTES`. Raises `ForeignFormatError` where it finds nothing."""
    try:
        if source.stat().st_size > MAX_FILE_BYTES:
            raise ForeignFormatError(f"{source}: larger than {MAX_FILE_BYTES} bytes")
        return decode(source.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ForeignFormatError(f"{source}: not the JSON that is wanted: {error}") from error
