"""Helpers of the end-to-end tests: cartridges made in variants, a server over them, and exact comparisons."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
from making import make_artifact
from safetensors import safe_open
from waiting import until

from lmcache_cartridge.artifact.identity import Identity
from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.prefill import build
from lmcache_cartridge.serve.launch import Launch, plan
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


SERVER_ARGS = ["--max-model-len", "8192", "--enforce-eager", "--kv-cache-memory-bytes", str(128 << 20)]


class Reply(NamedTuple):
    """What a greedy request came back with."""

    text: str
    logprobs: list[dict[str, float]]
    """Top 20 of each generated position, by token."""
    prompt_tokens: int
    cached_tokens: int


def stored_kv(root: Path) -> torch.Tensor:
    """Return the canonical KV `[2, L, T, H, D]` of an artefact, read by the safetensors library."""
    with safe_open(root / "payload.safetensors", framework="pt") as file:
        return torch.cat([file.get_tensor(name) for name in sorted(file.keys())], dim=3).permute(1, 2, 3, 0, 4)


class Client:
    """Asks one server greedily with token ids, past vLLM's own prefix cache."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=120)
        self._model = model

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def ask(self, ids: list[int], tag: str | None = None, tokens: int = 4, **fields: Any) -> Reply:
        """Return the reply to a prompt; `tag` is the request's `lmcache.tag.cartridge`, which the request API refuses."""
        return self._ask(ids, {} if tag is None else {"lmcache.tag.cartridge": tag}, tokens, **fields)

    def forget(self) -> None:
        """Have vLLM forget its own blocks, so that what is cached comes from LMCache."""
        until(lambda: self._http.post("/reset_prefix_cache").is_success)

    def ask_with(self, cartridges: list[str], ids: list[int], tokens: int = 4) -> Reply:
        """Return the reply to a prompt behind cartridges."""
        return self._ask(ids, {}, tokens, cartridges=cartridges)

    def _ask(self, ids: list[int], params: dict[str, str], tokens: int, **fields: Any) -> Reply:
        response = self.post(
            {"prompt": ids, "max_tokens": tokens, "temperature": 0, "logprobs": 20, "kv_transfer_params": params}
            | fields
        )
        assert response.is_success, response.text
        body = response.json()
        choice = body["choices"][0]
        return Reply(
            choice["text"],
            choice["logprobs"]["top_logprobs"],
            body["usage"]["prompt_tokens"],
            body["usage"]["prompt_tokens_details"]["cached_tokens"] or 0,
        )

    def computed(self, ids: list[int], tokens: int = 4) -> Reply:
        """Return the reply with every prompt token computed: a tag that no cartridge has keeps them all away."""
        reply = self._ask(ids, {"lmcache.tag.apart": "computed"}, tokens)
        assert reply.cached_tokens == 0
        return reply

    def post(self, body: dict[str, Any]) -> httpx.Response:
        """Post a completion with a `cache_salt` of its own."""
        return self._http.post("/v1/completions", json={"model": self._model, "cache_salt": uuid.uuid4().hex} | body)

    def post_json(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Post `body` to `path`."""
        return self._http.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        """Return what the server says at `path`."""
        return self._http.get(path)


@contextmanager
def serving(
    settings: Settings,
    log: Path,
    model: str = str(MODEL_DIR),
    *options: str,
    environment: dict[str, str] = SMALL,
    **given: Any,
) -> Iterator[Client]:
    """Serve a home's cartridges by what `plan` makes of `given`, with `options` of vLLM's behind `SERVER_ARGS`."""
    launch = plan(model, settings, vllm_args=[*SERVER_ARGS, *options], **given)
    with ServerProcess(launch, log, environment=environment) as server, Client(server.url, model) as client:
        yield client


def build_sheet(
    settings: Settings, model: CausalModel, sheet: str, name: str | None = None, *, encoding: str = "plain"
) -> tuple[Manifest, torch.Tensor]:
    """Build a shipped sheet as a cartridge and register it; return its manifest and KV, as it is read from a plain one."""
    root = settings.cartridges_dir / (name or sheet)
    made = build(model, SHEETS_DIR / f"{sheet}.txt", root, cartridge_id=name or sheet, version=1, encoding=encoding)
    Registry(settings.registry_path).register(root)
    return made, stored_kv(root) if encoding == "plain" else torch.empty(0)


def register_trained(settings: Settings, name: str, kv: torch.Tensor, like: Manifest) -> None:
    """Register KV as a trained cartridge under identity tokens."""
    root, positions = settings.cartridges_dir / name, kv.shape[2]
    make_artifact(
        root, positions=positions, cartridge_id=name, kind="trained", fingerprint=like.fingerprint, kv=kv,
        token_ids=Identity(positions, np.arange(10, 640)), chunk_tokens=like.payload.chunk_tokens,
    )  # fmt: skip
    Registry(settings.registry_path).register(root)


def difference(a: Reply, b: Reply) -> float:
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


def stale_installation(directory: Path, entry: str | None) -> Path:
    """Return a directory that, first in the path, makes this package one whose endpoint plugin is `entry`, or none."""
    info = directory / "lmcache_cartridge-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache-cartridge\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("" if entry is None else f"[vllm.endpoint_plugins]\ncartridges = {entry}\n")
    return directory
