"""Makers that the tests share: real artefacts, engines, damage and threads. Plain functions, no state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from lmcache_cartridge.artifact.identity import Identity
from lmcache_cartridge.artifact.manifest import Manifest, Provenance
from lmcache_cartridge.artifact.model import Fingerprint, Rotation
from lmcache_cartridge.artifact.writing import ArtifactWriter
from lmcache_cartridge.library.index import Hasher
from lmcache_cartridge.memory.codec import encode
from lmcache_cartridge.memory.described import Engine
from lmcache_cartridge.memory.layout import DTYPES, to_heads

if TYPE_CHECKING:
    from lmcache_cartridge.artifact.canary import ServedCanary

VOCABULARY = 1000


class Made(NamedTuple):
    """An artefact on disk: its manifest and the KV that was written, canonical `[2, L, T, H, D]`."""

    manifest: Manifest
    kv: torch.Tensor

    @property
    def digest(self) -> str:
        return self.manifest.digest


def make_rope(*, rotary_dim: int = 64) -> Rotation:
    """Return plain RoPE with theta 10000."""
    inv_freq = tuple(10000.0 ** (-i / rotary_dim) for i in range(0, rotary_dim, 2))
    return Rotation("default", inv_freq, 1.0, {"rope_theta": 10000.0, "rope_type": "default"})


def make_fingerprint(
    *, layers: int = 3, kv_heads: int = 2, head_size: int = 64, dtype: str = "bfloat16", rope: Rotation | None = None,
    pairing: str | None = None,
) -> Fingerprint:  # fmt: skip
    """Return the fingerprint of a small Llama, all of whose layers rotate where it is known how."""
    rope = rope or msgspec.structs.replace(make_rope(rotary_dim=head_size), pairing=pairing)
    if rope.pairing is not None:
        rope = msgspec.structs.replace(rope, layers=tuple(range(layers)))
    return Fingerprint(
        architecture="LlamaForCausalLM",
        layers=layers,
        kv_heads=kv_heads,
        head_size=head_size,
        dtype=dtype,
        vocab_size=VOCABULARY,
        rope=(rope,),
        config_digest="c0" * 32,
        weights_digest="d1" * 32,
    )


def make_kv(fingerprint: Fingerprint, positions: int, seed: int) -> torch.Tensor:
    """Return random canonical KV, no two elements alike by intent."""
    shape = (2, fingerprint.layers, positions, fingerprint.kv_heads, fingerprint.head_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[fingerprint.dtype])


def make_ids(positions: int, seed: int) -> list[int]:
    """Return random token ids of the vocabulary."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, positions).tolist()


def make_artifact(
    root: Path,
    *,
    positions: int,
    layers: int = 3,
    kv_heads: int = 2,
    head_size: int = 64,
    chunk_tokens: int = 16,
    dtype: str = "bfloat16",
    kind: Literal["prefill", "trained", "tokens"] = "prefill",
    seed: int = 0,
    cartridge_id: str = "doc",
    version: int = 1,
    token_ids: list[int] | Identity | None = None,
    document_ids: list[int] | None = None,
    fingerprint: Fingerprint | None = None,
    kv: torch.Tensor | None = None,
    encoding: str = "plain",
    canary: ServedCanary | None = None,
) -> Made:
    """Write an artefact of random KV through `ArtifactWriter`; another `seed` gives other KV and token ids."""
    shape = fingerprint or make_fingerprint(layers=layers, kv_heads=kv_heads, head_size=head_size, dtype=dtype)
    ids = make_ids(positions, seed) if token_ids is None else token_ids
    if kv is None:
        kv = make_kv(shape, positions, seed)
    with ArtifactWriter(
        root,
        cartridge_id=cartridge_id,
        version=version,
        kind=kind,
        fingerprint=shape,
        token_ids=ids if isinstance(ids, Identity) else np.asarray(ids, dtype="<u4"),
        document_ids=None if document_ids is None else np.asarray(document_ids),
        chunk_tokens=chunk_tokens,
        encoding=encoding,
    ) as writer:
        for chunk in _encoded(kv, shape, chunk_tokens, encoding) if kind != "tokens" else ():
            writer.write(chunk)
        return Made(writer.commit(Provenance(tool="tests", created="2026-01-01T00:00:00Z"), canary), kv)


def _encoded(kv: torch.Tensor, shape: Fingerprint, chunk_tokens: int, encoding: str) -> Iterator[bytes | memoryview]:
    for chunk in kv.split(chunk_tokens, dim=2):
        yield heads_bytes(chunk) if encoding == "plain" else encode(to_heads(chunk), shape)


def heads_bytes(canonical: torch.Tensor) -> bytes:
    """Return canonical KV as the bytes an artefact stores, `[H, 2, L, T, D]`."""
    return to_heads(canonical).view(torch.uint8).numpy().tobytes()


def make_engine(
    fingerprint: Fingerprint,
    *,
    chunk_tokens: int = 16,
    rank: int = 0,
    world: int = 1,
    layout: str = "heads",
    allow_trained: bool = True,
    layers: range | None = None,
) -> Engine:
    """Return an engine that hashes with `sha256_hasher`."""
    return Engine(
        fingerprint, chunk_tokens, rank, world, layout, sha256_hasher(chunk_tokens), pin_memory=False,
        allow_trained=allow_trained, layers=layers,
    )  # fmt: skip


def sha256_hasher(chunk_tokens: int) -> Hasher:
    """Return a hash chain over whole chunks, built as LMCache builds its own: each hash takes in the one before."""

    def chain(ids: np.ndarray | list[int]) -> Iterator[int]:
        digest = b""
        for end in range(chunk_tokens, len(ids) + 1, chunk_tokens):
            chunk = np.asarray(ids[end - chunk_tokens : end], dtype="<u4").tobytes()
            digest = hashlib.sha256(digest + chunk).digest()
            yield int.from_bytes(digest[:8], "big")

    return chain


def flip_bit(path: Path, offset: int) -> None:
    """Invert the lowest bit of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def files_under(root: Path) -> dict[str, tuple[bytes, int]]:
    """Return content and modification time of every file below `root`, by relative path."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
