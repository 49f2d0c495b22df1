"""TierStats: what a tier did, and what is in it."""

from __future__ import annotations

from typing import NamedTuple


class TierStats(NamedTuple):
    """Counters since the start, in chunks where no unit is named, and what is resident now.

    promoted - evicted = resident, always.
    """

    hits: int
    """Chunks that somebody asked for and that were resident."""
    misses: int
    promoted: int
    """Chunks that became resident."""
    failed: int
    evicted: int
    resident: int
    loading: int
    held: int
    """Chunks with a reference count above 0: claimed, leased or lent."""
    leased: int
    """Leases of one chunk each that were not released and have not run out."""
    lent: int
    """Loans that are open."""
    resident_bytes: int
    budget_bytes: int
    load_seconds: float
    """Time spent in loads, failed ones too."""
    load_counts: tuple[int, ...]
    """Loads by duration: one count for each bucket of `LOAD_SECONDS`, and one for longer ones."""
