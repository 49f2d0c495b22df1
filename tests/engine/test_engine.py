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
from homes import CHUNK_BYTES
from inprocess import CHUNK, StockConnector, lmcache_config, lmcache_engine, lmcache_metadata, plugin
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from lmcache_cartridge.artifact.model import Fingerprint
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.engine import backend, refusals
from lmcache_cartridge.engine import describe as engines
from lmcache_cartridge.engine.backend import CartridgeBackend
from lmcache_cartridge.engine.contract import CONTROL, NULL_BLOCK
from lmcache_cartridge.engine.forms import SKIP_SAVING
from lmcache_cartridge.engine.inject import EngineWriteConnector
from lmcache_cartridge.errors import UnsupportedEngine, UnsupportedModel
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import Settings, from_mapping

with quietly():
    from lmcache_cartridge.engine.connector import CartridgeConnector
    from lmcache_cartridge.engine.mp_connector import CartridgeMPConnector

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
_DRIVEN = {**_BESIDE, "lmcache.mp.mp_transfer_mode": "lmcache_driven"}
_STOCK = {
    "kv_connector": "LMCacheConnectorV1",
    "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector",
}


def _extra(**values: Any) -> VllmConfig:
    return vllm_config(transfer={"kv_connector_extra_config": values})


def _changed(**values: Any) -> VllmConfig:
    """Return a configuration some of whose parts are what vLLM itself would refuse, read from a draft model, or give to one
    engine of several."""
    config = vllm_config(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    for name, value in values.items():
        for part in (config.kv_transfer_config, config.parallel_config, config.speculative_config, config.model_config):
            if hasattr(part, name):
                setattr(part, name, value)
    return config


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: _extra(use_native=True), "use_native: .*remove it"),
        (lambda: _changed(kv_connector="MultiConnector"), "MultiConnector: .*kv_both"),
        (lambda: vllm_config(transfer={"kv_role": "kv_producer"}), "kv_role is kv_producer: .*kv_both"),
        (lambda: _changed(prefill_context_parallel_size=2), "context parallelism: "),
        (lambda: vllm_config(tensor_parallel_size=4, decode_context_parallel_size=2), "context parallelism: "),
        (lambda: _changed(method="eagle"), "speculation by eagle: .*ngram, ngram_gpu, suffix, draft_model"),
        (lambda: vllm_config(kv_cache_dtype="fp8_per_token_head"), "fp8_per_token_head.*remove --kv-cache-dtype"),
        (lambda: vllm_config(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"]), "--kv-cache-dtype-skip-layers"),
        (lambda: _extra(**{"lmcache.max_tokens_per_load": 512}), "lmcache.max_tokens_per_load: .*remove it"),
        (lambda: _changed(enable_sleep_mode=True, kv_connector_extra_config=_BESIDE), "sleep mode is enabled: "),
    ],
)  # fmt: skip
def test_a_vllm_that_is_not_safe_is_refused_with_the_reason(make, reason):
    with pytest.raises(UnsupportedEngine, match=reason):
        engines.check_vllm(make(), _cached())


def test_the_block_that_requests_share_is_lost_by_none_of_them(monkeypatch):
    """Where windows have left positions behind, a request whose KV is lost would end all others with it."""
    assert NULL_BLOCK == NULL_BLOCK_ID
    for connector in (CartridgeConnector, CartridgeMPConnector):
        one, theirs = connector.__new__(connector), connector.__mro__[3]
        one.failed = {NULL_BLOCK, 5}
        monkeypatch.setattr(theirs, "get_block_ids_with_load_errors", lambda self: {NULL_BLOCK, 6})
        assert one.get_block_ids_with_load_errors() == {5, 6}


@pytest.mark.parametrize(("may_sleep", "device_chunks"), [(True, 4), (False, 4), (True, 0)])
def test_a_device_tier_is_refused_where_vllm_may_sleep(home, monkeypatch, may_sleep, device_chunks):
    """On a CPU none ever does."""
    store = home.open(settings={"device_bytes": device_chunks * CHUNK_BYTES})
    monkeypatch.setattr(backend, "worker_store", lambda: store)
    connector = CartridgeConnector.__new__(CartridgeConnector)
    connector._config = _changed(enable_sleep_mode=may_sleep)
    refused = pytest.raises(UnsupportedEngine, match="`device_bytes: 0`")
    with refused if may_sleep and device_chunks else nullcontext():
        connector._check_sleep()


def _cached(*specs: AttentionSpec) -> KVCacheConfig:
    """Return what vLLM tells a connector of a model with a group of layers of each spec."""
    groups = [KVCacheGroupSpec([f"model.layers.{n}.self_attn.attn"], spec) for n, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)


_BLOCKS = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("extra", "role", "options", "reason"),
    [
        ({}, "kv_consumer", {}, f"--{refusals.ONE_GROUP}"),
        (_BESIDE, "kv_consumer", {}, f"--{refusals.ONE_GROUP}"),
        (_DRIVEN, "kv_consumer", {"pipeline_parallel_size": 2}, f"--{refusals.ONE_GROUP}"),
        (_DRIVEN, "kv_consumer", {"kv_cache_dtype": "fp8"}, f"--{refusals.ONE_GROUP}"),
        (_DRIVEN, "kv_both", {}, "--no-save"),
        (_DRIVEN, "kv_consumer", {}, None),
    ],
)  # fmt: skip
def test_layers_with_blocks_of_their_own_are_refused_unless_lmcaches_server_moves_them(extra, role, options, reason):
    full, sliding = FullAttentionSpec(**_BLOCKS), SlidingWindowSpec(**_BLOCKS, sliding_window=32)
    config = vllm_config(transfer={"kv_role": role, "kv_connector_extra_config": extra}, **options)
    with pytest.raises(UnsupportedEngine, match=reason) if reason else nullcontext():
        engines.check_vllm(config, _cached(full, sliding))
    engines.check_vllm(
        vllm_config(transfer={"kv_role": role}), _cached(FullAttentionSpec(**_BLOCKS, sliding_window=32))
    )


@pytest.mark.parametrize(
    ("role", "extra", "policy", "skips", "reason"),
    [
        ("kv_both", {}, "fail", "", "layers have a sliding window.*--no-save"), ("kv_consumer", {}, "fail", "", None),
        ("kv_both", {}, "fail", "1", None),
        ("kv_both", _BESIDE, "fail", "1", "--no-save"),  # LMCache's server knows no such variable
        ("kv_consumer", {}, "recompute", "", "layers have a sliding window.*kv_load_failure_policy"),
    ],
)  # fmt: skip
def test_nothing_is_saved_or_computed_again_of_a_model_whose_every_layer_gives_its_blocks_up(
    monkeypatch, role, extra, policy, skips, reason
):
    monkeypatch.setenv(SKIP_SAVING, skips)
    transfer = {"kv_role": role, "kv_connector_extra_config": extra, "kv_load_failure_policy": policy}
    config = vllm_config(transfer=transfer)
    longest = config.model_config.max_model_len
    with pytest.raises(UnsupportedEngine, match=reason) if reason else nullcontext():
        engines.check_vllm(config, _cached(SlidingWindowSpec(**_BLOCKS, sliding_window=longest - 1)))
    engines.check_vllm(config, _cached(SlidingWindowSpec(**_BLOCKS, sliding_window=longest)))  # and so gives up none


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: _changed(data_parallel_size=2), "data parallelism"),
        (lambda: _changed(data_parallel_index=1), "data parallelism"),
        (lambda: vllm_config(transfer={"engine_id": "8c7d_dp0"}), "data parallelism"),
        (lambda: vllm_config(pipeline_parallel_size=2, transfer={"kv_role": "kv_both"}), "2 pipeline stages"),
    ],
)  # fmt: skip
def test_what_lmcaches_server_alone_can_take_is_refused_inside_vllm(make, reason):
    with pytest.raises(UnsupportedEngine, match=f"{reason}: .* --mode multiprocess"):
        engines.check_vllm(make(), _cached())
    beside = make()
    beside.kv_transfer_config.kv_connector_extra_config = _BESIDE
    engines.check_vllm(beside, _cached())


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
        ({"extra": {"storage_plugin.cartridge.gpu_budget": 5}}, "gpu_budget: no such setting"),
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
    config.parallel_config.rank = rank
    with lmcache_engine(lmcache_config(settings), config, EngineWriteConnector()) as loaded:
        assert CartridgeBackend.refusal is None, "a plugin that loads clears the reason of one that did not"
        engine = plugin(loaded).store.engine
    assert (engine.rank, engine.world, engine.chunk_tokens) == (rank, 4, CHUNK)
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


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"quantization": "fp8"}, "quantisation: none, not online fp8"), ({"dtype": "float32"}, "dtype: bfloat16, not float32"),
        ({"hf_overrides": {"rms_norm_eps": 1e-5}}, "config_digest"),
    ],
)  # fmt: skip
def test_another_model_is_told_by_what_differs(settings, given, named):
    author = CausalModel(str(MODEL_DIR)).fingerprint
    (difference,) = author.differences(_fingerprint(settings, vllm_config(**given)))
    assert difference.startswith(named)


def test_an_engine_that_caches_layers_the_model_has_not_is_refused():
    with pytest.raises(UnsupportedModel, match="caches 4 layers, the model's config has 3"):
        engines.fingerprint_of(vllm_config(), torch.bfloat16, range(4))
