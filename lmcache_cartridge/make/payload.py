"""Canonical KV as the payload of an artefact holds it: packed, and read back."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from ..artifact import int8, reading
from ..artifact.manifest import Manifest
from ..artifact.model import Fingerprint
from ..errors import ArtifactError, ModelMismatch
from ..memory import codec
from ..memory.layout import DTYPES, to_heads
from .model import CausalModel
from .progress import Progress, silent


def pack(kv: torch.Tensor, shape: Fingerprint, encoding: str = "plain") -> memoryview:
    """Return one chunk of canonical KV, in the dtype of `shape`, as `ArtifactWriter.write` takes it.

    Raises `NonFiniteKV` for numbers that int8 cannot hold.
    """
    heads = to_heads(kv)
    return codec.encode(heads, shape) if encoding == "int8" else heads.view(torch.uint8).numpy().reshape(-1).data


def read_kv(manifest: Manifest, root: Path) -> torch.Tensor:
    """Return the canonical KV `[2, L, p, H, D]` of an artefact as it is served, unchecked; see `read_checked`.

    Raises `ArtifactError` for a cartridge without KV.
    """
    if manifest.payload is None:
        raise ArtifactError(f"cartridge {manifest.name} has no KV")
    return read_payload(root / manifest.payload.file, manifest.fingerprint, manifest.payload.encoding)


def read_checked(manifest: Manifest, root: Path, model: CausalModel, progress: Progress = silent) -> torch.Tensor:
    """Return what `read_kv` does, of an artefact that was verified and is of `model`.

    Raises `ModelMismatch` for one of another model, `ArtifactError` for one that is corrupt or has no KV.
    """
    if differences := manifest.fingerprint.differences(model.fingerprint):
        raise ModelMismatch(f"{manifest.name} is not of {model.name}: {'; '.join(differences)}")
    for done, total in reading.verify(root):
        progress(f"verify {manifest.name}", done, total)
    return read_kv(manifest, root)


def read_payload(path: Path, shape: Fingerprint, encoding: str) -> torch.Tensor:
    """Return the canonical KV in a payload file."""
    with safe_open(path, framework="pt") as file:
        chunks = [file.get_tensor(name) for name in sorted(file.keys())]
    if encoding == "int8":
        chunks = [_decoded(chunk, shape) for chunk in chunks]
    return torch.cat(chunks, dim=3).permute(1, 2, 3, 0, 4)


def as_served(kv: torch.Tensor, shape: Fingerprint, encoding: str, chunk_tokens: int) -> torch.Tensor:
    """Return canonical KV as a cartridge that stores it so gives it back."""
    if encoding == "plain":
        return kv
    packed = [torch.frombuffer(pack(chunk, shape, encoding), dtype=torch.uint8) for chunk in kv.split(chunk_tokens, 2)]
    heads = [_decoded(chunk.view(shape.kv_heads, -1), shape) for chunk in packed]
    return torch.cat(heads, dim=3).permute(1, 2, 3, 0, 4)


def _decoded(packed: torch.Tensor, shape: Fingerprint) -> torch.Tensor:
    """Return int8 records `[H, bytes]` as heads `[H, 2, L, T, D]`."""
    tokens = int8.tokens(shape, packed.shape[1])
    size = (len(packed), 2, shape.layers, tokens, shape.head_size)
    heads = torch.empty(size, dtype=DTYPES[shape.dtype])
    codec.decode(packed.numpy().reshape(-1).data, heads.view(torch.uint8).view(-1), shape, tokens)
    return heads


def rounded(kv: torch.Tensor, shape: Fingerprint) -> torch.Tensor:
    """Return detached KV on the CPU in the dtype in which a cartridge of `shape` stores it."""
    return kv.detach().cpu().to(DTYPES[shape.dtype])
