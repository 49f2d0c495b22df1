"""Loading of one chunk: by a source that a tier has, and at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from waiting import until

from lmcache_cartridge.library.index import ChunkKey
from lmcache_cartridge.memory.loads import ChunkSource

if TYPE_CHECKING:
    from lmcache_cartridge.artifact.cartridge import Segment
    from lmcache_cartridge.artifact.model import Fingerprint
    from lmcache_cartridge.memory.loader import ChunkLoader


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


def copied(loader: ChunkLoader) -> None:
    """Wait until the disk tier has its copies."""
    until(lambda: not loader._counts["unwritten"])


def in_int8(kv: torch.Tensor, shape: Fingerprint, stored: int) -> torch.Tensor:
    """Return canonical KV as it comes back from an int8 payload in chunks of `stored`."""
    from lmcache_cartridge.memory.codec import decode, encode
    from lmcache_cartridge.memory.layout import to_heads

    found = []
    for chunk in kv.split(stored, dim=2):
        heads = torch.full_like(to_heads(chunk), float("nan"))
        decode(encode(to_heads(chunk), shape), heads.flatten().view(torch.uint8), shape, chunk.shape[2])
        found.append(heads.permute(1, 2, 3, 0, 4))
    return torch.cat(found, dim=2)
