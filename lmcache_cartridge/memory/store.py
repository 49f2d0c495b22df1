"""CartridgeStore: answers an engine's chunk hashes with prepared chunks. What every serving adapter is built on."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ..artifact.cartridge import Place
from ..artifact.reading import load_token_ids
from ..errors import CartridgeError, RegistryError
from ..library.catalog import Catalog, Needed
from ..library.index import ChunkKey
from ..library.manifest_cache import ManifestCache
from ..library.quarantine import Quarantine
from ..library.registry import Registry
from ..library.workers import Workers, go_on, noted
from ..settings import Settings
from ..sources.disk_cache import DiskCache
from ..sources.published import follower_of
from ..sources.s3 import S3Source
from ..sources.sources import Sources
from . import tiles
from .claims import Background, Claim
from .described import Engine
from .device import Promotions, device_bytes
from .holds import Hold, Readiness, Reservation
from .layout import ChunkShape, rank_heads
from .loader import CatalogSource, ChunkLoader
from .tier import MemoryTier

_POLL_S = 0.1
"""How often claims in the background are polled."""
_MAX_READS = 32
"""Artefacts that are read at once for those who claim them."""


class CartridgeStore:
    """The registered cartridges that fit one engine and rank, and the tiers they are served from.

    A chunk is looked for in memory, the device's first. It comes into the cpu tier from the disk cache or its source,
    and from there onto the device. Safe from any thread.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        trust: Callable[..., Any],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the registry and make its cartridges findable. Blocks for that; loads no payload.

        `trust` makes a `Trust` of the settings, a catalog and a registry.
        Raises `OverBudget` or `RegistryError`. A cartridge that cannot be served is reported by `refused`.
        """
        self.engine, self._settings, self._clock = engine, settings, clock
        shape, heads = (
            engine.fingerprint,
            rank_heads(engine.fingerprint.kv_heads, engine.rank % engine.world, engine.world),
        )
        layers = engine.layers or range(shape.layers)
        dtype = "uint8" if engine.quantiser else shape.dtype
        self.shape = ChunkShape(len(heads), len(layers), engine.chunk_tokens, shape.head_size, dtype, shape.planes)
        self._sources = Sources(S3Source(**settings.s3))
        self._follower = follower_of(settings)
        self._registry = Registry(settings.registry_path, read_only=True)
        self._catalog = Catalog(
            self._registry,
            Quarantine(settings.quarantine_dir),
            ManifestCache(settings.manifests_dir, self._sources),
            fingerprint=engine.fingerprint,
            hasher=engine.hasher,
            chunk_tokens=engine.chunk_tokens,
            allow_trained=engine.allow_trained,
            grace_s=settings.lease_s,
            cache_dir=settings.cache_dir / "index",
            accept_weights=settings.accept_weights,
            clock=clock,
        )
        self._disk = DiskCache(settings.cache_dir, settings.disk_bytes) if settings.disk_bytes else None
        self._loader = ChunkLoader(
            self._sources, self.shape._replace(dtype=shape.dtype), heads, engine.layout, self._disk,
            keep_local=settings.disk_local, layers=layers, quantiser=engine.quantiser
        )  # fmt: skip
        source = CatalogSource(self._loader, self._catalog)
        self.cpu = MemoryTier(
            self.shape.size_bytes, settings.cpu_bytes, source, pin_memory=engine.pin_memory,
            lease_s=settings.lease_s, clock=clock, threads=settings.load_threads, slow_threads=settings.s3_connections,
            is_slow=self._catalog.is_remote
        )  # fmt: skip
        self._catalog.refresh()
        self.trust = trust(settings, self._catalog, self._registry)
        self.tried, self.untried = self.trust.tried, self.trust.untried
        self.device: MemoryTier | None = None
        self._memory = {"cpu": self.cpu}
        budget_bytes = device_bytes(settings.device_bytes, engine.device)
        if budget_bytes >= self.shape.size_bytes:
            self.device = MemoryTier(
                self.shape.size_bytes, budget_bytes, Promotions(self.cpu), device=engine.device,
                lease_s=settings.lease_s, clock=clock, threads=1
            )  # fmt: skip
            self._memory = {"device": self.device, "cpu": self.cpu}
        self._reads = Workers("cartridge-read", _MAX_READS, one_a_group=True)
        self._open: weakref.WeakSet[Claim] = weakref.WeakSet()
        self._background = background = Background(self.claim)
        self.preload, self.pin, self.unpin = background.preload, background.pin, background.unpin
        self.names, self.refused = self._catalog.names, self._catalog.refused
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._follow_labels()
        self._keeper = threading.Thread(target=self._keep, name="cartridge-keeper", daemon=True)
        self._keeper.start()

    def lookup(self, hashes: Sequence[int], tag: str | None = None) -> int:
        """Lease the leading chunks of a prompt and return how many of its hashes they answer.

        `tag` names a cartridge or chain by its digests, joined by dots; without one only prefill cartridges answer,
        each for its own tokens, as far as they are trusted. What is not resident starts loading, and is waited for
        `lookup_timeout_s` at most. Where a trained cartridge is part of it, all its chunks answer or none. Every chunk
        counted is resident, verified, and stays for the lease.
        """
        needed, plain = self._catalog.derive(tag), tag is None
        keys = self._leading(hashes, tag)
        if plain:
            self._load_untried(hashes[len(keys) :])
        if needed is None or not keys or len(keys) < needed.chunks or not self._note(keys, tag):
            return 0
        device = self.device
        if (
            device is not None
            and device.resident(keys) == len(keys)
            and device.lease(keys, 0.0, whole=True, plain=plain)
        ):
            return len(keys)
        found = self.cpu.lease(keys, self._settings.lookup_timeout_s, whole=any(needed), plain=plain)
        if device is not None and found:
            with device.hold(keys[:found]) as promoted:
                promoted.poll()
        return found

    def resident(self, hashes: Sequence[int], tag: str | None = None) -> int:
        """Return how many leading hashes one tier could lend now; leases and loads nothing."""
        if self._catalog.derive(tag) is None:
            return 0
        keys = self._leading(hashes, tag)
        return max(tier.resident(keys) for tier in self._memory.values())

    def lend(self, chunk_hash: int, tag: str | None = None) -> Hold | None:
        """Return a loan of one chunk, the caller's to close, or None if it cannot be had; see `lend_run`."""
        return next(iter(self.lend_run((chunk_hash,), tag)), None)

    def lend_run(self, hashes: Sequence[int], tag: str | None = None) -> list[Hold]:
        """Lend one chunk after the other until one cannot be had; return the loans, the caller's to close.

        They are the chunks that a lookup leased; without one, those that it could find now. One that is not resident any
        more is loaded again, waiting up to `lookup_timeout_s`.
        """
        loans: list[Hold] = []
        keys = self._promised(hashes, tag)
        if not self._note(keys, tag):
            return loans
        while rest := keys[len(loans) :]:
            more = next(filter(None, (tier.lend(rest) for tier in self._memory.values())), [])
            found = self.trust.may_answer(rest[0].digest) if tag is None else self._catalog.derive(tag) is not None
            if not more and found:
                more = self.cpu.load(rest[:1], self._settings.lookup_timeout_s)
            if not more:
                break
            loans += more
        return loans

    def tail(self, tag: str) -> torch.Tensor | None:
        """Return the KV `[planes, L, t, H, D]` behind the last whole chunk of a cartridge or chain, as the engine caches its
        numbers: of as many positions as must be had, a copy. None where it cannot be had. Blocks as `lend`.
        """
        needed = self._catalog.derive(tag)
        if not (needed and needed.tail) or (loan := self.lend(self._catalog.index.last(tag), tag)) is None:
            return None
        with loan:
            return tiles.unpack(loan.bytes, self.shape, self.engine.layout)[:, :, : needed.tail].clone()

    def release(self, chunk_hash: int, tag: str | None = None) -> bool:
        """End one lease of a chunk; False if it has none."""
        self._catalog.derive(tag)  # its chain may have been forgotten since it was looked up
        keys, tiers = self._catalog.index.candidates(chunk_hash, tag), self._memory.values()
        return any(tier.release(key, tag is None) for key in keys for tier in tiers)

    def _note(self, keys: Sequence[ChunkKey], tag: str | None) -> bool:
        """Note whose chunks answer a prompt that does not name them; whether they may."""
        return tag is not None or self.trust.note({key.digest for key in keys})

    def _leading(self, hashes: Sequence[int], tag: str | None) -> list[ChunkKey]:
        """Return the chunks of the longest leading run that a lookup may find, under a `tag` that `derive` has let pass."""
        return self._catalog.index.leading(hashes, tag, self.trust.may_answer if tag is None else bool)

    def _promised(self, hashes: Sequence[int], tag: str | None) -> list[ChunkKey]:
        """Return the leading chunks that lookups of these hashes leased, and for those without a lease what is found now.

        Of a quarantined cartridge that is named, what is resident was verified, and may have been promised already.
        """
        if tag is not None:
            self._catalog.derive(tag)  # its chain may have been forgotten since it was looked up
            return self._catalog.index.leading(hashes, tag)
        keys, tiers = self._leading(hashes, None), self._memory.values()
        if len(keys) == len(hashes) and any(tier.promised(keys) for tier in tiers):
            return keys
        for at, chunk_hash in enumerate(hashes):
            candidates = self._catalog.index.candidates(chunk_hash, None)
            leased = (key for key in candidates if any(tier.promised([key]) for tier in tiers))
            keys[at : at + 1] = [key for key in [next(leased, None) or next(iter(keys[at:]), None)] if key]
        return keys

    def _load_untried(self, hashes: Sequence[int]) -> None:
        """Load what may come to answer the rest of a prompt, since the engine will be tried with it."""
        if keys := self._catalog.index.leading(hashes, None, self.trust.may_be_tried):
            self.trust.want(keys[0].digest)
            with self.cpu.hold(keys) as hold:
                hold.poll()

    def claim(self, tag: str, places: Mapping[str, Place], room: Callable[[int], str | None] | None = None) -> Claim:
        """Return a claim on a cartridge or chain, the caller's to poll and close. Does not block: what there is to read
        is read in the background.

        `places` tells by digest where they lie, as the registry may not when it was last looked at. `room` returns why so
        many chunks are too many for whoever copies them, None if they are not.
        """
        opening = self._opening(tag, dict(places), room)
        claim = Claim(tag, opening, partial(self._refusal, tag), self._clock)
        with self._lock:
            self._open.add(claim)
        return claim

    def _opening(
        self, tag: str, places: Mapping[str, Place], room: Callable[[int], str | None] | None
    ) -> Iterator[Reservation | Readiness | None]:
        """See `Claim`."""
        self._catalog.keep(tag)
        elsewhere = {
            digest: place for digest, place in places.items() if place.location not in self._catalog.locations(digest)
        }
        try:
            if elsewhere or not self._catalog.is_at_hand(tag):
                where = {place.location for place in elsewhere.values()} | self._catalog.locations(tag)
                task = tag, tuple(elsewhere.items())
                reading = self._reads.submit(task, partial(self._read, tag, elsewhere), where)
                while not reading.done():
                    yield None
                needed = reading.result()
            else:
                needed = self._catalog.require(tag)
        except CartridgeError as error:
            yield Readiness.never(error)
            return
        keys = self._catalog.index.chunks(tag)
        size_bytes = len(keys) * self.shape.size_bytes
        why = room(len(keys)) if room is not None else None
        if size_bytes > self.cpu.budget_bytes:
            why = f"{len(keys)} chunks take {size_bytes} bytes, more than cpu_bytes"
        if why is not None:
            yield Readiness(0, 0, len(keys), why, digest=None if "." in tag else tag)
        else:
            tier = next((tier for tier in self._memory.values() if tier.resident(keys) == len(keys)), self.cpu)
            yield tier.hold(keys, whole=any(needed))

    def _read(self, tag: str, places: Mapping[str, Place]) -> Needed:
        """Read what a tag names, and return what `Catalog.require` does. Blocks.

        What is known from another place may be gone from there: the registry, looked at again, says so.
        """
        if any(map(self._catalog.knows, places)):
            with suppress(RegistryError):
                self.refresh()
        for digest, place in places.items():
            if not self._catalog.is_in_place(digest):
                self._catalog.add(digest, place)
        return self._catalog.require(tag)

    def evict(self, digest: str) -> int:
        """Drop a cartridge's chunks that nobody relies on, local copies too, and return how many were in memory.

        A quarantine that a copy on S3 caused is lifted.
        """
        self._background.cancel(digest)
        self._catalog.forgive(digest)
        if self._disk:
            self._disk.evict(digest)
        return [tier.evict(digest) for tier in self._memory.values()][-1]

    def refresh(self) -> None:
        """Take in what changed in the registry and the quarantine since the last look. Blocks for local reads.

        A new version is found from now on, and what is to be warm is followed. What was removed is found no more; requests
        that have it already are served to their end. Raises `RegistryError`.
        """
        for claim in self._claims():
            self._catalog.keep(claim.tag)
        for digest in self._catalog.refresh():
            self.unpin(digest)
            self.evict(digest)
        self.trust.withdraw()
        self._follow_labels()

    def _follow_labels(self) -> None:
        """Preload what warm labels have come to point at, as far as it is served."""
        self._background.warm({row.digest for row in self._registry.warm() if self._catalog.knows(row.digest)})

    def status(self) -> dict[str, Any]:
        """Return what this rank serves and holds, as plain values: `numbers`, with names in place of some counts."""
        return self.numbers() | {
            "refused": self.refused(),
            "resident": {name: tier.resident_by_digest() for name, tier in self._memory.items()},
            "pinned": self._background.pinned(),
            "loading": {tag: state._asdict() for tag, state in self._waiting().items()},
        }

    def numbers(self) -> dict[str, Any]:
        """Return counts. Polls every claim that is open."""
        background, waiting = self._background.claims(), self._waiting()
        started_at = [claim.started_at for claim in self._claims() if claim not in background]
        return {
            "rank": self.engine.rank,
            "chunk_tokens": self.engine.chunk_tokens,
            "served": len(self.names()),
            "refused": len(self.refused()),
            "quarantined": len(self._catalog.quarantined),
            "pinned": len(self._background.pinned()),
            "loading": len(waiting),
            "untried": len(self.trust.wanted),
            "claims": len(started_at),
            "background_errors": noted(),
            "oldest_claim_s": self._clock() - min(started_at) if started_at else 0.0,
            "tiers": self.tiers(),
        }

    def chunks_by_tier(self) -> dict[str, dict[str, int]]:
        """Return how many chunks each tier holds of each digest, at a cost that grows with them."""
        counts = {name: tier.resident_by_digest() for name, tier in self._memory.items()}
        return counts if self._disk is None else counts | {"disk": self._disk.chunks_by_digest()}

    def described(self, digest: str) -> tuple[list[int], dict[str, int]] | None:
        """Return the token ids of a cartridge's whole chunks, and how many chunks of each tier are all of it.

        None for a chain, for what is not served, and for an adapter's: its token ids are the base model's too. Blocks for
        local reads; raises `CartridgeError`.
        """
        segments, tokens = self._catalog.segments(digest), self.engine.chunk_tokens
        if len(segments) != 1:
            return None
        manifest, root, _ = segments[0].cartridge
        if manifest.fingerprint.lora is not None or manifest.payload is None:
            return None
        in_memory = manifest.positions // tokens
        stored = -(-in_memory * tokens // manifest.payload.chunk_tokens)
        token_ids = load_token_ids(manifest, root)[: in_memory * tokens].tolist()
        return token_ids, {"device": in_memory, "cpu": in_memory, "disk": stored}

    def tiers(self) -> dict[str, dict[str, Any]]:
        """Return the counters of every tier there is, fastest first; no side effects."""
        tiers: dict[str, Any] = self._memory | {"disk": self._disk, "source": self._loader}
        return {name: tier.stats()._asdict() for name, tier in tiers.items() if tier is not None}

    def close(self) -> None:
        """Stop loading. Loans stay valid. Waits for what is under way, but not for what hangs: two seconds at most."""
        self._stopping.set()
        self._keeper.join(2.0)

    def _claims(self) -> list[Claim]:
        with self._lock:
            return [claim for claim in self._open if not claim.closed]

    def _waiting(self) -> dict[str, Readiness]:
        """Return how far everything is, by tag, that is claimed and not whole in memory but may be yet."""
        states = {claim.tag: claim.poll() for claim in self._claims()}
        return {tag: state for tag, state in states.items() if not state.ready and state.refused is None}

    def _refusal(self, tag: str) -> Readiness | None:
        try:
            self._catalog.require(tag)
        except CartridgeError as error:
            return Readiness.never(error)
        return None

    def _keep(self) -> None:
        """Poll the claims in the background and follow changes of the registry, until the store is closed; end all it uses then."""
        refreshed_at = self._clock()
        while not self._stopping.wait(_POLL_S):
            tiers = (tier.relieve for tier in self._memory.values())
            for step in (*tiers, self._sources.s3.relieve, self._background.poll):
                go_on(step)
            if self._settings.reload_s and self._clock() - refreshed_at >= self._settings.reload_s:
                refreshed_at = self._clock()
                self._reads.submit("refresh", lambda: go_on(self.refresh))  # its disk may hang, and that of no other
        for each in (self._follower, self._catalog, *self._memory.values(), self._loader, self._sources):
            if each:
                go_on(each.close)
        self._reads.close(0.5)
