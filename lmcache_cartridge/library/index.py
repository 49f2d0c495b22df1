"""KeyIndex: chunk hash -> (cartridge, chunk). Knows no LMCache; the engine's own hasher is passed in."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..artifact.lru import Lru
from ..artifact.manifest import Manifest
from ..errors import ChunkSizeMismatch

Hasher = Callable[[list[int]], Iterable[int]]
"""Token ids -> hash chain, one hash for each whole chunk, as the engine computes it."""

MAX_CACHED_CHUNKS = 1 << 18
"""Chunks of which an index keeps the hash in a dict, by tag, and as many without one; some 50 MiB each."""
_LOW = (1 << 64) - 1


class ChunkKey(NamedTuple):
    """One chunk of the engine's chunk size in one cartridge, or in a chain of several."""

    digest: str
    """The cartridge's digest, or the digests of a chain joined by dots."""
    chunk: int


def count_digests(keys: Sequence[ChunkKey]) -> dict[str, int]:
    """Return how many of these keys of a prompt are of each digest."""
    if keys and keys[0].digest == keys[-1].digest:  # mostly they are of one, and a Counter takes longer than the rest
        return {keys[0].digest: len(keys)}
    return Counter(key.digest for key in keys)


class KeyIndex:
    """Maps an engine's chunk hashes to prepared chunks.

    Documents that are open are found by hash alone, since any request with these tokens may have them. Everything is
    found under its tag, trained cartridges under nothing else: knowing the identity tokens gives nobody the cartridge.
    The hashes of each cartridge are kept as bytes, and those of all open ones in a sorted array; chunks that were asked
    for lately are in dicts. Safe from any thread; a lookup without a tag takes no lock where the dicts have it.
    """

    def __init__(self, hasher: Hasher, chunk_tokens: int) -> None:
        """Hashes two chunks, to see what the engine's hashes are like."""
        self.chunk_tokens = chunk_tokens
        self._hasher = hasher
        self.probe = tuple(hasher(list(range(2 * chunk_tokens))))
        """The hashes of fixed tokens: another hash function or seed gives others."""
        self._width = 8 if all(h <= _LOW for h in self.probe) else 32
        self._lock = threading.RLock()
        self._open: dict[str, bytes] = {}
        self._closed: dict[str, bytes] = {}
        self._hidden: set[str] = set()
        """Of the open ones, those that lead no prompt."""
        self._sorted = _Sorted((), self._width)
        self._unsorted: set[str] = set()
        """The open ones that came after the array was sorted."""
        self._recent: dict[int, tuple[ChunkKey, ...]] = {}
        """Their chunks, the newest cartridge's first."""
        self._leading: dict[int, ChunkKey] = {}
        """The chunk that answers a hash, of those that were asked for lately and all unsorted ones."""
        self._tagged: Lru[str, dict[int, ChunkKey]] = Lru(MAX_CACHED_CHUNKS, lambda table: 1 + len(table))

    def hash(self, manifest: Manifest, token_ids: Sequence[int]) -> bytes:
        """Return the hashes of the whole chunks of a cartridge, as `add` takes them; changes nothing.

        The tail of a prefill cartridge, beyond its last whole chunk, is left for the engine to compute. Raises
        `ChunkSizeMismatch` for a trained cartridge with a tail: nothing can compute it.
        """
        if manifest.kind == "trained" and manifest.positions % self.chunk_tokens:
            fits = [n for n in (16, 32, 64, 128, 256, 512, 1024) if manifest.positions % n == 0]
            raise ChunkSizeMismatch(
                f"cartridge {manifest.name} has p = {manifest.positions}, no multiple of the engine's chunk_size "
                f"{self.chunk_tokens}. Set LMCache's chunk_size to a divisor of p"
                + (f": {', '.join(map(str, fits))}" if fits else "")
            )
        whole = manifest.positions // self.chunk_tokens
        return b"".join(map(self._pack, self._hasher(list(token_ids[: whole * self.chunk_tokens]))))

    def hash_bytes(self, positions: int) -> int:
        """Return how many bytes the hashes of a cartridge of so many positions are."""
        return positions // self.chunk_tokens * self._width

    def add(self, digest: str, hashes: bytes, *, open_to_all: bool) -> None:
        """Make the chunks of a cartridge findable by its tag, and if it is `open_to_all` by hash alone.

        `hashes` replace those that it may have. An open one stays open, and with `open_to_all` ceases to be hidden.
        """
        with self._lock:
            if self._open.get(digest, hashes) != hashes or self._closed.get(digest, hashes) != hashes:
                self.forget(digest)
            if open_to_all:
                self._hidden.discard(digest)
            if digest in self._open:
                return
            if not open_to_all:
                self._closed[digest] = hashes
            else:
                self._closed.pop(digest, None)
                self._open[digest] = hashes
                self._unsorted.add(digest)
                # Documents that begin alike share their first chunks: same tokens, same KV. The newest one serves, the
                # others stand in for it when it cannot.
                for key, chunk_hash in self._keys(digest, hashes):
                    self._recent[chunk_hash] = (key, *self._recent.get(chunk_hash, ()))
                    self._leading[chunk_hash] = key
                self._tidy()

    def add_all(self, hashes: Mapping[str, bytes]) -> None:
        """`add` many new ones that are open to all, and sort; of chunks that several share the last one's lead."""
        with self._lock:
            self._open.update(hashes)
            self._sort()

    def hide(self, digest: str) -> None:
        """Stop answering prompts without a tag from a cartridge; `candidates` and its tag still find its chunks."""
        with self._lock:
            if digest in self._open:
                self._hidden.add(digest)

    def forget(self, digest: str) -> None:
        """Drop a cartridge and every chain that has it."""
        with self._lock:
            for key, chunk_hash in self._keys(digest, self._open.pop(digest, b"")):
                if self._leading.get(chunk_hash) == key:
                    del self._leading[chunk_hash]
                if others := tuple(k for k in self._recent.pop(chunk_hash, ()) if k != key):
                    self._recent[chunk_hash] = others
            self._closed.pop(digest, None)
            self._hidden.discard(digest)
            self._unsorted.discard(digest)
            for tag in self._tagged:
                if digest in tag.split("."):
                    self._tagged.pop(tag)

    def add_chain(self, tag: str, token_ids: Sequence[int], keys: Sequence[ChunkKey]) -> None:
        """Make the whole chunks of a chain findable under `tag`, as `keys` in order; no change if they are already.

        Beyond `MAX_CACHED_CHUNKS` chunks the chains that were used least recently are dropped: ask `has`, and add a
        chain again. Takes no lock while it hashes.
        """
        if tag not in self._tagged:
            ids = list(token_ids[: len(keys) * self.chunk_tokens])
            self._tagged.put(tag, dict(zip(self._hasher(ids), keys, strict=True)))

    def has(self, tag: str) -> bool:
        """Whether the chunks of `tag` can be found."""
        return tag in self._tagged or tag in self._open or tag in self._closed

    def chunks(self, tag: str) -> list[ChunkKey]:
        """Return every chunk that can be found under `tag`, in order; empty for an unknown one."""
        return list(self._table(tag).values())

    def first(self, chunk_hash: int, tag: str | None) -> ChunkKey | None:
        """Return the first of `candidates`; None also for one that was not asked for lately."""
        return (self._leading if tag is None else self._table(tag)).get(chunk_hash)

    def candidates(self, chunk_hash: int, tag: str | None) -> Iterator[ChunkKey]:
        """Yield every chunk that answers a hash, also of hidden cartridges, the one that leads prompts first."""
        if tag is not None:
            if (key := self._table(tag).get(chunk_hash)) is not None:
                yield key
        elif (key := self._leading.get(chunk_hash) or self._fetch(chunk_hash)) is not None:
            yield key
            yield from (other for other in self._answers(chunk_hash) if other != key)

    def leading(self, hashes: Sequence[int], tag: str | None, without: Container[str] = ()) -> list[ChunkKey]:
        """Return the chunks of the longest run of known hashes from the first on.

        Cartridges whose digest is in `without` do not count.
        """
        table, hidden = (self._leading, self._hidden) if tag is None else (self._table(tag), ())
        run: list[Any] = list(map(table.get, hashes))
        if all(run) and not without and not hidden:
            return run
        for at, chunk_hash in enumerate(hashes):
            key = table.get(chunk_hash) or (self._fetch(chunk_hash) if tag is None else None)
            if key is not None and (key.digest in without or key.digest in hidden):
                others = self._answers(chunk_hash) if tag is None else ()
                key = next((k for k in others if k.digest not in without and k.digest not in hidden), None)
            if key is None:
                return run[:at]
            run[at] = key
        return run

    def _fetch(self, chunk_hash: int) -> ChunkKey | None:
        """Return the chunk that answers a hash, and take all of its cartridge's into the dict; None for a miss."""
        if not self._open:
            return None
        with self._lock:
            found = next(self._answers(chunk_hash), None)
            if found is not None:
                self._tidy()
                for key, own in self._keys(found.digest, self._open[found.digest]):
                    self._leading.setdefault(own, key)
            return found

    def _answers(self, chunk_hash: int) -> Iterator[ChunkKey]:
        """Yield every chunk of an open cartridge that has this hash, the newest cartridge's first."""
        yield from self._recent.get(chunk_hash, ())
        try:
            packed = self._pack(chunk_hash)
        except OverflowError:  # no hash of this engine
            return
        for digest in self._sorted.having(chunk_hash):
            hashes = self._open.get(digest)
            if hashes is None or digest in self._unsorted:
                continue
            for at in range(0, len(hashes), self._width):
                if hashes.startswith(packed, at):
                    yield ChunkKey(digest, at // self._width)

    def _table(self, tag: str) -> dict[int, ChunkKey]:
        if (table := self._tagged.get(tag)) is not None:
            return table
        with self._lock:
            hashes = self._closed.get(tag) or self._open.get(tag)
            if not hashes:
                return {}
            return self._tagged.put(tag, {chunk_hash: key for key, chunk_hash in self._keys(tag, hashes)})

    def _keys(self, digest: str, hashes: bytes) -> Iterator[tuple[ChunkKey, int]]:
        for chunk, at in enumerate(range(0, len(hashes), self._width)):
            yield ChunkKey(digest, chunk), int.from_bytes(hashes[at : at + self._width], "big")

    def _pack(self, chunk_hash: int) -> bytes:
        return chunk_hash.to_bytes(self._width, "big")

    def _tidy(self) -> None:
        """Keep the dicts within their bounds. The lock is held."""
        if len(self._recent) > MAX_CACHED_CHUNKS:
            self._sort()
        elif len(self._leading) > MAX_CACHED_CHUNKS:
            self._leading = {}

    def _sort(self) -> None:
        """Sort the hashes of all open cartridges anew, and empty the dicts. The lock is held."""
        self._sorted = _Sorted(self._open.items(), self._width)
        self._unsorted, self._recent, self._leading = set(), {}, {}

    def check(self) -> None:
        """Assert that nothing is kept of cartridges that were forgotten."""
        with self._lock:
            found = {key.digest for key in self._leading.values()}
            found |= {key.digest for keys in self._recent.values() for key in keys}
            found |= {tag for tag in self._tagged if "." not in tag}
            assert found | self._unsorted <= self._open.keys() | self._closed.keys()
            assert self._hidden <= self._open.keys()


class _Sorted:
    """The hashes of many cartridges, each with its digest; 12 bytes for a hash. A value."""

    def __init__(self, hashes: Iterable[tuple[str, bytes]], width: int) -> None:
        """`hashes` are those of each digest, `width` bytes big-endian each."""
        hashes = list(hashes)
        self._digests = [digest for digest, _ in hashes]
        joined = np.frombuffer(b"".join(own for _, own in hashes), ">u8").reshape(-1, width // 8)
        low = joined[:, -1].astype(np.uint64)
        order = np.argsort(low, kind="stable")
        counts = np.fromiter((len(own) // width for _, own in hashes), np.int64, len(hashes))
        self._low = low[order]
        self._rows = np.repeat(np.arange(len(hashes), dtype=np.uint32), counts)[order]

    def having(self, chunk_hash: int) -> Iterator[str]:
        """Yield the digests of those that may have a hash, its last 64 bits at least, last ones first."""
        low = np.uint64(chunk_hash & _LOW)
        at = int(self._low.searchsorted(low, "right"))
        while at and self._low[at - 1] == low:
            at -= 1
            yield self._digests[self._rows[at]]
