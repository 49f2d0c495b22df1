"""Replacement: which cartridge leaves a tier first. Decides nothing else, and has no lock of its own.

LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001) weighs a use by how long ago it was: a cartridge is worth
the sum of 2 ** (-age / half-life) over its uses, the age counted in uses of any cartridge. A short half-life is an LRU, a
long one counts. Which is right depends on the load, so three are simulated on it, each as a tier of its own without
bytes, and the one that lately hit most decides (as the experts of Ari et al., ACME, 2002). And what was just loaded is
judged by what it was worth before, as by the filter of W-TinyLFU (Einziger et al., ACM Transactions on Storage 13(4),
2017): a scan passes through one place and takes no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, log2

HALF_LIVES = (8, 64, 1024)
"""In uses. Chosen on loads with other seeds than those reported, see benchmarks/HISTORY.md."""
_FADES = 1.0 - 1.0 / 500
"""By the second number, how many uses the hits of an expert are averaged over."""
_REMEMBERED = 1 << 14
"""Cartridges whose uses are remembered, at least, whether they are in memory or not."""
_NOTHING = -inf


class _Expert:
    """LRFU with one half-life, and what a tier that goes by it alone would hold."""

    def __init__(self, half_life: float, slots: int) -> None:
        self._half_life, self._free = half_life, slots
        self.worth: dict[str, float] = {}
        """log2 of a cartridge's worth, as of the beginning of time: it grows with each use and never shrinks."""
        self.hits = 0.0
        """Chunks hit lately."""
        self._held: dict[str, int] = {}
        self._new = ""
        self._before = _NOTHING
        """What the newest one was worth before it was loaded."""
        self._heap: list[tuple[float, str]] = []
        """The held ones by what they were worth at some time: never more than they are."""

    def use(self, digest: str, chunks: int, now: int) -> float:
        """Note a use, and return what the cartridge was worth before."""
        added, before = now / self._half_life, self.worth.get(digest, _NOTHING)
        self.worth[digest] = added + log2(1.0 + 2.0 ** (before - added))
        self.hits *= _FADES
        if (held := self._held.get(digest)) is not None and held >= chunks:
            self.hits += chunks
            if digest == self._new:
                self._new = ""
            return before
        if held is not None:
            self._free += self._held.pop(digest)
        while self._free < chunks and self._held:
            self._evict()
        if self._free >= chunks:
            self._held[digest] = chunks
            self._free -= chunks
            self._new, self._before = digest, before
            heappush(self._heap, (before, digest))
        return before

    def forget(self, keep: int) -> None:
        """Forget all but the `keep` most worthy."""
        self.worth = dict(sorted(self.worth.items(), key=lambda item: item[1])[-keep:])

    def _evict(self) -> None:
        while True:
            worth, digest = self._heap[0]
            if digest not in self._held:
                heappop(self._heap)
                continue
            now = self._before if digest == self._new else self.worth.get(digest, _NOTHING)
            if now <= worth:
                heappop(self._heap)
                self._free += self._held.pop(digest)
                return
            heapreplace(self._heap, (now, digest))


class Replacement:
    """The order in which the cartridges of one tier leave it. Its caller has a lock."""

    def __init__(self, slots: int) -> None:
        """`slots` is how many chunks the tier has memory for."""
        self._slots = slots
        self._experts = [_Expert(half_life, slots) for half_life in HALF_LIVES]
        self._best = self._experts[0]
        self._now = 0
        self._on_trial: dict[str, list[float]] = {}
        """Of those that were loaded since something last left: what they were worth before, to each expert."""
        self._torn: set[str] = set()

    def use(self, digest: str, chunks: int, *, is_here: bool) -> None:
        """Note that somebody wants `chunks` chunks of a cartridge or chain, and whether all of them were in memory."""
        self._now += 1
        if chunks > self._slots:
            chunks = self._slots  # of a larger one the beginning stays
        before, now = [], self._now
        for expert in self._experts:
            before.append(expert.use(digest, chunks, now))
        self._torn.discard(digest)
        if is_here:
            self._on_trial.pop(digest, None)
            return
        self._on_trial[digest] = before
        if len(self._best.worth) > 2 * _REMEMBERED:
            for expert in self._experts:
                expert.forget(_REMEMBERED)

    def leave(self, digests: Iterable[str]) -> Iterator[str]:
        """Return these digests, the one to evict first first. Those that stay have passed their trial."""
        best = max(self._experts, key=lambda expert: expert.hits)
        if best.hits > self._best.hits:
            self._best = best
        which, worth = self._experts.index(self._best), self._best.worth
        order = []
        for digest in digests:
            trial = self._on_trial.pop(digest, None)
            now = trial[which] if trial is not None else worth.get(digest, _NOTHING)
            order.append((digest not in self._torn, now, digest))
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
