"""MemoryTier: the chunks of one engine rank in one memory, and who may rely on them for how long.

An entry has one reference count. Whoever relies on a chunk has a `Hold`, and what is held is never evicted:

hold(keys)    a claim's: grows from poll to poll, as chunks find memory and are loaded
lease(keys)   the tier's own, with a deadline: LMCache asks for chunks by key, and by key it lets them go
lend(keys)    a loan of one chunk's bytes, while they are copied
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Any, Self

import torch

from ..errors import CartridgeError, OverBudget
from ..library.index import ChunkKey
from .loads import ChunkSource, LoadThreads
from .loan import Entry, Lease, Loan, Make, loans
from .readiness import Readiness
from .replacement import Replacement, count_digests
from .slab import slab
from .tier_stats import TierStats

_FIRST_RETRY_S, _LAST_RETRY_S = 0.25, 5.0
"""The pause before a failed load is tried again doubles from the first to the last."""


class Hold:
    """Chunks of one tier that may not be evicted before `close()`.

    A hold that is dropped instead is closed when the tier next needs room or is asked for its totals.
    """

    whole = closed = False
    _problem: str | None = None
    _is_counted = False
    _retry_s = _retry_at = 0.0

    def __init__(self, tier: MemoryTier, keys: Sequence[ChunkKey], entries: set[Entry]) -> None:
        self.keys, self._tier, self._entries = keys, tier, entries

    def poll(self) -> Readiness:
        """Admit what is missing, as far as memory allows, and return how far everything is. Does not wait.

        A chunk that was admitted has memory until `close`. With `whole` all chunks are admitted or none, else as many
        of the leading ones as fit beside those that others hold. A failed load is tried again after a pause that grows
        from poll to poll. After `close` nothing is held, and nothing is admitted.
        """
        with self._tier._lock:
            if not self.closed:
                self._tier._grow(self)
            resident = sum(entry.state == "resident" for entry in self._entries)
            return Readiness(resident, len(self._entries), len(self.keys), problem=self._problem)

    def close(self) -> None:
        """Let the chunks go; those being loaded are loaded to their end. Closing twice is no change."""
        tier = self._tier
        with tier._lock:
            self.closed = True
            if self._entries:
                entries, self._entries = self._entries, set()
                tier._let_go(entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # No lock: a garbage collection comes anywhere, in a thread that holds another lock too.
        if self._entries:
            self._tier._dropped.append(self)


class MemoryTier:
    """Chunks of one size within a budget of bytes. Whole cartridges leave it, in the order of `Replacement`.

    Held and loading chunks are never evicted, so the budget may refuse but is never exceeded. However many callers want
    a chunk, it is loaded once. Every method may be called from any thread; only `lease` and `load` wait.
    """

    def __init__(
        self, slot_bytes: int, budget_bytes: int, source: ChunkSource, *, device: str = "cpu", pin_memory: bool = False,
        lease_s: float = 300.0, clock: Callable[[], float] = time.monotonic, **loading: Any,
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
        self._used = 0
        """Slots that were handed out at least once."""
        self._free: list[torch.Tensor] = []
        """Slots that were given back, as views: to make one costs more than the rest of a hit."""
        self._lease_s, self.clock = lease_s, clock
        self._entries: dict[ChunkKey, Entry] = {}
        self._cartridges: OrderedDict[str, dict[int, Entry]] = OrderedDict()
        """The same entries by digest, least recently used first, and chunk."""
        self._replacement = Replacement(self.slots)
        self._leases: OrderedDict[Lease, None] = OrderedDict()
        """Those that were not released, in the order in which they run out."""
        self._dropped: deque[Hold] = deque()
        """Holds that were not closed when the last reference to them went."""
        self._returned: deque[Entry] = deque()
        """One of each loan that ended and is not counted yet: to end one takes no lock."""
        self._lock = threading.RLock()  # re-entrant: `load` lends, and dropped holds are closed
        self._changed = threading.Condition(self._lock)
        self._threads = LoadThreads(source, self._loaded, self._lock, clock=clock, **loading)
        self.relieve = self._threads.relieve
        self._hits = self._misses = self._promoted = self._failed = self._evicted = 0
        # Totals are kept as they change: whoever asks for them must not hold up a hit.
        self._held = self._lent = self._idle = 0
        self._closed = False

    def hold(self, keys: Sequence[ChunkKey], *, whole: bool = False) -> Hold:
        """Return a hold on `keys`, the caller's to poll and close. Nothing is admitted before its first `poll()`."""
        hold = Hold(self, tuple(keys), set())
        hold.whole = whole
        return hold

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
        with self._lock:
            return all((entry := self._entries.get(key)) is not None and entry.lease(True) for key in keys)

    def lend(self, keys: Sequence[ChunkKey], make: Make = Loan) -> list[Any]:
        """Return a loan of each of the longest leading run of `keys` that is resident, the caller's to close."""
        with self._lock:
            self._settle()
            run: list[Any] = list(map(self._entries.get, keys))
            if not self._are_resident(run):
                run = list(takewhile(_is_resident, run))
            self._keep(run)
            self._lent += len(run)
        return loans(run, self._returned, make)

    def load(self, key: ChunkKey, timeout_s: float, make: Make = Loan) -> Any:
        """Return a loan of a chunk, loaded first if need be; None if it is not resident within `timeout_s`."""
        with self._lock:
            run = self._keep_run((key,), timeout_s)
            lent = self.lend((key,), make)
            self._let_go(run)
        return next(iter(lent), None)

    def resident(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the leading run of `keys` that is resident now; no side effects."""
        with self._lock:
            return len(list(takewhile(_is_resident, map(self._entries.get, keys))))

    def evict(self, digest: str) -> int:
        """Drop the chunks of a cartridge, or of a chain, that nobody holds and return how many."""
        with self._lock:
            self._expire()
            mine = list(filter(Entry.is_idle, self._cartridges.get(digest, {}).values()))
            self._drop(*mine)
            return len(mine)

    def resident_by_digest(self, most: int | None = None) -> dict[str, int]:
        """Return how many chunks of each digest are resident, the last used first; of the `most` last used chunks only."""
        with self._lock:
            newest = islice(chain.from_iterable(c.values() for c in reversed(self._cartridges.values())), most)
            return dict(Counter(entry.key.digest for entry in newest if entry.state == "resident"))

    def stats(self) -> TierStats:
        """Return counters and totals, at a cost that does not grow with the chunks; no side effects."""
        with self._lock:
            self._expire()
            resident = self._promoted - self._evicted
            return TierStats(
                self._hits, self._misses, self._promoted, self._failed, self._evicted,
                resident, len(self._entries) - resident, self._held, len(self._leases), self._lent,
                resident * self.slot_bytes, self.budget_bytes, *self._threads.durations(),
            )  # fmt: skip

    def close(self) -> None:
        """Admit no more chunks and wait for the loads under way. Loans stay valid."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._threads.close()

    # The lock is held in everything below but `_loaded`, which takes it.

    def _add(self, hold: Hold, entries: Iterable[Entry]) -> None:
        """Have a hold keep entries too."""
        new = set(entries) - hold._entries
        self._keep(new)
        hold._entries |= new

    def _keep(self, entries: Iterable[Entry]) -> None:
        """Count one hold more of each: the one place where reference counts grow."""
        for entry in entries:
            if not entry.holds:
                self._held += 1
                self._idle -= entry.state == "resident"
            entry.holds += 1

    def _let_go(self, entries: Iterable[Entry]) -> None:
        """Count one hold less of each: the one place where reference counts shrink."""
        for entry in entries:
            entry.holds -= 1
            if not entry.holds and entry.state != "gone":
                self._held -= 1
                self._idled(entry)

    def _idled(self, entry: Entry) -> None:
        """Have an entry that nobody holds be evicted in its turn, if it is resident."""
        if entry.state == "resident":
            self._idle += 1
            self._replacement.offer(entry.key.digest)

    def _settle(self) -> None:
        """Count the loans that ended without the lock, and close the holds that were dropped."""
        if self._returned:
            returned = [self._returned.popleft() for _ in range(len(self._returned))]
            self._let_go(returned)
            self._lent -= len(returned)
        while self._dropped:
            self._dropped.popleft().close()

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

    def _grow(self, hold: Hold) -> None:
        """Forget what could not be loaded of a hold, and admit what is missing."""
        self._settle()
        now = self.clock()
        if failed := [entry for entry in hold._entries if entry.state == "gone"]:
            hold._problem = str(failed[0].error)
            hold._entries.difference_update(failed)
            self._let_go(failed)
            hold._retry_s = min(2 * hold._retry_s or _FIRST_RETRY_S, _LAST_RETRY_S)
            hold._retry_at = now + hold._retry_s
        if not hold._is_counted:
            hold._is_counted = True
            hits = sum(key in self._entries and self._entries[key].state == "resident" for key in hold.keys)
            self._hits, self._misses = self._hits + hits, self._misses + len(hold.keys) - hits
            self._use(count_digests(hold.keys), hits == len(hold.keys))
        if len(hold._entries) < len(hold.keys):
            if now >= hold._retry_at:
                self._admit(hold)
        elif hold._problem is not None and all(entry.state == "resident" for entry in hold._entries):
            hold._problem, hold._retry_s = None, 0.0

    def _keep_run(self, keys: Sequence[ChunkKey], timeout_s: float, *, whole: bool = False) -> list[Entry]:
        """Keep the longest leading run of `keys` that is resident in time, and return it."""
        self._settle()
        here: list[Any] = list(map(self._entries.get, keys))
        uses = count_digests(keys)
        is_used = here and (here[0] is None or here[0].holds == len(here[0].leases))
        # A claimed chunk was counted when it was claimed. So a chunk is not counted while somebody copies it.
        if self._are_resident(here):
            self._hits += len([entry for entry in here if entry.holds == len(entry.leases)])
            self._keep(here)
            for digest, count in uses.items():
                self._cartridges.move_to_end(digest)
                if is_used:
                    self._replacement.use(digest, count, is_here=True)
            return here
        for entry in here:
            if entry is None or not (entry.holds or entry.state == "resident"):
                self._misses += 1
            elif entry.state == "resident" and entry.holds == len(entry.leases):
                self._hits += 1
        if is_used:
            self._use(uses, all(here))
        hold = self.hold(keys, whole=whole)
        entries, run = self._admit(hold), 0

        def has_ended() -> bool:
            nonlocal run
            while run < len(entries) and entries[run].state == "resident":
                run += 1  # what is held stays
            return run == len(entries) or entries[run].state == "gone"

        self._changed.wait_for(has_ended, timeout_s)
        kept = [] if whole and run < len(keys) else entries[:run]
        held, hold._entries = hold._entries, set()
        self._let_go(held.difference(kept))
        return kept

    def _admit(self, hold: Hold) -> list[Entry]:
        """Have a hold keep those of its chunks that are here, and start loading the others as far as there is room.

        Returns the leading run that it keeps.
        """
        here: list[Any] = list(map(self._entries.get, hold.keys))
        if not all(here) and hold.whole and not self._fits(hold.keys):
            return []
        # What is here is kept first, so that loading its neighbours cannot evict it.
        self._add(hold, filter(None, here))
        admitted = here if all(here) else self._load_missing(hold)
        for digest in count_digests(hold.keys[: len(admitted)]):
            self._cartridges.move_to_end(digest)
        return admitted

    def _load_missing(self, hold: Hold) -> list[Entry]:
        """Start loading chunks as long as there is room, and return the leading run that the hold keeps."""
        admitted, victims = [], self._victims()
        for key in hold.keys:
            found = self._entries.get(key)
            if found is None:
                slot = None if self._closed else self._take_slot(victims)
                if slot is None:
                    break
                found = self._entries[key] = Entry(key, slot)
                self._cartridges.setdefault(key.digest, {})[key.chunk] = found
                self._threads.submit(key, slot)
                self._add(hold, (found,))
            admitted.append(found)
        return admitted

    def _are_resident(self, entries: Sequence[Entry | None]) -> bool:
        """Whether all of these are here and nothing at all is on its way, which takes no look at each."""
        return all(entries) and len(self._entries) == self._promoted - self._evicted

    def _fits(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether all of `keys` could be in memory at once, given what is held."""
        self._expire()
        here = list(filter(None, map(self._entries.get, keys)))
        free = len(self._free) + self.slots - self._used + self._idle - sum(map(Entry.is_idle, here))
        missing = len(keys) - len(here)
        return missing <= free or missing <= free + sum(e.key not in keys for e in self._unwanted())

    def _unwanted(self) -> list[Entry]:
        """Return what nobody holds of the chunks that no thread has begun to load."""
        return [entry for entry in map(self._entries.__getitem__, self._threads.waiting()) if not entry.holds]

    def _use(self, uses: dict[str, int], is_here: bool) -> None:
        """Count a use of so many chunks of each cartridge."""
        for digest, count in uses.items():
            self._replacement.use(digest, count, is_here=is_here)

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
        if not self._free and self._used < self.slots:
            self._free.append(self._memory[self._used * self.slot_bytes : (self._used + 1) * self.slot_bytes])
            self._used += 1
        if not self._free:
            self._expire()
            self._drop(*islice(victims, 1))
        if not self._free and not self._closed:
            for entry in self._unwanted()[:1]:
                self._threads.take_back(entry.key)
                self._free_slot(entry)
        return self._free.pop() if self._free else None

    def _loaded(self, keys: Sequence[ChunkKey], errors: Sequence[CartridgeError | None]) -> None:
        """Note how loads ended, and wake whoever waits for them."""
        with self._changed:
            for key, error in zip(keys, errors, strict=True):
                entry = self._entries[key]  # loading chunks are never evicted
                if error is None:
                    entry.state = "resident"
                    self._promoted += 1
                    if not entry.holds:
                        self._idled(entry)
                else:
                    entry.error = error
                    self._held -= entry.holds > 0
                    self._failed += 1
                    self._free_slot(entry)
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
