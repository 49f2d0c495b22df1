"""What engine is this, and may it be served? Every trap that would corrupt or lose cartridges is refused here."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..artifact.hf_config import by_type, config_fields, of_config, quantisation_of, rope_kinds, rope_parameters
from ..artifact.model import ONLINE, Fingerprint
from ..artifact.weights import model_directory, weights_digest
from ..errors import UnsupportedEngine, UnsupportedModel
from ..memory.described import Engine
from ..memory.rope import default_frequencies
from . import host, host_inprocess, refusals
from .contract import API_PLUGIN, CONTROL, REQUEST_API
from .forms import SKIP_SAVING, configure
from .refusals import QUANTISED_CACHES

if TYPE_CHECKING:
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.lmcache_cartridge.describe")

_NAME = re.compile(r"_dp\d+$")
"""What vLLM's name of an engine ends in under data parallelism."""


def transfer_of(config: VllmConfig) -> KVTransferConfig:
    """Return an engine's KV transfer configuration."""
    assert config.kv_transfer_config is not None, "it names the connector that this was called by"
    return config.kv_transfer_config


def started(
    config: VllmConfig, kv_cache_config: KVCacheConfig, mode: Literal["in-process", "multiprocess"]
) -> KVCacheConfig:
    """Check all that a connector can know before LMCache's part of it is built, and return the caches without a draft model's.

    Raises `UnsupportedEngine`, with the fix.
    """
    configure(config.kv_transfer_config, in_process=mode == "in-process")
    host.start(mode)
    groups = [
        replace(group, layer_names=[name for name in group.layer_names if not is_draft(name)])
        for group in kv_cache_config.kv_cache_groups
    ]
    kv_cache_config = replace(kv_cache_config, kv_cache_groups=[group for group in groups if group.layer_names])
    refusals.check(refusals.ENGINE, facts_of(config, kv_cache_config))
    check_api(config)
    return kv_cache_config


def check_api(config: VllmConfig) -> None:
    """Raise `UnsupportedEngine` where the API server would not read the request field `cartridges`.

    Workers ask too, and first: once LMCache has threads, a process that fails waits for them at its end.

    vLLM ignores fields that it does not know, so it would answer without the cartridges, and where it cannot load a
    plugin it logs so and goes on. `REQUEST_API: "off"` in `kv_connector_extra_config` allows a server without.
    """
    if transfer_of(config).get_from_extra_config(REQUEST_API, "on") == "off":
        logger.warning(
            "the request API of lmcache-cartridge is switched off: this server IGNORES the request field `cartridges`, and injects "
            "only documents at the head of a prompt"
        )
        return
    if config.model_config.runner_type != "generate":  # vLLM leaves our request API out
        raise UnsupportedEngine(
            "this server generates nothing, and would ignore the cartridges that requests name; serve it without ours"
        )
    refusals.check(refusals.ENVIRONMENT, {"VLLM_PLUGINS": "", **os.environ})
    try:
        [entry] = metadata.entry_points(group="vllm.endpoint_plugins", name=API_PLUGIN)
        entry.load()
    except Exception as error:
        raise UnsupportedEngine(
            f"vLLM cannot load the request API ({error!r}); install lmcache-cartridge again, or requests would be answered without the "
            "cartridges that they name"
        ) from error


def facts_of(config: VllmConfig, kv_cache_config: KVCacheConfig) -> refusals.Facts:
    """Return what vLLM is configured for, by which it may be refused."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    parallel, transfer, speculates = config.parallel_config, transfer_of(config), config.speculative_config
    groups = kv_cache_config.kv_cache_groups
    # Whether LMCache runs in vLLM's workers, not beside as a server.
    is_inside = transfer.get_from_extra_config(CONTROL, None) is None
    # Under data parallelism engines of dense models are told that they are alone. The name that vLLM gives each for KV
    # transfer tells.
    is_one_of_several = parallel.data_parallel_index or _NAME.search(transfer.engine_id or "")
    return refusals.Facts(
        in_process=is_inside,
        saves=saves(config) if is_inside else transfer.kv_role != "kv_consumer",
        stages=parallel.pipeline_parallel_size,
        engines=max(parallel.data_parallel_size, 2 if is_one_of_several else 1),
        split=max(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size),
        speculation=speculates.method if speculates else None,
        cache_dtype=config.cache_config.cache_dtype,
        may_sleep=config.model_config.enable_sleep_mode,
        extra=transfer.kv_connector_extra_config,
        connector=transfer.kv_connector or "",
        role=transfer.kv_role or "",
        is_latent=config.model_config.use_mla,
        skips_layers=config.cache_config.kv_cache_dtype_skip_layers,
        groups=len(groups),
        maps_caches=not is_inside and host.maps_caches(config),
        gives_up_blocks=any(
            isinstance(spec := group.kv_cache_spec, SlidingWindowSpec)
            and spec.sliding_window < config.model_config.max_model_len
            for group in groups
        ),
        recomputes=transfer.kv_load_failure_policy != "fail",
    )


def is_draft(layer_name: str) -> bool:
    """Whether a layer is a draft model's, which only proposes tokens; what its cache holds changes no answer.

    vLLM 0.32 gives them this name. By another they would be layers too many, which the fingerprint refuses.
    """
    return layer_name.startswith("draft_model.")


def answering(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the KV caches of the model that answers, without those of a draft model."""
    return {name: cache for name, cache in kv_caches.items() if not is_draft(name)}


def saves(config: VllmConfig) -> bool:
    """Whether LMCache inside vLLM may save what it computes: as `kv_role` says, and LMCache's variable against it."""
    return transfer_of(config).kv_role != "kv_consumer" and not os.environ.get(SKIP_SAVING)


def describe(config: LMCacheEngineConfig, metadata: LMCacheMetadata, engine: LMCacheEngine) -> Engine:
    """Return what the store must know of the engine in this process.

    Called while vLLM's worker registers its KV caches. Raises `UnsupportedEngine` for an engine under which cartridges are
    not safe. Ends the process under another connector than ours: LMCache
    would go on without us, and the server answer without cartridges.
    """
    from .inject import EngineWriteConnector

    vllm_config = host.current_vllm_config()
    injector = engine.gpu_connector
    if not isinstance(injector, EngineWriteConnector):
        host_inprocess.end_process(
            f"{transfer_of(vllm_config).kv_connector} is not ours, and writes wrong KV (LMCache#4463). Where VLLM_PLUGINS is "
            f"set, name `{API_PLUGIN}` in it; else install lmcache-cartridge again"
        )
    refusals.check(refusals.LMCACHE, config)
    parallel, device = vllm_config.parallel_config, injector.device
    if vllm_config.model_config.enable_sleep_mode and device != "cpu":
        # vLLM 0.32 has all that is allocated while KV caches are registered in the memory that it frees.
        logger.warning("cartridges are held in no memory of the device, since sleep mode would free it")
        device = "cpu"
    is_stage = parallel.pipeline_parallel_size > 1
    layers = own_layers(vllm_config) if is_stage else range(metadata.kv_shape[0])
    return Engine(
        fingerprint=fingerprint_of(
            vllm_config, computed_dtype(vllm_config, metadata.kv_dtype), None if is_stage else layers
        ),
        chunk_tokens=config.chunk_size,
        rank=parallel.rank % parallel.world_size,
        world=parallel.tensor_parallel_size,
        layout=injector.layout,
        hasher=host_inprocess.hasher(engine),
        pin_memory=torch.cuda.is_available(),
        allow_trained=transfer_of(vllm_config).kv_load_failure_policy == "fail",
        device=device,
        layers=layers,
        quantiser=injector.quantiser,
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


def fingerprint_of(vllm_config: VllmConfig, dtype: torch.dtype, layers: range | None) -> Fingerprint:
    """Return what vLLM runs, with KV of `dtype`, in all its stages.

    Raises `UnsupportedModel`, also where `layers`, those that this engine caches, are not the model's. A stage of several
    gives None.
    """
    model = vllm_config.model_config
    fields = config_fields(model.hf_text_config)
    directory = model_directory(model.model)
    found = of_config(
        fields | {"architectures": model.hf_config.architectures},
        dtype=str(dtype).removeprefix("torch."),
        frequencies={
            kind: _frequencies(model.hf_text_config, kind, model.max_model_len) for kind in rope_kinds(fields)
        },
        weights=weights_digest(directory) if directory else None,
        quantisation=_quantisation(model),
        max_model_len=model.max_model_len,
    )
    if layers is not None and layers != range(found.layers):
        raise UnsupportedModel(f"the engine caches {len(layers)} layers, the model's config has {found.layers}")
    return by_type(found, fields["model_type"])


def _quantisation(model: Any) -> str | None:
    """Return how an engine has its weights quantised; vLLM quantises some itself (`--quantization fp8`)."""
    stated = next(
        (c for m in (model.hf_config, model.hf_text_config) if (c := getattr(m, "quantization_config", None))), None
    )
    if stated is not None:
        return quantisation_of(stated if isinstance(stated, dict) else stated.to_dict())
    return None if model.quantization is None else f"{ONLINE}{model.quantization}"


def _frequencies(config: Any, kind: str | None, max_model_len: int) -> tuple[Sequence[float], float]:
    """Return the frequencies and attention factor that transformers derives from a config, for layers of a `kind`."""
    fields = config_fields(config)
    rope_type = rope_parameters(fields, kind)["rope_type"]
    if rope_type == "default":
        return default_frequencies(fields, kind), 1.0
    return host.rope_frequencies(rope_type, config, kind, max_model_len)
