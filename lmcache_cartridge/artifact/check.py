"""ChunkCheck: whether the bytes of a chunk are those that its manifest describes, part by part as they come in."""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from ..errors import CorruptChunk, NonFiniteKV
from . import int8
from .manifest import CHECKSUM_BYTES, Manifest

_INFINITY = {"bfloat16": ("<i2", 0x7F80), "float16": ("<i2", 0x7C00), "float32": ("<i4", 0x7F800000)}
"""Of each dtype: a signed integer of its size, and infinity's bits in it."""


class ChunkCheck:
    """A check of heads `heads` of one stored chunk, for one thread: checksums, and no NaN or infinity.

    A part that is given right after it was read is in that core's cache still: a quarter of the time is saved that
    reading, hashing and looking for NaN take one after the other over a whole chunk.
    """

    def __init__(self, manifest: Manifest, chunk: int, heads: range) -> None:
        self._manifest, self._chunk, self._heads = manifest, chunk, heads
        self._head_bytes = manifest.head_bytes(chunk)
        self._checksums: list[str] = []
        self._hasher, self._hashed = blake3(), 0
        self._finite = self._by_parts = manifest.stored.encoding == "plain"  # int8 is looked at whole, at the end

    def update(self, part: memoryview) -> None:
        """Take the next bytes, whole numbers of the dtype if they are plain. Blocks; other threads run meanwhile."""
        if self._by_parts and self._finite:
            self._finite = is_finite(part, self._manifest.fingerprint.dtype)
        while len(part):
            rest = self._head_bytes - self._hashed
            self._hasher.update(part[:rest])
            self._hashed += min(rest, len(part))
            part = part[rest:]
            if self._hashed == self._head_bytes:
                self._checksums.append(self._hasher.hexdigest(CHECKSUM_BYTES))
                self._hasher, self._hashed = blake3(), 0

    def finish(self, data: memoryview, where: str) -> None:
        """Raise `CorruptChunk` or `NonFiniteKV`, naming `where`, unless `data`, all bytes that were taken, is sound."""
        manifest, chunk = self._manifest, self._chunk
        expected = manifest.stored.checksums[chunk]
        for head, found in zip(self._heads, self._checksums, strict=True):
            if found != expected[head]:
                raise CorruptChunk(
                    f"cartridge {manifest.name}: chunk {chunk}, KV head {head} of {where} has checksum {found}, "
                    f"its manifest says {expected[head]}. Replace the file from its source, or build the cartridge again"
                )
        if not self._by_parts:
            self._finite = int8.is_finite(data, manifest.fingerprint, manifest.chunk_length(chunk))
        if not self._finite:
            raise NonFiniteKV(
                f"cartridge {manifest.name}: chunk {chunk} of {where} holds NaN or infinity; whatever made it "
                "overflowed. Build it again, in bfloat16 or float32 if it was float16"
            )


def checksum(data: memoryview | bytes) -> str:
    """Return the checksum of a head of a chunk."""
    return blake3(data).hexdigest(CHECKSUM_BYTES)


def is_finite(data: memoryview, dtype: str) -> bool:
    """Return whether `data`, whole numbers of `dtype`, has no NaN and no infinity."""
    words, infinity = _INFINITY[dtype]
    signed = np.frombuffer(data, dtype=words)
    # IEEE 754 numbers of one sign are integers that grow with them, infinity and NaN last: as signed integers those
    # without a sign are the largest, as unsigned ones those with it.
    negative = infinity + (1 << 8 * signed.itemsize - 1)
    return bool(signed.max() < infinity and signed.view(words.replace("i", "u")).max() < negative)
