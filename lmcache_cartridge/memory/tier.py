"""MemoryTier: the chunks of one engine rank in one memory, and who may rely on them for how long.

An entry has one reference count. Whoever relies on a chunk has a hold, and what is held is never evicted:

hold(keys)    a claim's: grows from poll to poll, as chunks find memory and are loaded
lease(keys)   the tier's own, with a deadline: LMCache asks for chunks by key, and by key it lets them go
lend(keys)    of one chunk each, while their bytes are copied
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

import torch

from ..errors import OverBudget
from ..library.index import ChunkKey
from .holds import Entry, Hold, Lease, Readiness, Reservation
from .loads import ChunkSource, LoadThreads
from .replacement import Replacement
from .slab import slab

_RETRY_S = 1.0
"""The pause before a failed load is tried again."""


class TierStats(NamedTuple):
    """Counters since the start, in chunks where no unit is named, and what is resident now.

    promoted - evicted = resident, always.
    """

    hits: int
    """Chunks that somebody asked for and that were resident."""
    misses: int
    promoted: int
    """Chunks that became resident."""
    failed: int
    evicted: int
    resident: int
    loading: int
    held: int
    """Chunks with a reference count above 0: claimed, leased or lent."""
    leased: int
    """Leases of one chunk each that were not released and have not run out."""
    lent: int
    """Loans that are open."""
    resident_bytes: int
    budget_bytes: int
    load_seconds: float
    """Time spent in loads, failed ones too."""


class MemoryTier:
    """Chunks of one size within a budget of bytes. Whole cartridges leave it, in the order of `Replacement`.

    Held and loading chunks are never evicted, so the budget may refuse but is never exceeded. However many callers want
    a chunk, it is loaded once. Every method may be called from any thread; only `lease` and `load` wait.
    """

    def __init__(
        self, slot_bytes: int, budget_bytes: int, source: ChunkSource, *, device: str = "cpu", pin_memory: bool = False,
        lease_s: float = 300.0, clock: Callable[[], float] = time.monotonic, **loading: Any
    ) -> None:  # fmt: skip
        """Have memory for `budget_bytes // slot_bytes` chunks on `device`, page-locked with `pin_memory`.

        `source` has the chunks; `loading` is passed on to `LoadThreads`. Raises `OverBudget` where the budget
        has no room for one chunk.
        """
        self.slots, self.slot_bytes = budget_bytes // slot_bytes, slot_bytes
        self.budget_bytes = self.slots * slot_bytes
        if self.slots < 1:
            raise OverBudget(
                f"a budget of {budget_bytes} bytes holds no chunk of {slot_bytes} bytes; raise cpu_bytes to at least "
                f"{slot_bytes}, better to the size of the cartridges in use"
            )
        self._memory = slab(self.budget_bytes, device, pin_memory=pin_memory)  # equal slots, so nothing fragments
        self._unused = iter(range(0, self.budget_bytes, slot_bytes))
        self._free: list[torch.Tensor] = []
        """Slots that were given back, as views: to make one costs more than the rest of a hit, and all at once seconds."""
        self._lease_s, self.clock = lease_s, clock
        self._entries: dict[ChunkKey, Entry] = {}
        self._cartridges: dict[str, dict[int, Entry]] = {}
        """The same entries by digest and chunk."""
        self._replacement = Replacement(self.slots)
        self._leases: OrderedDict[Lease, None] = OrderedDict()
        """Those that were not released, in the order in which they run out."""
        self._returned: deque[Entry] = deque()
        """What holds gave back and is not counted yet, one for each time; and what loans did."""
        self._repaid: deque[Entry] = deque()
        self._lock = threading.RLock()  # re-entrant: `load` lends
        self._changed = threading.Condition(self._lock)
        self._threads = LoadThreads(source, self._loaded, self._lock, clock=clock, **loading)
        self.relieve = self._threads.relieve
        self._hits = self._misses = self._promoted = self._failed = self._evicted = 0
        # Totals are kept as they change: whoever asks for them must not hold up a hit.
        self._lent = self._idle = 0
        self._closed = False

    def hold(self, keys: Sequence[ChunkKey], *, whole: bool = False) -> Reservation:
        """Return a hold on `keys`, the caller's to poll and close. Nothing is admitted before its first `poll()`."""
        return Reservation(self._returned, keys, whole, self._poll)

    def lease(self, keys: Sequence[ChunkKey], timeout_s: float, *, whole: bool = False, plain: bool = False) -> int:
        """Lease the longest leading run of `keys` that is resident within `timeout_s`, and return its length.

        Chunks that are not resident start loading, as far as memory allows, and go on loading after the deadline. With
        `whole` the answer is all of `keys` or none. Nothing beyond that run stays held. A lease ends by `release`, chunk
        by chunk, or when it runs out. A `plain` one is that of a prompt that names no cartridge; see `promised`.
        """
        with self._lock:
            run = self._keep_run(keys, timeout_s, whole=whole)
            until = self.clock() + self._lease_s
            for entry in run:
                entry.leases.append(lease := Lease(entry, until, plain))
                self._leases[lease] = None
            return len(run)

    def release(self, key: ChunkKey, plain: bool = False) -> bool:
        """End one lease of a chunk, the oldest that has not run out; False if it has none."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.leases and entry.leases[0].until <= self.clock():
                self._expire()
            if entry is None or (lease := entry.lease(plain)) is None:
                return False
            self._end_lease(lease)
            return True

    def promised(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether all of these were leased for prompts that name no cartridge; no side effects."""
        return all((entry := self._entries.get(key)) is not None and entry.lease(True) for key in keys)

    def lend(self, keys: Sequence[ChunkKey]) -> list[Hold]:
        """Return a hold on each of the longest leading run of `keys` that is resident, the caller's to close."""
        with self._lock:
            self._settle()
            run: list[Any] = list(takewhile(_is_resident, map(self._entries.get, keys)))
            self._keep(run)
            self._lent += len(run)
        return [Hold(self._repaid, (entry,)) for entry in run]

    def load(self, keys: Sequence[ChunkKey], timeout_s: float) -> list[Hold]:
        """Do `lend` with what is resident within `timeout_s`, loaded first if need be."""
        with self._lock:
            run = self._keep_run(keys, timeout_s)
            lent = self.lend(keys)
            self._let_go(run)
        return lent

    def resident(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the leading run of `keys` that is resident now; no side effects."""
        return len(list(takewhile(_is_resident, map(self._entries.get, keys))))

    def evict(self, digest: str) -> int:
        """Drop the chunks of a cartridge, or of a chain, that nobody holds and return how many."""
        with self._lock:
            self._expire()
            mine = list(filter(Entry.is_idle, self._cartridges.get(digest, {}).values()))
            self._drop(*mine)
            return len(mine)

    def resident_by_digest(self) -> dict[str, int]:
        """Return how many chunks of each digest are resident."""
        with self._lock:
            return dict(Counter(key.digest for key, entry in self._entries.items() if _is_resident(entry)))

    def stats(self) -> TierStats:
        """Return counters and totals, at a cost that does not grow with the chunks; no side effects."""
        with self._lock:
            self._expire()
            resident, loading = self._promoted - self._evicted, self._threads.loading()
            held = resident - self._idle + sum(entry.holds > 0 for entry in loading)
            return TierStats(
                self._hits, self._misses, self._promoted, self._failed, self._evicted, resident, len(loading), held,
                len(self._leases), self._lent, resident * self.slot_bytes, self.budget_bytes, self._threads.seconds
            )  # fmt: skip

    def close(self) -> None:
        """Admit no more chunks and wait for the loads under way. Loans stay valid."""
        with self._lock:
            self._closed = True
        self._threads.close()

    def _poll(self, hold: Reservation) -> Readiness:
        with self._lock:
            if not hold.closed:
                self._grow(hold)
            entries = list(hold.entries)
            resident = sum(entry.state == "resident" for entry in entries)
            return Readiness(resident, len(entries), len(hold.keys), problem=hold.problem)

    # The lock is held in everything below.

    def _add(self, hold: Reservation, entries: Iterable[Entry]) -> None:
        """Have a hold keep entries too."""
        new = set(entries) - hold.entries
        self._keep(new)
        hold.entries |= new
        if hold.closed:  # meanwhile, by another thread
            hold.close()

    def _keep(self, entries: Iterable[Entry]) -> None:
        """Count one hold more of each: the one place where reference counts grow."""
        for entry in entries:
            self._idle -= entry.is_idle()
            entry.holds += 1

    def _let_go(self, entries: Iterable[Entry]) -> None:
        """Count one hold less of each: the one place where reference counts shrink."""
        for entry in entries:
            entry.holds -= 1
            if entry.is_idle():
                self._idled(entry)

    def _idled(self, entry: Entry) -> None:
        """Have a resident entry that nobody holds be evicted in its turn."""
        self._idle += 1
        self._replacement.offer(entry.key.digest)

    def _settle(self) -> None:
        """Count what was given back without the lock."""
        while self._returned:
            self._let_go((self._returned.popleft(),))
        while self._repaid:
            self._lent -= 1
            self._let_go((self._repaid.popleft(),))

    def _expire(self) -> None:
        """Do `_settle`, and end the leases that have run out."""
        self._settle()
        now = self.clock()
        while self._leases and (oldest := next(iter(self._leases))).until <= now:
            self._end_lease(oldest)

    def _end_lease(self, lease: Lease) -> None:
        del self._leases[lease]
        lease.entry.leases.remove(lease)
        self._let_go((lease.entry,))

    def _grow(self, hold: Reservation) -> None:
        """Forget what could not be loaded of a hold, and admit what is missing."""
        self._settle()
        now = self.clock()
        if failed := [entry for entry in list(hold.entries) if entry.state == "gone"]:
            hold.problem = str(failed[0].error)
            hold.entries.difference_update(failed)
            hold.retry_at = now + _RETRY_S
        here: list[Any] = list(map(self._entries.get, hold.keys))
        if not hold.is_counted:
            hold.is_counted = True
            self._use(hold.keys, here)
        if len(hold.entries) < len(hold.keys):
            if now >= hold.retry_at:
                self._admit(hold, here)
        elif hold.problem is not None and all(map(_is_resident, here)):
            hold.problem = None

    def _use(self, keys: Sequence[ChunkKey], wanted: Sequence[Entry | None]) -> None:
        """Count that somebody wants chunks: `wanted` of those that were not counted yet, None for what is not here."""
        hits = sum(map(_is_resident, wanted))
        self._hits, self._misses = self._hits + hits, self._misses + len(wanted) - hits
        if wanted:
            for digest, count in Counter(key.digest for key in keys).items():
                self._replacement.use(digest, count, is_here=all(wanted))

    def _keep_run(self, keys: Sequence[ChunkKey], timeout_s: float, *, whole: bool = False) -> list[Entry]:
        """Keep the longest leading run of `keys` that is resident in time, and return it."""
        self._settle()
        here: list[Any] = list(map(self._entries.get, keys))
        # A claimed chunk was counted when it was claimed. So a chunk is not counted while somebody copies it.
        self._use(keys, [entry for entry in here if entry is None or entry.holds == len(entry.leases)])
        hold = self.hold(keys, whole=whole)
        entries, run = self._admit(hold, here), 0

        def has_ended() -> bool:
            nonlocal run
            while run < len(entries) and entries[run].state == "resident":
                run += 1  # what is held stays
            return run == len(entries) or entries[run].state == "gone"

        self._changed.wait_for(has_ended, timeout_s)
        kept = [] if whole and run < len(keys) else entries[:run]
        hold.entries.difference_update(kept)
        hold.close()
        self._settle()
        return kept

    def _admit(self, hold: Reservation, here: Sequence[Any]) -> list[Entry]:
        """Have a hold keep those of its chunks that are `here`, and start loading the others as far as there is room.

        Returns the leading run that it keeps.
        """
        missing = not all(here)
        if missing and hold.whole and not self._fits(hold.keys):
            return []
        # What is here is kept first, so that loading its neighbours cannot evict it.
        self._add(hold, filter(None, here))
        return self._load_missing(hold) if missing else list(here)

    def _load_missing(self, hold: Reservation) -> list[Entry]:
        """Start loading chunks as long as there is room, and return the leading run that the hold keeps."""
        admitted, new, victims = list[Entry](), list[Entry](), self._victims()
        for key in hold.keys:
            found = self._entries.get(key)
            if found is None:
                slot = None if self._closed else self._take_slot(victims)
                if slot is None:
                    break
                found = self._entries[key] = Entry(key, slot)
                self._cartridges.setdefault(key.digest, {})[key.chunk] = found
                self._add(hold, (found,))
                new.append(found)
            admitted.append(found)
        self._threads.submit(new)
        return admitted

    def _fits(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether all of `keys` could be in memory at once, given what is held."""
        self._expire()
        here = list(filter(None, map(self._entries.get, keys)))
        free = self.slots - len(self._entries) + self._idle - sum(map(Entry.is_idle, here))
        missing = len(keys) - len(here)
        return missing <= free or missing <= free + len(set(self._unwanted()).difference(here))

    def _unwanted(self) -> list[Entry]:
        """Return what nobody holds of the chunks that no thread has begun to load, the last submitted first."""
        return list(filter(Entry.is_unwanted, self._threads.loading()))

    def _victims(self) -> Iterator[Entry]:
        """Yield idle chunks in the order in which to evict them, each to be evicted before the next is asked for.

        Of a cartridge that is worth least the end goes first, so that the rest of a prefill one can be used yet.
        """
        for digest in self._replacement.leave():
            chunks = sorted(
                filter(Entry.is_idle, self._cartridges[digest].values()), key=lambda entry: -entry.key.chunk
            )
            if chunks:
                self._replacement.tear(digest)
            yield from chunks

    def _take_slot(self, victims: Iterator[Entry]) -> torch.Tensor | None:
        """Return a free slot, that of a victim if need be; None where there is none."""
        if not self._free and (start := next(self._unused, None)) is not None:
            return self._memory[start : start + self.slot_bytes]
        if not self._free:
            self._expire()
            self._drop(*islice(victims, 1))
        if not self._free:
            for entry in self._unwanted()[:1]:
                self._threads.take_back(entry)
                self._free_slot(entry)
        return self._free.pop() if self._free else None

    def _loaded(self, entries: Sequence[Entry]) -> None:
        """Note how loads ended, and wake whoever waits for them."""
        for entry in entries:
            if entry.error is not None:
                self._failed += 1
                self._free_slot(entry)
                continue
            entry.state = "resident"
            self._promoted += 1
            if entry.is_idle():
                self._idled(entry)
        self._changed.notify_all()

    def _drop(self, *entries: Entry) -> None:
        """Evict idle chunks."""
        for entry in entries:
            self._free_slot(entry)
        self._evicted += len(entries)
        self._idle -= len(entries)

    def _free_slot(self, entry: Entry) -> None:
        entry.state = "gone"
        digest, chunk = entry.key
        del self._entries[entry.key], self._cartridges[digest][chunk]
        if not self._cartridges[digest]:
            del self._cartridges[digest]
            self._replacement.gone(digest)
        self._free.append(entry.bytes)


def _is_resident(entry: Entry | None) -> bool:
    return entry is not None and entry.state == "resident"
