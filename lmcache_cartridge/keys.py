"""KeyIndex: chunk hash -> (cartridge, chunk). Knows no LMCache; the engine's own hasher is passed in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

from .errors import ChunkSizeMismatch
from .manifest import Manifest

Hasher = Callable[[list[int]], Iterable[int]]
"""Token ids -> hash chain, one hash for each whole chunk, as the engine computes it."""


MAX_CHAIN_CHUNKS = 1 << 18
"""Chunks of chains that an index remembers; some 50 MiB."""


class ChunkKey(NamedTuple):
    """One chunk of the engine's chunk size in one cartridge, or in a chain of several."""

    digest: str
    """The cartridge's digest, or the digests of a chain joined by dots."""
    chunk: int


class KeyIndex:
    """Maps an engine's chunk hashes to prepared chunks.

    Prefill chunks are found by hash alone, since any request with these tokens may have them. Trained chunks are
    found only under their cartridge's tag (its digest): knowing the identity tokens gives nobody the cartridge.
    Changes are the caller's to serialise; lookups may run meanwhile, and are plain dict reads.
    """

    def __init__(self, hasher: Hasher, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self._hasher = hasher
        self._prefill: dict[int, ChunkKey] = {}
        self._others: dict[int, list[ChunkKey]] = {}
        self._hidden: set[str] = set()
        self._trained: dict[str, dict[int, ChunkKey]] = {}
        self._chains: OrderedDict[str, dict[int, ChunkKey]] = OrderedDict()

    def add(self, manifest: Manifest, token_ids: Sequence[int]) -> int:
        """Make the whole chunks of a cartridge findable and return how many there are.

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
        ids = list(token_ids[: whole * self.chunk_tokens])
        keys = {h: ChunkKey(manifest.digest, chunk) for chunk, h in enumerate(self._hasher(ids))}
        if manifest.digest in self._hidden:
            self._drop(manifest.digest)
        if manifest.kind == "trained":
            self._trained[manifest.digest] = keys
        else:
            # Documents that begin alike share their first chunks: same tokens, same KV. The newest one serves, the
            # others stand in for it when it cannot.
            for chunk_hash in keys.keys() & self._prefill.keys():
                self._others.setdefault(chunk_hash, []).insert(0, self._prefill[chunk_hash])
            self._prefill.update(keys)
        return whole

    def hide(self, digest: str) -> None:
        """Let a cartridge lead no prompt that has no tag. Those who were promised its chunks may still come for them."""
        self._hidden.add(digest)

    def forget(self, digest: str) -> None:
        """Let a cartridge and every chain it is part of be found no more."""
        self._drop(digest)
        self._trained.pop(digest, None)
        for tag in [tag for tag in self._chains if digest in tag.split(".")]:
            del self._chains[tag]

    def _drop(self, digest: str) -> None:
        """Take a cartridge's chunks from those that are found by hash alone."""
        self._hidden.discard(digest)
        for chunk_hash in [h for h, key in self._prefill.items() if key.digest == digest]:
            others = self._others.get(chunk_hash, [])
            if others:
                self._prefill[chunk_hash] = others.pop(0)
            else:
                del self._prefill[chunk_hash]
        for chunk_hash, others in list(self._others.items()):
            others[:] = [key for key in others if key.digest != digest]
            if not others:
                del self._others[chunk_hash]

    def add_chain(self, tag: str, token_ids: Sequence[int], keys: Sequence[ChunkKey]) -> None:
        """Make the whole chunks of a chain findable under `tag`, as `keys` in order; no change if they are already.

        Chains are derived when asked for. Beyond `MAX_CHAIN_CHUNKS` chunks the chains added first are forgotten, and
        derived again when asked for again.
        """
        if tag in self._chains:
            return
        ids = list(token_ids[: len(keys) * self.chunk_tokens])
        self._chains[tag] = dict(zip(self._hasher(ids), keys, strict=True))
        while len(self._chains) > 1 and sum(map(len, self._chains.values())) > MAX_CHAIN_CHUNKS:
            self._chains.popitem(last=False)

    def has(self, tag: str) -> bool:
        """Whether the chunks of `tag` can be found."""
        return tag in self._trained or tag in self._chains

    def chunks(self, tag: str) -> list[ChunkKey]:
        """Return every chunk that can be found under `tag`, in order; empty for an unknown one."""
        return list((self._trained.get(tag) or self._chains.get(tag) or {}).values())

    def candidates(self, chunk_hash: int, tag: str | None) -> tuple[ChunkKey, ...]:
        """Return every chunk that answers a hash, hidden ones too, the newest cartridge's first; no side effects."""
        key = self._table(tag).get(chunk_hash)
        if key is None:
            return ()
        return (key,) if tag is not None else (key, *self._others.get(chunk_hash, ()))

    def leading(self, hashes: Iterable[int], tag: str | None, without: Container[str] = ()) -> list[ChunkKey]:
        """Return the chunks of the longest run of known hashes from the first on; no side effects.

        Cartridges whose digest is in `without` do not count.
        """
        table, hidden = self._table(tag), self._hidden if tag is None else ()
        run = []
        for chunk_hash in hashes:
            key = table.get(chunk_hash)
            if key is None:
                break
            if key.digest in without or key.digest in hidden:
                others = self.candidates(chunk_hash, tag)[1:]
                key = next((k for k in others if k.digest not in without and k.digest not in hidden), None)
                if key is None:
                    break
            run.append(key)
        return run

    def _table(self, tag: str | None) -> dict[int, ChunkKey]:
        if tag is None:
            return self._prefill
        return self._trained.get(tag) or self._chains.get(tag) or {}
