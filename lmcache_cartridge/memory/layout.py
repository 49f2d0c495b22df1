"""Layouts of a chunk's KV, and which heads a tensor-parallel rank owns.

canonical   [2, L, T, H, D]     K and V, layer, token, head, element; what everybody reasons in
heads       [H, 2, L, T, D]     artefacts and resident chunks: any run of heads is one run of bytes
fused       [L, T, H, 2 * D]    LMCache's own for vLLM >= 0.26 on GPUs: K beside V for each token and head

Multi-head latent attention has one plane and one head, so that canonical, heads and LMCache's own are the same there:
`[L, T, D]`, a latent vector and then its rotary key for each token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HELD = DTYPES | {"uint8": torch.uint8}
"""What the chunks that an engine is given may be made of: KV as it was computed, or the bytes of a quantised cache."""


class ChunkShape(NamedTuple):
    """Geometry of one chunk as one rank sees it."""

    heads: int
    layers: int
    tokens: int
    head_size: int
    dtype: str
    planes: int = 2
    """K and V; 1 for latent vectors."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all planes."""
        return self.planes * self.heads * self.layers * self.tokens * self.head_size * HELD[self.dtype].itemsize


def rank_heads(kv_heads: int, rank: int, world: int) -> range:
    """Return the KV heads of tensor-parallel `rank` of `world`, as vLLM's QKVParallelLinear divides them.

    With fewer heads than ranks each head is replicated on `world / kv_heads` neighbouring ranks. Raises
    `ValueError` where neither number divides the other, which vLLM refuses too.
    """
    if max(kv_heads, world) % min(kv_heads, world) or not 0 <= rank < world:
        raise ValueError(f"{kv_heads} KV heads cannot be divided among {world} ranks (rank {rank})")
    if world >= kv_heads:
        head = rank // (world // kv_heads)
        return range(head, head + 1)
    count = kv_heads // world
    return range(rank * count, (rank + 1) * count)


def to_heads(canonical: torch.Tensor) -> torch.Tensor:
    """Return a contiguous `[H, 2, L, T, D]` copy of a canonical chunk."""
    return canonical.permute(3, 0, 1, 2, 4).clone(memory_format=torch.contiguous_format)


def heads_view(raw: torch.Tensor, shape: ChunkShape) -> torch.Tensor:
    """View flat uint8 bytes in the heads layout as canonical `[planes, L, T, H, D]`; no copy, not contiguous."""
    stored = raw.view(HELD[shape.dtype]).view(shape.heads, shape.planes, shape.layers, shape.tokens, shape.head_size)
    return stored.permute(1, 2, 3, 0, 4)


def fused_view(raw: torch.Tensor, shape: ChunkShape) -> torch.Tensor:
    """View flat uint8 bytes with K beside V as canonical `[2, L, T, H, D]`; no copy, not contiguous."""
    stored = raw.view(HELD[shape.dtype]).view(shape.layers, shape.tokens, shape.heads, 2, shape.head_size)
    return stored.permute(3, 0, 1, 2, 4)


VIEWS = {"heads": heads_view, "fused": fused_view}
"""How each layout of resident bytes is read or written as canonical KV. Those of `tiles` are packed instead."""
