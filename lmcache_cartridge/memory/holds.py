"""Entry: the one record of a chunk in a tier. Hold: what keeps chunks there. Readiness: how far they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple, Self

import torch

from ..errors import CartridgeError, ModelMismatch
from ..library.index import ChunkKey


class Entry:
    """The one record of a chunk that is in memory or on its way there. Tier and loading threads change it under their lock."""

    __slots__ = ("bytes", "error", "holds", "is_begun", "key", "leases", "left", "room", "state")

    def __init__(self, key: ChunkKey, slot: torch.Tensor) -> None:
        self.key, self.bytes = key, slot
        self.state: Literal["loading", "resident", "gone"] = "loading"
        self.error: CartridgeError | None = None
        self.holds = 0
        """The reference count."""
        self.leases: list[Lease] = []
        """Those of its holds that are leases, the oldest first."""
        self.room = slot
        """Where its pieces are put together while it is loaded; its own memory, or as much as that."""
        self.left, self.is_begun = 0, False
        """How many of them are not read, and whether a thread has begun with one."""

    def is_idle(self) -> bool:
        """Whether it can be evicted."""
        return not self.holds and self.state == "resident"

    def is_unwanted(self) -> bool:
        """Whether nobody holds it and no thread has begun to read for it."""
        return not self.holds and not self.is_begun

    def lease(self, plain: bool) -> Lease | None:
        """Return its oldest lease of a lookup that did, or did not, name cartridges; None without one."""
        return next((lease for lease in self.leases if lease.plain == plain), None)


class Lease:
    """A hold on one chunk that a lookup found, until it is released by key or runs out."""

    __slots__ = ("entry", "plain", "until")

    def __init__(self, entry: Entry, until: float, plain: bool) -> None:
        """It runs out at the time `until`; `plain` is whether the lookup named no cartridge."""
        self.entry, self.until, self.plain = entry, until, plain


class Hold:
    """Chunks of one tier that may not be evicted before `close()`.

    One that is dropped is closed. Neither takes a lock, since a garbage collection comes anywhere, in a thread that holds
    one too; the tier takes them back when it is next used.
    """

    closed = False

    def __init__(self, returned: deque[Entry], entries: Iterable[Entry] = ()) -> None:
        """`returned` is where its tier finds what is held no more."""
        self.entries, self._returned = set(entries), returned

    @property
    def bytes(self) -> torch.Tensor:
        """The bytes of its one chunk, flat uint8, shared with every other hold on it: read only."""
        (entry,) = self.entries
        return entry.bytes

    def close(self) -> None:
        """Let the chunks go; those being loaded are loaded to their end. Closing twice is no change."""
        self.closed = True
        with suppress(KeyError):
            while True:  # no two threads pop the same
                self._returned.append(self.entries.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Reservation(Hold):
    """A hold that grows from poll to poll, as chunks find memory."""

    problem: str | None = None
    is_counted = False
    retry_at = 0.0

    def __init__(
        self,
        returned: deque[Entry],
        keys: Sequence[ChunkKey],
        whole: bool,
        poll: Callable[[Reservation], Readiness],
    ) -> None:
        super().__init__(returned)
        self.keys, self.whole, self._poll = tuple(keys), whole, poll

    def poll(self) -> Readiness:
        """Admit what is missing, as far as memory allows, and return how far everything is. Does not wait.

        A chunk that was admitted has memory until `close`. With `whole` all chunks are admitted or none, else as many
        of the leading ones as fit beside those that others hold. A failed load is tried again after a pause.
        After `close` nothing is held, and nothing is admitted.
        """
        return self._poll(self)


class Readiness(NamedTuple):
    """How far chunks are, of a reservation or a claim, and whether they will ever be resident."""

    resident: int
    """Chunks that are resident."""
    admitted: int
    """Chunks that have memory: resident or being loaded. The others wait for memory."""
    chunks: int
    refused: str | None = None
    """Why it will never be, None if it may."""
    mismatch: bool = False
    """Whether it was made for another model, so that even its token ids mean nothing here."""
    problem: str | None = None
    """Why a chunk could not be loaded when it was last tried; it is tried again."""
    digest: str | None = None
    """Of a cartridge that is refused by itself, not for its place in a chain."""
    opening: bool = False
    """Whether its manifest is still being read; it has no chunks until then."""

    @classmethod
    def never(cls, error: CartridgeError) -> Readiness:
        """Return the readiness of what is refused for this reason."""
        return cls(0, 0, 0, str(error), isinstance(error, ModelMismatch), digest=error.digest)

    @property
    def ready(self) -> bool:
        """Whether every chunk is resident."""
        return self.refused is None and not self.opening and self.resident == self.chunks
