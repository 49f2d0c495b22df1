"""What is always so of the tiers in memory; tests ask after every step."""

from __future__ import annotations

from operator import length_hint
from typing import Any

from lmcache_cartridge.sources.disk_cache import DiskCache


def check(of: Any) -> None:
    """Assert of a tier, or of those of a store, that every slot has one owner, no reference count is below 0, and the totals
    add up.
    """
    if isinstance(of, DiskCache):
        there = [path.stat().st_size for path in of.root.glob("*/*") if len(path.parent.name) == 64]
        assert sum(there) <= of.stats().budget_bytes, "the budget is exceeded"
        return
    for tier in of._memory.values() if hasattr(of, "cpu") else [of]:
        with tier._lock:
            tier._expire()
            entries = tier._entries.values()
            slots = [slot.data_ptr() for slot in [*tier._free, *(entry.bytes for entry in entries)]]
            assert len(set(slots)) == len(slots) == tier.slots - length_hint(tier._unused), "a slot is lost, or shared"
            assert all(entry.holds >= len(entry.leases) for entry in entries), "a hold was closed twice"
            by_digest = [entry for chunks in tier._cartridges.values() for entry in chunks.values()]
            assert set(by_digest) == set(entries) and all(tier._cartridges.values()), "a chunk is in no cartridge"
            resident = sum(entry.state == "resident" for entry in entries)
            assert tier._promoted - tier._evicted == resident, "promoted - evicted != resident"
            idle = [entry for entry in entries if entry.is_idle()]
            assert tier._idle == len(idle), "what can be evicted was miscounted"
            offered = tier._replacement._queued.keys()
            assert {entry.key.digest for entry in idle} <= offered, "a chunk could never be evicted"
            leases = {lease for entry in entries for lease in entry.leases}
            assert tier._leases.keys() == leases, "a lease is lost"


def check_index(index: Any) -> None:
    """Assert that nothing is kept of cartridges that were forgotten."""
    with index._lock:
        found = {digest for digests in index._digests.values() for digest in digests}
        assert found <= index._open.keys() <= index._hashes.keys()
        assert all(index._digests.values())
        assert {tag for tag in index._tagged if "." not in tag} <= index._hashes.keys()
