"""What a machine with a GPU, torch and transformers proves in ten minutes, without vLLM and LMCache.

    python benchmarks/gpu.py [--device cuda] [--only SECTION] [--smoke | --full]

The paths are those that serve: the tiers with their promotions, the injector (over blocks as vLLM lays them out, with a
stand-in for its op), and prefill. What is computed on the device is compared with the CPU, and every rate
stands beside a plain copy of the same bytes in the same run. With `--device cpu` the same code runs where there is no GPU,
and its ratios mean nothing. The exit status is 1 where a byte or a number is wrong or a section failed, not where it is slow.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package, where it is not installed

import report  # noqa: E402
from report import Figure  # noqa: E402
from sizes import SHAPES, Shape  # noqa: E402

from lmcache_cartridge.cli.recall import MODEL_DIR  # noqa: E402
from lmcache_cartridge.library.index import ChunkKey  # noqa: E402
from lmcache_cartridge.make.model import CausalModel  # noqa: E402
from lmcache_cartridge.memory.device import Promotions  # noqa: E402
from lmcache_cartridge.memory.layout import HELD, VIEWS, ChunkShape  # noqa: E402
from lmcache_cartridge.memory.loads import ChunkSource  # noqa: E402
from lmcache_cartridge.memory.tier import MemoryTier  # noqa: E402

WRONG, BOUND = "wrong bytes", "of what is allowed"
"""Units of figures that must be 0, and at most 1."""
BLOCK = 16
"""vLLM's own default on GPUs."""
TINY = Shape("tiny", 3, 64, 4, 2, 16, 128, 1000)
LAYOUTS = {"LBNHC": (0, 1, 3, 2, 4), "LBHNC": (0, 1, 2, 3, 4)}
"""vLLM's own choices on GPUs, with the order in memory of layer, block, head, token and content (vLLM 0.32): FlashAttention,
FlexAttention and Triton take the first, FlashInfer on newer cards the other."""
_NAMES = {
    "lmcache.v1.gpu_connector.gpu_connectors": {"GPUConnectorInterface": object},
    "lmcache.v1.memory_management": {"MemoryObj": object},
    "vllm.model_executor.models.utils": {"extract_layer_index": lambda name: int(name.split(".")[2])},
}
"""The names of LMCache and vLLM without which the injector cannot be imported or bound; none of them moves a byte."""


class Bench:
    """Where the sections run, how much of everything, and the figures so far."""

    def __init__(self, device: torch.device, form: int, scratch: Path) -> None:
        """`form` is 0 for the smallest, 1, or 2 for the longest."""
        self.device, self.form, self.scratch = device, form, scratch
        self.figures: list[Figure] = []
        self.shape, tokens = (SHAPES["Qwen2.5-1.5B"], 256) if form else (TINY, 32)
        self.chunk = ChunkShape(self.shape.kv_heads, self.shape.layers, tokens, self.shape.head_size, "bfloat16")

    def timed(self, call: Callable[[], Any]) -> Callable[[], float]:
        """Return what times `call` with what it starts on the device."""

        def wait() -> None:
            if self.device.type != "cpu":
                torch.cuda.synchronize(self.device)

        def run() -> float:
            wait()
            return report.timed(lambda: (call(), wait()))

        return run

    def pinned(self, data: torch.Tensor) -> torch.Tensor:
        """Return data in page-locked memory, where there is a device to copy it to."""
        return data if self.device.type == "cpu" else data.pin_memory()

    def ratio(self, what: str, ours: Callable[[], float], other: str, beside: Callable[[], float]) -> None:
        """Add how many times as fast as another way ours is."""
        samples = report.in_turns({"ours": ours, "beside": beside}, (1, 7, 21)[self.form])
        ratios = [b / a for a, b in zip(samples["ours"], samples["beside"], strict=True)]
        self.figures.append(Figure.of(ratios, what, f"of {other}", device=str(self.device)))

    def add(self, what: str, unit: str, value: float, n: int = 1) -> None:
        """Add a number that was counted."""
        self.figures.append(Figure.counted(value, what, unit, n, device=str(self.device)))

    def same(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Add how many bytes differ, wherever they are."""
        a, b = (each.contiguous().view(torch.uint8).cpu() for each in (found, expected))
        self.add(what, WRONG, int((a != b).sum()) if a.shape == b.shape else b.numel(), b.numel())


class _Noise(ChunkSource):
    """Chunks of known bytes."""

    def __init__(self, expected: torch.Tensor) -> None:
        self._expected = expected

    def read(self, at: ChunkKey, out: torch.Tensor | None) -> torch.Tensor:
        return self._expected[at.chunk]


class Tiers:
    """The cpu tier, page-locked beside a GPU, and the device tier, each with room for some chunks of known bytes."""

    def __init__(self, bench: Bench) -> None:
        count, size = (4, 64, 256)[bench.form], bench.chunk.size_bytes
        noise = torch.randn(count * size // 2, generator=torch.Generator().manual_seed(7)).bfloat16()
        self.expected = noise.view(torch.uint8).view(count, -1)
        self.keys = [ChunkKey("gpu", number) for number in range(count)]
        self.cpu = MemoryTier(size, self.expected.numel(), _Noise(self.expected), pin_memory=bench.device.type != "cpu")
        self.device = MemoryTier(size, self.expected.numel(), Promotions(self.cpu), device=str(bench.device), threads=1)
        self.fill(self.cpu)

    def __enter__(self) -> Tiers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.device.close()
        self.cpu.close()

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


def slab(bench: Bench) -> None:
    """Bring chunks from the pinned slab onto the device, as lookups do."""
    with Tiers(bench) as tiers:
        with tiers.lent(tiers.cpu) as loans:
            loose = sum(loan.numel() for loan in loans if not loan.is_pinned())
        bench.add("bytes of the cpu tier that are not page-locked", WRONG, loose * (bench.device.type != "cpu"))
        plain, target = bench.pinned(tiers.expected.clone()), torch.empty_like(tiers.expected, device=bench.device)
        promoted = bench.timed(lambda: tiers.fill(tiers.device))

        def ours() -> float:
            tiers.device.evict("gpu")
            return promoted()

        copied = bench.timed(lambda: target.copy_(plain, non_blocking=True))
        bench.ratio("cpu tier to device tier", ours, "a pinned copy", copied)
        with tiers.lent(tiers.device) as loans:
            bench.same("bytes in the device tier", torch.stack(loans), tiers.expected)


class Chunk:
    """What LMCache hands an injector, as far as that looks at it: bytes."""

    def __init__(self, raw_data: torch.Tensor) -> None:
        self.raw_data, self.get_size = raw_data, raw_data.numel


def _write(layer: Any, keys: torch.Tensor, values: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write K and V `[T, H, D]` to these slots, as `reshape_and_cache_flash` does."""
    rows = kv_cache.transpose(1, 2)
    rows[slots // rows.shape[1], slots % rows.shape[1]] = torch.cat([keys, values], dim=-1)


@contextmanager
def without_hosts() -> Iterator[None]:
    """Let the injector be used where vLLM or LMCache are missing."""
    missing = {host for path in _NAMES if find_spec(host := path.partition(".")[0]) is None}
    made: dict[str, ModuleType] = {}
    for path, names in _NAMES.items():
        parts = path.split(".")
        if parts[0] in missing:
            above = [".".join(parts[: end + 1]) for end in range(len(parts))]
            made |= {name: ModuleType(name) for name in above if name not in made}
            vars(made[path]).update(names)
    sys.modules |= made
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def blocks(bench: Bench) -> None:
    """Copy chunks of both tiers into paged caches of K beside V, by the injector."""
    shape = bench.chunk
    with Tiers(bench) as tiers, without_hosts():
        from lmcache_cartridge.engine.inject import EngineWriteConnector

        tiers.fill(tiers.device)
        count = len(tiers.keys) * shape.tokens // BLOCK
        flat, pinned = tiers.expected.to(bench.device), bench.pinned(tiers.expected.clone())
        target = torch.empty_like(flat)
        starts = [number * shape.tokens for number in range(len(tiers.keys))]
        ends = [start + shape.tokens for start in starts]
        for layout, order in LAYOUTS.items():
            sizes = (shape.layers, count + 8, shape.heads, BLOCK, 2 * shape.head_size)
            memory = torch.empty(
                [sizes[axis] for axis in order], dtype=HELD[shape.dtype], device=bench.device
            ).normal_()
            named = enumerate(memory.permute([order.index(axis) for axis in range(5)]))
            caches = {f"model.layers.{i}.self_attn.attn": cache for i, cache in named}
            layers = {name: SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=_write)) for name in caches}
            connector = EngineWriteConnector()
            connector.bind(caches, layers, shape)
            expected = torch.cat([VIEWS[connector.layout](raw, shape) for raw in tiers.expected], dim=2)
            print(
                f"{layout}: chunks by",
                "LMCache's kernel" if connector.layout == "fused" else "each layer's op",
                flush=True,
            )
            slots = torch.randperm(count + 8)[:count, None] * BLOCK + torch.arange(BLOCK)
            slots = slots.flatten().to(bench.device)
            for name, tier, copied in (("device", tiers.device, flat), ("cpu", tiers.cpu, pinned)):
                with tiers.lent(tier) as loans:
                    chunks = [Chunk(raw) for raw in loans]
                    ours = bench.timed(
                        lambda c=connector, of=chunks, at=slots: c.batched_to_gpu(of, starts, ends, slot_mapping=at)
                    )
                    beside = bench.timed(lambda raw=copied: target.copy_(raw, non_blocking=True))
                    bench.ratio(f"{layout}: {name} tier to blocks", ours, "a copy of the same bytes", beside)
                rows = [cache.transpose(1, 2)[slots // BLOCK, slots % BLOCK] for cache in caches.values()]
                found = torch.stack(rows).unflatten(-1, (2, -1)).permute(3, 0, 1, 2, 4)
                bench.same(f"{layout}: {name} tier to blocks, bytes", found, expected)


def prefill(bench: Bench) -> None:
    """Compute a document's KV on the device and on the CPU, in float32 and in bfloat16."""
    from ttft import make_model

    name, tokens = str(MODEL_DIR), (48, 1024, 4096)[bench.form]
    if bench.form:
        name = str(make_model(bench.scratch / "model", SHAPES["Qwen2.5-0.5B"]._replace(vocabulary=8000)))
    ids = [5 + i * 7 % 400 for i in range(tokens)]
    kv, took = dict[tuple[str, str], torch.Tensor](), dict[tuple[str, str], float]()
    for here, where in (("cpu", "cpu"), ("device", str(bench.device))):
        for dtype in ("float32", "bfloat16"):
            model, case = CausalModel(name, dtype=dtype, device=where), (here, dtype)
            list(model.prefill(ids[:32], 32))  # the first call chooses kernels
            started = time.perf_counter()
            kv[case] = torch.cat(list(model.prefill(ids, 256)), dim=2).float()
            took[case] = time.perf_counter() - started
            if case == ("device", "float32"):
                question = ids[7:11]
                behind, plain = model.logits_after(kv[case], question), model.logits([*ids, *question], 1)
                differs = bool(behind[-1].argmax() != plain[-1].argmax())
                bench.add("another first token behind the KV than behind the document", WRONG, differs)
    exact = kv["cpu", "float32"]
    most = exact.abs().amax(dim=(2, 3, 4), keepdim=True)
    noise = float(((exact - kv["cpu", "bfloat16"]).abs() / most).max())
    for dtype, times in (("float32", 1), ("bfloat16", 2)):
        apart = float(((exact - kv["device", dtype]).abs() / most).max())
        bench.add(f"{dtype} from the CPU's float32, by what bfloat16 costs the CPU", BOUND, apart / (times * noise))
        bench.add(f"speed of {dtype}", "of the CPU's", took["cpu", dtype] / took["device", dtype])


SECTIONS = {each.__name__: each for each in (slab, blocks, prefill)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    made = report.Benchmark(__file__, __doc__, ["memory", "engine/inject.py", "make/model.py", "make/prefill.py"])
    made.parser.add_argument("--device", help="cuda, cuda:1 or cpu (default cuda where there is one)")
    made.parser.add_argument("--only", action="append", choices=SECTIONS, help="only this section; repeatable")
    options = made.start(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            made.parser.error(f"--device {device}: torch {torch.__version__} finds no GPU here")
        device = torch.device("cuda", device.index or 0)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(device, 0 if options.smoke else 2 if options.full else 1, Path(scratch))
        for name in options.only or SECTIONS:
            try:
                SECTIONS[name](bench)
            except Exception as error:  # takes no other section along
                report.say(f"FAILED {name}: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")
                failed += 1
    wrong = [f for f in bench.figures if (f.unit == WRONG and f.value) or (f.unit == BOUND and not f.value <= 1)]
    for figure in wrong:
        report.say(f"WRONG {figure.what}: {figure.value:g} {figure.unit}")
    if bench.figures:
        made.publish(bench.figures)
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
