"""Bytes per second from resident chunks into the engine's own blocks, beside memcpy of the same bytes.

    python benchmarks/inject.py [--full]

`EngineWriteConnector.batched_to_gpu` brings resident chunks into the paged KV caches of real vLLM CPU attention layers, as it serves:
chunks of whole blocks, packed for the instruction set when they were loaded, are copied. memcpy copies the same bytes once, out of the same memory, with torch and as many threads. Both read memory that no cache
holds. LMCache's own kernels write wrong KV into these blocks (LMCache#4463), so there is no rate of theirs to set beside.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import report
from sizes import SHAPES, TINY, Shape

CHUNK = 256
BLOCK = 128
"""vLLM's own default on CPU."""


class Target(NamedTuple):
    """An engine's blocks and the resident chunks to write there."""

    connector: Any
    resident: Any
    """Flat uint8 tensor of all chunks, as a slab."""
    objects: list[Any]
    slots: Any
    copy: Any
    """Where memcpy puts the same bytes."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all chunks."""
        return self.resident.numel()


@contextmanager
def target(shape: Shape, chunks: int) -> Iterator[Target]:
    """Build the attention layers of a model of this shape and resident chunks of noise, to be written to blocks in no order."""
    import torch
    from blocks import Blocks, memory_object, vllm_config

    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(shape.config()))
        tokens = chunks * CHUNK
        config = vllm_config(Path(scratch), max_model_len=max(2048, tokens), dtype="bfloat16", block_size=BLOCK)
        blocks = Blocks(config, tokens // BLOCK)
    connector = blocks.connector(CHUNK)
    if connector.layout == "heads":
        raise RuntimeError("this machine's blocks are written by vLLM's own op")
    size_bytes = blocks.shape(CHUNK).size_bytes
    resident = torch.empty(chunks * size_bytes, dtype=torch.uint8)
    resident.view(torch.bfloat16).normal_()
    objects = list(map(memory_object, resident.split(size_bytes)))
    with torch.inference_mode():
        yield Target(connector, resident, objects, blocks.whole(tokens), torch.zeros_like(resident))


def measure(shape: Shape, threads: Sequence[int], payload: int, repeat: int) -> list[report.Figure]:
    """Return the rates of both contenders for each number of threads."""
    import torch

    chunks = max(1, payload // (CHUNK * shape.token_bytes))
    rows = []
    with target(shape, chunks) as at:
        starts = [i * CHUNK for i in range(chunks)]
        ends = [start + CHUNK for start in starts]
        for count in threads:
            torch.set_num_threads(count)
            contenders: dict[str, Callable[[], float]] = {
                "whole blocks": lambda: report.timed(
                    lambda: at.connector.batched_to_gpu(
                        at.objects, starts, ends, slot_mapping=at.slots, vllm_cached_tokens=0
                    )
                ),
                "memcpy": lambda: report.timed(lambda: at.copy.copy_(at.resident)),
            }
            for path, seconds in report.in_turns(contenders, repeat).items():
                rates = [at.size_bytes / s for s in seconds]
                rows.append(report.Figure.of(rates, "rate", "bytes/s", model=shape.name, threads=count, path=path))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["engine/inject.py", "memory/layout.py", "memory/tiles.py"])
    options = bench.start(arguments)
    threads = [1] if options.smoke else sorted({1, len(os.sched_getaffinity(0))})
    shapes = [TINY] if options.smoke else SHAPES.values() if options.full else [SHAPES["Qwen2.5-1.5B"]]
    payload = (1 if options.smoke else 1024 if options.full else 256) << 20
    repeat, figures = 2 if options.smoke else 25 if options.full else 9, []
    for shape in shapes:
        report.say(f"{shape.name}: {payload >> 20} MiB")
        figures += measure(shape, threads, payload, repeat)
    bench.publish(figures)


if __name__ == "__main__":
    main()
