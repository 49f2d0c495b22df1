"""Script: run `benchmarks/gpu.py` on the CPU as on a bare machine, then with something wrong in each section; print JSON.

By name, the exit status, the figures and what was said. vLLM and LMCache cannot be imported.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

HOSTS = ("vllm", "lmcache", "boto3")


def run(out: Path, *sections: str) -> dict[str, Any]:
    sys.modules |= dict.fromkeys(HOSTS)  # so they cannot be imported
    import gpu

    said = io.StringIO()
    with redirect_stderr(said):
        only = [word for section in sections for word in ("--only", section)]
        status = gpu.main(["--smoke", "--device", "cpu", "--out", str(out), *only])
    figures = {each["what"]: each for each in json.loads((out / "gpu.json").read_text())["figures"]}
    return {"status": status, "figures": figures, "said": said.getvalue()}


@contextmanager
def promoted_wrong() -> Iterator[None]:
    from lmcache_cartridge.memory import device

    right = device.copy_and_wait

    def wrong(data: Any, out: Any) -> None:
        right(data, out)
        out[5] ^= 1

    with patch.object(device, "copy_and_wait", wrong):
        yield


@contextmanager
def injected_wrong() -> Iterator[None]:
    from lmcache_cartridge.engine.inject import EngineWriteConnector

    right = EngineWriteConnector.batched_to_gpu

    def wrong(self: Any, *chunks: Any, slot_mapping: Any) -> None:
        right(self, *chunks, slot_mapping=slot_mapping)
        for _, cache in self.layers:
            block, token = divmod(int(slot_mapping[0]), cache.shape[2])
            cache[block, 0, token, 0] *= -1

    with patch.object(EngineWriteConnector, "batched_to_gpu", wrong):
        yield


@contextmanager
def a_scale_wrong() -> Iterator[None]:
    """Of what is decoded on the device, which comes first in every turn."""
    import numpy as np

    from lmcache_cartridge.artifact import int8
    from lmcache_cartridge.memory import codec

    right, calls = codec.decode, []

    def wrong(packed: memoryview, out: Any, shape: Any, tokens: int) -> None:
        calls.append(1)
        heads = np.frombuffer(packed, int8.record(shape, tokens)).copy()
        heads["key_step"][0, 0, 0] *= 1 + len(calls) % 2
        right(heads.view("u1").data, out, shape, tokens)

    with patch.object(codec, "decode", wrong):
        yield


@contextmanager
def on_device(owner: Any, name: str, change: Any, number: int) -> Iterator[None]:
    """Change what one call returns: that for the device in float32."""
    right, calls = getattr(owner, name), []

    def wrong(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        found = right(*arguments, **named)
        return change(found) if len(calls) == number else found

    with patch.object(owner, name, wrong):
        yield


def main(out: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    import torch

    torch.set_num_threads(1)
    found = {"sound": run(out)}
    import gpu

    loud = lambda slices: [each * 1.5 for each in slices]  # noqa: E731
    cases: dict[str, tuple[Any, list[str]]] = {
        "promotion": (promoted_wrong(), ["slab"]),
        "injection": (injected_wrong(), ["blocks"]),
        "scale": (a_scale_wrong(), ["int8"]),
        "prefill": (on_device(gpu.CausalModel, "prefill", loud, 6), ["prefill"]),
        "crash": (patch("gpu.MemoryTier", side_effect=RuntimeError("no such kernel")), ["slab", "int8"]),
    }
    for name, (wrong, sections) in cases.items():
        with wrong:
            found[name] = run(out, *sections)
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
