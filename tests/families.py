"""Tiny random models of families that treat positions or heads each in its own way, with the shipped tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from making import make_artifact
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Exaone4Config,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    Llama4TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    SmolLM3Config,
)  # fmt: skip

from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.memory.layout import ChunkShape, heads_view
from lmcache_cartridge.memory.loader import ChunkLoader
from lmcache_cartridge.sources.sources import Sources

HEAD_SIZE = 32
"""The smallest that vLLM's CPU attention takes."""
_LOUD = 0.3
"""Deviation of the random weights. At the usual 0.02 all tokens are about as likely, whatever the KV holds."""
_SIZE = {
    "vocab_size": 640, "hidden_size": 4 * HEAD_SIZE, "num_hidden_layers": 4, "num_attention_heads": 4,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "initializer_range": _LOUD,
}  # fmt: skip
_LLAMA = {**_SIZE, "intermediate_size": 192, "num_key_value_heads": 2, "max_position_embeddings": 4096}
_GPT = {
    "vocab_size": 640, "n_embd": 4 * HEAD_SIZE, "n_layer": 4, "n_head": 4, "n_positions": 4096, "bos_token_id": 0,
    "eos_token_id": 1, "initializer_range": _LOUD,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_LLAMA),
    "smollm3": lambda: SmolLM3Config(**_LLAMA),
    "exaone4": lambda: Exaone4Config(**_LLAMA, sliding_window=2048, sliding_window_pattern=4),
    "cohere2": lambda: Cohere2Config(**_LLAMA),
    "llama4": lambda: Llama4TextConfig(
        **_LLAMA, head_dim=HEAD_SIZE, intermediate_size_mlp=192, num_local_experts=2, num_experts_per_tok=1
    ),
    "gptj": lambda: GPTJConfig(**_GPT, rotary_dim=16),
    "gpt2": lambda: GPT2Config(**_GPT),
    "falcon multi-query": lambda: FalconConfig(**_SIZE, multi_query=True),
    "falcon grouped": lambda: FalconConfig(**_SIZE, new_decoder_architecture=True, num_kv_heads=2),
    "falcon alibi": lambda: FalconConfig(**_SIZE, multi_query=False, alibi=True),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **_LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64
    ),
    "gemma3": lambda: Gemma3TextConfig(**_LLAMA, head_dim=HEAD_SIZE),
}
ROTATING = {
    **dict.fromkeys(("smollm3", "exaone4", "cohere2", "llama4"), (0, 1, 2)),
    **dict.fromkeys(("llama", "gptj", "falcon multi-query", "falcon grouped", "qwen2-moe"), (0, 1, 2, 3)),
}
"""The layers that rotate their keys, of families that can be chained."""


def make_model(directory: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model of a config at `directory` and return it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    for file in MODEL_DIR.glob("*token*"):
        shutil.copy(file, directory)
    return directory


def write(model: CausalModel, root: Path, ids: list[int]) -> Cartridge:
    """Write the KV of some ids as an artefact and return it."""
    made = make_artifact(
        root, positions=len(ids), cartridge_id=root.name, fingerprint=model.fingerprint, token_ids=ids,
        kv=torch.cat(list(model.prefill(ids, 32)), dim=2), chunk_tokens=32,
    )  # fmt: skip
    return Cartridge(made.manifest, root, str(root))


def chain(cartridges: list[Cartridge], layers: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the canonical KV of a chain as engines get it; `layers` rotate, else those that the manifests say."""
    segments, offset = [], 0
    for cartridge in cartridges:
        shape = cartridge.manifest.fingerprint
        if layers is not None:
            shape = msgspec.structs.replace(shape, rope=msgspec.structs.replace(shape.rope, layers=layers))
        manifest = msgspec.structs.replace(cartridge.manifest, fingerprint=shape)
        segments.append(Segment(cartridge._replace(manifest=manifest), offset))
        offset += manifest.positions
    chunk = ChunkShape(shape.kv_heads, shape.layers, offset, shape.head_size, shape.dtype)  # all of it in one
    out = torch.empty(chunk.size_bytes, dtype=torch.uint8)
    ChunkLoader(Sources(), chunk, range(shape.kv_heads), "heads").load(segments, 0, out)
    return heads_view(out, chunk)
