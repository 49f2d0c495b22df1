"""Packed KV: PEFT's `prompt_embeddings`, `[p, L * 2 * H * D]`, K then V of each layer."""

from __future__ import annotations

import torch


def pack(kv: torch.Tensor) -> torch.Tensor:
    """Return canonical KV `[2, L, p, H, D]` as PEFT stores it."""
    return kv.permute(2, 1, 0, 3, 4).reshape(kv.shape[2], -1)


def unpack(packed: torch.Tensor, layers: int, kv_heads: int) -> torch.Tensor:
    """Return PEFT's packed KV as canonical `[2, L, p, H, D]`; a view."""
    return packed.view(packed.shape[0], layers, 2, kv_heads, -1).permute(2, 1, 0, 3, 4)
