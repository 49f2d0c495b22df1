"""Entry: the one record of a chunk in a tier. Lease and Loan: two of the ways to rely on one."""

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
    """A hold on one chunk that a lookup found."""

    __slots__ = ("entry", "plain", "until")

    def __init__(self, entry: Entry, until: float, plain: bool) -> None:
        """It runs out at the time `until`; `plain` is whether the lookup named no cartridge."""
        self.entry, self.until, self.plain = entry, until, plain


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
