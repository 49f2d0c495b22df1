"""HF config: what a model's Hugging Face config says of its KV, and how its keys rotate."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from ..errors import UnsupportedModel
from .model import DTYPE_BYTES, Fingerprint, Pairing, Rotation

STATIC_ROPE = ("default", "linear", "llama3", "yarn", "longrope")
"""RoPE types whose frequencies do not depend on the sequence length, so that KV stays valid under any prompt. Those of
longrope depend on the engine's longest, which is settled when it starts."""


class _Kind(NamedTuple):
    """What a type of models has that its config does not say, as vLLM 0.32 runs it."""

    pairing: Pairing | None = None
    """Which dimensions of keys engines rotate together where transformers may do it otherwise."""
    latent: bool = False
    """Whether its latent vectors were compared with an engine's (`MLAAttention`)."""
    rotates: str | None = None
    """The only type of layers that rotate keys."""


_DEEPSEEK, _LOCAL = _Kind("interleaved", latent=True), _Kind(rotates="sliding_attention")
_KINDS = {
    "deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK, "cohere2": _LOCAL, "exaone4": _LOCAL,
    "llama4_text": _Kind("half"),  # vLLM takes the pairs apart as it loads the weights, of every layer
}  # fmt: skip
HALF = ("llama", "mistral", "qwen2", "qwen3")
"""Model types all of whose layers rotate their keys, dimension i with i + rotary_dim / 2 (transformers 5, vLLM 0.32)."""
ALIKE = {"kimi_k2": "deepseek_v3"}
"""Model types that are another one by another name; vLLM 0.32 reads their configs so too."""

# What changes K or V. A list of what counts, not of what does not: engines add and patch fields of their own, and none of
# those may turn a right cartridge into a refused one.
_KV_FIELDS = """
    model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size
    hidden_act hidden_activation rms_norm_eps layer_norm_eps attention_bias mlp_bias query_pre_attn_scalar
    attn_logit_softcapping sliding_window layer_types embedding_multiplier residual_multiplier attention_multiplier
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob no_rope_layers rotary_dim
    alibi multi_query new_decoder_architecture parallel_attn use_qk_norm
""".split()
_LATENT_FIELDS = """
    kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim n_routed_experts n_shared_experts n_group
    topk_group topk_method first_k_dense_replace routed_scaling_factor
""".split()
_PLAIN_LAYERS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
_STATES = "state_size ssm_state_size mamba_d_state mamba_d_conv lru_width conv_L_cache linear_num_value_heads".split()
"""Fields of models with state-space, recurrent or linear attention layers."""


def config_fields(config: Any) -> dict[str, Any]:
    """Return a Hugging Face config as plain fields, by their standard names where the model spells them otherwise."""
    standard = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    fields = config.to_dict() | {name: getattr(config, name) for name in standard if hasattr(config, name)}
    return fields | {"model_type": ALIKE.get(kind := fields.get("model_type", ""), kind)}


def of_config(
    config: Mapping[str, Any],
    *,
    dtype: str,
    frequencies: Mapping[str | None, tuple[Sequence[float], float]] | None = None,
    weights: str | None = None,
    quantisation: str | None = None,
    max_model_len: int | None = None,
) -> Fingerprint:
    """Return the fingerprint of a decoder described by the `config_fields` of a Hugging Face config.

    `frequencies` are those that the caller's model really uses, and its attention factor, by `rope_kinds`.
    `max_model_len` are the tokens that it is run with at most, which counts for `takes_long_factors` alone.
    Raises `UnsupportedModel` for what is neither K and V per head nor a latent vector (state-space layers) or whose RoPE
    changes with the sequence length.
    """
    latent = _latent_size(config)
    layer_types = set(config.get("layer_types") or ())
    if states := layer_types - _PLAIN_LAYERS if layer_types else {name for name in _STATES if config.get(name)}:
        raise UnsupportedModel(
            f"it has layers that do not cache plain K and V for each position but a state of the whole prompt, which no "
            f"cartridge can hold ({', '.join(sorted(states))})"
        )
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"KV dtype {dtype} is not one of {', '.join(DTYPE_BYTES)}; use --dtype")
    if missing := [name for name in ("num_hidden_layers", "num_attention_heads", "vocab_size") if name not in config]:
        raise UnsupportedModel(f"its config has no {', '.join(missing)}")
    names = _KV_FIELDS if latent is None else _KV_FIELDS + _LATENT_FIELDS
    fields = {name: config[name] for name in names if config.get(name) is not None}
    if not fields.get("sliding_window"):
        fields.pop("sliding_window", None)  # transformers says 0 where vLLM says None: no window
    kinds, rotations = rope_kinds(config), []
    for kind in kinds:
        parameters = rope_parameters(config, kind)
        if (rope_type := parameters["rope_type"]) not in STATIC_ROPE or (rope_type == "longrope" and kind):
            raise UnsupportedModel(
                f"RoPE type {rope_type!r} changes its frequencies with the sequence length, so stored keys would be wrong "
                f"under a longer prompt; supported: {', '.join(STATIC_ROPE)}"
            )
        if (is_long := takes_long_factors(config, max_model_len)) is not None:
            parameters["factors"] = "long" if is_long else "short"
        if frequencies:
            inv_freq, attention_factor = frequencies[kind]
            plain = {name: value for name, value in sorted(parameters.items()) if not isinstance(value, list | dict)}
            layers = _rotating(config, kind)
            rotations.append(
                Rotation(rope_type, tuple(inv_freq), attention_factor, plain, _kind(config).pairing, layers)
            )
    return Fingerprint(
        architecture=(config.get("architectures") or [config["model_type"]])[0],
        layers=config["num_hidden_layers"],
        kv_heads=_kv_heads(config) if latent is None else 1,
        head_size=head_size(config) if latent is None else latent + config["qk_rope_head_dim"],
        dtype=dtype,
        vocab_size=config["vocab_size"],
        rope=tuple(rotations),
        config_digest=blake3(json.dumps(fields, sort_keys=True).encode()).hexdigest(),
        weights_digest=weights,
        quantisation=quantisation or quantisation_of(config.get("quantization_config")),
        latent=latent,
    )


def by_type(model: Fingerprint, model_type: str) -> Fingerprint:
    """Return a fingerprint with how keys rotate, as far as the type of a model tells that nobody tries."""
    if model_type not in HALF:
        return model
    every = tuple(range(model.layers))
    rope = tuple(msgspec.structs.replace(each, pairing="half", layers=every) for each in model.rope)
    return msgspec.structs.replace(model, rope=rope)


def _rotating(config: Mapping[str, Any], kind: str | None) -> tuple[int, ...] | None:
    """Return the layers of a kind that rotate their keys where a config says so; most do not say, and rotate all."""
    types: Sequence[Any] = config.get("layer_types") or ()
    wanted: Any = kind or _kind(config).rotates
    if flags := config.get("no_rope_layers"):  # 1 for a layer that rotates, whatever the name says
        types, wanted = [bool(flag) for flag in flags], True
    elif wanted not in types:
        return None
    return tuple(layer for layer, each in enumerate(types) if each == wanted)


def _latent_size(config: Mapping[str, Any]) -> int | None:
    """Return the elements of a config's latent vectors, None for a model that caches K and V."""
    if not config.get("kv_lora_rank"):
        return None
    if not _kind(config).latent:
        compared = " and ".join(name for name, kind in _KINDS.items() if kind.latent)
        raise UnsupportedModel(
            f"multi-head latent attention as in {config['model_type']}, which was never compared with an engine's; only "
            f"{compared} were"
        )
    if not config.get("rope_interleave", True):
        raise UnsupportedModel("rope_interleave is false, and engines rotate interleaved all the same")
    return int(config["kv_lora_rank"])


def _kind(config: Mapping[str, Any]) -> _Kind:
    return _KINDS.get(config.get("model_type", ""), _Kind())


def reach(architecture: str) -> int | None:
    """Return up to which position KV means the same in every engine and at every place; None where it does everywhere.

    Llama 4's layers with RoPE see chunks of 8,192 positions. From there on those without scale their queries, or do not: vLLM
    0.32 by its --max-model-len, transformers by the config.
    """
    return 8192 if architecture.startswith("Llama4") else None


def _kv_heads(config: Mapping[str, Any]) -> int:
    """Return the KV heads that engines cache. Falcon has fields of its own for it."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return config.get("num_key_value_heads") or config.get("num_kv_heads") or config["num_attention_heads"]


def head_size(config: Mapping[str, Any]) -> int:
    """Return the elements of a KV head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def quantisation_of(config: Mapping[str, Any] | None) -> str | None:
    """Return how the `quantization_config` of a Hugging Face config says that weights are quantised, None where there is none.

    The method, and of its options those that every reader of the checkpoint keeps; the weights digest tells the rest.
    """
    if not config:
        return None
    method = str(getattr(config.get("quant_method"), "value", config.get("quant_method") or "unknown"))
    return " ".join([method, *(str(config[name]) for name in ("bits", "format") if config.get(name))])


def rope_kinds(config: Mapping[str, Any]) -> list[str | None]:
    """Return the kinds of layers, by the names in `layer_types`, that each have RoPE parameters of their own.

    Ordered by the first layers. `[None]` where all layers share theirs, empty without rotary embedding. Raises as
    `rope_parameters` does.
    """
    given = _given(config)
    kinds = [kind for kind in dict.fromkeys(config.get("layer_types") or ()) if isinstance(given.get(kind), Mapping)]
    return kinds or ([None] if rope_parameters(config) else [])


def rope_parameters(config: Mapping[str, Any], kind: str | None = None) -> dict[str, Any]:
    """Return the RoPE parameters of a config by their standard names, defaults filled in; empty where it has none.

    `kind` is one of `rope_kinds`, where there are some. Raises `UnsupportedModel` where it is not said whose they are.
    """
    parameters = dict(_given(config) if kind is None else _given(config)[kind])
    if kinds := sorted(name for name, value in parameters.items() if isinstance(value, Mapping)):
        raise UnsupportedModel(
            f"its RoPE has parameters for each kind of layer ({', '.join(kinds)}), and its layer_types do not say which "
            "layers are of which kind"
        )
    if rotary_dim := None if parameters else config.get("rotary_dim"):  # GPT-J
        parameters["partial_rotary_factor"] = rotary_dim / head_size(config)
    if not parameters and config.get("rope_theta") is None:
        return {}
    parameters.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    given: str = parameters.pop("type", "default")
    # vLLM makes the first of DeepSeek's yarn as it loads a config. With mrope a token has three positions, of which a text's
    # are one and the same.
    rope_type: str = parameters.get("rope_type", given)
    return parameters | {"rope_type": {"deepseek_yarn": "yarn", "mrope": "default"}.get(rope_type, rope_type)}


def takes_long_factors(config: Mapping[str, Any], max_model_len: int | None) -> bool | None:
    """Return whether an engine for at most so many tokens rotates by longrope's long factors; None without longrope.

    vLLM takes one kind for every prompt (0.32, `Phi3LongRoPEScaledRotaryEmbedding`), and where no length is given, the
    short ones. Transformers goes by each prompt's length. None also where kinds of layers have RoPE of their own. Raises
    `UnsupportedModel` where the two scale attention otherwise.
    """
    parameters = rope_parameters(config) if rope_kinds(config) == [None] else {}
    if parameters.get("rope_type") != "longrope":
        return None
    if strange := sorted({"short_mscale", "long_mscale", "attention_factor"} & {k for k, v in parameters.items() if v}):
        raise UnsupportedModel(f"longrope with a scale of attention that engines read otherwise ({', '.join(strange)})")
    original = parameters.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    most = config.get("max_position_embeddings")
    if not original or not most:
        raise UnsupportedModel("longrope without original_max_position_embeddings and max_position_embeddings")
    if not math.isclose(parameters.get("factor") or most / original, most / original):
        raise UnsupportedModel("longrope with a factor that is not how much longer its context is, as engines take it")
    return max_model_len is not None and max_model_len > original


def _given(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config says of RoPE: parameters, or parameters by kind of layer."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}
