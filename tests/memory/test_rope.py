"""Keys that are rotated by an offset are the keys that the model itself makes at the positions there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from families import make_model
from making import make_fingerprint, make_rope
from transformers import (
    CohereConfig,
    DynamicCache,
    GlmConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    StableLmConfig,
)  # fmt: skip

from lmcache_cartridge.artifact.model import Fingerprint, Rotation, check_shift
from lmcache_cartridge.errors import UnsupportedModel
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.memory.rope import shift_keys

FP32_NOISE = 1e-5
"""Measured at offset 1000: 1e-7 to 3e-6. Not moved: 0.7 and more; wrong pairs: 0.7 and more; one position off: 0.09."""
VOCABULARY = 640
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": None,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
NEOX = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}


def _llama(**rope: object) -> LlamaConfig:
    return LlamaConfig(**SMALL, rope_parameters={"rope_theta": 10000.0, **rope})


MODELS = {
    "default": (lambda: _llama(rope_type="default"), "half", 16),
    "linear": (lambda: _llama(rope_type="linear", factor=4.0), "half", 16),
    "llama3": (lambda: _llama(**LLAMA3), "half", 16),
    "yarn": (lambda: _llama(**YARN), "half", 16),
    "interleaved": (lambda: CohereConfig(**SMALL), "interleaved", 16),
    "partial": (lambda: GPTNeoXConfig(**NEOX, rotary_pct=0.25), "half", 4),
    "partial of grouped heads": (lambda: StableLmConfig(**SMALL, partial_rotary_factor=0.5), "half", 8),
    "partial and interleaved": (lambda: GlmConfig(**SMALL, head_dim=16, partial_rotary_factor=0.5), "interleaved", 8),
}


def _made(directory: Path, config: PreTrainedConfig) -> CausalModel:
    """Return a random model of a config."""
    return CausalModel(str(make_model(directory, config)))


@pytest.fixture(scope="module", params=MODELS)
def made(request, tmp_path_factory):
    config, pairing, rotary_dim = MODELS[request.param]
    return _made(tmp_path_factory.mktemp("model"), config()), pairing, rotary_dim


@torch.inference_mode()
def _made_at(model: CausalModel, ids: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values `[L, H, T, D]` of a text that stands at `start`."""
    cache = DynamicCache()
    positions = torch.arange(start, start + len(ids))[None]
    model.model(input_ids=torch.tensor([ids]), position_ids=positions, past_key_values=cache, use_cache=True)
    return torch.stack([layer.keys[0] for layer in cache.layers]), torch.stack(
        [layer.values[0] for layer in cache.layers]
    )


def _of(*rope: Rotation) -> Fingerprint:
    """Return the fingerprint of a model with such RoPE, exactly."""
    return msgspec.structs.replace(make_fingerprint(), rope=rope)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_keys_of_a_random_model_of_every_supported_kind_are_moved_exactly(made):
    model, pairing, rotary_dim = made
    (rope,) = model.fingerprint.rope
    assert (rope.pairing, rope.rotary_dim) == (pairing, rotary_dim)
    ids = list(range(5, 205))
    keys, _ = _made_at(model, ids, 0)
    for offset in (1, 1000):
        there, _ = _made_at(model, ids, offset)
        assert _error(shift_keys(keys, model.fingerprint, offset), there) < FP32_NOISE


def test_the_wrong_pairs_or_no_shift_are_far_off(made):
    model, pairing, _ = made
    wrong = "half" if pairing == "interleaved" else "interleaved"
    keys, _ = _made_at(model, list(range(5, 205)), 0)
    there, _ = _made_at(model, list(range(5, 205)), 1000)
    moved = shift_keys(keys, _of(msgspec.structs.replace(*model.fingerprint.rope, pairing=wrong)), 1000)
    assert _error(moved, there) > 5000 * FP32_NOISE
    assert _error(keys, there) > 5000 * FP32_NOISE
    assert _error(shift_keys(keys, model.fingerprint, 1001), there) > 5000 * FP32_NOISE, "one position beside"


def test_a_latent_vector_before_a_rotary_key_is_copied_bit_for_bit():
    keys = torch.randn(2, 5, 1, 80, generator=torch.Generator().manual_seed(0)).bfloat16()
    rope = msgspec.structs.replace(make_rope(), pairing="interleaved", layers=(0, 1))
    moved = shift_keys(keys, msgspec.structs.replace(_of(rope), latent=16), 9)
    assert torch.equal(moved[..., :16], keys[..., :16])
    assert torch.equal(moved[..., 16:], shift_keys(keys[..., 16:], _of(rope), 9))
    assert _error(moved[..., 16:], keys[..., 16:]) > 0.5


def test_no_offset_returns_the_same_numbers_in_a_tensor_of_its_own():
    keys = torch.randn(2, 5, 64)
    moved = shift_keys(keys, _of(), 0)
    assert torch.equal(moved, keys)
    assert moved.data_ptr() != keys.data_ptr()


def test_keys_of_a_model_without_rotary_embedding_are_not_moved(tmp_path):
    config = OPTConfig(
        **{k: v for k, v in NEOX.items() if k != "intermediate_size"}, ffn_dim=96, word_embed_proj_dim=64
    )
    rope = _made(tmp_path / "opt", config).fingerprint.rope
    assert rope == ()
    with pytest.raises(UnsupportedModel, match="no rotary embedding"):
        shift_keys(torch.zeros(2, 5, 64), _of(*rope), 1)


def test_keys_of_layers_that_do_not_rotate_are_copied_bit_for_bit():
    keys = torch.randn(3, 2, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rope = msgspec.structs.replace(make_rope(), pairing="half", layers=(0, 2))
    moved = shift_keys(keys, _of(rope), 9)
    assert torch.equal(moved[1], keys[1])
    every = shift_keys(keys, _of(msgspec.structs.replace(rope, layers=(0, 1, 2))), 9)
    assert torch.equal(moved[[0, 2]], every[[0, 2]])
    assert _error(moved[[0, 2]], keys[[0, 2]]) > 0.5


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"pairing": "half", "layers": None}, "not known which layers"),
        ({"pairing": "half", "layers": ()}, "no rotary embedding"),
        ({"pairing": None, "layers": (0, 1)}, "rotate together"),
    ],
)
def test_keys_are_not_moved_where_it_is_not_known_how(known, reason):
    rope = msgspec.structs.replace(make_rope(), **known)
    with pytest.raises(UnsupportedModel, match=reason):
        shift_keys(torch.zeros(2, 5, 64), _of(rope), 1)
    with pytest.raises(UnsupportedModel, match=reason):
        check_shift((rope,))
