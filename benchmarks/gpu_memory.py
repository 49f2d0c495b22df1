"""Sections of `gpu.py`: the pinned slab, the device tier, the engine's blocks, int8, prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import report
import torch
from gpu_blocks import Chunk, GpuBlocks, without_hosts
from gpu_rows import EQUAL, UNCHECKED, WRONG, Place, Row, same, within
from sizes import SHAPES, Shape

from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.library.index import ChunkKey
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.prefill import run_canary
from lmcache_cartridge.memory import codec
from lmcache_cartridge.memory.device import promotions
from lmcache_cartridge.memory.layout import DTYPES, ChunkShape
from lmcache_cartridge.memory.loads import LoadRun
from lmcache_cartridge.memory.tier import MemoryTier

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
            chunk.size_bytes, self.bytes, lambda key: LoadRun(1, self._fill),
            pin_memory=place.is_gpu,
        )  # fmt: skip
        self.device = MemoryTier(
            chunk.size_bytes, self.bytes, promotions(self.cpu), device=str(place.device), threads=1
        )
        self.fill(self.cpu)

    def _fill(self, chunk: int, outs: Sequence[torch.Tensor]) -> list[None]:
        outs[0].copy_(self.expected[chunk])
        return [None]

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


def prefill(place: Place) -> Iterator[Row]:
    """Compute a document's KV on the device and on the CPU, in float32 and in bfloat16."""
    from ttft import make_model

    name, tokens = str(MODEL_DIR), place.size(48, 1024, 4096)
    if place.form != "smoke":
        name = str(make_model(place.scratch / "model", SHAPES["Qwen2.5-0.5B"]._replace(vocabulary=8000)))
    ids = [5 + i * 7 % 400 for i in range(tokens)]
    kv, took = dict[str, torch.Tensor](), dict[str, float]()
    for here, where in (("cpu", "cpu"), ("device", str(place.device))):
        for dtype in ("float32", "bfloat16"):
            model = CausalModel(name, dtype=dtype, device=where)
            if here == "device":
                list(model.prefill(ids[:32], 32))  # the first call chooses kernels
                place.begin()
            started = time.perf_counter()
            kv[f"{here} {dtype}"] = torch.cat(list(model.prefill(ids, 256)), dim=2).float()
            took[f"{here} {dtype}"] = time.perf_counter() - started
            if here == "device" and dtype == "bfloat16":
                yield Row("prefill", f"memory for {tokens} tokens, bfloat16", place.memory(), "-", "-")
            if here == "device" and dtype == "float32":
                seen = run_canary(model, ids, kv[f"{here} {dtype}"], "what does it say?")
                yield Row(
                    "prefill", "first token behind the KV is that behind the document",
                    f"logits differ by {seen.max_abs_logit_difference:.2g}", "the same", EQUAL if seen.top1_equal else WRONG,
                )  # fmt: skip
            del model
    exact, noise = kv["cpu float32"], _apart(kv["cpu float32"], kv["cpu bfloat16"])
    there = "device"
    yield within("prefill", "float32 on the device, beside the CPU's", _apart(exact, kv[f"{there} float32"]), noise)
    yield within(
        "prefill", "bfloat16 on the device, beside the CPU's float32", _apart(exact, kv[f"{there} bfloat16"]), 2 * noise
    )
    for dtype in ("float32", "bfloat16"):
        ratio = took[f"cpu {dtype}"] / took[f"{there} {dtype}"]
        yield Row(
            "prefill", f"speed of {dtype}", f"{took[f'{there} {dtype}']:.2f} s, {ratio:.1f} times the CPU's speed", "-", "-",
            report.Figure("speed", "of the CPU's", {}, ratio, ratio, ratio, 1) if place.is_gpu else None,
        )  # fmt: skip


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference relative to the largest number of its layer and plane; NaN where one is."""
    most = one.abs().amax(dim=(2, 3, 4), keepdim=True)
    return float(((one - other).abs() / most).max())
