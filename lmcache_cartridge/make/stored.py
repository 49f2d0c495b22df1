"""Stored KV: canonical KV as an artefact's payload holds it, and read back."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from ..artifact import int8
from ..artifact.fingerprint import Fingerprint
from ..artifact.manifest import Manifest
from ..memory import codec
from ..memory.layout import DTYPES, to_heads


def pack(kv: torch.Tensor, shape: Fingerprint, encoding: str = "plain") -> memoryview:
    """Return one chunk of canonical KV, in the dtype of `shape`, as `ArtifactWriter.write` takes it.

    Raises `NonFiniteKV` for numbers that int8 cannot hold.
    """
    heads = to_heads(kv)
    return codec.encode(heads, shape) if encoding == "int8" else heads.view(torch.uint8).numpy().reshape(-1).data


def read_kv(manifest: Manifest, root: Path) -> torch.Tensor:
    """Return the canonical KV `[2, L, p, H, D]` of an artefact as it is served, unchecked; see `artifact.verify`."""
    return read_payload(root / manifest.payload.file, manifest.fingerprint, manifest.payload.encoding)


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
    heads = [_decoded(_bytes(chunk, shape), shape) for chunk in kv.split(chunk_tokens, dim=2)]
    return torch.cat(heads, dim=3).permute(1, 2, 3, 0, 4)


def _bytes(kv: torch.Tensor, shape: Fingerprint) -> torch.Tensor:
    return torch.frombuffer(pack(kv, shape, "int8"), dtype=torch.uint8).view(kv.shape[3], -1)


def _decoded(packed: torch.Tensor, shape: Fingerprint) -> torch.Tensor:
    """Return int8 records `[H, bytes]` as heads `[H, 2, L, T, D]`."""
    tokens = int8.tokens(shape, packed.shape[1])
    size = (len(packed), 2, shape.layers, tokens, shape.head_size)
    heads = torch.empty(size, dtype=DTYPES[shape.dtype])
    codec.decode(packed.numpy().reshape(-1).data, heads.view(torch.uint8).view(-1), shape, tokens)
    return heads
