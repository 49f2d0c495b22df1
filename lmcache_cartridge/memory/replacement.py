"""Replacement: which cartridge leaves a tier first. Decides nothing else, and has no lock of its own.

LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001) weighs a use by how long ago it was, 2 ** (-age / half-life).
A short half-life is an LRU, a long one counts; which is right depends on the load, so a use is worth a sum over three. And
what was just loaded is judged by what it was worth before, as by the filter of W-TinyLFU (Einziger et al., ACM Transactions
on Storage 13(4), 2017): a scan passes through one place and takes no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, nlargest
from typing import NamedTuple

_SHARES = {2: 1.0, 16: 1.4, 128: 2.0}
"""Of uses a second that each half-life sees, by half-life: in memories full of chunks."""
_REMEMBERED = 1 << 14
"""Cartridges whose uses are remembered, at least, whether they are in memory or not."""


class _Uses(NamedTuple):
    """Uses of one cartridge."""

    at: float = 0.0
    sums: tuple[float, ...] = (0.0,) * len(_SHARES)
    """What they weighed at that time, by each half-life."""

    def sums_at(self, now: float) -> list[float]:
        return [value * 2 ** ((self.at - now) / half_life) for value, half_life in zip(self.sums, _SHARES, strict=True)]

    def worth(self, now: float) -> float:
        shares = _SHARES.items()
        return sum(value * share / age for value, (age, share) in zip(self.sums_at(now), shares, strict=True))


class Replacement:
    """The order in which the cartridges of one tier leave it. Its caller has a lock."""

    def __init__(self, slots: int) -> None:
        """`slots` is how many chunks the tier has memory for."""
        self._slots = slots
        self._now = 0.0
        """Memories full of chunks that were used so far."""
        self._uses: dict[str, _Uses] = {}
        self._on_trial: dict[str, _Uses] = {}
        """Of those that were loaded since something last left: their uses before."""
        self._torn: set[str] = set()

    def use(self, digest: str, chunks: int, *, is_here: bool) -> None:
        """Note that somebody wants `chunks` chunks of a cartridge or chain, and whether all of them were in memory."""
        self._now += min(chunks / self._slots, 1.0)  # of a larger one the beginning stays
        before = self._uses.get(digest, _Uses())
        self._uses[digest] = _Uses(self._now, tuple(value + 1.0 for value in before.sums_at(self._now)))
        self._torn.discard(digest)
        if is_here:
            self._on_trial.pop(digest, None)
            return
        self._on_trial[digest] = before
        if len(self._uses) > 2 * _REMEMBERED:
            self._uses = dict(nlargest(_REMEMBERED, self._uses.items(), key=lambda item: item[1].worth(self._now)))

    def leave(self, digests: Iterable[str]) -> Iterator[str]:
        """Return these digests, the one to evict first first. Those that stay have passed their trial."""
        uses = ((d, self._on_trial.pop(d, self._uses.get(d, _Uses()))) for d in digests)
        order = [(digest not in self._torn, each.worth(self._now), digest) for digest, each in uses]
        heapify(order)
        while order:
            yield heappop(order)[-1]

    def tear(self, digest: str) -> None:
        """Note that a cartridge lost a chunk: the rest of it goes next, as the space it takes does little good."""
        self._torn.add(digest)

    def gone(self, digest: str) -> None:
        """Note that nothing of a cartridge is in memory any more. How often it was used stays known."""
        self._torn.discard(digest)
        self._on_trial.pop(digest, None)
