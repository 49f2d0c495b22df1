"""Cartridges of tokens only: a stored prompt prefix, which the engine computes once and its own caches keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from ..artifact.manifest import Manifest, Provenance
from ..artifact.writing import ArtifactWriter
from ..errors import ArtifactError, ForeignFormatError
from .foreign.pickle import load
from .model import CausalModel

IDS = "prefix_token_ids.json"
"""The name under which token ids lie beside KV that they belong to."""
DOCUMENT_IDS = "document_token_ids.json"
"""The name under which `export` writes the ids of a trained cartridge's document."""
MAX_FILE_BYTES = 256 << 20
MAX_IDS = 1 << 22


def build(model: CausalModel, source: Path, root: Path, *, cartridge_id: str, version: int) -> Manifest:
    """Write the `token_ids` in `source`, JSON or a PyTorch file, as an artefact without KV and return its manifest.

    Raises `ArtifactError` for a file that holds anything else, KV included, or ids outside the model's vocabulary.
    """
    ids, digest = read_token_ids(source), blake3(source.read_bytes()).hexdigest()
    provenance = model.provenance("register", document=source.name, document_blake3=digest)
    return write(model, ids, root, provenance, source=source, cartridge_id=cartridge_id, version=version)


def write(
    model: CausalModel,
    ids: list[int],
    root: Path,
    provenance: Provenance,
    *,
    source: Path,
    cartridge_id: str,
    version: int,
) -> Manifest:
    """Write ids that `source` holds as an artefact without KV. Raises `ArtifactError` for ids the model has not."""
    check_vocabulary(model, ids, source)
    writer = ArtifactWriter(
        root,
        cartridge_id=cartridge_id,
        version=version,
        kind="tokens",
        fingerprint=model.fingerprint,
        token_ids=np.array(ids),
    )
    with writer:
        return writer.commit(provenance)


def check_vocabulary(model: CausalModel, ids: list[int], source: Path) -> None:
    """Raise `ArtifactError` unless the model has every id."""
    vocabulary = model.fingerprint.vocab_size
    if outside := [i for i in ids if not 0 <= i < vocabulary]:
        raise ArtifactError(f"{source}: token id {outside[0]} is outside the model's vocabulary of {vocabulary}")


def read_token_ids(source: Path) -> list[int]:
    """Return the list under `token_ids` in a JSON or `.pt` file. Nothing in the file is executed."""
    if not source.is_file() or source.stat().st_size > MAX_FILE_BYTES:
        raise ArtifactError(f"{source}: no such file, or larger than {MAX_FILE_BYTES} bytes")
    content = read_json(source) if source.suffix == ".json" else load(source)
    if not isinstance(content, dict) or "token_ids" not in content:
        raise ArtifactError(f"{source}: no `token_ids` at its top level")
    if content.get("kv_cache") is not None:
        raise ArtifactError(f"{source}: holds KV beside its token ids; `lmcache-cartridge import` takes both")
    return plain_ids(content["token_ids"], source)


def read_ids(source: Path) -> list[int]:
    """Return the ids in a JSON file that is a list of them, or has one under `token_ids`."""
    content = read_json(source)
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
