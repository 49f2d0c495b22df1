"""Residency: which chunks are in one tier's memory, who may rely on them, and for how long.

hold(keys)      keeps chunks from when they are admitted until the hold is closed; tells how far loading is
acquire(keys)   waits until the chunks are resident (or the deadline) and leases them, so that they stay
release(key)    ends one lease; leases that nobody ends run out by themselves
lend(key)       hands out the resident bytes; they stay until the loan is closed
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import torch

from ..errors import CartridgeError
from ..library.index import ChunkKey
from .hold import Hold
from .loads import Load, LoadThreads
from .slab import Slab

LOAD_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the buckets in which durations of loads are counted; a last bucket holds what took longer."""


class ResidencyStats(NamedTuple):
    """Counters since the start, in chunks where no unit is named, and what is resident now.

    promoted - evicted = resident, always.
    """

    hits: int
    """Chunks that somebody asked for and that were resident."""
    misses: int
    promoted: int
    """Chunks that became resident."""
    failed: int
    """Loads that raised."""
    evicted: int
    resident: int
    loading: int
    held: int
    leased: int
    lent: int
    resident_bytes: int
    budget_bytes: int
    load_seconds: float
    """Time spent in loads, failed ones too."""
    load_counts: tuple[int, ...]
    """Loads by duration: one count for each bucket of `LOAD_SECONDS`, and one for what took longer."""


class Entry:
    """The one record of a chunk that is in memory or on its way there."""

    __slots__ = ("bytes", "error", "holds", "leases", "loans", "slot", "state")

    def __init__(self, slot: int, data: torch.Tensor) -> None:
        self.slot = slot
        self.bytes = data  # a hit takes them, and to make a view of the slot costs more than all the rest
        self.state: Literal["loading", "resident", "gone"] = "loading"
        self.error: CartridgeError | None = None
        self.leases: deque[float] = deque()
        """When each runs out."""
        self.loans = 0
        self.holds = 0

    def live_leases(self, now: float) -> int:
        """Forget the leases that have run out and return how many are left."""
        while self.leases and self.leases[0] <= now:
            self.leases.popleft()
        return len(self.leases)


class Loan:
    """The resident bytes of one chunk; they stay where they are until `close()`."""

    __slots__ = ("_entry", "_residency", "bytes")

    def __init__(self, residency: Residency, entry: Entry) -> None:
        self.bytes = entry.bytes
        """Flat uint8, shared with every other loan of the chunk: read only."""
        self._residency = residency
        self._entry: Entry | None = entry

    def close(self) -> None:
        """End the loan. Closing twice is no change. Does not block on I/O."""
        # Attribute swap first: LMCache may free an object from two threads, and one loan must count once.
        with self._residency._lock:
            entry, self._entry = self._entry, None
            if entry is not None:
                self._residency._lend(entry, -1)

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Residency:
    """One tier: chunks of one size in a slab, evicted least recently used first.

    Held, leased, lent and loading chunks are never evicted, so the budget may refuse but is never exceeded. However
    many callers want a chunk, it is loaded once. Every method may be called from any thread; only `acquire` waits.
    """

    def __init__(
        self,
        slab: Slab,
        load: Load,
        *,
        threads: int = 4,
        lease_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        **loading: Any,
    ) -> None:
        """`loading` is what else `LoadThreads` takes: slow chunks apart, neighbours together, who hears of failures."""
        self._slab, self._lease_s, self._clock = slab, lease_s, clock
        self.budget_bytes = slab.slots * slab.slot_bytes
        self._entries: OrderedDict[ChunkKey, Entry] = OrderedDict()
        self._lock = threading.RLock()  # re-entrant: a garbage collection inside it may close a loan
        self._changed = threading.Condition(self._lock)
        self._threads = LoadThreads(load, self._loaded, self._lock, threads=threads, clock=clock, **loading)
        self._hits = self._misses = self._promoted = self._failed = self._evicted = 0
        # How many chunks are so, kept as they change: whoever asks for totals must not hold up a hit.
        self._held = self._lent = 0
        self._leased: OrderedDict[Entry, None] = OrderedDict()
        """Those with a lease, in the order in which the last one runs out; it may have since."""
        self._reordered: set[Entry] = set()
        """Those whose last lease was given back, so that they have no place in that order."""
        self._load_seconds, self._load_counts = 0.0, [0] * (len(LOAD_SECONDS) + 1)
        self._closed = False

    def hold(self, keys: Sequence[ChunkKey], *, whole: bool = False) -> Hold:
        """Return a hold on `keys`, the caller's to poll and close."""
        return Hold(self, keys, whole)

    def lease_resident(self, keys: Sequence[ChunkKey]) -> bool:
        """Lease all of `keys` if every one is resident; else lease and load nothing and return False."""
        with self._lock:
            if _resident_run([self._entries[k] for k in takewhile(self._entries.__contains__, keys)]) < len(keys):
                return False
            self._admit(keys, self._clock() + self._lease_s)
            return True

    def want(self, keys: Sequence[ChunkKey]) -> None:
        """Start loading what is missing of `keys`, as far as idle memory allows; lease nothing and do not wait."""
        with self._lock:
            for key in keys[: self.acquire(keys, 0.0)]:
                self.release(key)

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
            expiry = self._clock() + self._lease_s
            entries = self._admit(keys, expiry)
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
                self._unlease(entry, expiry)
            return run

    def release(self, key: ChunkKey) -> bool:
        """End one lease of the chunk, the oldest that has not run out; False if it has none."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not self._live_leases(entry, self._clock()):
                return False
            self._unlease(entry, entry.leases[0])
            return True

    def resident(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the leading run of `keys` that is resident now; no side effects."""
        with self._lock:
            return _resident_run([self._entries[key] for key in takewhile(self._entries.__contains__, keys)])

    def lend(self, key: ChunkKey) -> Loan | None:
        """Return the resident bytes of a chunk, or None if it is not resident."""
        return next(iter(self.lend_run([key])), None)

    def lend_run(self, keys: Sequence[ChunkKey]) -> list[Loan]:
        """Return the resident bytes of each of the longest leading run of `keys` that is resident."""
        loans = []
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None or entry.state != "resident":
                    break
                self._lend(entry, 1)
                loans.append(Loan(self, entry))
        return loans

    def resident_by_digest(self) -> dict[str, int]:
        """Return how many chunks of each digest are resident; no side effects."""
        with self._lock:
            return dict(Counter(key.digest for key, entry in self._entries.items() if entry.state == "resident"))

    def evict(self, digest: str) -> int:
        """Drop the chunks of a cartridge, or of a chain, that nobody relies on and return how many."""
        with self._lock:
            now = self._clock()
            mine = [k for k, e in self._entries.items() if k.digest == digest and self._is_idle(e, now)]
            for key in mine:
                self._drop(key)
            return len(mine)

    def stats(self) -> ResidencyStats:
        """Return counters and totals, at a cost that does not grow with the chunks; no side effects."""
        with self._lock:
            self._forget_ends(self._clock())
            resident = self._promoted - self._evicted
            return ResidencyStats(
                hits=self._hits,
                misses=self._misses,
                promoted=self._promoted,
                failed=self._failed,
                evicted=self._evicted,
                resident=resident,
                loading=len(self._entries) - resident,
                held=self._held,
                leased=len(self._leased) + len(self._reordered),
                lent=self._lent,
                resident_bytes=resident * self._slab.slot_bytes,
                budget_bytes=self.budget_bytes,
                load_seconds=self._load_seconds,
                load_counts=tuple(self._load_counts),
            )

    def check(self) -> None:
        """Assert the invariants: every slot has one owner, counts add up, nothing is owed."""
        with self._lock:
            slots = [e.slot for e in self._entries.values()]
            assert len(set(slots)) == len(slots), "two chunks share a slot"
            assert len(slots) + self._slab.free_slots == self._slab.slots, "a slot is lost"
            assert all(e.loans >= 0 for e in self._entries.values()), "a loan was closed twice"
            assert all(e.holds >= 0 for e in self._entries.values()), "a hold was closed twice"
            resident = sum(e.state == "resident" for e in self._entries.values())
            assert self._promoted - self._evicted == resident, "promoted - evicted != resident"
            now, entries = self._clock(), self._entries.values()
            self._forget_ends(now)
            found = [sum(e.holds > 0 for e in entries), sum(e.loans > 0 for e in entries)]
            found.append(sum(any(t > now for t in e.leases) for e in entries))
            leased = len(self._leased) + len(self._reordered)
            assert [self._held, self._lent, leased] == found, "what is held, lent or leased was miscounted"

    def relieve(self) -> None:
        """Let other cartridges load past those whose reads hang; see `LoadThreads.relieve`. Does not wait."""
        self._threads.relieve()

    def close(self) -> None:
        """Admit no more chunks and wait for the loads under way. Loans stay valid."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._threads.close()

    def _fits(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether all of `keys` could be in memory at once, given what must stay. The lock is held."""
        missing = sum(key not in self._entries for key in keys)
        if missing <= self._slab.free_slots:
            return True
        now, wanted = self._clock(), set(keys)
        idle = sum(self._is_idle(e, now) for k, e in self._entries.items() if k not in wanted)
        return missing <= self._slab.free_slots + idle

    def _admit(self, keys: Sequence[ChunkKey], expiry: float) -> list[Entry]:
        """Lease a leading run of `keys`, start loading what is missing of it, and return it. The lock is held."""
        # What is here already is leased first, so that loading its neighbours cannot evict it.
        here = [entry for key in keys if (entry := self._entries.get(key)) is not None]
        for entry in here:
            if not entry.holds:  # what is held was counted when it was
                self._count(entry)
            self._lease(entry, expiry)
        if len(here) == len(keys):
            self._touch(keys)
            return here
        admitted = []
        for count, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                if self._closed or not self._has_room():
                    for beyond in keys[count + 1 :]:
                        if beyond in self._entries:
                            self._unlease(self._entries[beyond], expiry)
                    break
                entry = self._start(key)
                self._lease(entry, expiry)
            admitted.append(entry)
        self._touch(keys[: len(admitted)])
        return admitted

    def _count(self, entry: Entry | None) -> None:
        resident = entry is not None and entry.state == "resident"
        self._hits += resident
        self._misses += not resident

    def _touch(self, keys: Sequence[ChunkKey]) -> None:
        """Make `keys` the most recently used, the first of them most of all.

        When memory runs short a cartridge loses its end, and the rest of it stays useful.
        """
        for key in reversed(keys):
            self._entries.move_to_end(key)

    def _start(self, key: ChunkKey) -> Entry:
        """Give a chunk a free slot and have it loaded. The lock is held."""
        slot = self._slab.take()
        entry = self._entries[key] = Entry(slot, self._slab.tensor(slot))
        self._threads.submit(key, entry.bytes)
        return entry

    def _loaded(self, keys: Sequence[ChunkKey], errors: Sequence[CartridgeError | None], took_s: float) -> None:
        """Note how the load of chunks in a row ended, and wake who waits for them."""
        with self._changed:
            for key, error in zip(keys, errors, strict=True):
                self._settle(key, error, took_s / len(keys))
            self._changed.notify_all()

    def _settle(self, key: ChunkKey, error: CartridgeError | None, took_s: float) -> None:
        """Note how a load ended. The lock is held."""
        entry = self._entries[key]  # what loads is never dropped
        self._load_seconds += took_s
        self._load_counts[bisect_left(LOAD_SECONDS, took_s)] += 1
        if error is None:
            entry.state = "resident"
            self._promoted += 1
        else:
            self._held -= entry.holds > 0
            entry.state, entry.error = "gone", error
            entry.leases.clear()
            self._no_lease(entry)
            self._failed += 1
            del self._entries[key]
            self._slab.give(entry.slot)

    def _is_idle(self, entry: Entry, now: float) -> bool:
        return entry.state == "resident" and not (entry.holds or entry.loans or self._live_leases(entry, now))

    def _hold(self, entry: Entry, change: int) -> None:
        """Note that one hold more, or less, keeps a chunk. The lock is held."""
        before, entry.holds = entry.holds > 0, entry.holds + change
        if entry.state != "gone":
            self._held += (entry.holds > 0) - before

    def _lend(self, entry: Entry, change: int) -> None:
        before, entry.loans = entry.loans > 0, entry.loans + change
        self._lent += (entry.loans > 0) - before

    def _lease(self, entry: Entry, expiry: float) -> None:
        entry.leases.append(expiry)
        self._reordered.discard(entry)
        self._leased[entry] = None
        self._leased.move_to_end(entry)

    def _unlease(self, entry: Entry, expiry: float) -> None:
        """End the lease that runs out then; no change if it did, or somebody's late release ended it."""
        with suppress(ValueError):
            entry.leases.remove(expiry)
            if not entry.leases:
                self._no_lease(entry)
            elif entry.leases[-1] < expiry:
                self._leased.pop(entry, None)
                self._reordered.add(entry)

    def _live_leases(self, entry: Entry, now: float) -> int:
        """Forget the leases that have run out and return how many are left."""
        live = entry.live_leases(now)
        if not live:
            self._no_lease(entry)
        return live

    def _forget_ends(self, now: float) -> None:
        """Note which chunks have no lease any more since their last one ran out."""
        while self._leased and next(iter(self._leased)).leases[-1] <= now:
            self._live_leases(next(iter(self._leased)), now)
        for entry in list(self._reordered):
            self._live_leases(entry, now)

    def _no_lease(self, entry: Entry) -> None:
        self._leased.pop(entry, None)
        self._reordered.discard(entry)

    def _has_room(self) -> bool:
        """Whether a slot is free, that of the least recently used idle chunk if need be. The lock is held."""
        if self._slab.free_slots:
            return True
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


def _resident_run(entries: Sequence[Entry]) -> int:
    return next((i for i, entry in enumerate(entries) if entry.state != "resident"), len(entries))
