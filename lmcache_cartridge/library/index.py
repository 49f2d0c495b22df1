"""KeyIndex: chunk hash -> (cartridge, chunk). Knows no LMCache; the engine's own hasher is passed in."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from ..artifact.lru import Lru
from ..artifact.manifest import Kind, Manifest

Hasher = Callable[[np.ndarray | list[int]], Iterable[int]]
"""Token ids -> hash chain, one hash for each whole chunk, as the engine computes it. An array is of uint32."""

MAX_CACHED_CHUNKS = 1 << 18
"""Chunks whose keys an index keeps by tag, of those that were asked for lately; some 50 MiB."""
_LOW = (1 << 64) - 1
_FILLER = (1 << 32) - 1
"""A token id that no prompt has. The last chunk of a trained cartridge or chain is filled up with it, so that it has a hash."""


class ChunkKey(NamedTuple):
    """One chunk of the engine's chunk size in one cartridge, or in a chain of several."""

    digest: str
    """The cartridge's digest, or the digests of a chain joined by dots."""
    chunk: int


class KeyIndex:
    """Maps an engine's chunk hashes to prepared chunks.

    Documents that are open are found by hash alone, since any request with these tokens may have them. Everything is
    found under its tag, trained cartridges under nothing else: knowing the identity tokens gives nobody the cartridge.
    Safe from any thread; a lookup takes no lock where its cartridge was asked for lately.
    """

    def __init__(self, hasher: Hasher, chunk_tokens: int) -> None:
        """Hashes two chunks, to see what the engine's hashes are like."""
        self.chunk_tokens = chunk_tokens
        self._hasher = hasher
        self.probe = tuple(hasher(list(range(2 * chunk_tokens))))
        """The hashes of fixed tokens: another hash function or seed gives others."""
        self._width = 8 if all(h <= _LOW for h in self.probe) else 32
        self._lock = threading.RLock()
        self._hashes: dict[str, bytes] = {}
        self._open: dict[str, str] = {}
        """The rank of each open one."""
        self._digests: dict[int, tuple[str, ...]] = {}
        """The open ones that have a chunk whose hash begins with these 64 bits, in the order that they lead in: documents that
        begin alike share their first, and stand in for each other. Strings, since Python's garbage collector walks through
        tuples of others."""
        self._tagged: Lru[str, dict[int, ChunkKey]] = Lru(MAX_CACHED_CHUNKS, lambda table: 1 + len(table))

    def hash(self, manifest: Manifest, token_ids: np.ndarray) -> bytes:
        """Return the hashes of the chunks of a cartridge, as `add` takes them; changes nothing.

        The tail of a prefill cartridge, beyond its last whole chunk, is left for the engine to compute. A trained one has its
        tail as one more chunk, of which no prompt has the hash.
        """
        hashes = self._filled(token_ids, self.chunks_in(manifest.positions, manifest.kind))
        return b"".join(own.to_bytes(self._width, "big") for own in hashes)

    def chunks_in(self, positions: int, kind: Kind) -> int:
        """Return of how many chunks a cartridge of so many positions is."""
        whole, rest = divmod(positions, self.chunk_tokens)
        return 0 if kind == "tokens" else whole + (kind == "trained" and rest > 0)

    def _filled(self, token_ids: np.ndarray, chunks: int) -> Iterable[int]:
        filled = np.full(chunks * self.chunk_tokens, _FILLER, np.uint32)
        filled[: len(token_ids)] = token_ids[: len(filled)]
        return self._hasher(filled)

    def add(self, digest: str, hashes: bytes, *, open_to_all: bool, rank: str = "") -> None:
        """Make the chunks of a cartridge findable by its tag, and if it is `open_to_all` by hash alone.

        `hashes` replace those that it may have. An open one stays open and keeps its rank. Of those that have a chunk the
        highest rank leads, among equal ones the one added last.
        """
        with self._lock:
            if self._hashes.get(digest, hashes) != hashes:
                self.forget(digest)
            self._hashes[digest] = hashes
            if not open_to_all or digest in self._open:
                return
            self._open[digest] = rank
            alone = (digest,)
            for own in self._begins(hashes):
                if (others := self._digests.setdefault(own, alone)) is not alone and digest not in others:
                    having = sorted(alone + others, key=self._open.__getitem__, reverse=True)
                    self._digests[own] = tuple(having)

    def forget(self, digest: str) -> None:
        """Drop a cartridge and every chain that has it."""
        with self._lock:
            hashes = self._hashes.pop(digest, b"")
            for own in set(self._begins(hashes)) if digest in self._open else ():
                if left := tuple(other for other in self._digests[own] if other != digest):
                    self._digests[own] = left
                else:
                    del self._digests[own]
            self._open.pop(digest, None)
            for tag in self._tagged:
                if digest in tag.split("."):
                    self._tagged.pop(tag)

    def add_chain(self, tag: str, token_ids: np.ndarray, keys: Sequence[ChunkKey]) -> None:
        """Make the chunks of a chain findable under `tag`, as `keys` in order; no change if they are already.

        Beyond `MAX_CACHED_CHUNKS` chunks the chains that were used least recently are dropped: ask `has`, and add a
        chain again. Takes no lock while it hashes.
        """
        if tag not in self._tagged:
            self._tagged.put(tag, dict(zip(self._filled(token_ids, len(keys)), keys, strict=True)))

    def has(self, tag: str) -> bool:
        """Whether the chunks of `tag` can be found."""
        return tag in self._tagged or tag in self._hashes

    def chunks(self, tag: str) -> list[ChunkKey]:
        """Return every chunk that can be found under `tag`, in order; empty for an unknown one."""
        return list(self._table(tag).values())

    def last(self, tag: str) -> int:
        """Return the hash of the last chunk that can be found under `tag`, which has one."""
        return next(reversed(self._table(tag)))

    def candidates(self, chunk_hash: int, tag: str | None) -> list[ChunkKey]:
        """Return every chunk that answers a hash, the leading one's first."""
        digests = self._having(chunk_hash) if tag is None else (tag,)
        return [key for digest in digests if (key := self._table(digest).get(chunk_hash))]

    def leading(self, hashes: Sequence[int], tag: str | None, may: Callable[[str], bool] = bool) -> list[ChunkKey]:
        """Return the chunks of the longest run of known hashes from the first on, of cartridges whose digest `may`.

        Where several have the same chunk, the newest of those that may leads.
        """
        may, last, table, run = cache(may), "", self._table(""), []
        named = None if tag is None else (tag,)
        for chunk_hash in hashes:
            for digest in named or self._having(chunk_hash):
                if digest != last:
                    last, table = digest, self._table(digest)
                key = table.get(chunk_hash)
                if key is not None and may(key[0]):
                    run.append(key)
                    break
            else:
                break
        return run

    def _table(self, tag: str) -> dict[int, ChunkKey]:
        if (table := self._tagged.get(tag)) is not None:
            return table
        with self._lock:
            if not (hashes := self._hashes.get(tag)):
                return {}
            return self._tagged.put(tag, {own: ChunkKey(tag, chunk) for chunk, own in enumerate(self._ints(hashes))})

    def _having(self, chunk_hash: int) -> tuple[str, ...]:
        return self._digests.get(chunk_hash >> 8 * (self._width - 8), ())

    def _begins(self, hashes: bytes) -> Sequence[int]:
        return struct.unpack_from(f">{len(hashes) // 8}Q", hashes)[:: self._width // 8]

    def _ints(self, hashes: bytes) -> Sequence[int]:
        width = self._width
        return [int.from_bytes(hashes[at : at + width], "big") for at in range(0, len(hashes), width)]
