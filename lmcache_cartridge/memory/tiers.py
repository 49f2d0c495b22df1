"""Tiers: device -> cpu -> disk -> source. Where the chunks of one engine rank are in memory, and how they come there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..artifact.cartridge import Segment
from ..errors import CartridgeError
from ..library.index import ChunkKey
from ..settings import Settings
from ..sources.disk_cache import DiskCache
from .hold import Hold
from .layout import ChunkShape
from .loader import ChunkLoader
from .loads import LoadFailed
from .slab import Slab
from .tier import Loan, Residency

_PROMOTE_S = 30.0
"""How long a chunk on its way to the device may take from the cpu tier."""


class Tiers:
    """A chunk is looked for in memory, the device's first; it comes into the cpu tier from the disk tier or its source, and
    from there onto the device. Safe from any thread; only `lease` and `lend_loaded` wait.
    """

    def __init__(
        self,
        settings: Settings,
        shape: ChunkShape,
        loader: ChunkLoader,
        disk: DiskCache | None,
        *,
        segments: Callable[[str], Sequence[Segment]],
        is_remote: Callable[[str], bool],
        on_failure: LoadFailed,
        pin_memory: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """There is no device tier before `add_device`. `disk` is where `loader` keeps copies.

        `segments` returns what a tag names, nothing where it cannot be served, and `is_remote` whether it comes over
        the network. Raises `OverBudget`.
        """
        self._settings, self._shape, self._loader, self._disk = settings, shape, loader, disk
        self._segments, self._clock = segments, clock
        slab = Slab(shape.size_bytes, settings.cpu_bytes, pin_memory=pin_memory)
        self.cpu = Residency(
            slab, self._load, threads=settings.load_threads, slow_threads=settings.s3_connections,
            is_slow=lambda key: is_remote(key.digest), load_run=self._load_run, run_of=self._run_of,
            lease_s=settings.lease_s, on_failure=on_failure, clock=clock,
        )  # fmt: skip
        self.device: Residency | None = None
        self._memory: tuple[Residency, ...] = (self.cpu,)

    def add_device(self, device: str, budget_bytes: int) -> None:
        """Have a tier on `device`, if `budget_bytes` hold a chunk; nothing may have been asked before."""
        if budget_bytes >= self._shape.size_bytes:
            slab = Slab(self._shape.size_bytes, budget_bytes, device=device)
            self.device = Residency(slab, self._promote, threads=1, lease_s=self._settings.lease_s, clock=self._clock)
            self._memory = (self.device, self.cpu)

    def lease(self, keys: Sequence[ChunkKey], timeout_s: float, *, whole: bool) -> int:
        """Do `Residency.acquire`; what is in the cpu tier alone starts on its way to the device."""
        if self.device is not None and self.device.lease_resident(keys):
            return len(keys)
        found = self.cpu.acquire(keys, timeout_s, whole=whole)
        if self.device is not None and found:
            self.device.want(keys[:found])
        return found

    def release(self, key: ChunkKey) -> bool:
        """End one lease of a chunk; False if it has none."""
        return (self.device is not None and self.device.release(key)) or self.cpu.release(key)

    def resident(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the leading run of `keys` that one tier could lend now; no side effects."""
        return max(tier.resident(keys) for tier in self._memory)

    def lend(self, key: ChunkKey) -> Loan | None:
        """Return the resident bytes of a chunk, the caller's to close, or None if it is not resident."""
        return next(filter(None, (tier.lend(key) for tier in self._memory)), None)

    def lend_run(self, keys: Sequence[ChunkKey]) -> list[Loan]:
        """Lend the longest leading run of `keys` that the first tier which has any of it has."""
        return next(filter(None, (tier.lend_run(keys) for tier in self._memory)), [])

    def lend_loaded(self, key: ChunkKey, timeout_s: float) -> Loan | None:
        """Lend a chunk from the cpu tier, waiting `timeout_s` at most for it to be loaded; None where it is not then."""
        if not self.cpu.acquire([key], timeout_s):
            return None
        loan = self.cpu.lend(key)
        self.cpu.release(key)
        return loan

    def hold(self, keys: Sequence[ChunkKey], *, whole: bool) -> Hold:
        """Return a hold on `keys`, on the device where all of them are there, else in the cpu tier."""
        on_device = self.device is not None and self.device.resident(keys) == len(keys)
        return (self.device if on_device else self.cpu).hold(keys, whole=whole)

    def evict(self, digest: str) -> int:
        """Drop a cartridge's chunks that nobody relies on, local copies too; return how many the cpu tier had."""
        if self._disk is not None:
            self._disk.evict(digest)
        if self.device is not None:
            self.device.evict(digest)
        return self.cpu.evict(digest)

    def resident_by_digest(self) -> dict[str, dict[str, int]]:
        """Return for each tier in memory how many chunks of each digest are resident; no side effects."""
        return {name: tier.resident_by_digest() for name, tier in self._named()}

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the counters of every tier there is, fastest first; no side effects."""
        tiers = {name: tier.stats()._asdict() for name, tier in self._named()}
        if self._disk is not None:
            tiers["disk"] = self._disk.stats()._asdict()
        return tiers | {"source": self._loader.stats()._asdict()}

    def check(self) -> None:
        """Assert the invariants of the tiers in memory."""
        for tier in self._memory:
            tier.check()

    def relieve(self) -> None:
        """Do `Residency.relieve` for each tier in memory."""
        for tier in self._memory:
            tier.relieve()

    def close(self) -> None:
        """Stop loading. Loans stay valid."""
        for tier in self._memory:
            tier.close()

    def _named(self) -> list[tuple[str, Residency]]:
        return [("cpu" if tier is self.cpu else "device", tier) for tier in self._memory]

    def _promote(self, key: ChunkKey, out: torch.Tensor) -> None:
        """Fill a slot of the device tier from the cpu tier. Returns when the bytes are there."""
        loan = self.cpu.lend(key) or self.lend_loaded(key, _PROMOTE_S)
        if loan is None:
            raise CartridgeError(f"chunk {key.chunk} of {key.digest} left the cpu tier before it reached the device")
        with loan:
            out.copy_(loan.bytes)
            if out.is_cuda:
                torch.cuda.current_stream(out.device).synchronize()

    def _load(self, key: ChunkKey, out: torch.Tensor) -> None:
        self._loader.load(self._servable(key), key.chunk, out)

    def _load_run(self, key: ChunkKey, outs: Sequence[torch.Tensor]) -> list[CartridgeError | None]:
        return self._loader.load_run(self._servable(key), key.chunk, outs)

    def _run_of(self, key: ChunkKey) -> int:
        return self._loader.run_of(self._segments(key.digest))

    def _servable(self, key: ChunkKey) -> Sequence[Segment]:
        segments = self._segments(key.digest)
        if not segments:
            raise CartridgeError(f"a cartridge of {key.digest} was quarantined or removed meanwhile")
        return segments
