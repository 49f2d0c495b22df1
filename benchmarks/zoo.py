"""Tiny random models of every family that people serve: those of the tests, and the others here, made in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import report  # noqa: F401  makes the tests' helpers importable
import transformers
from families import FAMILIES as TRICKY
from families import GPT, HEAD_SIZE, LATENT, LLAMA, LOUD, SIZE
from transformers import PreTrainedConfig

CONTEXT = 4096
_EXPERTS = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {**LLAMA, "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama MQA": ("Llama", LLAMA | {"num_key_value_heads": 1}),
    "llama MHA": ("Llama", LLAMA | {"num_key_value_heads": 4}),
    "llama heads of 64": ("Llama", LLAMA | {"head_dim": 64}),
    "llama heads of 128": ("Llama", LLAMA | {"head_dim": 128}),
    "llama heads of 256": ("Llama", LLAMA | {"head_dim": 256}),
    "llama biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama tied embeddings": ("Llama", LLAMA | {"tie_word_embeddings": True}),
    "llama linear RoPE": ("Llama", _rope("linear", factor=2.0)),
    "llama 3.1": ("Llama", _rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512
    )),
    "llama yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=1024)),
    "qwen2": ("Qwen2", LLAMA), "qwen3": ("Qwen3", LLAMA | {"head_dim": HEAD_SIZE}),
    "qwen3-moe": ("Qwen3Moe", _EXPERTS | {"moe_intermediate_size": 64, "head_dim": HEAD_SIZE}),
    "qwen3-next": ("Qwen3Next", _EXPERTS | {"moe_intermediate_size": 64, "head_dim": HEAD_SIZE}),
    "mixtral": ("Mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi": ("Phi", LLAMA), "phi3": ("Phi3", LLAMA),
    "gpt-neox": ("GPTNeoX", SIZE | {"intermediate_size": 192, "max_position_embeddings": CONTEXT}),
    "opt": ("OPT", SIZE | {
        "ffn_dim": 192, "word_embed_proj_dim": 4 * HEAD_SIZE, "init_std": LOUD, "max_position_embeddings": CONTEXT,
    }),
    "bloom": ("Bloom", {name: GPT[name] for name in GPT if name not in ("n_embd", "n_positions")} | {
        "hidden_size": 4 * HEAD_SIZE,
    }),
    "olmo2": ("Olmo2", LLAMA), "olmoe": ("Olmoe", _EXPERTS), "cohere": ("Cohere", LLAMA),
    "gemma": ("Gemma", LLAMA | {"head_dim": HEAD_SIZE}), "glm4": ("Glm4", LLAMA | {"head_dim": HEAD_SIZE}),
    "granite": ("Granite", LLAMA), "stablelm": ("StableLm", LLAMA),
    "nemotron": ("Nemotron", LLAMA | {"head_dim": HEAD_SIZE}),
    "deepseek-v3 dense layers": ("DeepseekV3", LATENT | {
        "first_k_dense_replace": 3, "q_lora_rank": 64, "topk_method": "noaux_tc",
    }),
    "mamba": ("Mamba", {"vocab_size": 640, "hidden_size": 128, "num_hidden_layers": 2}),
}  # fmt: skip


def _config(name: str) -> PreTrainedConfig:
    kind, fields = _OTHERS[name]
    return getattr(transformers, f"{kind}Config")(**fields)


_LEFT_OUT = ("phi3 long", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "gemma3 seeing", "llama4 seeing")
"""One is for engines of another length; vLLM imports torchvision for the others, which is not beside a torch for CPU."""
FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    name: make for name, make in TRICKY.items() if name not in _LEFT_OUT
} | {name: (lambda name=name: _config(name)) for name in _OTHERS}  # fmt: skip
