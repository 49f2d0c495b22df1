"""Refusals: how an engine may not run that serves cartridges: what, why, and the way out.

One table, for the connectors, which see vLLM's configuration, and for `serve`, which reads the command line before it starts
anything. Imports no vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import UnsupportedEngine
from .contract import API_PLUGIN, REQUEST_API

PLAIN_CACHES = ("auto", "float16", "bfloat16")
"""Values of `--kv-cache-dtype` under which the cache holds KV as it was computed."""
QUANTISED_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Those under which it holds a byte for each number, by a scale for each layer that is settled when the model is loaded."""
SPECULATION = ("ngram", "ngram_gpu", "suffix", "draft_model")
"""Methods of speculation that go with cartridges. The first three have no KV of their own. A draft model has none for what
was injected, so it proposes less well there; the model itself decides on each token, so the answers are the same."""
ONE_GROUP = "disable-hybrid-kv-cache-manager"
"""The option of vLLM that keeps the KV of full and sliding layers in one group of equal blocks. Attention ignores what is
beyond a window all the same."""
SEVERAL_GROUPS = (
    "full and sliding layers would have KV caches with blocks of their own, and a cartridge has one KV for all layers; start "
    f"vLLM with --{ONE_GROUP}, as `serve` does"
)

SLEEP = (
    "LMCache's server keeps handles of the KV cache, and nothing tells it when sleep mode frees that memory; serve "
    "in-process, or without sleep mode"
)
"""Why an engine may not sleep in multiprocess mode."""


class Facts(NamedTuple):
    """What is known of an engine before it has loaded a model."""

    in_process: bool
    """Whether LMCache runs in vLLM's workers."""
    saves: bool
    """Whether LMCache saves what vLLM computes."""
    stages: int
    engines: int
    """Of one server."""
    split: int
    """Ranks that share one sequence."""
    speculation: str | None
    """Its method, empty for one without; None for none."""
    cache_dtype: str
    may_sleep: bool
    extra: Mapping[str, Any]
    """`kv_connector_extra_config`."""


_RUST = "VLLM_USE_RUST_FRONTEND"
_WITHOUT_API = "vLLM's server in Rust has no request API, and would answer without the cartridges that requests name"


def keeping_away() -> dict[str, str]:
    """Return by variable what keeps vLLM from loading what is ours; under its own connector nobody notices."""
    found, plugins = {}, os.environ.get("VLLM_PLUGINS")
    if plugins is not None and API_PLUGIN not in plugins.split(","):
        found["VLLM_PLUGINS"] = f"{plugins!r} has no `{API_PLUGIN}`: vLLM loads nothing of ours, and may answer without"
    if os.environ.get(_RUST, "0") != "0":
        found[_RUST] = _WITHOUT_API
    return found


_REFUSED: tuple[tuple[Callable[[Facts], Any], str], ...] = (
    (
        lambda engine: engine.in_process and engine.saves and engine.stages > 1,
        "{stages} pipeline stages: LMCache inside vLLM would save what one stage computed from KV that another could not "
        "load; use `serve --mode multiprocess`, or have nothing saved",
    ),
    (
        lambda engine: engine.in_process and engine.engines > 1,
        "data parallelism: LMCache 0.5.6 inside vLLM does not start in the second engine of a server; use `serve --mode "
        "multiprocess`, or one server for each engine and a router before them",
    ),
    (
        lambda engine: engine.may_sleep and not engine.in_process,
        f"sleep mode is enabled: {SLEEP}",
    ),
    (
        lambda engine: engine.split > 1,
        "context parallelism splits a sequence among ranks, and LMCache with it; remove it",
    ),
    (
        lambda engine: engine.speculation is not None and engine.speculation not in SPECULATION,
        "speculation by {speculation}: other methods add layers to the model's own, whose KV no cartridge has; use one of "
        + ", ".join(SPECULATION),
    ),
    (
        lambda engine: engine.cache_dtype not in PLAIN_CACHES + QUANTISED_CACHES,
        "the KV cache is quantised ({cache_dtype}) by scales that are found as KV comes, which no cartridge made ahead can "
        f"have; use one of {', '.join(QUANTISED_CACHES)}, or remove --kv-cache-dtype",
    ),
    (
        lambda engine: engine.extra.get("lmcache.max_tokens_per_load"),
        "lmcache.max_tokens_per_load cuts cartridges in the middle (LMCache 0.5.6); remove it from kv_connector_extra_config",
    ),
    (
        lambda engine: engine.extra.get("use_native"),
        "use_native takes vLLM's copy of an older LMCache; remove it from kv_connector_extra_config",
    ),
    (
        lambda engine: _RUST in keeping_away() and engine.extra.get(REQUEST_API) != "off",
        f"{_RUST} is set: {_WITHOUT_API}; unset it",
    ),
)


def check(engine: Facts) -> None:
    """Raise `UnsupportedEngine` for what an engine may not be."""
    for is_wrong, why in _REFUSED:
        if is_wrong(engine):
            raise UnsupportedEngine(why.format(**engine._asdict()))
