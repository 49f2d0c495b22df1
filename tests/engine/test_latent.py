"""Multi-head latent attention: what is stored of it, what is refused, and how it comes into an engine's blocks."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from blocks import quietly, vllm_config
from families import FAMILIES, make_model, write
from making import make_fingerprint

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.hf_config import config_fields, of_config
from lmcache_cartridge.artifact.manifest import decode
from lmcache_cartridge.errors import CartridgeError, ManifestError, UnsupportedEngine, UnsupportedModel
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.prefill import build

with quietly():
    from lmcache_cartridge.engine.describe import facts_of
    from lmcache_cartridge.engine.latent import check_latents


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return CausalModel(str(make_model(tmp_path_factory.mktemp("latent") / "model", FAMILIES["deepseek-v3"]())))


def test_a_document_is_built_as_one_plane_of_latent_vectors_and_rotary_keys(model, tmp_path):
    document = tmp_path / "doc.txt"
    document.write_text("The depot in Alder has a red door and two keys. " * 8)
    manifest = build(model, document, tmp_path / "doc", cartridge_id="doc", version=1, chunk_tokens=32)
    assert list(reading.verify(tmp_path / "doc"))[-1] == (manifest.chunks, manifest.chunks)
    assert manifest.data_bytes == manifest.positions * 3 * 576 * 4
    assert manifest.canary.sensitivity > 1, "KV in a wrong order would not be noticed"


def test_what_is_made_for_keys_and_values_or_contradicts_itself_is_refused(model, tmp_path):
    with pytest.raises(UnsupportedModel, match="train: DeepseekV3ForCausalLM caches latent vectors"):
        model.need_values("train")
    document = tmp_path / "doc.txt"
    document.write_text("The depot in Alder has a red door. " * 8)
    with pytest.raises(CartridgeError, match="not stored in int8"):
        build(model, document, tmp_path / "doc", cartridge_id="doc", version=1, encoding="int8")
    assert not (tmp_path / "doc").exists()
    manifest = write(model, tmp_path / "doc", list(range(5, 13))).manifest
    shape = msgspec.structs.replace(manifest.fingerprint, latent=576)
    with pytest.raises(ManifestError, match="a latent vector of 576 in 1 heads of 576 elements"):
        decode(msgspec.structs.replace(manifest, fingerprint=shape).encode(), "here")


def test_latent_attention_that_nobody_compared_is_refused_by_its_config():
    config = config_fields(FAMILIES["deepseek-v3"]())
    for change, reason in (({"model_type": "minicpm3"}, "minicpm3"), ({"rope_interleave": False}, "interleaved")):
        with pytest.raises(UnsupportedModel, match=reason):
            of_config(config | change, dtype="float32")


BLOCK, LATENT, SIZE = 4, 6, 10
_SHAPE = msgspec.structs.replace(make_fingerprint(layers=2, kv_heads=1, dtype="float32"), head_size=SIZE, latent=LATENT)


class _Layer:
    """An attention layer that writes rows, in the order of `parts`."""

    kv_cache_dtype, _k_scale = "auto", torch.ones(1)

    def __init__(self, parts: tuple[int, int] = (0, 1)) -> None:
        def update(latents: Any, keys: Any, cache: torch.Tensor, slots: Any, kind: str, scale: Any) -> None:
            given = latents, keys[:, 0]
            cache.view(-1, SIZE)[slots] = torch.cat([given[part] for part in parts], dim=-1)

        self.impl = SimpleNamespace(kv_lora_rank=LATENT, do_kv_cache_update=update)


@pytest.mark.parametrize(
    ("layers", "given", "reason"),
    [
        ([_Layer(), _Layer()], {}, None), ([_Layer(), _Layer((1, 0))], {}, "layers.1.attn writes something else .* than rows"),
        ([SimpleNamespace(impl=None)] * 2, {}, "no op to write latent vectors"),
        ([_Layer()] * 2, {"dtype": "bfloat16"}, "not bfloat16 rows of 10; remove --kv-cache-dtype"),
    ],
)  # fmt: skip
def test_in_multiprocess_mode_each_layer_is_seen_to_write_rows_at_start(layers, given, reason):
    caches = {f"model.layers.{layer}.attn": torch.zeros(6, 1, BLOCK, SIZE) for layer in range(2)}
    with pytest.raises(UnsupportedEngine, match=reason) if reason else nullcontext():
        check_latents(caches, dict(zip(caches, layers, strict=True)), msgspec.structs.replace(_SHAPE, **given))
    assert not any(cache.any() for cache in caches.values()), "the engine's own blocks were written to"


def test_vllm_tells_that_it_caches_them(tmp_path):
    """By which LMCache inside vLLM is refused."""
    config = vllm_config(make_model(tmp_path / "model", FAMILIES["deepseek-v3"]()), block_size=16)
    assert facts_of(config, SimpleNamespace(kv_cache_groups=[])).is_latent
