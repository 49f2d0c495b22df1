"""Every engine that would corrupt or lose cartridges is refused with the option and the fix; others are described."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import quietly, vllm_config
from inprocess import CHUNK, StockConnector, lmcache_config, lmcache_engine, lmcache_metadata, plugin
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from lmcache_cartridge.artifact.model import Fingerprint
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.engine import describe as engines
from lmcache_cartridge.engine import refusals
from lmcache_cartridge.engine.backend import CartridgeBackend
from lmcache_cartridge.engine.contract import CONTROL
from lmcache_cartridge.engine.forms import SKIP_SAVING
from lmcache_cartridge.engine.inject import EngineWriteConnector
from lmcache_cartridge.errors import UnsupportedEngine, UnsupportedModel
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import Settings, from_mapping

with quietly():
    pass

ROPE = {
    "default": {"rope_theta": 5e5},
    "linear": {"rope_theta": 1e5, "factor": 4.0},
    "llama3": {"rope_theta": 1e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 2048},
    "yarn": {"rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 2048},
}  # fmt: skip
"""Parameters of each RoPE type that a cartridge may be made for, other than the shipped model's."""


@pytest.fixture
def settings(tmp_path):
    return from_mapping({"home": tmp_path, "cpu_bytes": 4 << 20})


def _fingerprint(settings: Settings, config: VllmConfig) -> Fingerprint:
    metadata = lmcache_metadata(lmcache_config(settings), config)
    return engines.fingerprint_of(config, metadata.kv_dtype, range(metadata.kv_shape[0]))


_BESIDE = {CONTROL: "/tmp/x.sock"}
_STOCK = {
    "kv_connector": "LMCacheConnectorV1",
    "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector",
}


def _changed(config: VllmConfig | None = None, **values: Any) -> VllmConfig:
    """Return a configuration some of whose parts are what vLLM itself would refuse, read from a draft model, or give to one
    engine of several."""
    config = config or vllm_config(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    for name, value in values.items():
        for part in (config.kv_transfer_config, config.parallel_config, config.speculative_config, config.model_config):
            if hasattr(part, name):
                setattr(part, name, value)
    return config


_BLOCKS = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
_SOUND = refusals.Facts(
    in_process=True, saves=False, stages=1, engines=1, split=1, speculation=None, cache_dtype="auto", may_sleep=False,
    extra={}, connector="CartridgeConnector", role="kv_consumer", skips_layers=[],
)  # fmt: skip


def _sliding(window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(**_BLOCKS, sliding_window=window)


@pytest.mark.parametrize(
    ("make", "specs", "expected"),
    [
        (vllm_config, [FullAttentionSpec(**_BLOCKS, sliding_window=32)], {}),
        (lambda: vllm_config(transfer={"kv_load_failure_policy": "recompute"}), [_sliding(2047)],
            {"gives_up_blocks": True, "recomputes": True}),
        (lambda: vllm_config(transfer={"kv_role": "kv_both"}, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"]),
            [FullAttentionSpec(**_BLOCKS), _sliding(2048)],
            {"saves": True, "role": "kv_both", "cache_dtype": "fp8", "skips_layers": ["0"]}),
        (lambda: _changed(kv_connector="MultiConnector", prefill_context_parallel_size=2, method="eagle", enable_sleep_mode=True),
            [], {"connector": "MultiConnector", "split": 2, "speculation": "eagle", "may_sleep": True}),
        (lambda: _changed(vllm_config(tensor_parallel_size=4, decode_context_parallel_size=2), data_parallel_index=1), [],
            {"engines": 2, "split": 2}),
        (lambda: vllm_config(pipeline_parallel_size=2, transfer={"engine_id": "8c7d_dp0"}), [],
            {"engines": 2, "stages": 2}),
        (lambda: _changed(vllm_config(transfer={"kv_connector_extra_config": _BESIDE}), data_parallel_size=3), [],
            {"in_process": False, "engines": 3, "extra": _BESIDE}),
    ],
)  # fmt: skip
def test_what_vllm_is_configured_for_is_what_it_is_refused_by(make, specs, expected):
    """`specs` are those of its groups of layers."""
    groups = [KVCacheGroupSpec([f"model.layers.{n}.self_attn.attn"], spec) for n, spec in enumerate(specs)]
    cached = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    assert engines.facts_of(make(), cached) == _SOUND._replace(groups=len(specs), **expected)


@pytest.mark.parametrize(("extra", "saves"), [({}, False), (_BESIDE, True)])
def test_lmcaches_variable_against_saving_holds_for_lmcache_inside_vllm_alone(monkeypatch, extra, saves):
    monkeypatch.setenv(SKIP_SAVING, "1")
    config = vllm_config(transfer={"kv_role": "kv_both", "kv_connector_extra_config": extra})
    assert engines.facts_of(config, KVCacheConfig(1, [], [])).saves is saves


_GROUPS = {"in_process": False, "groups": 2, "maps_caches": True}
_WINDOW = {"gives_up_blocks": True}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, None), (_GROUPS, None), (_WINDOW, None), ({"cache_dtype": "fp8_e5m2", "saves": True}, None),
        *((_GROUPS | other, f"--{refusals.ONE_GROUP}") for other in (
            {"maps_caches": False}, {"stages": 2}, {"cache_dtype": "fp8"}, {"speculation": "draft_model"})),
        (_WINDOW | {"saves": True}, "--no-save"), (_WINDOW | {"recomputes": True}, "kv_load_failure_policy to fail"),
        ({"connector": "MultiConnector"}, "MultiConnector: .*kv_both"),
        ({"cache_dtype": "fp8", "skips_layers": ["0"]}, "--kv-cache-dtype-skip-layers"),
        ({"extra": {"lmcache.max_tokens_per_load": 512}}, "lmcache.max_tokens_per_load: .*remove it"),
        ({"is_latent": True}, "multi-head latent attention: .*--mode multiprocess"),
    ],
)  # fmt: skip
def test_an_engine_that_is_not_safe_is_refused_with_the_way_out(facts, reason):
    """`serve/test_launch.py` has the other rows."""
    with pytest.raises(UnsupportedEngine, match=reason) if reason else nullcontext():
        refusals.check(refusals.ENGINE, _SOUND._replace(**facts))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None), ({"local_cpu": True}, None), ({"retrieve_locations": ["LocalCPUBackend", "cartridge"]}, None),
        *(({name: True}, f"{name} is on: .*`{name}: false`") for name in (
            "enable_async_loading", "use_layerwise", "enable_blending", "save_unfull_chunk")),
        ({"min_retrieve_tokens": 1}, "min_retrieve_tokens: .*set it to 0"),
        ({"retrieve_locations": ["LocalCPUBackend"]}, "retrieve_locations .*name the cartridge plugin there"),
        ({"pre_caching_hash_algorithm": "builtin"}, "is builtin: .*`pre_caching_hash_algorithm: sha256_cbor`"),
    ],
)  # fmt: skip
def test_the_lmcache_configuration_that_serve_writes_is_accepted_and_an_unsafe_one_refused(settings, options, reason):
    config = lmcache_config(settings, **options)
    with pytest.raises(UnsupportedEngine, match=reason) if reason else nullcontext():
        refusals.check(refusals.LMCACHE, config)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"extra": {"storage_plugin.second.class_name": "CartridgeBackend"}}, "there must be one"),
        ({"lookup_timeout_ms": 1000}, "lookup_timeout_s is 1.0"),
    ],
)
def test_why_lmcache_dropped_the_plugin_is_kept(settings, options, reason):
    given = lmcache_config(settings.model_copy(update={"lookup_timeout_s": 1.0}), **options)
    with lmcache_engine(given, vllm_config(), EngineWriteConnector()) as engine:
        assert not [b for b in engine.storage_manager.storage_backends.values() if isinstance(b, CartridgeBackend)]
        assert reason in str(CartridgeBackend.refusal)


def test_a_worker_under_another_connector_than_ours_ends_with_the_reason(monkeypatch):
    """A plugin that raises is dropped by LMCache, and the server would answer without cartridges."""
    ended: list[str] = []
    monkeypatch.setattr(engines.host_inprocess, "end_process", ended.append)
    config = vllm_config(transfer=_STOCK)
    with set_current_vllm_config(config), pytest.raises(AttributeError):  # behind the end
        engines.describe(None, None, SimpleNamespace(gpu_connector=StockConnector()))
    (reason,) = ended
    assert re.search("LMCacheConnectorV1 is not ours.*LMCache#4463.*VLLM_PLUGINS is set, name `cartridges`", reason)


@pytest.mark.parametrize(("rank", "policy"), [(1, "recompute"), (3, "fail")])
def test_each_rank_of_tensor_parallelism_is_described_as_such(settings, rank, policy):
    CartridgeBackend.refusal = UnsupportedEngine("an earlier one")
    config = vllm_config(tensor_parallel_size=4, transfer={"kv_load_failure_policy": policy})
    config.parallel_config.rank, config.model_config.enable_sleep_mode = rank, True
    connector = EngineWriteConnector()
    connector.device = "cuda:0"
    with lmcache_engine(lmcache_config(settings), config, connector) as loaded:
        assert CartridgeBackend.refusal is None, "a plugin that loads clears the reason of one that did not"
        engine = plugin(loaded).store.engine
    assert (engine.rank, engine.world, engine.chunk_tokens) == (rank, 4, CHUNK)
    assert engine.device == "cpu", "vLLM may sleep, and frees what is allocated beside its own"
    assert engine.fingerprint.kv_heads == 2, "the model has two heads however many ranks share them"
    assert engine.allow_trained is (policy == "fail")


@pytest.mark.parametrize("kind", ROPE)
def test_a_model_of_any_supported_rope_is_the_same_to_vllm_and_to_an_author_and_rotates_so(settings, tmp_path, kind):
    directory = Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | {"rope_parameters": {"rope_type": kind, **ROPE[kind]}}))
    config = vllm_config(directory)
    author, engine = CausalModel(str(directory)).fingerprint, _fingerprint(settings, config)
    assert author.differences(engine) == []
    with set_current_vllm_config(config), quietly():
        rotary = get_rope(64, 8192, True, config.model_config.hf_text_config.rope_parameters, torch.float32)
    (rope,) = engine.rope
    positions = torch.tensor([0, 1, 7, 300, 2047])
    angles = torch.outer(positions.float(), torch.tensor(rope.inv_freq))
    expected = torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor
    assert torch.allclose(rotary.cos_sin_cache[positions], expected, atol=1e-6)


def test_weights_that_vllm_quantises_itself_are_told(settings):
    author = CausalModel(str(MODEL_DIR)).fingerprint
    [difference] = author.differences(_fingerprint(settings, vllm_config(quantization="fp8")))
    assert difference.startswith("quantisation: none, not online fp8")


def test_an_engine_that_caches_layers_the_model_has_not_is_refused():
    with pytest.raises(UnsupportedModel, match="caches 4 layers, the model's config has 3"):
        engines.fingerprint_of(vllm_config(), torch.bfloat16, range(4))
