"""Entry: the one record of a chunk in a tier. Leases and Loan: two of the ways to rely on one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch

from ..errors import CartridgeError
from ..library.index import ChunkKey

Make = Callable[[torch.Tensor, Callable[[], None]], Any]
"""Makes a loan of a chunk's resident bytes and of what ends it, which takes no lock; twice is no change."""


class Entry:
    """The one record of a chunk that is in memory or on its way there. Its tier changes it, with its lock held."""

    __slots__ = ("bytes", "error", "holds", "key", "leases", "state")

    def __init__(self, key: ChunkKey, slot: torch.Tensor) -> None:
        self.key, self.bytes = key, slot
        self.state: Literal["loading", "resident", "gone"] = "loading"
        self.error: CartridgeError | None = None
        self.holds = 0
        """The reference count."""
        self.leases: list[Lease] = []
        """Those of its holds that are leases, the oldest first."""

    def is_idle(self) -> bool:
        """Whether it can be evicted."""
        return not self.holds and self.state == "resident"

    def lease(self, plain: bool) -> Lease | None:
        """Return its oldest lease of a lookup that did, or did not, name cartridges; None without one."""
        return next((lease for lease in self.leases if lease.plain == plain), None)


class Lease:
    """Chunks that one lookup found."""

    __slots__ = ("entries", "left", "plain", "until")

    def __init__(self, until: float, entries: Sequence[Entry], plain: bool) -> None:
        """It runs out at the time `until`. `left` is how many of its entries were not released before, and `plain` whether
        the lookup named no cartridge.
        """
        self.until, self.entries, self.left, self.plain = until, entries, len(entries), plain


class Leases:
    """The leases of one tier. Its tier has a lock, and counts the holds."""

    def __init__(self) -> None:
        self._open: dict[Lease, None] = {}
        """In the order in which they run out."""
        self.count = 0
        """Of one chunk each, those that were not released and have not run out."""

    def add(self, until: float, entries: Sequence[Entry], plain: bool) -> None:
        """Lease chunks. No lease runs out before one that was added earlier."""
        lease = Lease(until, entries, plain)
        self._open[lease] = None
        self.count += len(entries)
        for entry in entries:
            entry.leases.append(lease)

    def release(self, entry: Entry, lease: Lease) -> None:
        """End one lease of a chunk."""
        entry.leases.remove(lease)
        lease.left -= 1
        if not lease.left:
            del self._open[lease]
        self.count -= 1

    def expire(self, now: float) -> list[Entry]:
        """End those that have run out, and return their chunks, once for each."""
        ended: list[Entry] = []
        while self._open and (oldest := next(iter(self._open))).until <= now:
            del self._open[oldest]
            left = [entry for entry in oldest.entries if oldest in entry.leases]
            for entry in left:
                entry.leases.remove(oldest)
            ended += left
        self.count -= len(ended)
        return ended


class Loan:
    """A chunk that may not be evicted before `close()`, of which a second call is no change; neither takes a lock."""

    __slots__ = ("bytes", "close")

    def __init__(self, data: torch.Tensor, close: Callable[[], None]) -> None:
        """`data` is flat uint8, shared with every other loan of the chunk: read only."""
        self.bytes, self.close = data, close

    def __del__(self) -> None:
        self.close()  # a garbage collection comes anywhere, in a thread that holds a lock too

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def loans(entries: Sequence[Entry], returned: deque[Entry], make: Make) -> list[Any]:
    """Return a loan of each entry. What ends it appends the entry to `returned`, once."""
    back = returned.extend  # no two threads have the next of an iterator
    ends = [partial(back, iter((entry,))) for entry in entries]
    try:
        return list(map(make, [entry.bytes for entry in entries], ends))
    except BaseException:
        for end in ends:
            end()
        raise
