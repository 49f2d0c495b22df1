"""Tier: what the memory tiers and the disk cache have in common, whatever they keep chunks in."""

from __future__ import annotations

from typing import Protocol


class TierStats(Protocol):
    """Counters since the tier was opened, and what is resident now. Tiers count more under names of their own."""

    @property
    def hits(self) -> int:
        """Chunks asked for that were resident."""

    @property
    def misses(self) -> int:
        """Chunks asked for that were not."""

    @property
    def promoted(self) -> int:
        """Chunks that became resident."""

    @property
    def evicted(self) -> int:
        """Chunks dropped, to make room or by `evict`."""

    @property
    def resident(self) -> int: ...

    @property
    def resident_bytes(self) -> int:
        """Never more than `budget_bytes`."""

    @property
    def budget_bytes(self) -> int: ...


class Tier(Protocol):
    """Verified chunks within a byte budget, least recently used dropped first. Safe from any thread.

    A chunk that is not resident is a miss, `None` or `False`, never an error. A resident chunk is exactly the bytes that
    were put in, or it is a miss. It may be dropped at any moment unless somebody holds it; then the newcomer stays out.

    How bytes are read differs, so that none are copied twice: memory lends its own, the disk cache and a `ByteSource`
    fill the caller's buffer by `read_into`. A source has no tier behind it, so it raises `SourceNotFound` for a miss.
    """

    def evict(self, digest: str) -> int:
        """Drop the chunks of a cartridge that nobody holds and return how many they were. Never raises."""

    def stats(self) -> TierStats:
        """Return the counters, at a cost that does not grow with the chunks; no side effects."""

    def check(self) -> None:
        """Raise `AssertionError` unless counters, budget and what is resident agree."""

    def close(self) -> None:
        """Stop what the tier does by itself. What was handed out stays valid; a second call is no change."""
