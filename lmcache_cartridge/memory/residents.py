"""Residents: which cartridges are whole in memory, by name."""

from __future__ import annotations

from collections.abc import Iterable

from ..library.catalog import Catalog
from .tier import MemoryTier

_RECENT = 1 << 13
"""Chunks of a tier that are looked at: less than a millisecond, for which hits wait."""


def residents(
    tiers: Iterable[MemoryTier], catalog: Catalog, waiting: Iterable[str], limit: int
) -> dict[str, list[str]]:
    """Return `id@version` of up to `limit` cartridges: `whole` in one tier, the last used first; `coming`, of `waiting`.

    `waiting` are tags that are claimed and not whole. Returns nothing where the limit is 0. Looks at the last used
    chunks only, so that what lies behind many others may be missing.
    """
    if not limit:
        return {}
    counts: dict[str, int] = {}
    for tier in tiers:
        for digest, count in tier.resident_by_digest(_RECENT).items():
            counts[digest] = max(count, counts.get(digest, 0))
    whole = [digest for digest, count in counts.items() if catalog.chunks_of(digest) == count]
    kinds = {"whole": whole, "coming": waiting}
    return {kind: [n for d in digests for n in catalog.names_of(d)][:limit] for kind, digests in kinds.items()}
