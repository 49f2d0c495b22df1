"""Helpers of the end-to-end tests: cartridges made in variants, a server over them, and exact comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import safe_open
from wards import MODEL, Answer, Asker

from lmcache_cartridge.cli.recall import SHEETS_DIR
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.prefill import build
from lmcache_cartridge.serve.launch import Launch, on_cpu, plan
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import Settings


def clear_lmcache(launch: Launch) -> None:
    """Have LMCache's server forget the one copy that it has for all tenants; nothing in-process, where it has none."""
    if launch.lmcache:
        ask_lmcache(launch, "POST", "/cache/clear")


def ask_lmcache(launch: Launch, method: str, path: str) -> httpx.Response:
    """Ask LMCache's server of multiprocess mode over HTTP."""
    port = launch.lmcache[launch.lmcache.index("--http-port") + 1]
    return httpx.request(method, f"http://127.0.0.1:{port}{path}", timeout=60).raise_for_status()


SERVER_ARGS = [
    "--max-model-len", "8192", "--enforce-eager", "--kv-cache-memory-bytes", str(128 << 20),
    *([] if on_cpu() else ["--gpu-memory-utilization", "0.05"]),  # which must be free, though not that much is used
]  # fmt: skip


def stored_kv(root: Path) -> torch.Tensor:
    """Return the canonical KV `[2, L, T, H, D]` of an artefact, read by the safetensors library."""
    with safe_open(root / "payload.safetensors", framework="pt") as file:
        return torch.cat([file.get_tensor(name) for name in sorted(file.keys())], dim=3).permute(1, 2, 3, 0, 4)


def faulty(launch: Launch) -> Launch:
    """Return a start by the plugins with faults, which the file `$LMCACHE_FAULTY_FILE` says."""

    def changed(text: str) -> str:
        return text.replace("lmcache_cartridge.engine.backend", "faulty").replace(
            "lmcache_cartridge.engine.l2", "faulty_l2"
        )

    return launch._replace(yaml=changed(launch.yaml), lmcache=launch.lmcache and [*map(changed, launch.lmcache)])


@contextmanager
def serving(
    settings: Settings,
    log: Path,
    model: str = MODEL,
    *options: str,
    key: str = "none",
    environment: dict[str, str] = SMALL,
    change: Callable[[Launch], Launch] = lambda launch: launch,
    **given: Any,
) -> Iterator[Asker]:
    """Serve a home's cartridges by what `plan` makes of `given`, changed, with `options` of vLLM's behind `SERVER_ARGS`."""
    keys = [] if key == "none" else ["--api-key", key]
    launch = change(plan(model, settings, vllm_args=[*SERVER_ARGS, *options, *keys], **given))
    with ServerProcess(launch, log, environment=environment) as server, Asker(server.url, key, model) as asker:
        asker.server, asker.launch = server, launch
        yield asker


def build_sheet(settings: Settings, model: CausalModel, sheet: str, name: str | None = None) -> None:
    """Build a shipped sheet as a cartridge and register it."""
    root = settings.cartridges_dir / (name or sheet)
    build(model, SHEETS_DIR / f"{sheet}.txt", root, cartridge_id=name or sheet, version=1)
    Registry(settings.registry_path).register(root)


def difference(a: Answer, b: Answer) -> float:
    """Return the largest difference of the first position's top-20 logprobs; infinite where they share no token.

    Only the first position: after it the two replies may have been given different tokens.
    """
    first, second = a.logprobs[0], b.logprobs[0]
    shared = first.keys() & second.keys()
    top = max(first, key=first.get)
    if top not in second:
        return float("inf")
    return max(abs(first[token] - second[token]) for token in shared)


def question_ids(model: CausalModel, text: str) -> list[int]:
    """Return the ids of a question as it follows a sheet."""
    return model.encode(" " + text, special=False)


def stale_installation(directory: Path, entry: str) -> Path:
    """Return a directory that, first in the path, makes this package one whose endpoint plugin is `entry`."""
    info = directory / "lmcache_cartridge-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache-cartridge\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.endpoint_plugins]\ncartridges = {entry}\n")
    return directory
