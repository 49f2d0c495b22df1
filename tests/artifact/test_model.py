"""A fingerprint tells models apart wherever their K and V could differ, and nowhere else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from lmcache_cartridge.artifact.hf_config import of_config
from lmcache_cartridge.artifact.model import Fingerprint, rotating_layers, rotation_of
from lmcache_cartridge.artifact.weights import weights_digest
from lmcache_cartridge.errors import UnsupportedModel

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
INV_FREQ = [1.0, 0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6, 1e-7]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
FALCON = {"model_type": "falcon", "num_key_value_heads": None}
TYPES = ["sliding_attention", "full_attention", "full_attention"]
ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
KINDS = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", *TYPES[:2], "sliding_attention"], "rope_parameters": ROPE,
}  # fmt: skip
GLOBAL = [f / 9 for f in INV_FREQ]


def _of(inv_freq: list[float] | None = INV_FREQ, attention_factor: float = 1.0, **changes: Any) -> Any:
    return of_config(
        {**CONFIG, **changes}, dtype="bfloat16", frequencies=inv_freq and {None: (inv_freq, attention_factor)}
    )


def _of_kinds(local: list[float] = INV_FREQ, full: list[float] = GLOBAL, **changes: Any) -> Any:
    of_kinds = {"full_attention": (full, 1.0), "sliding_attention": (local, 1.0)}
    return of_config({**CONFIG, **KINDS, **changes}, dtype="bfloat16", frequencies=of_kinds)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ({"head_dim": 32}, "head_size", 32),
        ({"num_key_value_heads": None}, "kv_heads", 4),
        ({"architectures": None}, "architecture", "llama"),
        ({"inv_freq": None}, "rope", ()),
        # Falcons say otherwise how many KV heads they have.
        (FALCON | {"multi_query": False, "num_kv_heads": 3}, "kv_heads", 3),
        (FALCON | {"multi_query": False}, "kv_heads", 4),
    ],
)
def test_what_a_config_means_by_what_it_says_and_does_not_say(config, field, value):
    assert getattr(_of(**config), field) == value


@pytest.mark.parametrize(
    "noise", [{"torch_dtype": "float32"}, {"sliding_window": 0}, {"inv_freq": [f * (1 + 5e-6) for f in INV_FREQ]}]
)
def test_what_leaves_k_and_v_alone_and_rounding_make_no_difference(noise):
    assert _of().differences(_of(**noise)) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rms_norm_eps": 1e-6}, "config_digest"),
        ({"num_hidden_layers": 4}, "layers: 3, not 4"),
        ({"num_key_value_heads": 4}, "kv_heads: 2, not 4"),
        ({"head_dim": 32}, "head_size: 16, not 32"),
        ({"vocab_size": 1001}, "vocab_size: 1000, not 1001"),
        ({"architectures": ["Other"]}, "architecture: LlamaForCausalLM, not Other"),
        ({"inv_freq": [f * (1 + 5e-5) for f in INV_FREQ]}, "rope frequencies"),
        ({"inv_freq": INV_FREQ[:7]}, "rope rotary_dim: 16, not 14"),
        ({"attention_factor": 1.5}, "rope attention_factor: 1.0, not 1.5"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope kind: default, not linear"),
        ({"quantization_config": AWQ}, "quantisation: none, not awq 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_a_difference_in_k_or_v_is_told_with_both_values(change, told):
    assert any(line.startswith(told) for line in _of().differences(_of(**change))), _of().differences(_of(**change))
    assert _of(**change).differences(_of(**change)) == []


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, None),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 1]}, (0, 2)),
        ({"model_type": "cohere2", "layer_types": TYPES}, (0,)),
        ({"model_type": "exaone4", "layer_types": TYPES[1:] * 2}, None),
        ({"model_type": "gemma2", "layer_types": TYPES}, None),
    ],
)  # fmt: skip
def test_the_layers_that_rotate_are_named_where_the_config_names_them(config, layers):
    assert _of(**config).rope[0].layers == layers


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "RoPE type 'dynamic'"),
        (KINDS | {"rope_parameters": ROPE | {"full_attention": {"rope_type": "longrope"}}}, "RoPE type 'longrope'"),
        (KINDS | {"layer_types": None}, "full_attention, sliding_attention.*layer_types do not say"),
        ({"layer_types": ["full_attention", "linear_attention", "mamba"]}, r"\(linear_attention, mamba\)"),
        ({"kv_lora_rank": 512}, "latent"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_a_model_whose_kv_no_cartridge_can_hold_is_refused_before_its_weights_are_read(config, said):
    with pytest.raises(UnsupportedModel, match=said):
        of_config(CONFIG | config, dtype=config.get("dtype", "bfloat16"))


def _weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(50, 60, generator=generator) for i in range(3)}


def test_weights_names_dtypes_and_shapes_make_the_digest_of_weights_and_not_how_they_are_split_into_files(tmp_path):
    first, *rest = (dict([item]) for item in _weights().items())
    ((name, weight),) = first.items()
    variants = {
        "whole": [_weights()],
        "split": [*rest, first],
        "weights": [_weights(1)],
        "name": [{"other": weight}, *rest],
        "dtype": [{name: weight.view(torch.int32)}, *rest],
        "shape": [{name: weight.view(60, 50)}, *rest],
        "fewer": rest,
        "none": [],
    }
    digests = []
    for variant, files in variants.items():
        (tmp_path / variant).mkdir()
        for number, tensors in enumerate(files):
            save_file(tensors, tmp_path / variant / f"model-{number}.safetensors")
        digests.append(weights_digest(tmp_path / variant))
    assert digests[0] == digests[1] and digests[-1] is None
    assert len(set(digests)) == len(variants) - 1


def test_kinds_of_layers_rotate_each_by_its_own_frequencies():
    rope = _of_kinds().rope
    assert [(each.kind, each.layers, list(each.inv_freq)) for each in rope] == [
        ("default", (0, 1, 3), INV_FREQ), ("linear", (2,), GLOBAL),
    ]  # fmt: skip
    assert rotating_layers(rope) == (0, 1, 2, 3)
    assert [rotation_of(rope, layer).kind for layer in (2, 3)] == ["linear", "default"]
    assert rope[1].parameters == ROPE["full_attention"]


def _rotating(model: Fingerprint, layers: tuple[int, ...] | None) -> Fingerprint:
    return msgspec.structs.replace(model, rope=(msgspec.structs.replace(*model.rope, layers=layers),))


def test_differences_between_kinds_of_layers_are_told():
    mine, one = _of_kinds(), _of(inv_freq=GLOBAL, num_hidden_layers=4, rope_parameters=ROPE["full_attention"])
    assert mine.differences(_of_kinds(full=[f / 2 for f in GLOBAL])) == [
        f"rope frequencies: {mine.rope[1].parameters}, not {mine.rope[1].parameters}"
    ]
    assert "rope kind: default, not linear" in mine.differences(one)


def test_layers_that_rotate_count_where_both_sides_know_them():
    known, other, unknown = (_rotating(_of(), layers) for layers in ((0, 1), (0, 1, 2), None))
    assert known.differences(other) == ["rope of some layers: none, not default"]
    assert known.differences(unknown) == unknown.differences(known) == []
