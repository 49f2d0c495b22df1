"""Script: run `benchmarks/gpu.py` on the CPU as on a bare machine, then with other bytes in two sections; print JSON.

By name, the exit status, the figures and what was said. vLLM and LMCache cannot be imported.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr
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


def promoted(right: Any) -> Any:
    def wrong(data: Any, out: Any) -> None:
        right(data, out)
        out[5] ^= 1

    return wrong


def injected(right: Any) -> Any:
    def wrong(self: Any, *chunks: Any, slot_mapping: Any) -> None:
        right(self, *chunks, slot_mapping=slot_mapping)
        for _, cache in self.layers:
            block, token = divmod(int(slot_mapping[0]), cache.shape[2])
            cache[block, 0, token, 0] *= -1

    return wrong


def main(out: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    import torch

    torch.set_num_threads(1)
    found = {"sound": run(out)}

    from lmcache_cartridge.engine.inject import EngineWriteConnector
    from lmcache_cartridge.memory import device

    for name, owner, attribute, make, section in (
        ("promotion", device, "copy_and_wait", promoted, "slab"),
        ("injection", EngineWriteConnector, "batched_to_gpu", injected, "blocks"),
    ):
        with patch.object(owner, attribute, make(getattr(owner, attribute))):
            found[name] = run(out, section)
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
