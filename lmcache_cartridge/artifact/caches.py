"""What models cache otherwise than plain keys and values of a position: latent vectors, other pairs, or states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..errors import UnsupportedModel

MODELS = ("deepseek_v2", "deepseek_v3")
"""Model types whose cache was compared with an engine's: for each token a latent vector, and its rotary key with the
dimensions 2i and 2i + 1 in pairs (vLLM 0.32, `MLAAttention`)."""
ALIKE = {"kimi_k2": "deepseek_v3"}
"""Model types that are another one by another name; vLLM 0.32 reads their configs so too."""
LATENT_FIELDS = (
    "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_routed_experts",
    "n_shared_experts", "n_group", "topk_group", "topk_method", "first_k_dense_replace", "routed_scaling_factor",
)  # fmt: skip
"""Fields of a Hugging Face config that change such KV beside those of every model."""
_LOCAL_ROTATES = ("cohere2", "exaone4")
"""Model types whose layers rotate keys where their attention is local (`sliding_attention`)."""
_STATES = (
    "state_size", "ssm_state_size", "mamba_d_state", "mamba_d_conv", "lru_width", "conv_L_cache", "linear_num_value_heads"
)  # fmt: skip
"""Fields of the configs of models with state-space, recurrent or linear attention layers."""


def check_state(config: Mapping[str, Any], plain_layers: Sequence[str]) -> None:
    """Raise `UnsupportedModel` for a config with layers of other kinds than `plain_layers`: they keep a prompt's state."""
    kinds = set(config.get("layer_types") or ())
    found = kinds - set(plain_layers) if kinds else {name for name in _STATES if config.get(name)}
    if found:
        raise UnsupportedModel(
            f"it has layers that do not cache plain K and V for each position but a state of the whole prompt, which no "
            f"cartridge can hold ({', '.join(sorted(found))})"
        )


def latent_size(config: Mapping[str, Any]) -> int | None:
    """Return the elements of a config's latent vectors, None for a model that caches K and V.

    Raises `UnsupportedModel` for a model that nobody compared with an engine.
    """
    if not config.get("kv_lora_rank"):
        return None
    if config["model_type"] not in MODELS:
        raise UnsupportedModel(
            f"multi-head latent attention as in {config['model_type']}, which was never compared with an engine's; only "
            f"{' and '.join(MODELS)} were"
        )
    if not config.get("rope_interleave", True):
        raise UnsupportedModel("rope_interleave is false, and engines rotate interleaved all the same")
    return int(config["kv_lora_rank"])


def engine_pairing(config: Mapping[str, Any]) -> Literal["half", "interleaved"] | None:
    """Return which dimensions of keys engines rotate together where transformers may do it otherwise; None where alike."""
    model = config.get("model_type")
    if model == "llama4_text":  # vLLM 0.32 takes the pairs apart as it loads the weights, of every layer
        return "half"
    return "interleaved" if model in MODELS else None


def reach(architecture: str) -> int | None:
    """Return up to which position KV means the same in every engine and at every place; None where it does everywhere.

    Llama 4's layers with RoPE see chunks of 8,192 positions. From there on those without scale their queries, or do not: vLLM
    0.32 by its --max-model-len, transformers by the config.
    """
    return 8192 if architecture.startswith("Llama4") else None


def rotating_layers(config: Mapping[str, Any]) -> tuple[int, ...] | msgspec.UnsetType:
    """Return the layers that rotate their keys where a config says so; most do not say, and rotate all."""
    if flags := config.get("no_rope_layers"):  # 1 for a layer that rotates, whatever the name says
        return tuple(layer for layer, rotates in enumerate(flags) if rotates)
    kinds = config.get("layer_types") or ()
    if config.get("model_type") in _LOCAL_ROTATES and "sliding_attention" in kinds:
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return msgspec.UNSET


def kv_heads(config: Mapping[str, Any]) -> int:
    """Return the KV heads that engines cache. Falcon has fields of its own for it."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return config.get("num_key_value_heads") or config.get("num_kv_heads") or config["num_attention_heads"]


def head_size(config: Mapping[str, Any]) -> int:
    """Return the elements of a KV head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def takes_long(parameters: Mapping[str, Any], config: Mapping[str, Any], max_model_len: int | None) -> bool | None:
    """Return whether by RoPE `parameters` an engine for at most so many tokens rotates by longrope's long factors; None without longrope.

    vLLM takes one kind for every prompt (0.32, `Phi3LongRoPEScaledRotaryEmbedding`), and where no length is given, the
    short ones. Transformers goes by each prompt's length. Raises `UnsupportedModel` where the two scale attention otherwise.
    """
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
