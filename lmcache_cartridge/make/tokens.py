"""Cartridges of tokens only: a stored prompt prefix, which the engine computes once and its own caches keep."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ArtifactError
from ..manifest import Manifest
from ..writer import ArtifactWriter
from .model import CausalModel

MAX_FILE_BYTES = 256 << 20


def build(model: CausalModel, source: Path, root: Path, *, cartridge_id: str, version: int) -> Manifest:
    """Write the `token_ids` in `source`, JSON or a PyTorch file, as an artefact without KV and return its manifest.

    Raises `ArtifactError` for a file that holds anything else, KV included, or ids outside the model's vocabulary.
    """
    ids = read_token_ids(source)
    vocabulary = model.fingerprint.vocab_size
    if outside := [i for i in ids if not 0 <= i < vocabulary]:
        raise ArtifactError(f"{source}: token id {outside[0]} is outside the model's vocabulary of {vocabulary}")
    writer = ArtifactWriter(
        root, cartridge_id=cartridge_id, version=version, kind="tokens", fingerprint=model.fingerprint,
        token_ids=np.array(ids),
    )  # fmt: skip
    with writer:
        return writer.commit(model.provenance("register", source, source.read_bytes()))


def read_token_ids(source: Path) -> list[int]:
    """Return the list under `token_ids` in a JSON or `.pt` file. Nothing in the file is executed."""
    if not source.is_file() or source.stat().st_size > MAX_FILE_BYTES:
        raise ArtifactError(f"{source}: no such file, or larger than {MAX_FILE_BYTES} bytes")
    content = _read_json(source) if source.suffix == ".json" else _read_pt(source)
    if not isinstance(content, dict) or "token_ids" not in content:
        raise ArtifactError(f"{source}: no `token_ids` at its top level")
    if content.get("kv_cache") is not None:
        raise ArtifactError(f"{source}: holds KV beside its token ids, and this release imports no foreign KV")
    ids = content["token_ids"]
    ids = ids.flatten().tolist() if isinstance(ids, torch.Tensor) else ids
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise ArtifactError(f"{source}: `token_ids` is not a list of at least one whole number")
    return ids


def _read_json(source: Path) -> Any:
    try:
        return json.loads(source.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{source}: no JSON: {error}") from error


def _read_pt(source: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle protocol that torch itself does not write
            return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch's restricted unpickler stumbles over in a broken or hostile file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArtifactError(f"{source}: not a PyTorch file of plain tensors: {reason}") from error
