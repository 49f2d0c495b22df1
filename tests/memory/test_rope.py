"""Keys that are rotated by an offset are the keys that the model itself makes at the positions there."""

from __future__ import annotations

import msgspec
import pytest
import torch
from families import make_model
from making import make_fingerprint
from transformers import DynamicCache, GlmConfig, GPTNeoXConfig

from lmcache_cartridge.artifact.model import Fingerprint, Rotation
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.memory.rope import shift

FP32_NOISE = 1e-5
"""Measured at offset 1000: 1e-7 to 3e-6. Not moved: 0.7 and more; wrong pairs: 0.7 and more; one position off: 0.09."""
VOCABULARY = 640
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": None,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
NEOX = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
MODELS = {
    "partial": (GPTNeoXConfig(**NEOX, rotary_pct=0.25), "half", 4),
    "partial and interleaved": (GlmConfig(**SMALL, head_dim=16, partial_rotary_factor=0.5), "interleaved", 8),
}
"""Families of which `engine/test_families.py` has none; there real models of others are held against their chains."""


@torch.inference_mode()
def _made_at(model: CausalModel, start: int) -> torch.Tensor:
    """Return keys `[1, L, H, T, D]` of a text that stands at `start`."""
    cache, ids = DynamicCache(), torch.arange(5, 205)[None]
    model.model(input_ids=ids, position_ids=ids + start - 5, past_key_values=cache, use_cache=True)
    return torch.stack([layer.keys[0] for layer in cache.layers])[None]


def _of(*rope: Rotation) -> Fingerprint:
    """Return the fingerprint of a model with such RoPE, exactly."""
    return msgspec.structs.replace(make_fingerprint(), rope=rope)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("kind", MODELS)
def test_keys_of_a_random_model_of_every_kind_are_moved_exactly_and_otherwise_they_are_far_off(tmp_path, kind):
    config, pairing, rotary_dim = MODELS[kind]
    model = CausalModel(str(make_model(tmp_path / "model", config)))
    (rope,) = model.fingerprint.rope
    assert (rope.pairing, rope.rotary_dim) == (pairing, rotary_dim)
    keys = _made_at(model, 0)
    for offset in (1, 1000):
        there = _made_at(model, offset)
        assert _error(shift(keys, model.fingerprint, offset), there) < FP32_NOISE
    other = msgspec.structs.replace(rope, pairing="half" if pairing == "interleaved" else "interleaved")
    for wrong in (keys, shift(keys, _of(other), 1000), shift(keys, model.fingerprint, 1001)):
        assert _error(wrong, there) > 5000 * FP32_NOISE
