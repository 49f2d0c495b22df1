"""Sections of `gpu.py` about bytes: the pinned slab, the device tier, the engine's blocks, promotion, int8."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import report
import torch
from chunks import finite_bytes
from gpu_blocks import Chunk, GpuBlocks, without_hosts
from gpu_rows import EQUAL, UNCHECKED, WRONG, Place, Row, same
from making import sha256_hasher
from sizes import SHAPES, Shape

from lmcache_cartridge.library.index import ChunkKey
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.memory import codec
from lmcache_cartridge.memory.described import Engine
from lmcache_cartridge.memory.device import promotions
from lmcache_cartridge.memory.layout import DTYPES, ChunkShape
from lmcache_cartridge.memory.loads import one_by_one
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.memory.tier import MemoryTier
from lmcache_cartridge.settings import from_mapping

BLOCK = 16
"""vLLM's own default on GPUs."""
TINY = Shape("tiny", 3, 64, 4, 2, 16, 128, 1000)
LAYOUTS = ("LBNHC", "LBHNC")
"""vLLM's own choices on GPUs: FlashAttention, FlexAttention and Triton take the first, FlashInfer on newer cards the other."""


def shape_of(place: Place) -> tuple[Shape, ChunkShape]:
    """Return the model whose KV is moved, and its chunks."""
    shape, tokens = (TINY, 32) if place.form == "smoke" else (SHAPES["Qwen2.5-1.5B"], 256)
    return shape, ChunkShape(shape.kv_heads, shape.layers, tokens, shape.head_size, "bfloat16")


class Tiers:
    """The cpu tier, page-locked beside a GPU, and the device tier, each with room for some chunks of known bytes."""

    def __init__(self, place: Place, chunk: ChunkShape, count: int) -> None:
        self.expected = torch.randn(count * chunk.size_bytes // 2, generator=torch.Generator().manual_seed(7))
        self.expected = self.expected.bfloat16().view(torch.uint8).view(count, -1)
        self.keys = [ChunkKey("gpu", number) for number in range(count)]
        self.bytes = self.expected.numel()
        self.cpu = MemoryTier(
            chunk.size_bytes, self.bytes, one_by_one(lambda key, out: out.copy_(self.expected[key.chunk])),
            pin_memory=place.is_gpu,
        )  # fmt: skip
        self.device = MemoryTier(
            chunk.size_bytes, self.bytes, promotions(self.cpu), device=str(place.device), threads=1
        )
        self.fill(self.cpu)

    def fill(self, tier: MemoryTier) -> None:
        """Have all chunks in a tier; returns when they are there."""
        if tier.lease(self.keys, 60.0) < len(self.keys):
            raise RuntimeError(f"{tier.hold(self.keys).poll()}")
        for key in self.keys:
            tier.release(key)

    @contextmanager
    def lent(self, tier: MemoryTier) -> Iterator[list[torch.Tensor]]:
        """Lend all chunks of a tier."""
        with ExitStack() as stack:
            yield [stack.enter_context(loan).bytes for loan in tier.lend(self.keys)]

    def close(self) -> None:
        """End the threads of both."""
        self.device.close()
        self.cpu.close()


def slab(place: Place) -> Iterator[Row]:
    """Bring chunks from the pinned slab onto the device, as lookups do."""
    _, chunk = shape_of(place)
    tiers = Tiers(place, chunk, place.size(4, 64, 256))
    try:
        with tiers.lent(tiers.cpu) as loans:
            locked = all(loan.is_pinned() for loan in loans)
        verdict = (EQUAL if locked else WRONG) if place.is_gpu else f"{UNCHECKED}: no GPU"
        yield Row("slab", "the cpu tier is page-locked", "yes" if locked else "no", "yes", verdict)
        plain = place.pinned(tiers.expected.clone())
        target = torch.empty_like(tiers.expected, device=place.device)

        def ours() -> float:
            tiers.device.evict("gpu")
            return place.timed(lambda: tiers.fill(tiers.device))

        contenders: dict[str, Callable[[], float]] = {
            "ours": ours, "a pinned copy": lambda: place.timed(lambda: target.copy_(plain, non_blocking=True)),
        }  # fmt: skip
        yield place.ratio("slab", "H2D", report.in_turns(contenders, place.repeat), tiers.bytes, 0.9)
        with tiers.lent(tiers.device) as loans:
            found = torch.stack(loans) if loans else torch.empty(0)
            yield same("slab", "bytes in the device tier", found, tiers.expected)
    finally:
        tiers.close()


def blocks(place: Place) -> Iterator[Row]:
    """Copy chunks of both tiers into an engine's paged caches, by the injector."""
    with without_hosts() as missing:
        from lmcache_cartridge.engine.inject import EngineWriteConnector
    _, chunk = shape_of(place)
    tiers = Tiers(place, chunk, place.size(4, 64, 256))
    stand_ins = f" (stand-ins for {', '.join(missing)})" if missing else ""
    try:
        tiers.fill(tiers.device)
        tokens = len(tiers.keys) * chunk.tokens
        target, flat = (torch.empty(tiers.bytes, dtype=torch.uint8, device=place.device) for _ in range(2))
        pinned = place.pinned(tiers.expected.clone()).view(-1)
        starts = [number * chunk.tokens for number in range(len(tiers.keys))]
        ends = [start + chunk.tokens for start in starts]
        expected = torch.cat([Chunk(raw).canonical(chunk) for raw in tiers.expected], dim=2)
        for layout in LAYOUTS:
            paged = GpuBlocks(chunk, tokens // BLOCK + 8, BLOCK, layout=layout, device=str(place.device))
            connector = EngineWriteConnector()
            with without_hosts(missing):
                connector.bind(paged.caches, paged.layers, chunk)
            order = torch.randperm(paged.slots // BLOCK)[: tokens // BLOCK]
            slots = (order[:, None] * BLOCK + torch.arange(BLOCK)).flatten().to(place.device)
            is_rows = connector.layout == "fused"
            yield Row(
                "blocks", f"{layout}: rows are copied without the engine's op{stand_ins}", connector.layout, "fused",
                EQUAL if is_rows else WRONG,
            )  # fmt: skip
            for tier, copied, of_what, goal in (
                (tiers.device, flat, "a D2D copy", 0.7), (tiers.cpu, pinned, "a pinned copy", None),
            ):  # fmt: skip
                with tiers.lent(tier) as loans:
                    given = [Chunk(raw) for raw in loans]

                    def ours(given: list[Chunk] = given, slots: torch.Tensor = slots, to: object = connector) -> float:
                        return place.timed(lambda: to.batched_to_gpu(given, starts, ends, slot_mapping=slots))

                    samples = report.in_turns(
                        {
                            "ours": ours,
                            of_what: lambda raw=copied: place.timed(lambda: target.copy_(raw, non_blocking=True)),
                        },
                        place.repeat,
                    )
                    what = f"{layout}: {'device' if tier is tiers.device else 'cpu'} tier to blocks"
                    yield place.ratio("blocks", what, samples, tiers.bytes, goal)
                yield same("blocks", f"{what}, bytes", paged.kv(slots), expected)
        yield Row(
            "blocks", "K and V in planes of their own", "-", "-",
            f"{UNCHECKED}: vLLM < 0.26 has them, and LMCache's own kernels fill them",
        )  # fmt: skip
    finally:
        tiers.close()


def promotion(place: Place) -> Iterator[Row]:
    """Claim a cartridge while others are promoted over and over, beside the same without; through the store."""
    shape, chunk = shape_of(place)
    count, chunks, home = 4, place.size(2, 16), place.scratch / "promotion"
    settings = from_mapping({
        "home": home, "cpu_bytes": count * chunks * chunk.size_bytes, "device_bytes": 2 * chunks * chunk.size_bytes,
        "disk_bytes": 0, "reload_s": 0, "lookup_timeout_s": 60,
    })  # fmt: skip
    registry, hasher = Registry(settings.registry_path), sha256_hasher(chunk.tokens)
    data, prompts = finite_bytes(chunk.size_bytes), {}
    for number in range(count):
        ids = np.random.default_rng(number).integers(0, shape.vocabulary, chunks * chunk.tokens)
        made = report.write_artifact(home / f"doc{number}", shape.fingerprint(), ids, chunk.tokens, data)
        registry.register(home / f"doc{number}")
        prompts[made.digest] = list(hasher(ids.tolist()))
    engine = Engine(
        shape.fingerprint(), chunk.tokens, 0, 1, "heads", hasher, pin_memory=place.is_gpu, allow_trained=True,
        device=str(place.device),
    )  # fmt: skip
    store, stop, problems = CartridgeStore(settings, engine), threading.Event(), list[str]()
    try:
        if store.device is None:
            raise RuntimeError("the store has no device tier")
        expected = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for hashes in prompts.values():
            _look(store, hashes, None, problems)

        def promote_on() -> None:
            for hashes in itertools.cycle(prompts.values()):
                if stop.is_set():
                    return
                _look(store, hashes, expected, problems)

        digest, samples, steps = next(iter(prompts)), dict[str, list[float]](), dict[str, list[float]]()
        product = torch.randn(place.size(64, 4096, 4096), place.size(64, 4096, 4096), device=place.device)
        for name in ("alone", "under load"):
            thread = threading.Thread(target=promote_on, daemon=True)
            if name == "under load":
                _promote_more(store, thread)
            samples[name] = [_claimed(store, digest) for _ in range(place.size(20, 400))]
            steps[name] = [place.timed(lambda: product @ product) for _ in range(place.size(2, 50))]
            if thread.ident is not None:
                stop.set()
                thread.join()
        for hashes in prompts.values():
            for _ in range(2):  # what the first brings to the device the second is lent there
                _look(store, hashes, expected, problems)
                _settled(store)
        promoted = store.device.stats().promoted
        late = {name: float(np.quantile(times, 0.95)) for name, times in samples.items()}
        yield Row(
            "promotion", "p95 of a claim under load, and alone", f"{1e3 * late['under load']:.3g} and {1e3 * late['alone']:.3g} ms",
            "-", "-",
        )  # fmt: skip
        busy, alone = (report.Spread.of(steps[name]).median for name in ("under load", "alone"))
        yield Row(
            "promotion", "a matrix product beside promotions, over alone", f"{alone / busy:.2f} of its speed", "-", "-"
        )
        wrong = "; ".join(sorted(set(problems)))
        yield Row(
            "promotion", f"bytes lent meanwhile, {promoted} chunks promoted", wrong or "all as stored", "as stored",
            WRONG if problems or not promoted else EQUAL,
        )  # fmt: skip
    finally:
        stop.set()
        store.close()


def _settled(store: CartridgeStore) -> None:
    device = store.device
    assert device is not None
    _wait(lambda: not device.stats().loading, 60)


def _promote_more(store: CartridgeStore, thread: threading.Thread) -> None:
    """Start a thread and wait until chunks are promoted."""
    device = store.device
    assert device is not None
    before = device.stats().promoted
    thread.start()
    _wait(lambda: device.stats().promoted > before, 60)


def _look(store: CartridgeStore, hashes: Sequence[int], expected: torch.Tensor | None, problems: list[str]) -> None:
    """Look a prompt up, and compare what is lent with `expected`."""
    found = store.lookup(hashes)
    if found < len(hashes):
        problems.append(f"{found} of {len(hashes)} chunks were found")
    for number, loan in enumerate(store.lend_run(hashes[:found])):
        with loan:
            if expected is not None and not torch.equal(loan.bytes.cpu(), expected):
                problems.append(f"chunk {number} has other bytes")
    for one in hashes[:found]:
        store.release(one)


def _claimed(store: CartridgeStore, digest: str) -> float:
    started = time.perf_counter()
    claim = store.claim(digest, {})
    _wait(lambda: claim.poll().ready, 60)
    took = time.perf_counter() - started
    claim.close()
    return took


def _wait(is_so: Callable[[], bool], timeout_s: float) -> None:
    ends = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > ends:
            raise RuntimeError(f"nothing came of it in {timeout_s:g} s")
        time.sleep(0)


def int8(place: Place) -> Iterator[Row]:
    """Decode int8 records on the device, beside doing so on the CPU."""
    shape, chunk = shape_of(place)
    about, tokens = shape.fingerprint(), place.size(32, 2048)
    size = (about.kv_heads, 2, about.layers, tokens, about.head_size)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(3)).to(DTYPES[about.dtype])
    packed = codec.encode(noise, about)
    at_home = place.pinned(torch.empty(noise.nbytes, dtype=torch.uint8))
    there, target = (torch.empty(noise.nbytes, dtype=torch.uint8, device=place.device) for _ in range(2))

    def decoded() -> float:
        return place.timed(lambda: codec.decode(packed, there, about, tokens))

    def brought() -> float:
        def both() -> None:
            codec.decode(packed, at_home, about, tokens)
            target.copy_(at_home, non_blocking=True)

        return place.timed(both)

    samples = report.in_turns(
        {"ours": decoded, "decoding on the CPU and copying": brought,
         "copy": lambda: place.timed(lambda: target.copy_(at_home, non_blocking=True))}, place.repeat,
    )  # fmt: skip
    copied = samples.pop("copy")
    yield place.ratio("int8", "decoding on the device", dict(samples), noise.nbytes, 1.0)
    yield place.ratio(
        "int8", "the same", {"ours": samples["ours"], "a pinned copy of as much KV": copied}, noise.nbytes, None
    )
    yield same("int8", "numbers", there, at_home)
