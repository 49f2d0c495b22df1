"""ChunkCheck: finds out whether a chunk is what its manifest says, part by part, as its bytes come in."""

from __future__ import annotations

from blake3 import blake3

from .manifest import CHECKSUM_BYTES, Manifest
from .reading import check_finite, compare_checksum, is_finite


class ChunkCheck:
    """A check of heads `heads` of one stored chunk, for one thread.

    A part that is given right after it was read is in that core's cache still: a quarter of the time is saved that
    reading, hashing and looking for NaN take one after the other over a whole chunk.
    """

    def __init__(self, manifest: Manifest, chunk: int, heads: range, *, known_finite: bool = False) -> None:
        """With `known_finite` bytes of these checksums were once found to have no NaN, and are not looked at again."""
        self._manifest, self._chunk, self._heads = manifest, chunk, heads
        self._head_bytes = manifest.head_bytes(chunk)
        self._checksums: list[str] = []
        self._hasher, self._hashed = blake3(), 0
        self._known_finite = known_finite
        self._found_finite = known_finite or manifest.payload.encoding == "plain"  # others are looked at whole

    def update(self, part: memoryview) -> None:
        """Take the next bytes, whole numbers of the dtype if they are plain. Blocks; other threads run meanwhile."""
        if self._found_finite and not self._known_finite:
            self._found_finite = is_finite(part, self._manifest.fingerprint.dtype)
        while len(part):
            rest = self._head_bytes - self._hashed
            self._hasher.update(part[:rest])
            self._hashed += min(rest, len(part))
            part = part[rest:]
            if self._hashed == self._head_bytes:
                self._checksums.append(self._hasher.hexdigest(CHECKSUM_BYTES))
                self._hasher, self._hashed = blake3(), 0

    def finish(self, data: memoryview, where: str) -> None:
        """Raise `CorruptChunk` or `NonFiniteKV`, naming `where`, unless `data`, all that was taken, is as it should be."""
        for head, found in zip(self._heads, self._checksums, strict=True):
            compare_checksum(self._manifest, self._chunk, head, found, where)
        if not self._found_finite:
            check_finite(self._manifest, self._chunk, data, where)
