"""Replacement: which cartridge leaves a tier first. Decides nothing else, and has no lock of its own.

LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001) weighs a use by how long ago it was, 2 ** (-age / half-life).
And what was just loaded is judged by what it was worth before, as by the filter of W-TinyLFU (Einziger et al., ACM
Transactions on Storage 13(4), 2017): a scan passes through one place and takes no others.

All uses lose weight at the same pace, so the order changes only where something is used, and a heap keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, nlargest
from math import exp2, inf, log2

_HALF_LIFE = 7
"""In memories full of chunks that were used."""
_NEVER = -1e9
"""What a cartridge is worth that was not used."""
_REMEMBERED = 1 << 14
"""Cartridges whose uses are remembered, at least, whether they are in memory or not."""


class Replacement:
    """The order in which the cartridges of one tier leave it. Its caller has a lock."""

    def __init__(self, slots: int) -> None:
        """`slots` is how many chunks the tier has memory for."""
        self._slots = slots
        self._now = 0.0
        """Half-lives since the start."""
        self._worth: dict[str, float] = {}
        """Binary logarithm of what the uses of a cartridge weigh: each 1 at the start, and twice as much a half-life later."""
        self._turn = 0
        """How often something left."""
        self._before: dict[str, tuple[float, float]] = {}
        """Of those on trial: what they were worth before they were loaded, and the turn that ends it, known once they can leave."""
        self._heap: list[tuple[float, str]] = []
        self._queued: dict[str, float] = {}
        """Where in the heap each stands that can leave; what else is there does not count. Those used since stand too far
        in front."""

    def use(self, digest: str, chunks: int, *, is_here: bool) -> None:
        """Note that somebody wants `chunks` chunks of a cartridge or chain, and whether all of them were in memory."""
        self._now += min(chunks / self._slots, 1.0) / _HALF_LIFE  # of a larger one the beginning stays
        before = self._worth.get(digest, _NEVER)
        self._worth[digest] = self._now + log2(1 + exp2(before - self._now))
        if is_here:
            self._before.pop(digest, None)
        else:
            self._before[digest] = before, inf
        if self._queued.get(digest) == -inf:  # it becomes whole again
            self._queue(digest, self._rank(digest))
        if len(self._worth) > 2 * _REMEMBERED:
            self._worth = dict(nlargest(_REMEMBERED, self._worth.items(), key=lambda item: item[1]))

    def offer(self, digest: str) -> None:
        """Note that a cartridge has a chunk that can be evicted. Saying so again is no change."""
        if digest not in self._queued:
            if digest in self._before:
                self._before[digest] = self._before[digest][0], self._turn + 1
            self._queue(digest, self._rank(digest))

    def leave(self) -> Iterator[str]:
        """Yield what was offered, the one to evict first first, and forget that it was. Those that stay have passed their trial."""
        self._turn += 1
        while self._heap:
            stood, digest = heappop(self._heap)
            if self._queued.get(digest) != stood:
                continue
            if stood > -inf and stood < (rank := self._rank(digest)):
                self._queue(digest, rank)
                continue
            del self._queued[digest]
            yield digest

    def tear(self, digest: str) -> None:
        """Offer a cartridge that loses a chunk first of all: the space that its rest takes does little good."""
        self._queue(digest, -inf)

    def gone(self, digest: str) -> None:
        """Note that nothing of a cartridge is in memory any more. How often it was used stays known."""
        self._queued.pop(digest, None)
        self._before.pop(digest, None)

    def _rank(self, digest: str) -> float:
        before, until = self._before.get(digest, (_NEVER, 0))
        return before if self._turn <= until else self._worth.get(digest, _NEVER)

    def _queue(self, digest: str, rank: float) -> None:
        self._queued[digest] = rank
        heappush(self._heap, (rank, digest))
