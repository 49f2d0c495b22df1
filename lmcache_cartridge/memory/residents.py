"""Residents: which cartridges are in memory and on disk, by name and by tier."""

from __future__ import annotations

from collections.abc import Iterable

from ..artifact.reading import load_token_ids
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


def described(catalog: Catalog, digest: str, chunk_tokens: int) -> tuple[list[int], dict[str, int]] | None:
    """Return the token ids of a cartridge's whole chunks, and how many chunks of each tier are all of it.

    None for a chain, for what is not served, and for an adapter's: its token ids are the base model's too. Blocks for
    local reads; raises `CartridgeError`.
    """
    segments = catalog.segments(digest)
    if len(segments) != 1:
        return None
    manifest, root, _ = segments[0].cartridge
    if manifest.fingerprint.lora is not None or manifest.payload is None:
        return None
    positions = manifest.positions // chunk_tokens * chunk_tokens
    in_memory, stored = positions // chunk_tokens, -(-positions // manifest.payload.chunk_tokens)
    token_ids = load_token_ids(manifest, root)[:positions].tolist()
    return token_ids, {"device": in_memory, "cpu": in_memory, "disk": stored}
