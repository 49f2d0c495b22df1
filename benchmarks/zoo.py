"""Tiny random models of every family that people serve, made from transformers' configurations, with the shipped tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from lmcache_cartridge.cli.recall import MODEL_DIR

CONTEXT = 4096
_HEAD = 32
"""The smallest head that vLLM's CPU attention takes."""
_LOUD = 0.3
"""Deviation of the random weights. At the usual 0.02 all tokens are about as likely, whatever the KV holds."""
_SIZE = {
    "vocab_size": 640, "hidden_size": 4 * _HEAD, "num_hidden_layers": 4, "num_attention_heads": 4, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None, "initializer_range": _LOUD, "max_position_embeddings": CONTEXT,
}  # fmt: skip
_LLAMA = {**_SIZE, "intermediate_size": 192, "num_key_value_heads": 2}
_GPT = {
    "vocab_size": 640, "n_embd": 4 * _HEAD, "n_layer": 4, "n_head": 4, "n_positions": CONTEXT, "bos_token_id": 0,
    "eos_token_id": 1, "initializer_range": _LOUD,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    **_SIZE, "num_hidden_layers": 3, "intermediate_size": 192, "moe_intermediate_size": 64, "num_key_value_heads": 4,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "initializer_range": 0.1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 256,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
"""Of the one size that vLLM 0.32 has kernels for on CPU, with the RoPE that DeepSeek's models have."""
_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [2.0 + 0.2 * i for i in range(16)], "original_max_position_embeddings": 2048,
}  # fmt: skip
_WINDOW = 128
"""Sliding windows are shorter than the default chunk, so that every cartridge is longer than its window."""


def _llama(**more: Any) -> PreTrainedConfig:
    return _config("LlamaConfig", **_LLAMA | more)


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def _config(name: str, **fields: Any) -> PreTrainedConfig:
    return getattr(transformers, name)(**fields)


FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "Llama": _llama,
    "Llama MQA": lambda: _llama(num_key_value_heads=1),
    "Llama MHA": lambda: _llama(num_key_value_heads=4),
    "Llama heads of 64": lambda: _llama(head_dim=64),
    "Llama heads of 128": lambda: _llama(head_dim=128),
    "Llama heads of 256": lambda: _llama(head_dim=256),
    "Llama biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "Llama tied embeddings": lambda: _llama(tie_word_embeddings=True),
    "Llama linear RoPE": lambda: _llama(**_rope("linear", factor=2.0)),
    "Llama 3.1": lambda: _llama(
        **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512)
    ),
    "Llama yarn": lambda: _llama(**_rope("yarn", factor=4.0, original_max_position_embeddings=1024)),
    "Llama 4 (text)": lambda: _config(
        "Llama4TextConfig", **_LLAMA, head_dim=_HEAD, intermediate_size_mlp=192, num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "SmolLM3": lambda: _config("SmolLM3Config", **_LLAMA),
    "Qwen2": lambda: _config("Qwen2Config", **_LLAMA),
    "Qwen2-MoE": lambda: _config("Qwen2MoeConfig", **_LLAMA, **_EXPERTS, shared_expert_intermediate_size=64),
    "Qwen2.5-VL (text)": lambda: _config(
        "Qwen2_5_VLConfig",
        text_config={
            **_LLAMA,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128,
            "fullatt_block_indexes": [1],
        },
        image_token_id=600, video_token_id=601, vision_start_token_id=602, vision_end_token_id=603,
    ),
    "Qwen3": lambda: _config("Qwen3Config", **_LLAMA, head_dim=_HEAD),
    "Qwen3-MoE": lambda: _config("Qwen3MoeConfig", **_LLAMA, **_EXPERTS, head_dim=_HEAD),
    "Qwen3-Next": lambda: _config("Qwen3NextConfig", **_LLAMA, **_EXPERTS, head_dim=_HEAD),
    "Mistral": lambda: _config("MistralConfig", **_LLAMA, head_dim=_HEAD, sliding_window=None),
    "Mistral window": lambda: _config("MistralConfig", **_LLAMA, head_dim=_HEAD, sliding_window=_WINDOW),
    "Mixtral": lambda: _config("MixtralConfig", **_LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "Phi": lambda: _config("PhiConfig", **_LLAMA),
    "Phi-3": lambda: _config("Phi3Config", **_LLAMA),
    "Phi-3 longrope": lambda: _config(
        "Phi3Config", **_LLAMA, original_max_position_embeddings=2048, rope_parameters=_LONG
    ),
    "GPT-2": lambda: _config("GPT2Config", **_GPT),
    "GPT-J": lambda: _config("GPTJConfig", **_GPT, rotary_dim=16),
    "GPT-NeoX": lambda: _config("GPTNeoXConfig", **_SIZE, intermediate_size=192),
    "OPT": lambda: _config(
        "OPTConfig", **_SIZE, ffn_dim=192, word_embed_proj_dim=4 * _HEAD, init_std=_LOUD
    ),
    "Bloom": lambda: _config(
        "BloomConfig", vocab_size=640, hidden_size=4 * _HEAD, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=1,
        initializer_range=_LOUD,
    ),
    "Falcon multi-query": lambda: _config("FalconConfig", **_SIZE, multi_query=True),
    "Falcon grouped": lambda: _config("FalconConfig", **_SIZE, new_decoder_architecture=True, num_kv_heads=2),
    "Falcon alibi": lambda: _config("FalconConfig", **_SIZE, multi_query=False, alibi=True),
    "OLMo2": lambda: _config("Olmo2Config", **_LLAMA),
    "OLMoE": lambda: _config("OlmoeConfig", **_LLAMA, num_experts=4, num_experts_per_tok=2),
    "Cohere": lambda: _config("CohereConfig", **_LLAMA),
    "Cohere2": lambda: _config("Cohere2Config", **_LLAMA, sliding_window=_WINDOW),
    "Gemma": lambda: _config("GemmaConfig", **_LLAMA, head_dim=_HEAD),
    "Gemma-2": lambda: _config("Gemma2Config", **_LLAMA, head_dim=_HEAD, sliding_window=_WINDOW),
    "Gemma-3 (text)": lambda: _config(
        "Gemma3TextConfig", **_LLAMA, head_dim=_HEAD, sliding_window=_WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gpt-oss": lambda: _config(
        "GptOssConfig", **_LLAMA, head_dim=_HEAD, sliding_window=_WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "GLM-4": lambda: _config("Glm4Config", **_LLAMA, head_dim=_HEAD),
    "Granite": lambda: _config("GraniteConfig", **_LLAMA),
    "EXAONE-4": lambda: _config("Exaone4Config", **_LLAMA, sliding_window=_WINDOW, sliding_window_pattern=4),
    "StableLM": lambda: _config("StableLmConfig", **_LLAMA),
    "Nemotron": lambda: _config("NemotronConfig", **_LLAMA, head_dim=_HEAD),
    "DeepSeek-V2": lambda: _config(
        "DeepseekV2Config", **_LATENT, first_k_dense_replace=1, q_lora_rank=None, topk_method="greedy"
    ),
    "DeepSeek-V3 dense layers": lambda: _config(
        "DeepseekV3Config", **_LATENT, first_k_dense_replace=3, q_lora_rank=64, topk_method="noaux_tc"
    ),
    "DeepSeek-V3": lambda: _config(
        "DeepseekV3Config", **_LATENT, first_k_dense_replace=1, q_lora_rank=64, topk_method="noaux_tc",
        scoring_func="sigmoid",
    ),
    "Mamba": lambda: _config("MambaConfig", vocab_size=640, hidden_size=128, num_hidden_layers=2),
}  # fmt: skip
"""By the name that people know."""
EXPERTS = ("Llama 4 (text)", "Qwen2-MoE", "Qwen3-MoE", "Mixtral", "OLMoE", "gpt-oss", "DeepSeek-V2", "DeepSeek-V3")
"""Whose router may send a token elsewhere for a rounding: in bfloat16 the noise of these is larger than their float32."""


def make_model(name: str, directory: Path, dtype: str) -> Path:
    """Save a random model of a family at `directory` and return it."""
    torch.manual_seed(0)
    config = FAMILIES[name]()
    made = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else _seeing()
    made.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(directory)
    for file in MODEL_DIR.glob("*token*"):
        shutil.copy(file, directory)
    AutoConfig.from_pretrained(directory)
    return directory


def _seeing() -> Any:
    """Return what makes models that also look at images."""
    return transformers.AutoModelForImageTextToText
