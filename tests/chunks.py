"""Loading of one chunk: by a source that a tier has, and at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from waiting import until

from lmcache_cartridge.artifact.cartridge import Segment
from lmcache_cartridge.artifact.model import Fingerprint
from lmcache_cartridge.library.index import ChunkKey
from lmcache_cartridge.memory.codec import decode, encode
from lmcache_cartridge.memory.layout import ChunkShape, heads_view, to_heads
from lmcache_cartridge.memory.loader import ChunkLoader
from lmcache_cartridge.memory.loads import ChunkSource
from lmcache_cartridge.sources.sources import Sources


class one_by_one(ChunkSource):  # noqa: N801
    """What a function loads that fills one chunk, or raises `CartridgeError`."""

    def __init__(self, load: Callable[[ChunkKey, torch.Tensor], None]) -> None:
        self._load = load

    def read(self, at: ChunkKey, out: torch.Tensor) -> torch.Tensor:
        self._load(at, out)
        return out


def load(loader: ChunkLoader, segments: Sequence[Segment], chunk: int, out: torch.Tensor, *, wait: bool = True) -> None:
    """Fill `out` with one chunk of some cartridges in a row, and `wait` for its copies. Raises why it cannot be had."""
    room = loader.room(out)
    cartridges = {segment.cartridge.manifest.digest: segment.cartridge for segment in segments}
    for piece in loader.pieces(segments, chunk):
        data = loader.read(cartridges[piece.at.digest], piece.at.chunk, None if piece.where else room)
        if data is not room:
            loader.put(piece, data, room)
    loader.finish(room, out)
    if wait:
        copied(loader)


def served(segments: Sequence[Segment], tokens: int, chunk: int = 0) -> torch.Tensor:
    """Return a chunk of so many tokens as an engine with all heads is served it, canonical."""
    model = segments[-1].cartridge.manifest.fingerprint
    shape = ChunkShape(model.kv_heads, model.layers, tokens, model.head_size, model.dtype, model.planes)
    out = torch.empty(shape.size_bytes, dtype=torch.uint8)
    load(ChunkLoader(Sources(), shape, range(model.kv_heads), "heads"), segments, chunk, out)
    return heads_view(out, shape)


def copied(loader: ChunkLoader) -> None:
    """Wait until the disk tier has its copies."""
    until(lambda: not loader._counts["unwritten"])


def in_int8(kv: torch.Tensor, shape: Fingerprint, stored: int) -> torch.Tensor:
    """Return canonical KV as it comes back from an int8 payload in chunks of `stored`."""
    found = []
    for chunk in kv.split(stored, dim=2):
        heads = torch.full_like(to_heads(chunk), float("nan"))
        decode(encode(to_heads(chunk), shape), heads.flatten().view(torch.uint8), shape, chunk.shape[2])
        found.append(heads.permute(1, 2, 3, 0, 4))
    return torch.cat(found, dim=2)
