"""Remarks: what whoever reads the figures has to know."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .figures import Row
from .run import Plan
from .watch import Tiers


def remarks(plan: Plan, rows: Sequence[Row], counted: Tiers, warm: Collection[str]) -> list[str]:
    """Return what was not as it should be, and where KV came from: warm cartridges were in the tiers `warm`."""
    found = [
        f"p = {row.p}, c = {row.c}, {row.way}: {row.errors} errors, {row.not_so} not so: {'; '.join(row.remarks[:3])}"
        for row in rows
        if row.remarks
    ]
    if any(row.cached is None and row.requests for row in rows):
        found.append(
            "the server does not tell cached tokens, so that nothing shows that *dense* was computed and *prefix* was not; "
            "vLLM tells with --enable-prompt-tokens-details"
        )
    ways = {row.way for row in rows}
    if "warm" in ways and warm:
        found.append(f"warm cartridges were in the tier {', '.join(sorted(warm))}")
    if "cold" in ways:
        read = {tier: of["read_bytes"] / 2**20 for tier, of in counted.items() if of.get("read_bytes")}
        told = ", ".join(f"{count:,.1f} MiB from the tier {tier}" for tier, count in read.items())
        found.append(f"the server read {told or 'nothing that it counts'} in all; {_dropped(plan, rows)}")
    if any(not place.is_same for place in plan.places):
        found.append(
            "a trained cartridge is compared in time with a generated text of p tokens, and not in its answers"
        )
    return found


def _dropped(plan: Plan, rows: Sequence[Row]) -> str:
    """Return of which cartridges the files were dropped before cold requests."""
    cold = {row.p for row in rows if row.way == "cold"}
    dropped = [f"{place.p:,}" for place in plan.places if place.p in cold and place.files]
    kept = [f"{place.p:,}" for place in plan.places if place.p in cold and not place.files]
    if not kept:
        return "before cold requests their files were dropped from the system's page cache"
    if not dropped:
        told = "no file was dropped from the system's page cache"
    else:
        told = (
            f"the files of p = {', '.join(dropped)} were dropped from the system's page cache, those of "
            f"p = {', '.join(kept)} were not"
        )
    return f"before cold requests {told}, so that a local disk may have answered from memory"
