"""Index: which blocks each server has, by what its KV events tell.

vLLM's names of blocks have salts in them, so that two tenants' copies of one prompt have different names. Here a block is
found by its tokens and all before them, and is there until the last copy is gone. Another tenant's or LoRA adapter's copy
counts as a hit: a request in the wrong place, never a wrong answer, since vLLM checks both.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, NamedTuple

import msgspec

TIERS = ("gpu", "cpu", "disk")
"""By rising cost of a hit: in the engine's blocks, in the host's memory, on a disk or further away."""
_TIER = {None: "gpu", "GPU": "gpu", "CPU": "cpu"}
Name = int | bytes
"""Of a block in a server's events."""
_Word = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """What is read of vLLM 0.32's event of this name."""

    block_hashes: list[Name]
    token_ids: list[_Word]
    block_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)]
    parent_block_hash: Name | None = None
    medium: str | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Likewise."""

    block_hashes: list[Name]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Likewise; of all tiers."""


_decoder = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)


class Source(NamedTuple):
    """Who tells events: one engine of a server."""

    pod: int
    rank: int = 0
    """vLLM's data-parallel rank."""


class Tokens:
    """Token ids of a prompt, with the hashes of its blocks of each size that was asked for."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = array("I", ids)
        self._prefixes: dict[int, list[bytes]] = {}

    def prefixes(self, size: int) -> list[bytes]:
        """Return the hash of each whole block of `size` tokens and all before it."""
        if size not in self._prefixes:
            self._prefixes[size] = prefixes(self.ids, size)
        return self._prefixes[size]


class _Place(NamedTuple):
    """Where blocks are."""

    source: Source
    tier: str
    group: int
    size: int


class _Copies:
    """The blocks in one place."""

    def __init__(self) -> None:
        self.prefixes: dict[Name, bytes] = {}
        """The hash of each block's tokens and all before them, by its name in the events."""
        self.count: Counter[bytes] = Counter()
        """How many blocks have such a hash."""

    def drop(self, name: Name) -> None:
        """Forget a block, if it is there."""
        if (prefix := self.prefixes.pop(name, None)) is not None:
            self.count[prefix] -= 1
            if not self.count[prefix]:
                del self.count[prefix]


class Index:
    """What all servers have. One thread."""

    def __init__(self) -> None:
        self._copies: dict[_Place, _Copies] = {}

    def apply(self, source: Source, packed: bytes | msgspec.Raw) -> None:
        """Take in an event in MessagePack, but for blocks that follow on one which is not known: where they belong cannot be
        said.

        Raises `msgspec.DecodeError` or `ValueError` for what is no event, of which nothing is taken in then.
        """
        event = _decoder.decode(packed)
        if isinstance(event, BlockStored):
            self._store(source, event)
        elif isinstance(event, AllBlocksCleared):
            self.clear(source)
        else:
            for place, copies in self._copies.items():
                if place[:3] == (source, _tier(event.medium), event.group_idx or 0):
                    for name in event.block_hashes:
                        copies.drop(name)

    def clear(self, source: Source) -> None:
        """Forget all that a source has told."""
        self._copies = {place: copies for place, copies in self._copies.items() if place.source != source}

    def matches(self, tokens: Tokens) -> dict[int, dict[str, int]]:
        """Return how many leading tokens each server has, by its number and tier; none for what has none."""
        found: dict[int, dict[str, int]] = {}
        for place, copies in self._copies.items():
            hashes = tokens.prefixes(place.size)
            blocks = next((n for n, prefix in enumerate(hashes) if prefix not in copies.count), len(hashes))
            if blocks:
                by_tier = found.setdefault(place.source.pod, {})
                by_tier[place.tier] = max(by_tier.get(place.tier, 0), blocks * place.size)
        return found

    def blocks(self) -> dict[tuple[int, str], int]:
        """Return how many different blocks each server has, by its number and tier."""
        found: Counter[tuple[int, str]] = Counter()
        for place, copies in self._copies.items():
            found[place.source.pod, place.tier] += len(copies.count)
        return dict(found)

    def _store(self, source: Source, event: BlockStored) -> None:
        names, ids, size, parent = event.block_hashes, event.token_ids, event.block_size, event.parent_block_hash
        if len(ids) != len(names) * size:
            raise ValueError(f"{len(names)} blocks of {size} tokens have {len(ids)}")
        place = _Place(source, _tier(event.medium), event.group_idx or 0, size)
        copies = self._copies.get(place) or _Copies()
        before = b"" if parent is None else copies.prefixes.get(parent)
        if before is None:
            return
        for name, prefix in zip(names, prefixes(ids, size, before), strict=True):
            copies.drop(name)
            copies.prefixes[name] = prefix
            copies.count[prefix] += 1
        if copies.count:
            self._copies[place] = copies


def prefixes(ids: Sequence[int], size: int, before: bytes = b"") -> list[bytes]:
    """Return the hash of each whole block of `size` tokens and all before it; `before` is that of the block before."""
    words, found = array("I", ids), []
    for end in range(size, len(words) + 1, size):
        before = blake2b(before + words[end - size : end].tobytes(), digest_size=8).digest()
        found.append(before)
    return found


def _tier(medium: str | None) -> str:
    return _TIER.get(medium and medium.upper(), "disk")
