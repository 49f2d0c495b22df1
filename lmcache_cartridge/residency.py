"""Residency: which chunks are in memory, who may rely on them, and for how long.

acquire(keys)   waits until the chunks are resident (or the deadline) and leases them, so that they stay
release(key)    ends one lease; leases that nobody ends run out by themselves
lend(key)       hands out the resident bytes; they stay until the loan is closed
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Literal, NamedTuple

import torch

from .errors import CartridgeError
from .keys import ChunkKey
from .slab import Slab

logger = logging.getLogger(__name__)

Load = Callable[[ChunkKey, torch.Tensor], None]
"""Fills a slot, flat uint8, with the verified bytes of a chunk; raises `CartridgeError` when it cannot."""


class ResidencyStats(NamedTuple):
    """Counters since the start, and what is resident now. Without loads in flight, loaded - evicted = resident."""

    hits: int
    misses: int
    loaded: int
    failed: int
    evicted: int
    resident: int
    loading: int
    leased: int
    lent: int
    resident_bytes: int
    budget_bytes: int


class _Entry:
    """The one record of a chunk that is in memory or on its way there."""

    __slots__ = ("leases", "loans", "pinned", "slot", "state")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.state: Literal["loading", "resident", "gone"] = "loading"
        self.leases: deque[float] = deque()
        self.loans = 0
        self.pinned = False

    def live_leases(self, now: float) -> int:
        """Forget the leases that have run out and return how many are left."""
        while self.leases and self.leases[0] <= now:
            self.leases.popleft()
        return len(self.leases)


class Loan:
    """The resident bytes of one chunk; they stay where they are until `close()`."""

    __slots__ = ("_entry", "_residency", "bytes")

    def __init__(self, residency: Residency, entry: _Entry, data: torch.Tensor) -> None:
        self.bytes = data
        """Flat uint8, shared with every other loan of the chunk: read only."""
        self._residency = residency
        self._entry: _Entry | None = entry

    def close(self) -> None:
        """End the loan. Closing twice is no change. Does not block on I/O."""
        # Attribute swap first: LMCache may free an object from two threads, and one loan must count once.
        with self._residency._lock:
            entry, self._entry = self._entry, None
            if entry is not None:
                entry.loans -= 1

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Residency:
    """The cpu tier: chunks of one size in a slab, evicted least recently used first.

    Leased, lent and loading chunks are never evicted, so the budget may refuse but is never exceeded. However many
    callers want a chunk, it is loaded once. Every method may be called from any thread; only `acquire` waits.
    """

    def __init__(
        self,
        slab: Slab,
        load: Load,
        *,
        threads: int = 4,
        lease_s: float = 300.0,
        on_failure: Callable[[ChunkKey, CartridgeError], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_failure` hears of every load that raised, from the loading thread, before any waiter does."""
        self._slab, self._load, self._on_failure = slab, load, on_failure
        self._lease_s, self._clock = lease_s, clock
        self._entries: OrderedDict[ChunkKey, _Entry] = OrderedDict()
        self._lock = threading.RLock()  # re-entrant: a garbage collection inside it may close a loan
        self._changed = threading.Condition(self._lock)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cartridge-load")
        self._hits = self._misses = self._loaded = self._failed = self._evicted = 0
        self._closed = False

    def acquire(self, keys: Sequence[ChunkKey], timeout_s: float, *, whole: bool = False) -> int:
        """Lease the longest leading run of `keys` that is resident within `timeout_s`, and return its length.

        Chunks that are not resident start loading, as far as unleased memory allows, and go on loading after the
        deadline. With `whole` the answer is all of `keys` or none. Leases nothing beyond the run it returns.
        """
        deadline = self._clock() + timeout_s
        with self._changed:
            if whole and not self._fits(keys):
                self._misses += 1
                return 0
            entries = self._admit(keys)
            run = _resident_run(entries)
            while run < len(entries) and entries[run].state == "loading":
                remaining = deadline - self._clock()
                if remaining <= 0 or not self._changed.wait(remaining):
                    break
                run = _resident_run(entries)
            run = _resident_run(entries)
            if whole and run < len(keys):
                run = 0
            for entry in entries[run:]:
                if entry.leases:  # it may have run out meanwhile, or another's late release may have ended it
                    entry.leases.pop()
            return run

    def release(self, key: ChunkKey) -> bool:
        """End one lease of the chunk, the oldest that has not run out; False if it has none."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.live_leases(self._clock()):
                return False
            entry.leases.popleft()
            return True

    def resident(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the leading run of `keys` that is resident now; no side effects."""
        with self._lock:
            return _resident_run([self._entries[key] for key in takewhile(self._entries.__contains__, keys)])

    def lend(self, key: ChunkKey) -> Loan | None:
        """Return the resident bytes of a chunk, or None if it is not resident."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.state != "resident":
                return None
            entry.loans += 1
            return Loan(self, entry, self._slab.tensor(entry.slot))

    def resident_by_digest(self) -> dict[str, int]:
        """Return how many chunks of each digest are resident; no side effects."""
        with self._lock:
            return Counter(key.digest for key, entry in self._entries.items() if entry.state == "resident")

    def pin(self, digest: str, pinned: bool) -> int:
        """Pin or unpin a cartridge's chunks that are in memory, and return how many. Pinned ones are never evicted."""
        with self._lock:
            mine = [entry for key, entry in self._entries.items() if key.digest == digest]
            for entry in mine:
                entry.pinned = pinned
            return len(mine)

    def evict(self, digest: str) -> int:
        """Drop the chunks of a cartridge, or of a chain, that nobody relies on and return how many."""
        with self._lock:
            now = self._clock()
            mine = [k for k, e in self._entries.items() if k.digest == digest and self._is_idle(e, now)]
            for key in mine:
                self._drop(key)
            return len(mine)

    def stats(self) -> ResidencyStats:
        """Return counters and totals; no side effects."""
        with self._lock:
            entries, now = self._entries.values(), self._clock()
            resident = sum(e.state == "resident" for e in entries)
            return ResidencyStats(
                hits=self._hits,
                misses=self._misses,
                loaded=self._loaded,
                failed=self._failed,
                evicted=self._evicted,
                resident=resident,
                loading=len(self._entries) - resident,
                leased=sum(any(t > now for t in e.leases) for e in entries),
                lent=sum(e.loans > 0 for e in entries),
                resident_bytes=resident * self._slab.slot_bytes,
                budget_bytes=self._slab.slots * self._slab.slot_bytes,
            )

    def check(self) -> None:
        """Assert the invariants: every slot has one owner, counts add up, nothing is owed."""
        with self._lock:
            slots = [e.slot for e in self._entries.values()]
            assert len(set(slots)) == len(slots), "two chunks share a slot"
            assert len(slots) + self._slab.free_slots == self._slab.slots, "a slot is lost"
            assert all(e.loans >= 0 for e in self._entries.values()), "a loan was closed twice"
            resident = sum(e.state == "resident" for e in self._entries.values())
            assert self._loaded - self._evicted == resident, "loaded - evicted != resident"

    def close(self) -> None:
        """Admit no more chunks and wait for the loads under way. Loans stay valid."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=True, cancel_futures=False)

    def _fits(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether all of `keys` could be in memory at once, given what must stay. The lock is held."""
        missing = sum(key not in self._entries for key in keys)
        if missing <= self._slab.free_slots:
            return True
        now, wanted = self._clock(), set(keys)
        idle = sum(self._is_idle(e, now) for k, e in self._entries.items() if k not in wanted)
        return missing <= self._slab.free_slots + idle

    def _admit(self, keys: Sequence[ChunkKey]) -> list[_Entry]:
        """Lease a leading run of `keys`, start loading what is missing of it, and return it. The lock is held."""
        expiry = self._clock() + self._lease_s
        # What is here already is leased first, so that loading its neighbours cannot evict it.
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                self._hits += entry.state == "resident"
                self._misses += entry.state == "loading"
                entry.leases.append(expiry)
        admitted = []
        for count, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                if self._closed or not (self._slab.free_slots or self._evict_one()):
                    for beyond in keys[count + 1 :]:
                        if beyond in self._entries:
                            self._entries[beyond].leases.pop()
                    break
                entry = self._entries[key] = _Entry(self._slab.take())
                entry.leases.append(expiry)
                self._pool.submit(self._run_load, key, entry)
            admitted.append(entry)
        # Looking up is what counts as use, the last chunk first: when memory runs short a cartridge loses its end, and
        # the rest of it stays useful.
        for key in reversed(keys[: len(admitted)]):
            self._entries.move_to_end(key)
        return admitted

    def _run_load(self, key: ChunkKey, entry: _Entry) -> None:
        error = None
        try:
            self._load(key, self._slab.tensor(entry.slot))
        except CartridgeError as caught:
            error = caught
        except Exception as caught:  # a bug must not leave waiters hanging or a slot lost
            error = CartridgeError(f"loading chunk {key.chunk} of {key.digest}: {type(caught).__name__}: {caught}")
        if error is not None and self._on_failure is not None:
            try:
                self._on_failure(key, error)
            except Exception:
                logger.exception("chunk %d of %s was not loaded (%s), and nobody heard", key.chunk, key.digest, error)
        with self._changed:
            if error is None:
                entry.state = "resident"
                self._loaded += 1
            else:
                entry.state = "gone"
                self._failed += 1
                del self._entries[key]
                self._slab.give(entry.slot)
            self._changed.notify_all()

    def _is_idle(self, entry: _Entry, now: float) -> bool:
        return entry.state == "resident" and not (entry.live_leases(now) or entry.loans or entry.pinned)

    def _evict_one(self) -> bool:
        """Free the slot of the least recently used idle chunk; False if there is none. The lock is held."""
        now = self._clock()
        for key, entry in self._entries.items():
            if self._is_idle(entry, now):
                self._drop(key)
                return True
        return False

    def _drop(self, key: ChunkKey) -> None:
        entry = self._entries.pop(key)
        entry.state = "gone"
        self._slab.give(entry.slot)
        self._evicted += 1


def _resident_run(entries: Sequence[_Entry]) -> int:
    return next((i for i, entry in enumerate(entries) if entry.state != "resident"), len(entries))
