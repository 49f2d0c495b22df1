"""A fingerprint tells models apart wherever their K and V could differ, and nowhere else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from lmcache_cartridge.artifact.hf_config import config_fields, of_config
from lmcache_cartridge.artifact.model import Fingerprint, from_plain, rotating_layers, rotation_of
from lmcache_cartridge.artifact.weights import model_directory, weights_digest
from lmcache_cartridge.errors import UnsupportedModel
from lmcache_cartridge.memory.rope import default_frequencies

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
INV_FREQ = [1.0, 0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6, 1e-7]


def _of(inv_freq: list[float] | None = INV_FREQ, attention_factor: float = 1.0, **changes: Any) -> Any:
    return of_config(
        {**CONFIG, **changes}, dtype="bfloat16", frequencies=inv_freq and {None: (inv_freq, attention_factor)}
    )


def test_a_config_without_optional_fields_means_their_defaults():
    assert _of(head_dim=32).head_size == 32
    assert _of(num_key_value_heads=None).kv_heads == 4
    assert _of(architectures=None).architecture == "llama"
    assert _of(inv_freq=None).rope == ()


@pytest.mark.parametrize(
    "noise",
    [
        {"max_position_embeddings": 9},
        {"torch_dtype": "float32"},
        {"_name_or_path": "x"},
        {"use_cache": False},
        {"sliding_window": 0},
        {"sliding_window": None},
    ],
)
def test_a_config_field_that_leaves_k_and_v_alone_makes_no_difference(noise):
    assert _of().differences(_of(**noise)) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_act": "gelu"}, "config_digest"),
        ({"rms_norm_eps": 1e-6}, "config_digest"),
        ({"sliding_window": 128}, "config_digest"),
        ({"intermediate_size": 129}, "config_digest"),
        ({"num_hidden_layers": 4}, "layers: 3, not 4"),
        ({"num_key_value_heads": 4}, "kv_heads: 2, not 4"),
        ({"head_dim": 32}, "head_size: 16, not 32"),
        ({"vocab_size": 1001}, "vocab_size: 1000, not 1001"),
        ({"architectures": ["Other"]}, "architecture: LlamaForCausalLM, not Other"),
        ({"inv_freq": [2.0, *INV_FREQ[1:]]}, "rope frequencies"),
        ({"inv_freq": INV_FREQ[:7]}, "rope rotary_dim: 16, not 14"),
        ({"inv_freq": None}, "rope: default, not none"),
        ({"attention_factor": 1.5}, "rope attention_factor: 1.0, not 1.5"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope kind: default, not linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_a_difference_in_k_or_v_is_told_with_both_values(change, told):
    assert any(line.startswith(told) for line in _of().differences(_of(**change))), _of().differences(_of(**change))


def test_frequencies_may_differ_by_rounding_and_no_more():
    assert _of().differences(_of(inv_freq=[f * (1 + 5e-6) for f in INV_FREQ])) == []
    assert len(_of().differences(_of(inv_freq=[f * (1 + 5e-5) for f in INV_FREQ]))) == 1


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, None),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 1]}, (0, 2)),
        ({"model_type": "cohere2", "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, (0,)),
        ({"model_type": "exaone4", "layer_types": ["full_attention"] * 3}, None),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, None),
    ],
)  # fmt: skip
def test_the_layers_that_rotate_are_named_where_the_config_names_them(config, layers):
    assert _of(**config).rope[0].layers == layers


def test_layers_that_rotate_count_where_both_sides_know_them():
    known, other, unknown = (
        msgspec.structs.replace(_of(), rope=(msgspec.structs.replace(*_of().rope, layers=layers),))
        for layers in ((0, 1), (0, 1, 2), None)
    )
    assert known.differences(other) == ["rope of layers 2: none, not default"]
    assert known.differences(unknown) == unknown.differences(known) == []


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": True, "num_kv_heads": 4}, 1),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"multi_query": False, "num_kv_heads": 4}, 4),
        ({"multi_query": False}, 4),
    ],
)
def test_falcons_say_otherwise_how_many_kv_heads_they_have(config, heads):
    assert _of(num_key_value_heads=None, model_type="falcon", **config).kv_heads == heads


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


def test_a_quantised_model_is_told_from_its_original_and_from_one_quantised_otherwise():
    plain, awq = _of(), _of(quantization_config=AWQ)
    gptq = _of(quantization_config=AWQ | {"quant_method": "gptq"})
    online = msgspec.structs.replace(plain, quantisation="online fp8")
    assert awq.quantisation == "awq 4"
    assert plain.differences(awq) == ["quantisation: none, not awq 4"]
    assert awq.differences(gptq) == ["quantisation: awq 4, not gptq 4"]
    assert online.differences(plain) == ["quantisation: online fp8, not none"]
    assert awq.differences(_of(quantization_config=AWQ)) == online.differences(online) == []


@pytest.mark.parametrize("kind", ["dynamic", "something"])
def test_rope_whose_frequencies_depend_on_the_length_is_refused(kind):
    with pytest.raises(UnsupportedModel, match=f"RoPE type '{kind}'"):
        _of(rope_parameters={"rope_type": kind, "rope_theta": 1e4})
    with pytest.raises(UnsupportedModel, match=f"RoPE type '{kind}'"):
        _of(rope_parameters=None, rope_scaling={"type": kind})


@pytest.mark.parametrize(
    "layer", ["linear_attention", "mamba", "conv", "hybrid", "moe", "compressed_sparse_attention", "unheard_of"]
)
def test_layers_that_cache_no_plain_k_and_v_are_refused(layer):
    with pytest.raises(UnsupportedModel, match=layer):
        _of(layer_types=["full_attention", layer, "full_attention"])


def test_latent_attention_and_strange_dtypes_are_refused():
    with pytest.raises(UnsupportedModel, match="latent"):
        _of(kv_lora_rank=512)
    with pytest.raises(UnsupportedModel, match="float8_e4m3fn"):
        of_config(CONFIG, dtype="float8_e4m3fn")


def _weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(50, 60, generator=generator) for i in range(4)}


def test_the_digest_of_weights_does_not_depend_on_how_they_are_split_into_files(tmp_path):
    weights = _weights()
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    save_file(weights, tmp_path / "one" / "model.safetensors", metadata={"format": "pt"})
    for part, names in enumerate((["layer.0", "layer.3"], ["layer.1", "layer.2"])):
        save_file({name: weights[name] for name in names}, tmp_path / "two" / f"model-{part}.safetensors")
    assert weights_digest(tmp_path / "one") == weights_digest(tmp_path / "two")
    assert len(weights_digest(tmp_path / "one")) == 64


def test_other_weights_names_dtypes_and_shapes_give_other_digests(tmp_path):
    weights = _weights()
    variants = {
        "same": weights,
        "weights": _weights(1),
        "name": {**{n: w for n, w in weights.items() if n != "layer.0"}, "layer.9": weights["layer.0"]},
        "dtype": {**weights, "layer.0": weights["layer.0"].view(torch.int32)},
        "shape": {**weights, "layer.0": weights["layer.0"].view(60, 50)},
        "fewer": {"layer.1": weights["layer.1"]},
    }
    digests = {}
    for name, variant in variants.items():
        (tmp_path / name).mkdir()
        save_file(variant, tmp_path / name / "model.safetensors")
        digests[name] = weights_digest(tmp_path / name)
    assert len(set(digests.values())) == len(variants)


def test_a_directory_without_weights_has_no_digest(tmp_path):
    assert weights_digest(tmp_path) is None


def test_a_model_is_a_directory_or_in_the_cache_or_nowhere(tmp_path):
    assert model_directory(str(tmp_path)) == tmp_path
    assert model_directory("nobody/has-this-model") is None
    assert model_directory(str(tmp_path / "nowhere")) is None


KINDS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
LOCAL, GLOBAL = INV_FREQ, [f / 9 for f in INV_FREQ]


def _of_kinds(local: list[float] = LOCAL, full: list[float] = GLOBAL, **changes: Any) -> Any:
    of_kinds = {"full_attention": (full, 1.0), "sliding_attention": (local, 1.0)}
    return of_config({**CONFIG, **KINDS, **changes}, dtype="bfloat16", frequencies=of_kinds)


def test_kinds_of_layers_rotate_each_by_its_own_frequencies():
    rope = _of_kinds().rope
    assert [(each.kind, each.layers, list(each.inv_freq)) for each in rope] == [
        ("default", (0, 1, 3), LOCAL), ("linear", (2,), GLOBAL),
    ]  # fmt: skip
    assert rotating_layers(rope) == (0, 1, 2, 3)
    assert [rotation_of(rope, layer).kind for layer in range(4)] == ["default", "default", "linear", "default"]
    assert rope[1].parameters == {"factor": 8.0, "rope_theta": 1e6, "rope_type": "linear"}


def test_how_transformers_4_says_that_kinds_of_layers_have_rope_of_their_own_is_read():
    old = {
        "rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    assert _of_kinds(**old) == _of_kinds()


def test_differences_between_kinds_of_layers_are_told_by_layer():
    mine = _of_kinds()
    assert mine.differences(_of_kinds()) == []
    assert mine.differences(_of_kinds(full=[f / 2 for f in GLOBAL])) == [
        f"rope of layers 2: frequencies: {mine.rope[1].parameters}, not {mine.rope[1].parameters}"
    ]
    parameters = KINDS["rope_parameters"]
    told = mine.differences(
        _of_kinds(local=GLOBAL, rope_parameters={**parameters, "sliding_attention": parameters["full_attention"]})
    )
    assert told[0] == "rope of layers 0, 1, 3: kind: default, not linear"
    assert told[1].startswith("rope of layers 0, 1, 3: frequencies: {'rope_theta': 10000.0")
    one = _of(inv_freq=GLOBAL, num_hidden_layers=4, rope_parameters=parameters["full_attention"])
    assert [line.partition(":")[0] for line in mine.differences(one) if line.startswith("rope")] == [
        "rope of layers 0, 1, 3"
    ] * 2
    assert [line.partition(":")[0] for line in one.differences(mine) if line.startswith("rope")] == [
        "rope of layers 0, 1, 3"
    ] * 2
    nowhere = msgspec.structs.replace(one, rope=(msgspec.structs.replace(*one.rope, layers=(0, 2)),))
    assert [line for line in nowhere.differences(mine) if "none" in line] == ["rope of layers 1, 3: none, not default"]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_one_kind_of_layers_whose_frequencies_depend_on_the_length_is_refused(kind):
    rope = {**KINDS["rope_parameters"], "full_attention": {"rope_type": kind, "rope_theta": 1e6}}
    with pytest.raises(UnsupportedModel, match=f"RoPE type '{kind}'"):
        _of_kinds(rope_parameters=rope)
    with pytest.raises(UnsupportedModel, match=f"RoPE type '{kind}'"):  # before the weights are read
        of_config({**CONFIG, **KINDS, "rope_parameters": rope}, dtype="bfloat16")


def test_rope_of_kinds_that_no_layer_is_said_to_be_of_is_refused():
    with pytest.raises(UnsupportedModel, match="full_attention, sliding_attention.*layer_types do not say"):
        _of_kinds(layer_types=None)


def test_a_fingerprint_that_was_sent_is_the_same():
    for shape in (_of(), _of_kinds(), _of(quantization_config=AWQ), _of(inv_freq=None)):
        assert msgspec.json.decode(msgspec.json.encode(shape), type=Fingerprint) == shape
        assert from_plain(msgspec.to_builtins(shape)) == shape


def test_a_config_that_spells_its_fields_otherwise_is_read_by_their_standard_names():
    from transformers import GPT2Config

    found = of_config(config_fields(GPT2Config(n_layer=3, n_head=4, n_embd=64, vocab_size=99)), dtype="float32")
    assert (found.layers, found.kv_heads, found.head_size, found.vocab_size, found.rope) == (3, 4, 16, 99, ())


def test_a_config_that_names_rotating_dimensions_alone_has_rope():
    from transformers import GPTJConfig

    config = config_fields(GPTJConfig(n_layer=3, n_head=4, n_embd=64, vocab_size=99, rotary_dim=8))
    found = of_config(config, dtype="float32", frequencies={None: (default_frequencies(config), 1.0)})
    assert (found.rope[0].kind, found.rope[0].rotary_dim, found.rope[0].parameters["rope_theta"]) == (
        "default",
        8,
        10000.0,
    )
    assert found.rope[0].inv_freq == pytest.approx((1.0, 0.1, 0.01, 0.001))


def test_a_config_without_layers_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match="num_hidden_layers, num_attention_heads, vocab_size"):
        of_config({"model_type": "strange"}, dtype="float32")
