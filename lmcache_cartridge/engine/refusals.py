"""Refusals: what may not be where cartridges are served: what it is, why, and the way out.

One table, for the connectors, which see vLLM's and LMCache's configurations, for `serve`, which reads the command line before it
starts anything, and for `doctor`. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import UnsupportedEngine
from .contract import API_PLUGIN

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
IN_FP8 = "this engine caches KV in fp8, not as it computes it"
"""Why none of its KV is taken for a cartridge."""
SLEEP = "LMCache's server keeps handles of the KV cache, and nothing tells it when sleep mode frees that memory"
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
    connector: str = ""
    role: str = "kv_both"
    """vLLM's word for whether it loads and saves KV."""
    is_latent: bool = False
    """Whether it caches latent vectors."""
    skips_layers: object = False
    """Whether some layers' caches are quantised and some are not."""
    groups: int = 1
    """Of layers that have blocks of their own."""
    maps_caches: bool = False
    """Whether LMCache's server moves their blocks."""
    gives_up_blocks: bool = False
    """Whether layers with a window are a group, so that a request's earlier blocks are given to others."""
    recomputes: bool = False
    """Whether vLLM computes what could not be loaded."""


Row = tuple[Callable[[Any], Any], str, str, str]
"""Whether something is wrong, what, why, and the way out; `{0}` in the texts is what it was found in."""


ENGINE: list[Row] = [
    (lambda engine: engine.role not in ("kv_consumer", "kv_both"),
            "kv_role is {0.role}", "such an engine may load nothing", 'set "kv_role": "kv_both"'),
    (lambda engine: engine.connector == "MultiConnector", "MultiConnector",
            "in the step in which KV could not be loaded, the connectors beside ours save what was computed without it, and answer "
            "from that later; nobody can stop them (vLLM 0.32). LMCache's own saving goes beside cartridges",
            'name our connector alone, with "kv_role": "kv_both"'),
    (lambda engine: engine.in_process and engine.saves and engine.stages > 1, "{0.stages} pipeline stages",
            "LMCache inside vLLM would save what one stage computed from KV that another could not load",
            "use `serve --mode multiprocess`, or have nothing saved"),
    (lambda engine: engine.in_process and engine.engines > 1, "data parallelism",
            "LMCache 0.5.6 inside vLLM does not start in the second engine of a server",
            "use `serve --mode multiprocess`, or one server for each engine and a router before them"),
    (lambda engine: engine.may_sleep and not engine.in_process, "sleep mode is enabled", SLEEP, "serve in-process, or without sleep mode"),
    (lambda engine: engine.split > 1, "context parallelism", "it splits a sequence among ranks, and LMCache with it",
            "remove it"),
    (lambda engine: engine.speculation is not None and engine.speculation not in SPECULATION,
            "speculation by {0.speculation}", "other methods add layers to the model's own, whose KV no cartridge has",
            "use one of " + ", ".join(SPECULATION)),
    (lambda engine: engine.cache_dtype not in PLAIN_CACHES + QUANTISED_CACHES,
            "the KV cache is quantised ({0.cache_dtype})",
            "its scales are found as KV comes, which no cartridge made ahead can have",
            f"use one of {', '.join(QUANTISED_CACHES)}, or remove --kv-cache-dtype"),
    (lambda engine: engine.cache_dtype in QUANTISED_CACHES and engine.skips_layers,
            "some layers' KV is quantised and some is not", "LMCache has one dtype", "remove --kv-cache-dtype-skip-layers"),
    (lambda engine: engine.is_latent and engine.in_process, "multi-head latent attention",
            "one latent vector a token is served in multiprocess mode only", "use --mode multiprocess"),
    (lambda engine: engine.groups > 1 and (not engine.maps_caches or engine.stages > 1 or engine.speculation == "draft_model"
            or engine.cache_dtype in QUANTISED_CACHES), "{0.groups} KV cache groups",
            "full and sliding layers have blocks of their own. They are moved by LMCache's server only (LMCache 0.5.6, lmcache_driven), and were never run with pipeline stages, a draft model or a quantised KV cache",
            f"start vLLM with --{ONE_GROUP}, as `serve` does"),
    (lambda engine: engine.gives_up_blocks and engine.saves, "layers have a sliding window and blocks of their own",
            "vLLM gives a request's earlier blocks to others, and LMCache would save what those write",
            "have nothing saved (`serve --no-save`, or kv_role kv_consumer)"),
    (lambda engine: engine.gives_up_blocks and engine.recomputes, "layers have a sliding window and blocks of their own",
            "vLLM keeps no blocks in which what could not be loaded could be computed", "set kv_load_failure_policy to fail"),
    (lambda engine: engine.extra.get("lmcache.max_tokens_per_load"), "lmcache.max_tokens_per_load",
            "it cuts cartridges in the middle (LMCache 0.5.6)", "remove it from kv_connector_extra_config"),
    (lambda engine: engine.extra.get("lmcache.mp.server_urls"), "several LMCache servers", "cartridges lie in one",
            "give lmcache.mp.host and lmcache.mp.port"),
    (lambda engine: engine.extra.get("use_native"), "use_native", "it takes vLLM's copy of an older LMCache",
            "remove it from kv_connector_extra_config"),
]  # fmt: skip
"""Of `Facts`."""
LMCACHE: list[Row] = [
    (lambda config: config.enable_async_loading, "LMCache's enable_async_loading is on",
            "it releases cached objects twice and hangs on a miss (LMCache 0.5.6)", "set `enable_async_loading: false` in the LMCache YAML"),
    (lambda config: config.use_layerwise, "LMCache's use_layerwise is on",
            "it drops request tags and memory references too early (LMCache 0.5.6)", "set `use_layerwise: false` in the LMCache YAML"),
    (lambda config: config.enable_blending, "LMCache's enable_blending is on", "it recomputes and moves cached KV",
            "set `enable_blending: false` in the LMCache YAML"),
    (lambda config: config.save_unfull_chunk, "LMCache's save_unfull_chunk is on", "parts of chunks cannot be read back",
            "set `save_unfull_chunk: false` in the LMCache YAML"),
    (lambda config: config.min_retrieve_tokens, "LMCache's min_retrieve_tokens",
            "it hides short cartridges", "set it to 0"),
    (lambda config: config.pre_caching_hash_algorithm not in ("sha256_cbor", "sha256"),
            "pre_caching_hash_algorithm is {0.pre_caching_hash_algorithm}",
            "its hashes differ from process to process, so no cartridge would ever be found",
            "set `pre_caching_hash_algorithm: sha256_cbor` in the LMCache YAML"),
    (lambda config: not config.storage_plugins, "storage_plugins names no plugin",
            "LMCache loads none of those in extra_config", "name the cartridge plugin there"),
    (lambda config: config.retrieve_locations is not None
            and not set(config.retrieve_locations) & set(config.storage_plugins), "retrieve_locations {0.retrieve_locations}",
            "LMCache looks cartridges up there only, and no storage plugin is named",
            "name the cartridge plugin there as in storage_plugins, or remove it"),
]  # fmt: skip
"""Of LMCache's configuration in-process."""
ENVIRONMENT: list[Row] = [
    (lambda variables: API_PLUGIN not in variables.get("VLLM_PLUGINS", API_PLUGIN).split(","), "VLLM_PLUGINS",
            f"{{0[VLLM_PLUGINS]!r}} has no `{API_PLUGIN}`: vLLM loads nothing of ours, and may answer without", f"set VLLM_PLUGINS={API_PLUGIN}, or add it to what is there"),
    (lambda variables: variables.get("VLLM_USE_RUST_FRONTEND", "0") != "0", "VLLM_USE_RUST_FRONTEND",
            "vLLM's server in Rust has no request API, and would answer without the cartridges that requests name", "unset it"),
]  # fmt: skip
"""Of the environment of vLLM's server: what keeps it from loading what is ours; under its own connector nobody notices."""


def found(table: list[Row], of: Any) -> Iterator[list[str]]:
    """Yield what is wrong with something, why, and the way out."""
    for is_wrong, *texts in table:
        if is_wrong(of):
            yield [text.format(of) for text in texts]


def check(table: list[Row], of: Any) -> None:
    """Raise `UnsupportedEngine` for the first that is wrong."""
    for what, why, mend in found(table, of):
        raise UnsupportedEngine(f"{what}: {why}; {mend}")
