"""What engine is this, and may it be served? Every trap that would corrupt or lose cartridges is refused here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..artifact import fingerprint
from ..artifact.rope import rope_kinds, rope_parameters
from ..errors import UnsupportedEngine, UnsupportedModel
from ..memory.described import Engine
from ..memory.rope import default_frequencies
from . import host, host_inprocess
from .contract import (
    CONTROL,
    DATA_PARALLEL,
    PLAIN_CACHES,
    QUANTISED_CACHES,
    QUANTISED_OTHERWISE,
    REFUSED_EXTRA,
    SAVING_STAGES,
    SEVERAL_GROUPS,
    SPECULATION,
    SPECULATION_OTHERWISE,
    WINDOWS_RECOMPUTED,
    WINDOWS_SAVED,
)
from .forms import SKIP_SAVING

if TYPE_CHECKING:
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


_NAME = re.compile(r"_dp(\d+)$")
"""What vLLM's name of an engine ends in under data parallelism."""


def transfer_of(config: VllmConfig) -> KVTransferConfig:
    """Return an engine's KV transfer configuration. Raises `UnsupportedEngine` where it has none."""
    if config.kv_transfer_config is None:
        raise UnsupportedEngine("the engine has no --kv-transfer-config, which names the connector for cartridges")
    return config.kv_transfer_config


def check_vllm(config: VllmConfig, kv_cache_config: KVCacheConfig | None = None) -> None:
    """Raise `UnsupportedEngine`, with the fix, for a vLLM configuration under which cartridges are not safe."""
    transfer = transfer_of(config)
    refuse = UnsupportedEngine
    if transfer.kv_role not in ("kv_consumer", "kv_both"):
        raise refuse(f'kv_role is {transfer.kv_role}: such an engine may load nothing. Set "kv_role": "kv_both"')
    if transfer.kv_connector == "MultiConnector":
        raise refuse(
            "MultiConnector: in the step in which KV could not be loaded, the connectors beside ours save what was computed "
            "without it, and answer from that later; nobody can stop them (vLLM 0.32). LMCache's own saving goes beside "
            'cartridges: name our connector alone, with "kv_role": "kv_both"'
        )
    if config.lora_config is not None and not host.is_connector_ours(transfer):
        raise refuse(
            f"LoRA is enabled, and LMCache's keys ignore the adapter; {transfer.kv_connector} would give it the base model's "
            "KV. Our connector tells them apart: `lmcache-cartridge serve MODEL --print` shows its name"
        )
    if config.parallel_config.prefill_context_parallel_size > 1 or (
        config.parallel_config.decode_context_parallel_size > 1
    ):
        raise refuse("context parallelism splits a sequence among ranks; LMCache in-process does not handle it")
    if config.speculative_config is not None and config.speculative_config.method not in SPECULATION:
        raise refuse(f"speculation by {config.speculative_config.method}: {SPECULATION_OTHERWISE}")
    if (kind := config.cache_config.cache_dtype) not in PLAIN_CACHES + QUANTISED_CACHES:
        raise refuse(f"the KV cache is quantised ({kind}) {QUANTISED_OTHERWISE}")
    if kind in QUANTISED_CACHES and config.cache_config.kv_cache_dtype_skip_layers:
        raise refuse(
            "some layers' KV is quantised and some is not; LMCache has one dtype. Remove --kv-cache-dtype-skip-layers"
        )
    if kv_cache_config is not None:
        _check_groups(config, kv_cache_config)
    for key, why in REFUSED_EXTRA.items():
        if transfer.get_from_extra_config(key, None):
            raise refuse(f"{key} {why}; remove it from kv_connector_extra_config")


def _check_groups(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1:
        raise UnsupportedEngine(f"the model needs {len(groups)} KV cache groups: {SEVERAL_GROUPS}")
    if any(
        isinstance(group.kv_cache_spec, SlidingWindowSpec)
        and group.kv_cache_spec.sliding_window < config.model_config.max_model_len
        for group in groups
    ):
        is_inside = transfer_of(config).get_from_extra_config(CONTROL, None) is None
        if saves(config) if is_inside else transfer_of(config).kv_role != "kv_consumer":
            raise UnsupportedEngine(WINDOWS_SAVED)
        if transfer_of(config).kv_load_failure_policy != "fail":
            raise UnsupportedEngine(WINDOWS_RECOMPUTED)


def is_draft(layer_name: str) -> bool:
    """Whether a layer is a draft model's, which only proposes tokens; what its cache holds changes no answer.

    vLLM 0.32 gives them this name. By another they would be layers too many, which the fingerprint refuses.
    """
    return layer_name.startswith("draft_model.")


def answering(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the KV caches of the model that answers, without those of a draft model."""
    return {name: cache for name, cache in kv_caches.items() if not is_draft(name)}


def without_draft(kv_cache_config: KVCacheConfig | None) -> KVCacheConfig | None:
    """Return which KV caches the model that answers has, without those of a draft model."""
    if kv_cache_config is None:
        return None
    groups = [
        replace(group, layer_names=[name for name in group.layer_names if not is_draft(name)])
        for group in kv_cache_config.kv_cache_groups
    ]
    return replace(kv_cache_config, kv_cache_groups=[group for group in groups if group.layer_names])


def check_inside(config: VllmConfig) -> None:
    """Raise `UnsupportedEngine` for what LMCache inside vLLM is not made for, and LMCache's server is."""
    if config.parallel_config.data_parallel_size > 1 or engine_number(config) or _NAME.search(_name(config)):
        raise UnsupportedEngine(f"data parallelism: {DATA_PARALLEL}")
    if config.parallel_config.pipeline_parallel_size > 1 and saves(config):
        raise UnsupportedEngine(f"saving in a pipeline: {SAVING_STAGES}")


def saves(config: VllmConfig) -> bool:
    """Whether LMCache inside vLLM may save what it computes: as `kv_role` says, and LMCache's variable against it."""
    return transfer_of(config).kv_role != "kv_consumer" and not os.environ.get(SKIP_SAVING)


def engine_number(config: VllmConfig) -> int:
    """Return the number of this engine among those of one server, 0 for one alone.

    Under data parallelism engines of dense models are told that they are alone. Then the name that vLLM gives each for
    KV transfer tells.
    """
    named = _NAME.search(_name(config))
    return int(named[1]) if named else config.parallel_config.data_parallel_index


def _name(config: VllmConfig) -> str:
    return transfer_of(config).engine_id or ""


def worker_number(config: VllmConfig) -> int:
    """Return the number of this process among the workers of all engines of one server."""
    parallel = config.parallel_config
    return engine_number(config) * parallel.world_size + parallel.rank % parallel.world_size


def check_lmcache(config: LMCacheEngineConfig, metadata: LMCacheMetadata) -> None:
    """Raise `UnsupportedEngine`, with the fix, for an LMCache configuration under which cartridges are not safe."""
    problems = {
        "enable_async_loading": "it releases cached objects twice and hangs on a miss (LMCache 0.5.6)",
        "use_layerwise": "it drops request tags and memory references too early (LMCache 0.5.6)",
        "enable_blending": "it recomputes and moves cached KV",
        "save_unfull_chunk": "parts of chunks cannot be read back",
    }
    for option, why in problems.items():
        if getattr(config, option):
            raise UnsupportedEngine(f"LMCache's {option} is on: {why}. Set `{option}: false` in the LMCache YAML")
    if getattr(config, "min_retrieve_tokens", 0):
        raise UnsupportedEngine("LMCache's min_retrieve_tokens hides short cartridges; set it to 0")
    algorithm = config.pre_caching_hash_algorithm
    if algorithm not in ("sha256_cbor", "sha256"):
        raise UnsupportedEngine(
            f"pre_caching_hash_algorithm is {algorithm}, whose hashes differ from process to process, so no cartridge "
            "would ever be found. Set `pre_caching_hash_algorithm: sha256_cbor` in the LMCache YAML"
        )
    locations = config.retrieve_locations
    if locations is not None and not set(locations) & set(config.storage_plugins or ()):
        raise UnsupportedEngine(
            f"LMCache looks cartridges up in retrieve_locations only, {locations}, which names no storage plugin. Name "
            "the cartridge plugin there as in storage_plugins, or remove it"
        )
    if metadata.use_mla and metadata.world_size > 1:
        raise UnsupportedEngine(
            "multi-head latent attention on several ranks: LMCache in-process hands on what the first rank has (0.5.6), which "
            "was never run with cartridges. Serve it with --mode multiprocess, or on one rank"
        )


def is_split(kv_cache: torch.Tensor) -> bool:
    """Whether a registered KV cache has K and V as planes of their own, which LMCache's kernels write correctly.

    vLLM < 0.26 registers `[2, blocks, block, heads, size]` or `[blocks, 2, ...]`; later ones
    `[blocks, heads, block, 2 * size]`, which LMCache 0.5.6 corrupts silently (LMCache#4463).
    """
    return kv_cache.dim() == 5


def describe(config: LMCacheEngineConfig, metadata: LMCacheMetadata, engine: LMCacheEngine) -> Engine:
    """Return what the store must know of the engine in this process.

    Called while vLLM's worker registers its KV caches. Raises `UnsupportedEngine` where an injector would write
    wrong KV, or where vLLM's configuration is out of reach.
    """
    vllm_config = host.current_vllm_config()
    if vllm_config is None:
        raise UnsupportedEngine("no vLLM configuration is set in this process; the plugin runs in vLLM's workers only")
    check_vllm(vllm_config)
    check_inside(vllm_config)
    check_lmcache(config, metadata)
    parallel = vllm_config.parallel_config
    layout = _layout(engine, vllm_config)
    is_stage = parallel.pipeline_parallel_size > 1
    layers = own_layers(vllm_config) if is_stage else range(metadata.kv_shape[0])
    if len(layers) != metadata.kv_shape[0]:
        raise UnsupportedEngine(f"this stage caches {len(layers)} layers, LMCache {metadata.kv_shape[0]}")
    return Engine(
        fingerprint=fingerprint_of(
            vllm_config, computed_dtype(vllm_config, metadata.kv_dtype), None if is_stage else layers
        ),
        chunk_tokens=config.chunk_size,
        rank=parallel.rank % parallel.tensor_parallel_size,
        world=parallel.tensor_parallel_size,
        layout=layout,
        hasher=host_inprocess.hasher(engine),
        pin_memory=torch.cuda.is_available(),
        allow_trained=transfer_of(vllm_config).kv_load_failure_policy == "fail",
        device=_device(engine, vllm_config),
        layers=layers,
        worker=worker_number(vllm_config),
        quantiser=getattr(engine.gpu_connector, "quantiser", None),
    )


def computed_dtype(vllm_config: VllmConfig, cached: torch.dtype) -> torch.dtype:
    """Return the dtype in which an engine computes the KV that it caches in `cached`.

    Raises `UnsupportedEngine` where the configuration does not say how that is quantised: it is part of LMCache's keys.
    """
    if cached != torch.uint8:
        return cached
    if vllm_config.cache_config.cache_dtype not in QUANTISED_CACHES:
        raise UnsupportedEngine(
            "the checkpoint quantises the KV cache; say how, by --kv-cache-dtype fp8_e4m3 or fp8_e5m2"
        )
    computed = vllm_config.model_config.dtype
    assert isinstance(computed, torch.dtype), "vLLM resolves names when it makes its configuration"
    return computed


def own_layers(vllm_config: VllmConfig) -> range:
    """Return the layers that this process has, in the order of the model. Raises `UnsupportedEngine` for gaps."""
    names = [name for name in host.attention_layers(vllm_config) if not is_draft(name)]
    numbers = sorted(map(host.layer_index, names))
    layers = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
    if numbers != list(layers):
        raise UnsupportedEngine(f"this process caches layers {numbers}, which are not all layers of a stage")
    return layers


def _layout(engine: LMCacheEngine, vllm_config: VllmConfig) -> str:
    from .inject import EngineWriteConnector

    if isinstance(engine.gpu_connector, EngineWriteConnector):
        return engine.gpu_connector.layout
    caches = _caches(vllm_config)
    if caches and all(map(is_split, caches)):
        if vllm_config.cache_config.cache_dtype in QUANTISED_CACHES:
            raise UnsupportedEngine("quantised KV caches need vLLM >= 0.26; remove --kv-cache-dtype")
        return "kv_2ltd"
    raise UnsupportedEngine(
        "LMCache's own connector writes wrong KV into this engine's fused cache layout (LMCache#4463). Use "
        '"kv_connector": "CartridgeConnector", "kv_connector_module_path": "lmcache_cartridge.engine.connector"'
    )


def _caches(vllm_config: VllmConfig) -> list[torch.Tensor]:
    layers = host.attention_layers(vllm_config).values()
    return [layer.kv_cache for layer in layers if isinstance(getattr(layer, "kv_cache", None), torch.Tensor)]


def _device(engine: LMCacheEngine, vllm_config: VllmConfig) -> str:
    """Return where the engine's blocks are, so that the device tier is there too: `cpu`, `cuda:0`."""
    from .inject import EngineWriteConnector

    if isinstance(engine.gpu_connector, EngineWriteConnector):
        return engine.gpu_connector.device
    return str(next((cache.device for cache in _caches(vllm_config)), "cpu"))


def fingerprint_of(vllm_config: VllmConfig, dtype: torch.dtype, layers: range | None) -> fingerprint.Fingerprint:
    """Return what vLLM runs, with KV of `dtype`, in all its stages.

    Raises `UnsupportedModel`, also where `layers`, those that this engine caches, are not the model's. A stage of several
    gives None.
    """
    model = vllm_config.model_config
    fields = fingerprint.config_fields(model.hf_text_config)
    kinds = rope_kinds(fields)
    inv_freq, attention_factor = (None, 1.0) if kinds else _rope_frequencies(model.hf_text_config, model.max_model_len)
    directory = fingerprint.model_directory(model.model)
    found = fingerprint.of_config(
        fields | {"architectures": model.hf_config.architectures},
        dtype=str(dtype).removeprefix("torch."),
        inv_freq=inv_freq,
        attention_factor=attention_factor,
        weights=fingerprint.weights_digest(directory) if directory else None,
        quantisation=_quantisation(model),
        of_kinds={kind: _frequencies(model.hf_text_config, kind, model.max_model_len) for kind in kinds},
        max_model_len=model.max_model_len,
    )
    if layers is not None and layers != range(found.layers):
        raise UnsupportedModel(f"the engine caches {len(layers)} layers, the model's config has {found.layers}")
    return found


def _quantisation(model: Any) -> str | None:
    """Return how an engine has its weights quantised; vLLM quantises some itself (`--quantization fp8`)."""
    stated = next(
        (c for m in (model.hf_config, model.hf_text_config) if (c := getattr(m, "quantization_config", None))), None
    )
    if stated is not None:
        return fingerprint.quantisation_of(stated if isinstance(stated, dict) else stated.to_dict())
    return None if model.quantization is None else f"{fingerprint.ONLINE}{model.quantization}"


def _rope_frequencies(config: Any, max_model_len: int) -> tuple[Sequence[float] | None, float]:
    """Return the frequencies and attention factor that transformers derives from a config; None without RoPE."""
    if not rope_parameters(fingerprint.config_fields(config)):
        return None, 1.0
    return _frequencies(config, None, max_model_len)


def _frequencies(config: Any, kind: str | None, max_model_len: int) -> tuple[Sequence[float], float]:
    """Return the frequencies and attention factor that transformers derives from a config, for layers of a `kind`."""
    fields = fingerprint.config_fields(config)
    rope_type = rope_parameters(fields, kind)["rope_type"]
    if rope_type == "default":
        return default_frequencies(fields, kind), 1.0
    return host.rope_frequencies(rope_type, config, kind, max_model_len)
