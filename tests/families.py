"""Tiny random models of families that treat positions or heads each in its own way, with the shipped tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from chunks import served
from making import make_artifact
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    Llama4Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SmolLM3Config,
)  # fmt: skip

from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.artifact.model import Rope
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.make.model import CausalModel

HEAD_SIZE = 32
"""The smallest that vLLM's CPU attention takes."""
LOUD = 0.3
"""Deviation of the random weights. At the usual 0.02 all tokens are about as likely, whatever the KV holds."""
SIZE = {
    "vocab_size": 640, "hidden_size": 4 * HEAD_SIZE, "num_hidden_layers": 4, "num_attention_heads": 4,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "initializer_range": LOUD,
}  # fmt: skip
LLAMA = {**SIZE, "intermediate_size": 192, "num_key_value_heads": 2, "max_position_embeddings": 4096}
GPT = {
    "vocab_size": 640, "n_embd": 4 * HEAD_SIZE, "n_layer": 4, "n_head": 4, "n_positions": 4096, "bos_token_id": 0,
    "eos_token_id": 1, "initializer_range": LOUD,
}  # fmt: skip
WINDOW = 48
"""Tokens that layers with a sliding window see: fewer than a chunk of the tests has."""


def _phi3(original: int) -> PreTrainedConfig:
    """Return the config of a Phi-3 with longrope, made for `original` tokens by its short factors."""
    short, long = [1.0 + i / 8 for i in range(HEAD_SIZE // 2)], [2.0 + i for i in range(HEAD_SIZE // 2)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long,
            "original_max_position_embeddings": original}  # fmt: skip
    return Phi3Config(**LLAMA, rope_parameters=rope, original_max_position_embeddings=original)


_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 256,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LATENT = {
    **LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 4, "moe_intermediate_size": 64, "rope_parameters": _YARN,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "initializer_range": 0.1,
}  # fmt: skip
"""Latent vectors of the one size that vLLM 0.32 has kernels for on CPU, with the RoPE that DeepSeek's models have."""
MAX_MODEL_LEN = 1024
"""Of the engines that the families are tried in. Phi-3 is for it where it is `long`, and is not where it is `short`."""
_EYES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
}  # fmt: skip
_QWEN_EYES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 4 * HEAD_SIZE}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
_IDS = {
    "image_token_id": 630, "video_token_id": 631, "vision_start_token_id": 632, "vision_end_token_id": 633,
}  # fmt: skip
_GEMMA3 = {
    **LLAMA, "head_dim": HEAD_SIZE, "query_pre_attn_scalar": HEAD_SIZE, "sliding_window": WINDOW, "sliding_window_pattern": 3
}  # fmt: skip
_LLAMA4 = {
    **LLAMA, "head_dim": HEAD_SIZE, "intermediate_size_mlp": 192, "num_local_experts": 2, "num_experts_per_tok": 1
}  # fmt: skip
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**LLAMA),
    "smollm3": lambda: SmolLM3Config(**LLAMA),
    "exaone4": lambda: Exaone4Config(**LLAMA, sliding_window=2048, sliding_window_pattern=4),
    "cohere2": lambda: Cohere2Config(**LLAMA, logit_scale=1.0),
    "llama4": lambda: Llama4TextConfig(**_LLAMA4),
    "phi3 long": lambda: _phi3(512),
    "phi3 short": lambda: _phi3(2048),
    "deepseek-v2": lambda: DeepseekV2Config(**LATENT, q_lora_rank=None, topk_method="greedy"),
    "deepseek-v3": lambda: DeepseekV3Config(**LATENT, q_lora_rank=64, topk_method="noaux_tc", scoring_func="sigmoid"),
    "gptj": lambda: GPTJConfig(**GPT, rotary_dim=16),
    "gpt2": lambda: GPT2Config(**GPT),
    "falcon multi-query": lambda: FalconConfig(**SIZE, multi_query=True),
    "falcon grouped": lambda: FalconConfig(**SIZE, new_decoder_architecture=True, num_kv_heads=2),
    "falcon alibi": lambda: FalconConfig(**SIZE, multi_query=False, alibi=True),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64
    ),
    "mistral": lambda: MistralConfig(**LLAMA, head_dim=HEAD_SIZE, sliding_window=None),
    "gemma2": lambda: Gemma2Config(**LLAMA, head_dim=HEAD_SIZE, query_pre_attn_scalar=HEAD_SIZE, sliding_window=WINDOW),
    "mistral with a window": lambda: MistralConfig(**LLAMA, head_dim=HEAD_SIZE, sliding_window=WINDOW),
    "gpt-oss": lambda: GptOssConfig(
        **LLAMA, head_dim=HEAD_SIZE, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA3),
    "qwen2-vl": lambda: Qwen2VLConfig(
        text_config=LLAMA | _MROPE,
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 4 * HEAD_SIZE, "num_heads": 2},
        **_IDS,
    ),
    "qwen2.5-vl": lambda: Qwen2_5_VLConfig(
        text_config=LLAMA | _MROPE, vision_config=_QWEN_EYES | {"fullatt_block_indexes": [0]}, **_IDS
    ),
    "qwen3-vl": lambda: Qwen3VLConfig(
        text_config={
            **LLAMA,
            "head_dim": HEAD_SIZE,
            "rope_parameters": _MROPE["rope_parameters"] | {"mrope_interleaved": True},
        },
        vision_config=_QWEN_EYES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **_IDS,
    ),
    "gemma3 seeing": lambda: Gemma3Config(
        text_config=_GEMMA3, mm_tokens_per_image=4, image_token_index=630, boi_token_index=632, eoi_token_index=633,
        vision_config=_EYES,
    ),
    "llama4 seeing": lambda: Llama4Config(
        text_config=_LLAMA4, image_token_index=630,
        vision_config=_EYES | {"intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
}  # fmt: skip
ROTATING = dict.fromkeys("smollm3,exaone4,cohere2,llama4,llama4 seeing,deepseek-v2,deepseek-v3".split(","), (0, 1, 2)) | dict.fromkeys(
    "llama,gptj,falcon multi-query,falcon grouped,qwen2-moe,gemma2,mistral with a window,gpt-oss,gemma3,gemma3 seeing,qwen2-vl,"
    "qwen2.5-vl,qwen3-vl,phi3 long,phi3 short".split(","), (0, 1, 2, 3),
)  # fmt: skip
"""The layers that rotate their keys, of families that can be chained."""


def make_model(directory: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Save a random model of a config at `directory` and return it."""
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    auto.from_config(config, dtype=dtype).save_pretrained(directory)
    for file in MODEL_DIR.glob("*token*"):
        shutil.copy(file, directory)
    return directory


def write(model: CausalModel, root: Path, ids: list[int], encoding: str = "plain") -> Cartridge:
    """Write the KV of some ids as an artefact and return it."""
    made = make_artifact(
        root, positions=len(ids), cartridge_id=root.name, fingerprint=model.fingerprint, token_ids=ids,
        kv=torch.cat(list(model.prefill(ids, 32)), dim=2), chunk_tokens=32, encoding=encoding,
    )  # fmt: skip
    return Cartridge(made.manifest, root, str(root))


def chain(cartridges: list[Cartridge], layers: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the canonical KV of a chain as engines get it; `layers` rotate, else those that the manifests say."""
    segments, offset = [], 0
    for cartridge in cartridges:
        shape = cartridge.manifest.fingerprint
        if layers is not None:
            shape = msgspec.structs.replace(shape, rope=_rotating(shape.rope, layers))
        manifest = msgspec.structs.replace(cartridge.manifest, fingerprint=shape)
        segments.append(Segment(cartridge._replace(manifest=manifest), offset))
        offset += manifest.positions
    return served(segments, offset)


def _rotating(rope: Rope, layers: tuple[int, ...]) -> Rope:
    """Return what rotates `layers`: where kinds of them have rotations of their own, each those of its kind."""
    replace = msgspec.structs.replace
    if len(rope) == 1:
        return (replace(*rope, layers=layers),)
    return tuple(replace(each, layers=tuple(set(each.layers) & set(layers))) for each in rope)
