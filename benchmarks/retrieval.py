"""Chunks through the plugin as LMCache calls it, beside LMCache's own backends and the limits of the machine.

    python benchmarks/retrieval.py [--case Qwen2.5-7B:256]

What is timed is what LMCache does with a backend in one retrieval: `batched_contains` with a pin, `batched_get_blocking`,
then a release and an unpin for each chunk. Tiers and their rivals, on the same chunks:

  cpu    resident in our cpu tier           LMCache LocalCPU; copying the same bytes once (memcpy)
  disk   in a directory, verified           LMCache LocalDisk, which does not verify; `preadv` and `aiofiles` into reused memory

Cold means that the files' pages were dropped from the page cache (fsync, then POSIX_FADV_DONTNEED; mincore proves it)
and, for ours, that the chunks were evicted from memory. Cached means that the page cache has the files, which
takes the disk out of the comparison. Every contender has four threads, memory aligned as ours and written
to before, and runs in turn with the others, by one caller, or by c at once. A retrieval that finds fewer chunks than there are
ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiofiles
import numpy as np
import report
from sizes import SHAPES, TINY, Shape
from waiting import until

from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.settings import Settings, from_mapping

MEASURES = ["artifact", "library", "sources", "memory", "engine/backend.py"]
THREADS = 4
CONCURRENCY = (1, 4, 16)
CPU_LOOPS = 20
"""Retrievals in one sample of the cpu tier, which takes microseconds."""
PAYLOAD_BYTES = 512 << 20
"""Of the chunks in a case."""


class Case(NamedTuple):
    """What one run of contenders shares."""

    shape: Shape
    chunk_tokens: int
    chunks: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.chunk_tokens * self.shape.token_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of all chunks."""
        return self.chunks * self.chunk_bytes


class Scene(NamedTuple):
    """A case set up: LMCache's engine with our plugin, LMCache's own backends, and the files of them all."""

    case: Case
    plugin: Any
    digest: str
    payload: Path
    manifest: Manifest
    local_cpu: Any
    local_disk: Any
    rival_files: Path
    keys: list[Any]


def case_of(text: str) -> Case:
    """Return the case `MODEL:CHUNK`."""
    name, _, tokens = text.rpartition(":")
    shape = SHAPES[name]
    return Case(shape, int(tokens), max(1, min(64, PAYLOAD_BYTES // (int(tokens) * shape.token_bytes))))


def finite_bytes(count: int) -> bytes:
    """Return random bfloat16 numbers, none of them NaN or infinite, as bytes."""
    words = np.random.default_rng(0).integers(0, 1 << 16, count // 2, dtype=np.uint16)
    return (words & 0xBFFF).astype("<u2").tobytes()


@contextlib.contextmanager
def scene(case: Case, scratch: Path) -> Iterator[Scene]:
    """Set a case up in `scratch` and take it down."""
    import torch
    from blocks import vllm_config
    from inprocess import lmcache_config, lmcache_engine, lmcache_metadata, plugin

    from lmcache_cartridge.artifact.reading import load_token_ids
    from lmcache_cartridge.engine import describe as engines
    from lmcache_cartridge.engine.inject import EngineWriteConnector
    from lmcache_cartridge.library.registry import Registry

    model = scratch / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(case.shape.config()))
    positions = case.chunks * case.chunk_tokens
    config = vllm_config(model, max_model_len=max(2048, positions + 64), dtype="bfloat16")
    settings = from_mapping(
        {
            "home": scratch / "home", "cpu_bytes": case.size_bytes, "lookup_timeout_s": 60, "load_threads": THREADS,
            "disk_bytes": 0, "reload_s": 0, "disk_dir": scratch / "cache", "plain_prompts": "all",
        }
    )  # fmt: skip
    registry = Registry(settings.registry_path)
    lm = lmcache_config(settings, case.chunk_tokens)
    metadata = lmcache_metadata(lm, config)
    fingerprint = engines.fingerprint_of(config, metadata.kv_dtype, range(metadata.kv_shape[0]))
    root = scratch / "doc"
    ids = np.random.default_rng(1).integers(0, fingerprint.vocab_size, positions)
    manifest = report.write_artifact(root, fingerprint, ids, case.chunk_tokens, finite_bytes(case.chunk_bytes))
    registry.register(root)
    rival_files = scratch / "rivals"
    with lmcache_engine(lm, config, EngineWriteConnector()) as engine, torch.inference_mode():
        keys = [
            key for _, _, key in engine.token_database.process_tokens(tokens=load_token_ids(manifest, root).tolist())
        ]
        with own_backends(settings, case, metadata, rival_files, keys) as (cpu, disk):
            payload = root / manifest.payload.file
            yield Scene(case, plugin(engine), manifest.digest, payload, manifest, cpu, disk, rival_files, keys)
        plugin(engine).close()


@contextlib.contextmanager
def own_backends(
    settings: Settings, case: Case, metadata: Any, files: Path, keys: list[Any]
) -> Iterator[tuple[Any, Any]]:
    """Build LMCache's LocalCPU and LocalDisk backends, holding a chunk under each key."""
    import torch
    from blocks import quietly
    from inprocess import lmcache_config
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    files.mkdir()
    pool_gb = (2 * case.size_bytes + (64 << 20)) / 2**30
    config = lmcache_config(
        settings, case.chunk_tokens, local_cpu=True, max_local_cpu_size=pool_gb, local_disk=f"{files}/",
        max_local_disk_size=4 * pool_gb, extra={"disk_io_threads": THREADS},
    )  # fmt: skip
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    with quietly():
        cpu = LocalCPUBackend(config, metadata, "cpu")
        disk = LocalDiskBackend(config, loop, cpu, "cpu", None, metadata)
    data = torch.frombuffer(bytearray(finite_bytes(case.chunk_bytes)), dtype=torch.uint8)
    shape = torch.Size([2, case.shape.layers, case.chunk_tokens, case.shape.kv_heads * case.shape.head_size])
    for key in keys:
        chunk = cpu.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD)
        chunk.raw_data[: case.chunk_bytes].copy_(data)
        for backend in (cpu, disk):
            backend.batched_submit_put_task([key], [chunk])
        chunk.ref_count_down()
    until(lambda: disk.batched_contains(keys) == len(keys), timeout_s=300)
    until(lambda: not any(map(disk.exists_in_put_tasks, keys)), timeout_s=300)
    try:
        yield cpu, disk
    finally:
        for backend in (disk, cpu):
            with contextlib.suppress(Exception):
                backend.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def retrieve(backend: Any, keys: Sequence[Any]) -> None:
    """Do what LMCache does with a backend in one retrieval, but for the injection."""
    found = backend.batched_contains(keys, True)
    assert found == len(keys), f"{backend} has {found} of {len(keys)} chunks"
    chunks = backend.batched_get_blocking(keys)
    assert None not in chunks and len(chunks) == len(keys), f"{backend} lost a chunk"
    for chunk in chunks:
        chunk.ref_count_down()
    for key in keys:
        backend.unpin(key)


def drop(files: Sequence[Path]) -> None:
    """Drop files from the page cache, and prove it."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            for _ in range(10):  # pages that a core has just put in stay until it flushes its list of them
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                if not (share := cached_share(path)):
                    break
                time.sleep(0.05)
            else:
                raise RuntimeError(f"{share:.1%} of {path} stays in the page cache")
        finally:
            os.close(descriptor)


def cached_share(path: Path) -> float:
    """Return how much of a file is in the page cache, as `mincore` tells."""
    mapped = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-len(mapped) // 4096), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(
        ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data)
    ):
        raise OSError(ctypes.get_errno(), "mincore")
    return float((pages & 1).mean())


def warm(files: Sequence[Path]) -> None:
    """Bring files into the page cache."""
    for path in files:
        path.read_bytes()


class Limit:
    """The payload's chunks into one reused buffer by `THREADS` threads, without the plugin."""

    def __init__(self, scene: Scene) -> None:
        self._start, self._path, self._case = scene.manifest.payload.data_offset_bytes, scene.payload, scene.case
        self._buffer = written(scene.case.size_bytes)
        self._pool = ThreadPoolExecutor(THREADS)

    def preadv(self) -> None:
        """Read by `preadv`."""

        def read(chunk: int) -> None:
            place, at = self._place(chunk)
            descriptor = os.open(self._path, os.O_RDONLY)  # each its own: the kernel reads ahead by descriptor
            try:
                done = 0
                while done < len(place):
                    done += os.preadv(descriptor, [place[done:]], at + done)
            finally:
                os.close(descriptor)

        list(self._pool.map(read, range(self._case.chunks)))

    def aiofiles(self) -> None:
        """Read by aiofiles, which hands each read to the same threads."""

        async def read(chunk: int) -> None:
            place, at = self._place(chunk)
            async with aiofiles.open(self._path, "rb", buffering=0, executor=self._pool) as file:
                await file.seek(at)
                done = 0
                while done < len(place):
                    done += await file.readinto(place[done:])

        async def all_chunks() -> None:
            await asyncio.gather(*map(read, range(self._case.chunks)))

        asyncio.run(all_chunks())

    def _place(self, chunk: int) -> tuple[memoryview, int]:
        first = chunk * self._case.chunk_bytes
        return self._buffer[first : first + self._case.chunk_bytes], self._start + first

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()


def written(size_bytes: int) -> memoryview:
    """Return memory that begins at a page, as a slab's does, and was written to.

    The kernel takes twice as long to copy to where NumPy begins large arrays, 16 bytes after a page.
    """
    memory = np.ones(size_bytes + 4096, np.uint8)
    return memoryview(memory)[-memory.ctypes.data % 4096 :][:size_bytes]


def measure_cpu(at: Scene, repeat: int) -> list[report.Figure]:
    """Return the figures of each contender and concurrency with everything in memory."""
    rows = []
    source, target = np.ones(at.case.size_bytes, np.uint8), np.empty(at.case.size_bytes, np.uint8)
    retrieve(at.plugin, at.keys)
    for c in CONCURRENCY:
        parts = [at.keys[len(at.keys) * i // c : len(at.keys) * (i + 1) // c] for i in range(min(c, len(at.keys)))]
        with ThreadPoolExecutor(c) as pool:

            def loops(backend: Any, pool: Any = pool, parts: Any = parts) -> float:
                def work(keys: Any) -> None:
                    for _ in range(CPU_LOOPS):
                        retrieve(backend, keys)

                took = report.timed(lambda: list(pool.map(work, parts))) / CPU_LOOPS
                if backend is at.local_cpu:
                    backend.touch_cache()
                return took

            samples = report.in_turns(
                {
                    "cartridge": partial(loops, at.plugin), "LMCache LocalCPU": partial(loops, at.local_cpu),
                    "memcpy of the bytes": lambda: report.timed(lambda: np.copyto(target, source)),
                },
                repeat,
            )  # fmt: skip
        rows += make_figures(at.case, "cpu", c, samples)
    return rows


def measure_disk(at: Scene, repeat: int, cold: bool) -> list[report.Figure]:
    """Return the figures of each contender with the chunks in files, in the page cache or not."""
    limit = Limit(at)
    rivals = sorted(at.rival_files.rglob("*.pt"))
    assert rivals, "no files of LMCache's"
    reads = {
        "cartridge": partial(retrieve, at.plugin, at.keys), "LMCache LocalDisk": partial(retrieve, at.local_disk, at.keys),
        "preadv": limit.preadv, "aiofiles": limit.aiofiles,
    }  # fmt: skip

    def sample(name: str) -> float:
        at.plugin.store.evict(at.digest)
        (drop if cold else warm)(rivals if name == "LMCache LocalDisk" else [at.payload])
        return report.timed(reads[name])

    samples = report.in_turns({name: partial(sample, name) for name in reads}, repeat)
    limit.close()
    return make_figures(at.case, "disk cold" if cold else "disk cached", 1, samples)


def make_figures(case: Case, tier: str, c: int, samples: dict[str, list[float]]) -> list[report.Figure]:
    """Return the rate of each contender."""
    about = {"model": case.shape.name, "chunk": case.chunk_tokens, "tier": tier, "c": c}
    return [
        report.Figure.of([case.size_bytes / s for s in seconds], "rate", "bytes/s", contender=name, **about)
        for name, seconds in samples.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, MEASURES)
    bench.parser.add_argument("--case", type=case_of, default="Qwen2.5-1.5B:256", help="MODEL:CHUNK (%(default)s)")
    options = bench.start(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    case, repeat = (Case(TINY, 64, 8), 1) if options.smoke else (options.case, 11 if options.full else 5)
    with tempfile.TemporaryDirectory(prefix="cartridge-retrieval-") as scratch, scene(case, Path(scratch)) as at:
        figures = measure_cpu(at, repeat)
        for cold in (True, False):
            figures += measure_disk(at, repeat, cold)
    bench.publish(figures)


if __name__ == "__main__":
    main()
